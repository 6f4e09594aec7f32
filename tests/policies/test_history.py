from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterator
from itertools import islice

import numpy as np
import pytest

from aiokvoffload.keys import OffloadKey
from aiokvoffload.policies.adaptive import GHOST_ROW_BYTES
from aiokvoffload.policies.candidates import CANDIDATES, HALF_LIVES
from aiokvoffload.policies.history import GHOST_BYTES, History, InsertionClock
from aiokvoffload.policies.shadow import ENTRY_BYTES, ROW_BYTES, ShadowCaches
from aiokvoffload.policies.uses import GhostRows, UseTable
from aiokvoffload.testing.strategies import make_keys

COUNT = 6_000


def own_keys() -> Iterator[OffloadKey]:
    """Keys of 32 bytes of hash that nobody else holds."""
    for number in range(2 * COUNT):
        yield OffloadKey(number.to_bytes(36, "big"))


def fill_history() -> object:
    history = History(COUNT)
    for number, key in enumerate(own_keys()):
        history.put(key, float(number))
    return history


def fill_ghost_rows() -> object:
    ghosts, uses = GhostRows(1_000_000, COUNT), UseTable(COUNT, [1.0, 2.0])
    for key in own_keys():
        ghosts.put([hash(key)])
    return ghosts, uses


def fill_shadows() -> object:
    """All hold the same, most entries of their heaps for the second time."""
    shadows = ShadowCaches(COUNT, COUNT)
    tick = 0
    for _ in range(3):
        keys = iter(own_keys())
        while hashes := list(map(hash, islice(keys, 100))):
            tick += 1
            uses = np.repeat(UseTable(1, HALF_LIVES).of([0]) + tick, 100, axis=0)
            shadows.request(hashes, uses, range(100), tick, tick)
    return shadows


@pytest.mark.parametrize(
    ("fill", "bound_bytes"),
    [
        (fill_history, GHOST_BYTES),
        (fill_ghost_rows, GHOST_ROW_BYTES),
        (fill_shadows, ROW_BYTES + len(CANDIDATES) * ENTRY_BYTES),
    ],
)
def test_what_is_remembered_takes_no_more_than_is_reported(fill: Callable[[], object], bound_bytes: int) -> None:
    tracemalloc.start()
    try:
        held = fill()
        # Only what these modules allocate: threads that earlier tests have left may allocate too.
        ours = [tracemalloc.Filter(True, pattern) for pattern in ("*/aiokvoffload/policies/*", __file__)]
        taken_bytes = sum(trace.size for trace in tracemalloc.take_snapshot().filter_traces(ours).traces)
    finally:
        tracemalloc.stop()
    assert held is not None
    assert 0.7 * bound_bytes < taken_bytes / COUNT <= bound_bytes


@pytest.mark.parametrize("limit", [0, 1, 5])
def test_the_oldest_is_forgotten_first(limit: int) -> None:
    history = History(limit)
    keys = make_keys(*range(8))
    for number, key in enumerate(keys):
        history.put(key, number)
    assert [key for key in keys if history.get(key) is not None] == keys[8 - limit :]
    assert len(history) == limit
    assert history.pop(keys[-1]) == (7 if limit else None)
    assert history.get(keys[-1]) is None
    history.clear()
    assert len(history) == 0


def test_shards_hold_no_more_than_the_limit() -> None:
    history = History(5_000)
    for key in make_keys(*range(20_000)):
        history.put(key, 0)
    assert len(history) == 5_000


@pytest.mark.parametrize("limit", [0, 1, 5])
def test_the_oldest_ghost_gives_its_row_to_the_youngest(limit: int) -> None:
    ghosts = GhostRows(100, limit)
    rows = [ghosts.put([number]) for number in range(1, 9)]
    assert rows == [[100 + number % limit] if limit else [] for number in range(8)]
    assert [row is not None for row in ghosts.get(range(1, 9))] == [False] * (8 - limit) + [True] * limit
    assert ghosts.pop([8]) == [rows[-1][0] if limit else None]
    assert ghosts.get([8]) == [None]
    assert len(ghosts) == max(0, limit - 1)


def test_a_ghost_that_came_and_left_again_keeps_its_new_row() -> None:
    ghosts = GhostRows(0, 3)
    ghosts.put([1, 2])
    ghosts.pop([1])
    assert ghosts.put([1, 3]) == [2, 0]
    assert ghosts.get([1, 2, 3]) == [2, 1, 0]


def test_of_too_many_ghosts_the_last_ones_find_room() -> None:
    ghosts = GhostRows(0, 3)
    assert ghosts.put(range(1, 9)) == [0, 1, 2]
    assert ghosts.get([5, 6, 7, 8]) == [None, 0, 1, 2]


def test_what_was_cleared_is_gone_at_once_and_freed_bit_by_bit() -> None:
    ghosts = GhostRows(0, 5_000)
    ghosts.put(range(1, 5_001))
    ghosts.clear()
    assert len(ghosts) == 0
    assert ghosts.put(range(1, 10)) == [*range(5_000 % 5_000, 9)]
    assert sum(map(len, ghosts._given_up)) == 5_000
    for number in range(len(ghosts._given_up)):
        ghosts.pop([number + 100])
    assert not ghosts._given_up
    assert len(ghosts) == 9


def test_time_stands_still_within_a_request() -> None:
    clock = InsertionClock()
    assert clock.at(1) == 0
    clock.advance(10)
    assert clock.at(1) == 0
    assert clock.at(2) == 10
    clock.advance(5)
    assert (clock.at(1), clock.at(2), clock.at(3)) == (0, 10, 15)


def test_a_cleared_history_is_freed_by_few_blocks_with_each_new_one() -> None:
    history = History(4_000)
    for key in make_keys(*range(4_000)):
        history.put(key, 1)
    history.clear()
    assert len(history) == 0
    left = sum(map(len, history._given_up))
    for number, key in enumerate(make_keys(*range(left // 16 + 4))):
        history.put(key, 1)
        assert sum(map(len, history._given_up)) >= left - 16 * (number + 1)
    assert not history._given_up
