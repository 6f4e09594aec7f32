from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aiokvoffload.errors import InvalidRequestError
from aiokvoffload.keys import OffloadKey
from aiokvoffload.kv_caches import KVGroup
from aiokvoffload.managers.cpu import CPUOffloadingManager
from aiokvoffload.managers.prefix import PrefixMatcher
from aiokvoffload.specs import LookupResult
from aiokvoffload.testing.manager_contract import assert_at_rest
from aiokvoffload.testing.models import longest_prefix, needed_blocks
from aiokvoffload.testing.policy_contract import CONTRACT_SETTINGS
from aiokvoffload.testing.strategies import group_layouts, make_keys

FULL = KVGroup(2, [0])
WINDOW = KVGroup(2, [1], "window", window_tokens=3)
STATE = KVGroup(4, [2], "state")


def chains(*block_counts: int) -> list[list[OffloadKey]]:
    """Keys of each group's blocks from the start of a request."""
    return [make_keys(*range(count), group_index=group) for group, count in enumerate(block_counts)]


def joined(parts: Sequence[Sequence[OffloadKey]]) -> tuple[list[OffloadKey], list[int]]:
    return list(itertools.chain(*parts)), [len(part) for part in parts]


def manager_with(groups: Sequence[KVGroup], keys: Sequence[OffloadKey], factor: int = 1) -> CPUOffloadingManager:
    manager = CPUOffloadingManager(max(1, len(keys)), groups=groups, block_size_factor=factor)
    manager.complete_store_nowait(manager.prepare_store_nowait(keys))
    return manager


