"""The scenario by which the field's leading implementation is tested."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from aiokvoffload.managers.base import OffloadingManager
from aiokvoffload.managers.cpu import CPUOffloadingManager
from aiokvoffload.managers.reuse import FilterReusedOffloadingManager
from aiokvoffload.specs import LookupResult
from aiokvoffload.testing.manager_contract import assert_at_rest
from aiokvoffload.testing.strategies import make_keys

MISS, HIT, PENDING = LookupResult.MISS, LookupResult.HIT, LookupResult.PENDING


@pytest.mark.parametrize(
    "make_manager",
    [lambda: CPUOffloadingManager(4), lambda: FilterReusedOffloadingManager(CPUOffloadingManager(4))],
    ids=["cpu", "behind a filter"],
)
def test_the_known_scenario(make_manager: Callable[[], OffloadingManager]) -> None:
    manager = make_manager()

    first = manager.prepare_store_nowait(make_keys(1, 2), filtered=False)
    assert first.slots == [0, 1]
    assert not first.evicted_keys
    assert manager.lookup_nowait(make_keys(1, 2, 3)) == [PENDING, PENDING, MISS]
    manager.complete_store_nowait(first)
    assert manager.lookup_nowait(make_keys(1, 2, 3)) == [HIT, HIT, MISS]

    second = manager.prepare_store_nowait(make_keys(2, 3, 4, 5), filtered=False)
    assert second.keys_to_store == make_keys(3, 4, 5)
    assert second.slots == [2, 3, 0]
    assert second.evicted_keys == make_keys(1)
    refused = manager.prepare_store_nowait(make_keys(1, 6), filtered=False)
    assert refused.is_refused
    assert not refused.evicted_keys
    assert manager.lookup_nowait(make_keys(1, 2, 3, 4, 5)) == [MISS, HIT, PENDING, PENDING, PENDING]
    manager.complete_store_nowait(second)

    load = manager.prepare_load_nowait(make_keys(2, 3))
    assert load.slots == [1, 2]
    assert load.load_spec.block_ids.tolist() == [1, 2]
    assert manager.prepare_store_nowait(make_keys(6, 7, 8), filtered=False).is_refused
    manager.complete_load_nowait(load)

    third = manager.prepare_store_nowait(make_keys(6, 7, 8), filtered=False)
    assert third.slots == [3, 2, 1]
    assert third.evicted_keys == make_keys(2, 3, 4)
    manager.complete_store_nowait(third)

    manager.touch(make_keys(5, 6, 7))
    fourth = manager.prepare_store_nowait(make_keys(9), filtered=False)
    assert fourth.slots == [1]
    assert fourth.evicted_keys == make_keys(8)
    manager.complete_store_nowait(fourth, success=False)
    assert manager.lookup_nowait(make_keys(5, 6, 7, 8, 9)) == [HIT, HIT, HIT, MISS, MISS]
    assert manager.statistics().free == 1
    assert_at_rest(manager)
