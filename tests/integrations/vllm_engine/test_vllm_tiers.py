"""Tiers below a real engine: what CPU memory has lost, or an engine of before has left, comes back from disk."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from engines import Generated

pytest_plugins = ["vllm_models"]
pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("default"), pytest.mark.timeout(400)]

OVERRUN = [0, 1, 2, 3, 4, 0, 1]
CACHED_TOKENS = 192
SMALL = 12 * 32768
"""Room for two prompts."""


@pytest.fixture(scope="module")
def expected(full_model: Path) -> list[Generated]:
    """What an engine generates that offloads nothing."""
    from engines import engine

    with engine(full_model) as plain:
        return plain.one_by_one(OVERRUN)


@pytest.fixture(autouse=True)
def hash_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let vLLM hash blocks in the same way in each engine."""
    monkeypatch.setenv("PYTHONHASHSEED", "0")


def test_blocks_come_back_from_disk(full_model: Path, expected: list[Generated], tmp_path: Path) -> None:
    from engines import engine

    settings = {"cpu_bytes_to_use": SMALL, "tiers": [f"file://{tmp_path}?capacity=64MiB"]}
    with engine(full_model, settings) as tested:
        found = []
        for number in OVERRUN:
            found += tested.one_by_one([number])
            tested.manager.steps.drain(10.0)  # what is being written keeps its slot, so less might be read
        statistics = tested.manager.steps.statistics()
        from_disk = tested.metric("vllm:prompt_tokens_cached_by_source", source="disk")
    assert found == expected
    assert [one.cached_tokens for one in found[5:]] == [CACHED_TOKENS] * 2
    assert from_disk == 2 * CACHED_TOKENS
    assert statistics.evicted_blocks > 0
    assert (statistics.writing, statistics.promoting, statistics.leased_without_key) == (0, 0, 0)


@pytest.mark.parametrize("chunk", [1, 2])
def test_blocks_survive_the_engine(full_model: Path, expected: list[Generated], tmp_path: Path, chunk: int) -> None:
    from engines import engine

    settings = {"tiers": [f"file://{tmp_path}?capacity=64MiB"], "blocks_per_chunk": chunk}
    with engine(full_model, settings) as first:
        first.one_by_one(OVERRUN[:3])
    with engine(full_model, settings) as second:
        found = second.one_by_one(OVERRUN)
    assert found == expected
    assert [one.cached_tokens for one in found] == [*[CACHED_TOKENS] * 3, 0, 0, *[CACHED_TOKENS] * 2]


def test_windows_survive_the_engine(mixed_model: Path, tmp_path: Path) -> None:
    from engines import engine

    numbers = [0, 1, 2]
    settings = {"tiers": [f"file://{tmp_path}?capacity=64MiB"]}
    with engine(mixed_model, settings, blocks=40) as first:
        expected = first.one_by_one(numbers)
    with engine(mixed_model, settings, blocks=40) as second:
        found = second.one_by_one(numbers)
    assert found == expected
    assert [one.cached_tokens for one in found] == [CACHED_TOKENS] * 3


def test_other_weights_share_nothing(full_model: Path, expected: list[Generated], tmp_path: Path) -> None:
    from engines import engine

    settings = {"tiers": [f"file://{tmp_path}?capacity=64MiB"]}
    with engine(full_model, settings) as first:
        first.one_by_one([0])
    with engine(full_model, {**settings, "revision": "fine-tuned"}) as second:
        found = second.one_by_one([0])
    assert found == expected[:1]
    assert found[0].cached_tokens == 0


@pytest.mark.parametrize(("on_reset", "cached_tokens"), [("new-weights", 0), ("same-weights", CACHED_TOKENS)])
def test_weight_update_reaches_what_is_in_tiers(
    full_model: Path, expected: list[Generated], tmp_path: Path, on_reset: str, cached_tokens: int
) -> None:
    """vLLM's keys do not change with the weights, so what is stored under them must get out of reach."""
    from engines import engine

    settings = {"tiers": [f"file://{tmp_path}?capacity=64MiB"], "on_reset": on_reset}
    with engine(full_model, settings) as tested:
        tested.one_by_one([0])
        tested.manager.steps.drain(10.0)
        assert tested.llm.reset_prefix_cache(reset_connector=True)
        (found,) = tested.one_by_one([0])
    assert found == expected[0]
    assert found.cached_tokens == cached_tokens


@pytest.mark.parametrize("damage", ["corrupted", "removed"])
def test_damaged_files_are_recomputed(full_model: Path, expected: list[Generated], tmp_path: Path, damage: str) -> None:
    from engines import engine

    settings = {"tiers": [f"file://{tmp_path}?capacity=64MiB"], "drain_seconds": 1.0}
    with engine(full_model, settings) as first:
        first.one_by_one(OVERRUN[:2])
    with engine(full_model, settings) as second:
        if damage == "removed":
            shutil.rmtree(tmp_path)
        else:
            files = [path for path in tmp_path.rglob("*") if path.is_file() and path.stat().st_size > 32768]
            assert len(files) == 12
            for path in files:
                content = bytearray(path.read_bytes())
                content[len(content) // 2] ^= 1
                path.write_bytes(content)
        found = second.one_by_one(OVERRUN)
    assert found == expected
    assert [one.cached_tokens for one in found[:5]] == [0] * 5
