from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any

import pytest

from aiokvoffload.errors import ConfigurationError, InvalidRequestError
from aiokvoffload.keys import OffloadKey
from aiokvoffload.managers.cpu import CPUOffloadingManager
from aiokvoffload.policies.base import Access
from aiokvoffload.policies.lru import LRUPolicy
from aiokvoffload.specs import LookupResult, ReqContext, Ticket
from aiokvoffload.testing.clock import ManualClock
from aiokvoffload.testing.manager_contract import assert_at_rest
from aiokvoffload.testing.models import LRUModel
from aiokvoffload.testing.strategies import make_keys


@pytest.mark.parametrize(
    ("block_count", "options", "message"),
    [
        (0, {}, "a manager of 0 blocks can hold nothing; give it at least 1"),
        (-1, {}, "a manager of -1 blocks"),
        (4, {"policy": "nothing"}, "unknown eviction policy 'nothing'"),
        (4, {"policy": LRUModel(5)}, "the policy ranks 5 slots, but the manager has 4; make them equal"),
    ],
)
def test_settings_that_cannot_work_are_refused(block_count: int, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        CPUOffloadingManager(block_count, **options)


def test_slots_never_used_come_first_then_the_one_freed_last() -> None:
    manager = CPUOffloadingManager(5)
    tickets = [manager.prepare_store_nowait(make_keys(number)) for number in (1, 2, 3)]
    for ticket in (tickets[2], tickets[0], tickets[1]):
        manager.complete_store_nowait(ticket, success=False)
    assert manager.prepare_store_nowait(make_keys(4, 5, 6, 7, 8)).slots == [3, 4, 1, 0, 2]


def test_a_lease_alone_keeps_a_ready_block_from_being_evicted() -> None:
    manager = CPUOffloadingManager(2)
    ticket = manager.prepare_store_nowait(make_keys(1, 2))
    leases = [ticket.lease() for _ in range(3)]
    manager.complete_store_nowait(ticket)
    for lease in leases:
        assert manager.prepare_store_nowait(make_keys(3)).is_refused
        lease.release()
    assert manager.prepare_store_nowait(make_keys(3)).evicted_keys == make_keys(1)


def test_eviction_order_is_kept_while_blocks_are_used() -> None:
    manager = CPUOffloadingManager(4)
    for number in range(4):
        manager.complete_store_nowait(manager.prepare_store_nowait(make_keys(number)))
    load = manager.prepare_load_nowait(make_keys(0, 1))
    assert manager.prepare_store_nowait(make_keys(10)).evicted_keys == make_keys(2)
    manager.complete_load_nowait(load)
    assert manager.prepare_store_nowait(make_keys(11)).evicted_keys == make_keys(0)


def test_pending_keys_of_an_offer_are_not_evicted_after_it() -> None:
    manager = CPUOffloadingManager(3)
    writing = manager.prepare_store_nowait(make_keys(1))
    ticket = manager.prepare_store_nowait(make_keys(1, 2, 3))
    assert ticket.pending_keys == make_keys(1)
    manager.complete_store_nowait(writing)
    manager.complete_store_nowait(ticket)
    assert manager.lookup_nowait(make_keys(1, 2, 3)) == [LookupResult.HIT] * 3
    assert_at_rest(manager)


def test_the_policy_is_told_when_and_by_whom() -> None:
    seen: list[object] = []

    class Recording(LRUModel):
        def insert(self, slots: Any, keys: Any, access: Any) -> None:
            seen.append(("insert", access.tick, access.time, access.turn, access.priority, access.depths))
            super().insert(slots, keys, access)

        def touch(self, slots: Any, access: Any) -> None:
            seen.append(("touch", access.tick, access.time, access.turn, access.priority, access.depths))
            super().touch(slots, access)

    clock = ManualClock(7.0)
    manager = CPUOffloadingManager(4, policy=Recording, clock=clock)
    ctx = ReqContext("one", turn=3, priority=2)
    manager.complete_store_nowait(manager.prepare_store_nowait(make_keys(1), ctx, depths=[16]))
    clock.advance(1.0)
    other = ReqContext("two")
    manager.touch(make_keys(1, 2), other, depths=[16, 32])
    manager.prepare_store_nowait(make_keys(1, 2), other, depths=[16, 32])
    assert [call for call in seen if call[0] == "insert"] == [  # type: ignore[index]
        ("insert", 1, 7.0, 3, 2, [16]),
        ("insert", 2, 8.0, 0, 0, [32]),
    ]
    assert seen[-2] == ("touch", 2, 8.0, 0, 0, [16])


def test_tickets_that_are_over_are_forgotten() -> None:
    manager = CPUOffloadingManager(4)

    def use() -> None:
        for success in (True, False):
            ticket = manager.prepare_store_nowait(make_keys(1, 2))
            load = manager.prepare_load_nowait(make_keys(1), take="leading")
            watch = manager.watch_nowait(make_keys(1))
            manager.complete_store_nowait(ticket, success)
            manager.complete_load_nowait(load)
            manager.complete_load_nowait(watch)
            manager.complete_store_nowait(manager.prepare_store_nowait(make_keys(1)))
            manager.complete_store_nowait(manager.prepare_store_nowait([]))
        writing = manager.prepare_store_nowait(make_keys(3))
        refused = manager.prepare_store_nowait(make_keys(*range(10, 14)))
        waiting = manager.prepare_store_nowait(make_keys(*range(10, 14)), when_full="wait")
        manager.complete_store_nowait(refused)
        manager.complete_store_nowait(waiting)
        manager.complete_store_nowait(writing)

    def tickets() -> int:
        gc.collect()
        # By type, for some objects of other libraries answer isinstance() with a warning.
        mine = [found for found in gc.get_objects() if issubclass(type(found), Ticket)]
        return sum(found.holder is manager for found in mine)

    use()
    before = tickets()
    for _ in range(20):
        use()
    assert tickets() == before


def test_an_unknown_way_to_take_or_to_wait_is_refused_before_anything_is_pinned() -> None:
    manager = CPUOffloadingManager(4)
    (key,) = make_keys(1)
    manager.complete_store_nowait(manager.prepare_store_nowait([key]))
    with pytest.raises(InvalidRequestError, match="take is 'some', it must be one of all, leading"):
        manager.prepare_load_nowait([key], take="some")  # type: ignore[arg-type]  # on purpose
    with pytest.raises(InvalidRequestError, match="when_full is 'queue', it must be one of refuse, leading, wait"):
        manager.prepare_store_nowait([key], when_full="queue")  # type: ignore[arg-type]  # on purpose
    assert manager.statistics().pinned == 0


def test_blocks_that_must_be_kept_pass_by_the_policy() -> None:
    class Closed(LRUPolicy):
        def admit(self, keys: Sequence[OffloadKey], access: Access) -> Sequence[OffloadKey]:
            return ()

    manager = CPUOffloadingManager(4, policy=Closed)
    assert not manager.prepare_store_nowait(make_keys(1)).slots
    assert len(manager.prepare_store_nowait(make_keys(2), filtered=False).slots) == 1
    assert len(manager.prepare_demotion_nowait(make_keys(3), filtered=False).slots) == 1
