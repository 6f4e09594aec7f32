"""A real engine: what the GPU has lost comes back from CPU memory, and nothing that it generates changes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from engines import Generated

pytest_plugins = ["vllm_models"]
pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("default"), pytest.mark.timeout(400)]

OVERRUN = [0, 1, 2, 3, 4, 0, 1]
"""Four prompts fill the GPU's blocks, so that what was first has gone when it is asked for again."""
CACHED_TOKENS = 192


@pytest.fixture(scope="module")
def expected(full_model: Path) -> list[Generated]:
    """What an engine generates that offloads nothing."""
    from engines import engine

    with engine(full_model) as plain:
        return plain.one_by_one(OVERRUN)


@pytest.mark.parametrize("connector", ["AioKVOffloadConnector", "OffloadingConnector"])
def test_first_prompts_come_back_after_an_overrun(full_model: Path, expected: list[Generated], connector: str) -> None:
    from engines import engine

    with engine(full_model, {}, connector=connector) as tested:
        found = tested.one_by_one(OVERRUN)
        hits = tested.metric("vllm:external_prefix_cache_hits")
        statistics = tested.manager.steps.statistics()
    assert found == expected
    assert [one.cached_tokens for one in found] == [0, 0, 0, 0, 0, CACHED_TOKENS, CACHED_TOKENS]
    assert hits == 2 * CACHED_TOKENS
    assert (statistics.writing, statistics.pinned, statistics.leased_without_key) == (0, 0, 0)


def test_loads_that_write_zeros_change_the_tokens(full_model: Path, expected: list[Generated]) -> None:
    """Otherwise none of the tests here would show that a load brings the right bytes."""
    from engines import engine

    with engine(full_model, {"fault": "zero-load"}) as tested:
        found = tested.one_by_one(OVERRUN)
    assert found[:5] == expected[:5]
    assert [one.tokens for one in found[5:]] != [one.tokens for one in expected[5:]]


@pytest.mark.parametrize("blocks_per_chunk", [2, 3])
def test_several_blocks_per_chunk(full_model: Path, expected: list[Generated], blocks_per_chunk: int) -> None:
    from engines import engine

    with engine(full_model, {"blocks_per_chunk": blocks_per_chunk}) as tested:
        found = tested.one_by_one(OVERRUN)
    assert found == expected
    assert [one.cached_tokens for one in found[5:]] == [CACHED_TOKENS] * 2


@pytest.mark.parametrize("blocks_per_chunk", [1, 2, 3])
def test_windows_and_full_attention(mixed_model: Path, blocks_per_chunk: int) -> None:
    from engines import engine

    numbers = [*range(8), 0, 1]
    with engine(mixed_model, blocks=40) as plain:
        expected = plain.one_by_one(numbers)
    with engine(mixed_model, {"blocks_per_chunk": blocks_per_chunk}, blocks=40) as tested:
        found = tested.one_by_one(numbers)
    assert found == expected
    assert [one.cached_tokens for one in found[8:]] == [CACHED_TOKENS] * 2


def test_zeros_in_windows_or_full_attention_change_the_tokens(mixed_model: Path) -> None:
    from engines import engine

    numbers = [*range(8), 0, 1]
    with engine(mixed_model, blocks=40) as plain:
        expected = plain.one_by_one(numbers)
    with engine(mixed_model, {"fault": "zero-load"}, blocks=40) as tested:
        found = tested.one_by_one(numbers)
    assert found[:8] == expected[:8]
    assert [one.tokens for one in found[8:]] != [one.tokens for one in expected[8:]]


def test_concurrent_requests_with_preemptions(full_model: Path) -> None:
    """More requests than the blocks hold, twice, so that the second time around is served from CPU memory."""
    from engines import engine

    numbers = [0, 1, 2, 3, 4, 5]
    with engine(full_model, blocks=64) as roomy:
        expected = [one.tokens for one in roomy.one_by_one(numbers, max_tokens=100)]
    with engine(full_model, {}, blocks=20) as tested:
        first = tested.generate(numbers, max_tokens=100)
        preemptions = tested.metric("vllm:num_preemptions")
        second = tested.generate(numbers, max_tokens=100)
        hits = tested.metric("vllm:external_prefix_cache_hits")
        statistics = tested.manager.steps.statistics()
    assert [one.tokens for one in first] == expected
    assert [one.tokens for one in second] == expected
    assert preemptions > 0
    assert hits > 0
    assert (statistics.writing, statistics.pinned, statistics.leased_without_key) == (0, 0, 0)


def test_cpu_memory_smaller_than_a_prompt(full_model: Path, expected: list[Generated]) -> None:
    from engines import engine

    with engine(full_model, {"cpu_bytes_to_use": 4 * 32768}) as tested:
        found = tested.one_by_one(OVERRUN)
        total = tested.manager.steps.statistics().total
    assert total == 4
    assert found == expected
