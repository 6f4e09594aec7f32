"""The manager's bench, at sizes too small to measure anything."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from aiokvoffload.cli.bench import hostile
from aiokvoffload.cli.bench.hostile import HOSTILE_CASES, HostileCall
from aiokvoffload.cli.bench.manager import MEASURED
from aiokvoffload.cli.bench.rounds import BenchSize
from aiokvoffload.cli.main import run
from aiokvoffload.policies.lru import LRUPolicy

SMALL = ["bench", "manager", "--quick", "--blocks", "256", "--no-compare"]


def costs_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, Any]]:
    assert run([*SMALL, *arguments, "--json"]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_every_operation_and_every_hostile_case_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    costs = costs_of(capsys, "--policy", "lru", "arc", "adaptive")
    assert [cost["policy"] for cost in costs] == ["lru", "arc", "adaptive"]
    for cost in costs:
        assert tuple(cost["operations"]) == MEASURED
        for operation in cost["operations"].values():
            times = operation["times"]
            assert 0 < times["p50_ms"] <= times["p99_ms"] <= times["max_ms"]
            assert operation["share_of_bare_loop"] > 0
        assert set(cost["hostile"]) == set(HOSTILE_CASES)
        assert cost["hostile"]["offer all stored blocks and one more"]["key_count"] == 257
        assert cost["footprint"]["own_bytes"] > 0
        assert cost["collector_pause_ms"] > 0


def test_of_the_same_hostile_call_the_shorter_time_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([[1.0, 9.0, 2.0], [8.0, 3.0, 2.5]])

    def calls_of_cases(*_: object) -> dict[str, list[HostileCall]]:
        found = next(times)
        return {name: [HostileCall(milliseconds, 128) for milliseconds in found] for name in HOSTILE_CASES}

    monkeypatch.setattr(hostile, "_calls_of_cases", calls_of_cases)
    longest = hostile.measure_hostile_cases("lru", BenchSize(block_count=1024))
    assert longest == dict.fromkeys(HOSTILE_CASES, HostileCall(3.0, 128))


def test_history_is_told_apart_from_what_a_block_takes(capsys: pytest.CaptureFixture[str]) -> None:
    (lru,) = costs_of(capsys, "--policy", "lru")
    (lru2,) = costs_of(capsys, "--policy", "lru2")
    assert lru2["footprint"]["own_bytes"] < 250
    assert lru2["footprint"]["history_bytes"] > lru["footprint"]["history_bytes"] + 200


def test_batches_and_sizes_are_crossed(capsys: pytest.CaptureFixture[str]) -> None:
    costs = costs_of(capsys, "--policy", "lru", "--batch", "8", "1", "--blocks", "128", "64")
    assert [(cost["size"]["batch_size"], cost["size"]["block_count"]) for cost in costs] == [
        (8, 64),
        (8, 128),
        (1, 64),
        (1, 128),
    ]


def test_the_tables_name_everything(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*SMALL, "--policy", "arc", "--blocks", "256", "512"]) == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in (*MEASURED, *HOSTILE_CASES))
    assert "Time per block at 512 over that at 256" in printed
    assert "Python 3." in printed


def test_one_size_shows_no_growth(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*SMALL, "--policy", "lru"]) == 0
    assert "Time per block" not in capsys.readouterr().out


def test_the_plot_is_an_image(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "speeds.png"
    assert run([*SMALL, "--policy", "lru", "--plot", str(path)]) == 0
    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_plot_into_no_folder_is_named_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(SystemExit) as caught:
        run([*SMALL, "--plot", str(tmp_path / "nowhere" / "speeds.png")])
    assert caught.value.code == 2
    printed = capsys.readouterr()
    assert "there is no folder" in printed.err
    assert not printed.out


def test_a_plot_without_matplotlib_is_named_before_anything_runs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(SystemExit) as caught:
        run([*SMALL, "--plot", "speeds.png"])
    assert caught.value.code == 2
    printed = capsys.readouterr()
    assert "pip install aiokvoffload[plot]" in printed.err
    assert not printed.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--blocks", "10"], "at least four batches, 64"),
        (["--blocks", "many"], "whole number"),
        (["--batch", "0"], "whole number, at least 1"),
        (["--policy", "lruu"], "did you mean 'lru'?"),
    ],
)
def test_a_mistake_is_one_sentence(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    with pytest.raises(SystemExit) as caught:
        run([*SMALL, *arguments])
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


class InterruptedPolicy(LRUPolicy):
    """Stands for a Ctrl-C while the bench runs."""

    def __init__(self, capacity: int) -> None:
        raise KeyboardInterrupt


def test_an_interrupt_is_one_word_and_status_130(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*SMALL, "--policy", f"{__name__}:InterruptedPolicy"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


class ForgetfulPolicy(LRUPolicy):
    """Stores nothing, so that no block can be loaded."""

    def admit(self, keys: Any, access: Any) -> Any:
        return ()


def test_a_policy_that_keeps_nothing_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run([*SMALL, "--policy", f"{__name__}:ForgetfulPolicy"])
    assert "too few are still stored" in capsys.readouterr().err


def test_bookkeeping_is_measured_without_torch() -> None:
    program = (
        "import sys; sys.modules['torch'] = None; from aiokvoffload.cli.main import run; "
        f"sys.exit(run({[*SMALL, '--policy', 'lru']!r}))"
    )
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)
