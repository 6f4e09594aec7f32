from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterator

import pytest

from aiokvoffload.keys import OffloadKey
from aiokvoffload.policies.adaptive import GHOST_ROW_BYTES
from aiokvoffload.policies.history import GHOST_BYTES, History, InsertionClock
from aiokvoffload.policies.shadow import SHADOW_SLOT_BYTES, ShadowCache
from aiokvoffload.policies.uses import GhostRows, UseTable
from aiokvoffload.testing.strategies import make_keys

COUNT = 20_000


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
        ghosts.put(key)
    return ghosts, uses


def fill_shadow() -> object:
    shadow = ShadowCache(COUNT)
    for number, key in enumerate(own_keys()):
        shadow.request([key], [(number + 1 << 48) + number], [512], None)
    return shadow


@pytest.mark.parametrize(
    ("fill", "bound_bytes"),
    [(fill_history, GHOST_BYTES), (fill_ghost_rows, GHOST_ROW_BYTES), (fill_shadow, SHADOW_SLOT_BYTES)],
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
    keys = make_keys(*range(8))
    rows = [ghosts.put(key) for key in keys]
    assert rows == [100 + number % limit if limit else None for number in range(8)]
    assert [key for key in keys if ghosts.get(key) is not None] == keys[8 - limit :]
    assert ghosts.pop(keys[-1]) == rows[-1]
    assert ghosts.get(keys[-1]) is None
    assert ghosts.put(keys[0]) is None if not limit else ghosts.get(keys[0]) is None


def test_time_stands_still_within_a_request() -> None:
    clock = InsertionClock()
    assert clock.at(1) == 0
    clock.advance(10)
    assert clock.at(1) == 0
    assert clock.at(2) == 10
    clock.advance(5)
    assert (clock.at(1), clock.at(2), clock.at(3)) == (0, 10, 15)
