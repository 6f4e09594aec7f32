"""The replay command, run as its users run it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import anyio
import pytest

from aiokvoffload.cli.main import run
from aiokvoffload.cli.options import ReplayOptions
from aiokvoffload.cli.replay import Replay, replay
from aiokvoffload.cli.requests import requests_of
from aiokvoffload.cli.trace import TraceRequest
from aiokvoffload.errors import ConfigurationError

CONVERSATION = Path(__file__).parents[3] / "shared" / "traces" / "mooncake_conversation.jsonl"
SMALL = ["replay", "--limit", "150", "--cpu-blocks", "200", "--page-bytes", "64", "--layers", "2"]


def report_of(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 0) -> dict[str, Any]:
    assert run([*SMALL, *arguments, "--json"]) == status
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_every_loaded_block_is_verified_and_nothing_stays_behind(
    capsys: pytest.CaptureFixture[str], backend: str, policy: str
) -> None:
    report = report_of(capsys, "--backend", backend, "--policy", policy)
    assert report["mismatches"] == report["order_violations"] == 0
    assert report["blocks_verified"] == report["blocks_hit"] > 400
    assert report["evictions"] > 400
    assert report["left_pinned"] == report["left_leased"] == 0
    assert report["bytes_loaded"] == report["blocks_hit"] * 64 * 2


def test_a_flipped_byte_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    assert report_of(capsys, "--corrupt", "1", status=1)["mismatches"] > 0


def test_alone_the_requests_hit_as_without_data(capsys: pytest.CaptureFixture[str]) -> None:
    with_data = report_of(capsys, "--concurrency", "1")
    without = report_of(capsys, "--no-data")
    assert with_data["blocks_hit"] == without["blocks_hit"]
    assert without["bytes_loaded"] is None


def test_the_filter_and_several_gpu_blocks_per_block(capsys: pytest.CaptureFixture[str]) -> None:
    filtered = report_of(capsys, "--store-threshold", "2")
    plain = report_of(capsys)
    assert 0 < filtered["bytes_stored"] < plain["bytes_stored"]
    wide = report_of(capsys, "--block-size-factor", "3")
    assert wide["blocks_hit"] == wide["blocks_verified"] > 0
    assert wide["blocks_hit"] % 3 == 0


def test_few_gpu_blocks_make_requests_wait_for_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    assert report_of(capsys, "--gpu-blocks", "40")["mismatches"] == 0


def test_a_request_larger_than_the_gpu_is_a_clear_mistake(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        run([*SMALL, "--gpu-blocks", "3"])
    assert caught.value.code == 2
    assert "use --gpu-blocks" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--policy", "lruu"], "did you mean 'lru'? Known: a"),
        (["--trace", "nowhere.jsonl"], "nowhere.jsonl"),
    ],
)
@pytest.mark.parametrize("mode", [[], ["--no-data"]])
def test_a_mistake_is_one_sentence_and_status_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str, mode: list[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        run([*SMALL, *arguments, *mode])
    assert caught.value.code == 2
    printed = capsys.readouterr().err
    assert message in printed
    assert "Traceback" not in printed


def test_the_order_checker_has_looked() -> None:
    options = ReplayOptions(limit=20, cpu_blocks=50, page_bytes=64, layers=2)
    assert replay(options).order_violations == 0
    assert replay(ReplayOptions(limit=20, cpu_blocks=50, page_bytes=64, layers=2, check_order=False)).mismatches == 0


def test_requests_without_blocks_are_served() -> None:
    options = ReplayOptions(cpu_blocks=10, page_bytes=64, layers=1, concurrency=1)
    requests = [TraceRequest(0, 100, 1, ()), TraceRequest(1, 1024, 1, (1, 2)), TraceRequest(2, 1024, 1, (1, 2))]
    assert len(requests_of(ReplayOptions(limit=3))) == 3
    report = anyio.run(Replay(options, requests).run)
    assert report.blocks_verified == 2


def test_a_page_too_large_for_the_memory_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="multiple of 8"):
        ReplayOptions(page_bytes=12)


def test_the_console_script_runs() -> None:
    finished = subprocess.run(
        [sys.executable, "-m", "aiokvoffload", *SMALL, "--limit", "20"], check=True, capture_output=True, text=True
    )
    assert "hit rate" in finished.stdout


@pytest.mark.skipif(not CONVERSATION.exists(), reason="the trace is not here")
def test_a_real_trace_hits_as_published(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["replay", "--no-data", "--trace", str(CONVERSATION), "--cpu-blocks", "9139", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["blocks_looked_up"] == 288_500
    assert 100 * report["hit_rate"] == pytest.approx(19.58, abs=0.3)
