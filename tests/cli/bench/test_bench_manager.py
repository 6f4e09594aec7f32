"""The bench command, at sizes too small to measure anything."""

from __future__ import annotations

import json

import pytest

from aiokvoffload.cli.bench_manager import HOSTILE_CASES, OPERATIONS
from aiokvoffload.cli.main import run
from aiokvoffload.policies.lru import LRUPolicy

SMALL = ["bench", "manager", "--blocks", "256", "--batch", "16", "--calls", "20"]


def test_every_operation_and_every_hostile_case_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*SMALL, "--json"]) == 0
    costs = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [cost["policy"] for cost in costs] == ["lru", "arc"]
    for cost in costs:
        assert tuple(cost["operations"]) == OPERATIONS
        assert all(operation["blocks_per_second"] > 0 for operation in cost["operations"].values())
        assert all(operation["share_of_bare_loop"] > 0 for operation in cost["operations"].values())
        assert set(cost["hostile_max_ms"]) == set(HOSTILE_CASES)
        assert cost["bytes_per_block"] > 0


def test_the_table_names_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*SMALL, "--policy", "arc"]) == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in (*OPERATIONS, *HOSTILE_CASES))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--blocks", "10"], "at least four batches"),
        (["--blocks", "many"], "whole number"),
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
