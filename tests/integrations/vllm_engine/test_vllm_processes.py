"""Engines of several processes: manager in the engine core, workers with a share of every block each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest_plugins = ["vllm_models"]
pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("default"), pytest.mark.timeout(400)]

OVERRUN = [0, 1, 2, 3, 4, 0, 1]
CACHED_TOKENS = 192


@pytest.fixture(autouse=True)
def several_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let vLLM start its engine core in a process of its own, and pin no worker to a NUMA node."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    monkeypatch.setenv("PYTHONHASHSEED", "0")


@pytest.mark.parametrize("rank_count", [1, 2])
def test_blocks_come_back_and_survive_the_engine(full_model: Path, tmp_path: Path, rank_count: int) -> None:
    from engines import engine

    settings: dict[str, Any] = {"tiers": [f"file://{tmp_path}?capacity=64MiB"]}
    with engine(full_model, settings, tensor_parallel_size=rank_count) as first:
        cold = first.one_by_one(OVERRUN)
    with engine(full_model, settings, tensor_parallel_size=rank_count) as second:
        warm = second.one_by_one(OVERRUN)
    assert [one.cached_tokens for one in cold] == [*[0] * 5, *[CACHED_TOKENS] * 2]
    assert cold[5:] == cold[:2]
    assert [one.cached_tokens for one in warm] == [CACHED_TOKENS] * 7
    assert warm == cold


@pytest.mark.parametrize("fault", ["fail-load", "fail-store"])
def test_failures_on_one_rank_are_failures_of_all(full_model: Path, fault: str) -> None:
    from engines import engine

    with engine(full_model, {"fault": fault, "fault_ranks": [1]}, tensor_parallel_size=2) as tested:
        found = tested.one_by_one(OVERRUN)
    assert found[5:] == found[:2]
    assert [one.cached_tokens for one in found[5:]] == [0, 0]


def test_zeros_on_ranks_change_the_tokens(full_model: Path) -> None:
    from engines import engine

    with engine(full_model, {"fault": "zero-load"}, tensor_parallel_size=2) as tested:
        found = tested.one_by_one(OVERRUN)
    assert [one.tokens for one in found[5:]] != [one.tokens for one in found[:2]]
