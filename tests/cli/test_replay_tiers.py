"""Replays with tiers below CPU memory."""

from __future__ import annotations

import json
import multiprocessing
import os
from pathlib import Path
from typing import Any

import pytest

from aiokvoffload.cli.main import run

CONVERSATION = Path(__file__).parents[3] / "shared" / "traces" / "mooncake_conversation.jsonl"
SMALL = ["replay", "--limit", "120", "--page-bytes", "64", "--layers", "2"]


def report_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert run([*SMALL, *arguments, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"file://{tmp_path}/kv?capacity=256MiB&keep_free=1MiB"


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_with_a_tier_below_it_little_cpu_memory_hits_as_much(
    capsys: pytest.CaptureFixture[str], url: str, backend: str
) -> None:
    little = ["--cpu-blocks", "120", "--concurrency", "1", "--backend", backend]
    report = report_of(capsys, *little, "--tier", url, "--cascade", "wait")
    assert report["blocks_hit"] == report["blocks_verified"] == report_of(capsys, "--no-data")["blocks_hit"]
    assert report["blocks_hit"] > 1.2 * report_of(capsys, *little)["blocks_hit"]
    (tier,) = report["tiers"]
    assert tier["breaker"] == "closed"
    assert tier["bytes_read"] == tier["hits"] * 128 > 0
    assert tier["misses_by_reason"].keys() == {"absent"}
    assert "?" not in tier["url"]


def test_after_a_restart_what_was_stored_is_found_again(capsys: pytest.CaptureFixture[str], url: str) -> None:
    arguments = ["--cpu-blocks", "200", "--restart-after", "60", "--concurrency", "4"]
    kept = report_of(capsys, *arguments, "--tier", url)
    lost = report_of(capsys, *arguments)
    assert kept["requests"] == lost["requests"] == 120
    assert kept["blocks_hit"] > lost["blocks_hit"]
    assert kept["blocks_verified"] == kept["blocks_hit"]


def test_one_engine_hits_what_another_has_stored(capsys: pytest.CaptureFixture[str], url: str) -> None:
    report = report_of(capsys, "--engines", "2", "--cpu-blocks", "4000", "--tier", url, "--cascade", "wait")
    assert report["requests"] == 120
    assert report["blocks_verified"] == report["blocks_hit"]
    assert report["tiers"][0]["hits"] > 0  # what the other one stored: nothing of one's own leaves CPU memory
    (tier,) = report_of(capsys, "--tier", url)["tiers"]  # a third one
    assert tier["hits"] == tier["lookups"] > 0  # also what was stored while the directory was still being listed
    assert not multiprocessing.active_children()


def test_a_mistake_that_an_engine_finds_is_said_once_and_no_engine_goes_on(
    capfd: pytest.CaptureFixture[str], url: str
) -> None:
    with pytest.raises(SystemExit, match="2"):
        run([*SMALL, "--engines", "2", "--tier", url, "--policy", "lruu"])
    said = capfd.readouterr().err
    assert said.count("did you mean 'lru'") == 1
    assert "Traceback" not in said
    assert not multiprocessing.active_children()


def test_a_tier_is_a_line_of_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*SMALL, "--tier", "memory://?capacity=8MiB", "--cpu-blocks", "100"]) == 0
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("memory://"))
    assert "found" in line
    assert line.endswith("breaker closed")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tier", "memory://", "--no-data"], "nothing to put into a tier"),
        (["--engines", "2"], "give --tier"),
        (["--cascade", "wait"], "give --tier"),
        (["--tier", "cloud://bucket"], "Known: "),
        (["--tier", "memory://?capacity=10"], "capacity"),
    ],
)
def test_mistakes(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    with pytest.raises(SystemExit) as caught:
        run([*SMALL, *arguments])
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(not CONVERSATION.exists(), reason="the trace is not here")
def test_on_the_real_trace_a_disk_hits_as_cpu_memory_of_its_size_would(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    trace = ["replay", "--trace", os.fspath(CONVERSATION), "--page-bytes", "64", "--layers", "2", "--json"]
    assert run([*trace, "--no-data", "--cpu-blocks", "18279"]) == 0
    expected = json.loads(capsys.readouterr().out)["hit_rate"]
    url = f"file://{tmp_path}/kv?capacity={18_279 * 8_192}&keep_free=1MiB"
    assert run([*trace, "--cpu-blocks", "1828", "--tier", url, "--concurrency", "1", "--cascade", "wait"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert abs(report["hit_rate"] - expected) <= 0.01
    assert report["blocks_verified"] == report["blocks_hit"]