@settings(CONTRACT_SETTINGS, max_examples=400)
@given(
    groups=group_layouts(max_groups=4),
    factor=st.integers(1, 2),
    tokens=st.integers(0, 32),
    resident_tokens=st.integers(0, 20),
    data=st.data(),
)
def test_the_boundary_is_the_one_that_trying_all_finds(
    groups: list[KVGroup], factor: int, tokens: int, resident_tokens: int, data: st.DataObject
) -> None:
    block_tokens = [group.block_tokens * factor for group in groups]
    # Groups may know a little more or less than each other.
    counts = [max(0, tokens // size + data.draw(st.integers(-1, 1))) for size in block_tokens]
    parts = chains(*counts)
    keys, sizes = joined(parts)
    missing = data.draw(st.sets(st.sampled_from(keys), max_size=4)) if keys else set()
    usable = [key for key in keys if key not in missing]
    manager = manager_with(groups, usable, factor)
    expected = longest_prefix(groups, block_tokens, parts, usable.__contains__, resident_tokens)
    found = manager.lookup_prefix_nowait(keys, group_sizes=sizes, resident_tokens=resident_tokens)
    assert found == expected

    ticket = manager.prepare_load_nowait(keys, take="leading", group_sizes=sizes, resident_tokens=resident_tokens)
    needed = [
        needed_blocks(group, size, expected, resident_tokens) for group, size in zip(groups, block_tokens, strict=True)
    ]
    assert ticket.token_count == expected
    assert list(ticket.keys) == [part[block] for part, run in zip(parts, needed, strict=True) for block in run]
    assert ticket.group_sizes == tuple(map(len, needed))
    for first, run, size in zip(ticket.first_indices, needed, block_tokens, strict=True):
        assert first == (run[0] if run else expected // size)
    assert manager.statistics().pinned == len(ticket.keys)
    manager.complete_load_nowait(ticket)

    whole = manager.prepare_load_nowait(keys, group_sizes=sizes)
    assert list(whole.keys) == ([] if missing else keys)
    manager.complete_load_nowait(whole)
    assert_at_rest(manager)


@settings(CONTRACT_SETTINGS, max_examples=200)
@given(groups=group_layouts(max_groups=3), tokens=st.integers(1, 32), resident_tokens=st.integers(0, 8), data=st.data())
def test_pending_blocks_count_until_their_write_fails(
    groups: list[KVGroup], tokens: int, resident_tokens: int, data: st.DataObject
) -> None:
    block_tokens = [group.block_tokens for group in groups]
    parts = chains(*[tokens // size for size in block_tokens])
    keys, sizes = joined(parts)
    pending = data.draw(st.sets(st.sampled_from(keys), max_size=3)) if keys else set()
    failing = data.draw(st.sets(st.sampled_from(sorted(pending)))) if pending else set()
    manager = CPUOffloadingManager(len(keys) + 1, groups=groups)
    manager.complete_store_nowait(manager.prepare_store_nowait([key for key in keys if key not in pending]))
    writes = {key: manager.prepare_store_nowait([key]) for key in sorted(pending)}
    limit = longest_prefix(groups, block_tokens, parts, keys.__contains__, resident_tokens)
    assert manager.lookup_prefix_nowait(keys, group_sizes=sizes, resident_tokens=resident_tokens) == limit
    ticket = manager.prepare_load_nowait(keys, take="leading", group_sizes=sizes, resident_tokens=resident_tokens)
    assert ticket.token_count == limit
    awaited = pending & {*ticket.keys}
    assert ticket.is_waiting == bool(awaited)
    for key, write in writes.items():
        manager.complete_store_nowait(write, success=key not in failing)
    assert not ticket.is_waiting
    ready = [key for key in keys if key not in failing]
    expected = limit
    if failing & awaited:
        expected = longest_prefix(groups, block_tokens, parts, ready.__contains__, resident_tokens)
    assert ticket.token_count == expected
    assert failing.isdisjoint(ticket.keys)
    manager.complete_load_nowait(ticket)
    assert_at_rest(manager)


def test_every_group_has_its_own_needs() -> None:
    parts = chains(6, 6, 3)
    keys, sizes = joined(parts)
    manager = manager_with([FULL, WINDOW, STATE], keys)
    ticket = manager.prepare_load_nowait(keys, take="leading", group_sizes=sizes)
    assert ticket.token_count == 12
    assert ticket.group_sizes == (6, 2, 1)
    assert ticket.first_indices == (0, 4, 2)
    assert list(ticket.keys) == [*parts[0], *parts[1][4:], *parts[2][2:]]


def test_groups_agree_on_a_shorter_prefix() -> None:
    full, window, state = chains(6, 6, 3)
    # The state at 12 is missing; at 8 the window needs blocks 2 and 3, of which 3 is missing; at 4 all is there.
    present = [*full, *window[:3], *window[4:], *state[:2]]
    manager = manager_with([FULL, WINDOW, STATE], present)
    keys, sizes = joined([full, window, state])
    assert manager.lookup_prefix_nowait(keys, group_sizes=sizes) == 4
    # With 8 tokens on the GPU nothing further is to be had, and nothing is loaded.
    ticket = manager.prepare_load_nowait(keys, take="leading", group_sizes=sizes, resident_tokens=8)
    assert ticket.token_count == 8
    assert ticket.result is LookupResult.MISS
    assert ticket.group_sizes == (0, 0, 0)


def test_what_the_gpu_holds_is_not_needed() -> None:
    full, window, state = chains(6, 6, 3)
    # The GPU holds 7 tokens: block 3 of 2 tokens, half of it on the GPU, is needed whole.
    manager = manager_with([FULL, WINDOW, STATE], [*full[3:], *window[4:], *state[2:]])
    keys, sizes = joined([full, window, state])
    assert manager.lookup_prefix_nowait(keys, group_sizes=sizes) == 0
    ticket = manager.prepare_load_nowait(keys, take="leading", group_sizes=sizes, resident_tokens=7)
    assert ticket.token_count == 12
    assert ticket.group_sizes == (3, 2, 1)
    assert ticket.first_indices == (3, 4, 2)
    assert manager.prepare_load_nowait(keys, take="leading", group_sizes=sizes, resident_tokens=5).result is (
        LookupResult.MISS
    )


def test_no_more_is_asked_than_needed() -> None:
    matcher = PrefixMatcher([KVGroup(1, [0]), KVGroup(1, [1], "window", window_tokens=4)])
    asked: list[OffloadKey] = []

    def are_usable(keys: Sequence[OffloadKey]) -> list[bool]:
        asked.extend(keys)
        return [True] * len(keys)

    assert matcher.boundary(chains(1000, 1000), are_usable, 900) == 1000
    assert len(asked) <= 100 + 5


@pytest.mark.parametrize(
    ("group_sizes", "resident_tokens"), [(None, 0), ([6], 0), ([3, 4], 0), ([2, 2, 2], 0), ([7, -1], 0), ([3, 3], -1)]
)
def test_sizes_that_do_not_fit_are_refused(group_sizes: list[int] | None, resident_tokens: int) -> None:
    manager = CPUOffloadingManager(8, groups=[FULL, WINDOW])
    keys, _ = joined(chains(3, 3))
    with pytest.raises(InvalidRequestError):
        manager.lookup_prefix_nowait(keys, group_sizes=group_sizes, resident_tokens=resident_tokens)
    with pytest.raises(InvalidRequestError):
        manager.prepare_load_nowait(keys, take="leading", group_sizes=group_sizes, resident_tokens=resident_tokens)


def test_a_load_of_all_says_how_many_tokens_every_group_has() -> None:
    keys, sizes = joined(chains(4, 3, 2))
    manager = manager_with([FULL, WINDOW, STATE], keys)
    ticket = manager.prepare_load_nowait(keys, group_sizes=sizes)
    assert ticket.token_count == 6
    assert ticket.group_sizes == (4, 3, 2)
    assert ticket.first_indices == (0, 0, 0)
    assert manager.block_tokens == (2, 2, 4)
    assert CPUOffloadingManager(1, groups=[FULL, STATE], block_size_factor=3).block_tokens == (6, 12)


def test_a_key_in_two_groups_is_pinned_and_unpinned() -> None:
    keys = make_keys(1, 2)
    manager = manager_with([KVGroup(1, [0]), KVGroup(1, [1])], keys)
    ticket = manager.prepare_load_nowait(keys * 2, take="leading", group_sizes=[2, 2])
    lease = ticket.lease()
    assert ticket.token_count == 2
    manager.complete_load_nowait(ticket)
    assert manager.statistics().pinned == 2
    lease.release()
    assert_at_rest(manager)
    assert manager.prepare_store_nowait(make_keys(3, 4)).evicted_keys == keys
