"""The benches that move bytes, at sizes too small to measure anything."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from aiokvoffload.cli.bench.copies import kinds_of
from aiokvoffload.cli.bench.path import PathSize, measure_path
from aiokvoffload.cli.bench.transfer import USUAL
from aiokvoffload.cli.main import run


def figures_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert run(["bench", *arguments, "--quick", "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_copies_are_measured_in_pages_both_ways_and_to_their_waiters(capsys: pytest.CaptureFixture[str]) -> None:
    cost = figures_of(capsys, "transfer")
    copies = cost["copies"]
    assert all(each["gigabytes_per_second"] > 0 and each["submission_ns_per_copy"] > 0 for each in copies)
    by_page: dict[int | None, set[tuple[str, int, int]]] = {}
    for kind in (each["kind"] for each in copies):
        by_page.setdefault(kind["page_bytes"], set()).add((kind["ways"], kind["run_pages"], kind["stream_count"]))
    every_way = {("store", 1, 1), ("load", 1, 1), ("both", 1, 1)}
    assert by_page.pop(None) == every_way
    assert list(by_page) == [4096, 16384, 65536, 262144, 1048576]
    assert by_page[4096] == every_way | {("store", 1, 2), ("store", 16, 1)}
    assert by_page[1048576] == every_way | {("store", 1, 2)}
    assert all(each["share_of_contiguous"] > 0 for each in copies)
    waits = {(wait["loop"], wait["has_doorbell"]): wait for wait in cost["waits"]}
    assert {("asyncio", True), ("asyncio", False), ("trio", True), ("trio", False)} <= set(waits)
    for wait in waits.values():
        assert wait["polls_per_transfer"] > 0
        assert 0 < wait["delay_p50_ms"] <= wait["delay_p99_ms"]
        assert wait["stall_max_ms"] >= 0


def test_pages_from_4_kib_to_16_mib_are_copied() -> None:
    pages = [kind.page_bytes for kind in kinds_of(USUAL.copied_bytes) if kind.page_bytes is not None]
    assert (min(pages), max(pages)) == (4 << 10, 16 << 20)


def test_the_speeds_of_copies_are_drawn(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert run(["bench", "transfer", "--quick", "--plot", str(tmp_path / "speeds.png")]) == 0
    assert (tmp_path / "speeds.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(SystemExit, match="2"):
        run(["bench", "transfer", "--quick", "--plot", str(tmp_path / "no" / "speeds.png")])
    assert "no" in capsys.readouterr().err


def test_requests_are_measured_alone_and_in_a_crowd(capsys: pytest.CaptureFixture[str]) -> None:
    cost = figures_of(capsys, "path", "--blocks", "512", "256", "--policy", "arc")
    assert [each["block_count"] for each in cost["requests"]] == [256, 512]
    assert all(each["processor_ms"] > 0 for each in cost["requests"])
    crowd = cost["crowd"]
    assert crowd["request_count"] == cost["size"]["concurrency"] * cost["size"]["turns"]
    assert 0 < crowd["wait_p50_ms"] <= crowd["wait_max_ms"]
    assert 0 < crowd["most_in_flight_bytes"] <= cost["size"]["in_flight_bytes"]


def test_all_bytes_of_a_crowd_are_moved_within_the_budget() -> None:
    size = PathSize(
        block_counts=(256,),
        request_blocks=4,
        request_count=1,
        concurrency=16,
        turns=2,
        step_seconds=0.001,
        in_flight_bytes=8 * 4096,
    )
    crowd = measure_path(size).crowd
    assert crowd.most_in_flight_bytes <= 8 * 4096
    assert crowd.most_queued > 0
    # What lands behind the last step is not seen by any.
    assert 0 < crowd.moved_bytes_per_step * crowd.step_count <= 2 * 2 * 16 * 4 * 4096


@pytest.mark.parametrize("what", ["transfer", "path"])
def test_the_tables_are_for_people(capsys: pytest.CaptureFixture[str], what: str) -> None:
    assert run(["bench", what, "--quick"]) == 0
    printed = capsys.readouterr().out
    assert "Python 3." in printed
    assert ("delay p50 ms" if what == "transfer" else "longest over median") in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["path", "--blocks", "4"], "take at least 32"),
        (["path", "--policy", "lruu"], "did you mean 'lru'?"),
        (["path", "--blocks", "0"], "whole number, at least 1"),
    ],
)
def test_a_mistake_is_one_sentence(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    with pytest.raises(SystemExit) as caught:
        run(["bench", *arguments, "--quick"])
    assert caught.value.code == 2
    assert message in capsys.readouterr().err
