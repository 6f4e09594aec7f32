from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import anyio
import pytest
from anyio.lowlevel import checkpoint
from tiered_rig import Rig, make_rig

from aiokvoffload.errors import ClosedError, ConfigurationError
from aiokvoffload.events import EventKind
from aiokvoffload.keys import OffloadKey
from aiokvoffload.managers.reuse import FilterReusedOffloadingManager
from aiokvoffload.managers.tier_plan import TierPlan
from aiokvoffload.managers.tiered import TieredOffloadingManager
from aiokvoffload.policies.base import Access
from aiokvoffload.policies.lru import LRUPolicy
from aiokvoffload.specs import Completion, LookupResult, PrepareLoadOutput, ReqContext, TierFilter
from aiokvoffload.testing.strategies import make_keys
from aiokvoffload.tiers.outcomes import Reason, miss, refusal

NEVER = TierPlan(cascade="reused", min_uses=1_000_000)
on_both_loops = pytest.mark.parametrize("backend", ["asyncio", "trio"])


# Reading


def test_what_cpu_memory_has_is_answered_at_once() -> None:
    rig = make_rig(8, NEVER)
    rig.store(1, 2)
    ticket = rig.load(1, 2)
    assert (ticket.result, ticket.token_count) == (LookupResult.HIT, 2)
    assert rig.tier.waiting_count == 0
    assert rig.finish(ticket) == 2
    rig.assert_at_rest()


def test_what_a_tier_has_is_read_into_slots() -> None:
    rig = make_rig(8, NEVER)
    rig.store(1)
    rig.put_into_tier(2, 3)
    ticket = rig.load(1, 2, 3, 4)
    assert ticket.result is LookupResult.PENDING
    rig.tier.land()  # the lookup
    assert rig.manager.statistics().promoting == 2
    assert rig.manager.lookup_nowait(make_keys(1, 2, 3, 4)) == [
        LookupResult.HIT,
        LookupResult.PENDING,
        LookupResult.PENDING,
        LookupResult.MISS,
    ]
    assert rig.finish(ticket) == 3
    statistics = rig.manager.statistics()
    assert (statistics.hit_blocks, statistics.stored_blocks, statistics.promoting) == (3, 3, 0)
    assert rig.manager.tier_statistics()[0].promoted == 2
    rig.assert_at_rest()


def test_what_is_in_no_tier_is_a_miss() -> None:
    rig = make_rig(8, NEVER)
    ticket = rig.load(1, 2)
    assert rig.finish(ticket) == 0
    assert ticket.result is LookupResult.MISS
    rig.assert_at_rest()


def test_only_blocks_whose_prefix_is_there_are_read() -> None:
    rig = make_rig(8, NEVER)
    rig.put_into_tier(1, 3)
    assert rig.finish(rig.load(1, 2, 3)) == 1
    assert rig.manager.tier_statistics()[0].promoted == 1


def test_all_or_nothing_reads_nothing_if_a_block_is_missing() -> None:
    rig = make_rig(8, NEVER)
    rig.put_into_tier(1, 2)
    ticket = rig.manager.prepare_load_nowait(make_keys(1, 2, 3))
    assert rig.finish(ticket) == 0
    ticket = rig.manager.prepare_load_nowait(make_keys(1, 2))
    assert rig.finish(ticket) == 2
    rig.assert_at_rest()


def test_tiers_are_asked_in_order_each_for_what_those_before_do_not_have() -> None:
    rig = make_rig(8, NEVER, NEVER)
    rig.put_into_tier(1, 2)
    rig.put_into_tier(2, 3, tier=1)
    ticket = rig.load(1, 2, 3)
    rig.tier.land()
    assert [tier.waiting_count for tier in rig.tiers] == [0, 1]
    assert rig.finish(ticket) == 3
    assert [counts.promoted for counts in rig.manager.tier_statistics()] == [2, 1]
    rig.assert_at_rest()


def test_loads_of_the_same_blocks_share_one_lookup_and_one_read() -> None:
    rig = make_rig(8, NEVER)
    rig.put_into_tier(1, 2, 3)
    loads = [rig.load(1, 2), rig.load(1, 2, 3)]
    assert rig.tier.waiting_count == 3
    rig.tier.land()
    assert rig.tier.waiting_count == 3
    rig.land_all()
    assert [load.token_count for load in loads] == [2, 3]
    assert [rig.finish(load) for load in loads] == [2, 3]
    assert rig.manager.tier_statistics()[0].promoted == 3
    rig.assert_at_rest()


def test_a_block_that_cannot_be_read_is_one_miss_and_not_asked_for_again_at_once() -> None:
    rig = make_rig(8, TierPlan(cascade="reused", min_uses=1_000, retry_seconds=30.0))
    rig.put_into_tier(1, 2, 3)
    ticket = rig.load(1, 2, 3)
    rig.tier.land()
    rig.tier.land(1)
    rig.tier.land(1, result=miss(Reason.WRONG_CHECKSUM))
    rig.tier.land(1)
    assert not ticket.is_waiting
    assert rig.finish(ticket) == 1
    counts = rig.manager.tier_statistics()[0]
    assert (counts.promoted, counts.failed_promotions) == (2, 1)
    assert rig.manager.lookup_nowait(make_keys(1, 2, 3)) == [LookupResult.HIT, LookupResult.MISS, LookupResult.HIT]
    assert rig.finish(rig.load(1, 2, 3)) == 1
    assert rig.tier.waiting_count == 0
    rig.clock.advance(30.0)
    assert rig.finish(rig.load(1, 2, 3)) == 3
    rig.assert_at_rest()


def test_reads_stand_in_line_for_the_byte_budget_and_one_always_may() -> None:
    rig = make_rig(8, TierPlan(cascade="reused", min_uses=1_000, read_bytes=20))
    rig.put_into_tier(1, 2, 3, 4)
    loads = [rig.load(1, 2), rig.load(3), rig.load(4)]
    rig.tier.land(4)
    assert rig.manager.statistics().promoting == 2
    rig.tier.land(2)
    rig.manager.poll_nowait()
    assert not loads[0].is_waiting
    assert rig.manager.statistics().promoting == 1
    assert [rig.finish(load) for load in loads] == [2, 1, 1]
    rig.assert_at_rest()


def test_a_read_takes_what_fits_into_cpu_memory() -> None:
    rig = make_rig(3, NEVER)
    rig.put_into_tier(*range(6))
    pinned = rig.load(0)
    rig.land_all()
    assert rig.finish(rig.load(*range(6))) == 3
    rig.manager.complete_load_nowait(pinned)
    rig.assert_at_rest()


def test_a_read_without_any_room_is_a_miss() -> None:
    rig = make_rig(1, NEVER)
    rig.store(9)
    pinned = rig.load(9)
    rig.put_into_tier(1)
    assert rig.finish(rig.load(1)) == 0
    rig.manager.complete_load_nowait(pinned)
    rig.assert_at_rest()


def test_the_prefix_in_cpu_memory_is_pinned_while_tiers_are_asked() -> None:
    rig = make_rig(4, NEVER)
    rig.store(1, 2)
    rig.put_into_tier(3)
    ticket = rig.load(1, 2, 3)
    rig.store(10, 11, 12, 13)
    assert rig.finish(ticket) == 3
    rig.assert_at_rest()


# Ending a wait early


def test_at_the_lookup_deadline_what_is_unanswered_is_a_miss() -> None:
    rig = make_rig(8, TierPlan(cascade="reused", min_uses=1_000, lookup_seconds=1.0))
    rig.store(1)
    rig.put_into_tier(2)
    ticket = rig.load(1, 2)
    assert rig.manager.next_deadline == 101.0
    rig.clock.advance(1.0)
    rig.manager.poll_nowait()
    assert not ticket.is_waiting
    assert rig.finish(ticket) == 1
    rig.assert_at_rest()


@pytest.mark.parametrize("leaves_at", ["before the read", "during the read"])
def test_a_block_that_a_tier_evicts_between_lookup_and_read_is_one_miss(leaves_at: str) -> None:
    rig = make_rig(8, NEVER)
    rig.put_into_tier(1, 2)
    ticket = rig.load(1, 2)
    rig.land(2)  # both are found
    if leaves_at == "during the read":
        rig.tier.begin_work(1)
    del rig.tier.blocks[make_keys(2)[0]]
    assert rig.finish(ticket) == 1
    assert rig.manager.tier_statistics()[0].failed_promotions == 1
    assert rig.finish(rig.load(1, 2)) == 1
    rig.store(2)
    assert rig.finish(rig.load(1, 2)) == 2
    rig.assert_at_rest()


@pytest.mark.parametrize("landed", [0, 1, 2, 3])
def test_a_wait_that_is_settled_early_ends_with_what_is_there(landed: int) -> None:
    rig = make_rig(8, NEVER)
    rig.store(1)
    rig.put_into_tier(2, 3)
    ticket = rig.load(1, 2, 3)
    rig.land(landed)
    rig.manager.settle_nowait(ticket)
    rig.manager.settle_nowait(ticket)
    assert (ticket.is_waiting, ticket.token_count) == (False, 1)
    rig.check_bytes(ticket)
    rig.manager.complete_load_nowait(ticket)
    rig.land_all()
    # What was being read is there for the next one.
    assert rig.manager.lookup_prefix_nowait(make_keys(1, 2, 3)) == (1 if landed < 2 else 3)
    rig.assert_at_rest()


@pytest.mark.parametrize("landed", [0, 1, 2, 3])
def test_a_wait_that_is_given_up_leaves_nothing_pinned(landed: int) -> None:
    rig = make_rig(8, NEVER)
    rig.store(1)
    rig.put_into_tier(2, 3)
    ticket = rig.load(1, 2, 3)
    settled: list[int] = []
    ticket.on_settled(lambda: settled.append(1))
    rig.land(landed)
    assert rig.manager.complete_load_nowait(ticket) is Completion.APPLIED
    assert rig.manager.complete_load_nowait(ticket) is not Completion.APPLIED
    assert (ticket.is_waiting, list(ticket.keys), settled) == (False, [], [1])
    rig.land_all()
    rig.assert_at_rest()


def test_a_slot_is_free_only_when_the_tier_lets_go_of_it() -> None:
    rig = make_rig(2, TierPlan(cascade="reused", min_uses=1_000, read_seconds=5.0))
    rig.put_into_tier(1, 2)
    ticket = rig.load(1, 2)
    rig.tier.land()
    rig.tier.begin_work()
    rig.clock.advance(5.0)
    rig.manager.poll_nowait()
    assert (ticket.is_waiting, ticket.token_count) == (False, 0)
    statistics = rig.manager.statistics()
    assert (statistics.free, statistics.leased_without_key) == (0, 2)
    rig.manager.complete_load_nowait(ticket)
    rig.land_all()
    assert rig.manager.statistics().free == 2
    rig.assert_at_rest()


def test_a_reset_makes_waiting_loads_miss_and_leaves_the_tiers_alone() -> None:
    rig = make_rig(8)
    rig.store(1, 2)
    rig.land_all()
    rig.put_into_tier(3)
    tickets = [rig.load(1, 2, 3)]
    rig.tier.land()
    tickets.append(rig.load(7))
    rig.manager.reset_nowait()
    assert [(ticket.is_waiting, ticket.result) for ticket in tickets] == [(False, LookupResult.MISS)] * 2
    for ticket in tickets:
        rig.manager.complete_load_nowait(ticket)
    rig.land_all()
    assert rig.finish(rig.load(1, 2, 3)) == 3
    rig.assert_at_rest()


def test_after_a_weight_update_nothing_older_can_be_reached_in_any_tier() -> None:
    rig = make_rig(8)
    rig.store(1, 2)
    rig.land_all()
    ticket = rig.load(1, 2, 3)
    rig.manager.bump_epoch_nowait()
    assert ticket.result is LookupResult.MISS
    rig.manager.complete_load_nowait(ticket)
    assert rig.finish(rig.load(1, 2)) == 0
    rig.store(1)
    rig.land_all()
    rig.manager.reset_nowait()
    assert rig.finish(rig.load(1, 2)) == 1
    assert len(rig.tier.blocks) == 3
    # Two managers never share what they call by the same epoch.
    others = make_rig(8)
    others.manager.bump_epoch_nowait()
    others.tier.blocks.update(rig.tier.blocks)
    assert others.finish(others.load(1, 2)) == 0
    rig.assert_at_rest()


def test_closing_makes_waiting_loads_miss_and_completions_still_count() -> None:
    rig = make_rig(8)
    rig.put_into_tier(1)
    rig.store(5)
    ticket, held = rig.load(1), rig.load(5)
    rig.manager.close_nowait()
    assert ticket.result is LookupResult.MISS
    assert rig.manager.complete_load_nowait(held) is Completion.APPLIED
    rig.manager.complete_load_nowait(ticket)
    rig.tier.land()
    rig.assert_at_rest()
    with pytest.raises(ClosedError):
        rig.load(1)


# Writing


def test_what_is_stored_is_written_through() -> None:
    rig = make_rig(8)
    rig.store(1, 2)
    assert rig.manager.is_at_rest is False
    rig.land_all()
    assert rig.tier_has(1, 2, 3) == [True, True, False]
    assert rig.manager.tier_statistics()[0].written == 2
    rig.assert_at_rest()


def test_a_failed_store_is_not_written() -> None:
    rig = make_rig(8)
    ticket = rig.manager.prepare_store_nowait(make_keys(1, 2, 3))
    for key, slot in zip(ticket.keys_to_store, ticket.slots, strict=True):
        rig.slots.rows[slot] = list((key * 16)[:16])
    rig.manager.complete_store_nowait(ticket, failed_keys=make_keys(2))
    failed = rig.manager.prepare_store_nowait(make_keys(4))
    rig.manager.complete_store_nowait(failed, success=False)
    rig.land_all()
    assert rig.tier_has(1, 2, 3, 4) == [True, False, True, False]
    assert rig.manager.statistics().failed_blocks == 2
    assert rig.manager.tier_statistics()[0].dropped_writes == 0  # they were never to be written
    rig.assert_at_rest()


def test_a_block_that_is_being_written_cannot_be_evicted_and_writes_never_hold_all_slots() -> None:
    rig = make_rig(8)
    rig.store(*range(8))
    assert rig.manager.statistics().pinned == 2
    rig.store(*range(10, 16))
    assert [result is LookupResult.HIT for result in rig.manager.lookup_nowait(make_keys(0, 1))] == [True, True]
    rig.land_all()
    counts = rig.manager.tier_statistics()[0]
    assert (counts.written, counts.dropped_writes) == (8, 6)
    rig.assert_at_rest()


def test_blocks_that_come_back_are_written_at_their_second_use() -> None:
    rig = make_rig(8, TierPlan(cascade="reused", min_uses=2))
    keys = make_keys(1, 2)
    first = rig.context()
    rig.manager.touch(keys, first)
    rig.store(1, 2, ctx=first)
    rig.land_all()
    assert rig.tier_has(1, 2) == [False, False]
    rig.manager.touch(keys[:1], rig.context())
    assert rig.manager.tier_statistics()[0].writing_bytes == 16
    rig.land_all()
    assert rig.tier_has(1, 2) == [True, False]
    rig.assert_at_rest()


def test_a_block_used_twice_before_it_is_stored_is_written_when_it_is() -> None:
    rig = make_rig(8, TierPlan(cascade="reused", min_uses=2))
    rig.manager.touch(make_keys(1), rig.context())
    ctx = rig.context()
    rig.manager.touch(make_keys(1), ctx)
    rig.store(1, ctx=ctx)
    rig.land_all()
    assert rig.tier_has(1) == [True]


def test_ahead_of_eviction_only_the_cold_end_is_written_and_what_leaves_unwritten_is_counted() -> None:
    rig = make_rig(8, TierPlan(cascade="ahead", clean_share=0.5))
    for number in range(8):
        rig.store(number)
        rig.land_all()
    assert rig.tier_has(*range(8)) == [True] * 4 + [False] * 4
    rig.store(20, 21)
    rig.land_all()
    assert rig.manager.tier_statistics()[0].dirty_evictions == 0
    assert rig.tier_has(*range(8)) == [True] * 6 + [False] * 2
    rig.store(*range(30, 36))
    assert rig.manager.tier_statistics()[0].dirty_evictions == 2
    rig.land_all()
    rig.assert_at_rest()


def test_what_finds_no_room_in_the_queue_is_dropped_and_counted() -> None:
    rig = make_rig(8, TierPlan(queue_bytes=3 * 16, write_bytes=1))
    rig.store(1, 2, 3, 4, 5)
    rig.land_all()
    assert rig.tier_has(1, 2, 3, 4, 5) == [True, True, True, False, False]
    assert rig.manager.tier_statistics()[0].dropped_writes == 2
    rig.assert_at_rest()


def test_a_write_that_the_tier_refuses_is_counted_and_costs_nothing_else() -> None:
    rig = make_rig(8)
    rig.store(1, 2)
    rig.tier.land(2, result=refusal(Reason.FULL))
    assert rig.manager.tier_statistics()[0].refused_writes == 2
    assert rig.finish(rig.load(1, 2)) == 2
    rig.assert_at_rest()


def test_what_a_tier_is_not_ready_for_waits_within_the_bounds_of_the_queue() -> None:
    rig = make_rig(8, TierPlan(queue_bytes=3 * 16))
    rig.tier.is_ready = False
    rig.store(1, 2, 3, 4)
    rig.manager.poll_nowait()
    counts = rig.manager.tier_statistics()[0]
    assert (counts.waiting_write_bytes, counts.writing_bytes) == (3 * 16, 0)
    assert (counts.refused_writes, counts.dropped_writes) == (0, 1)
    assert not rig.manager.is_at_rest
    rig.tier.is_ready = True
    rig.manager.poll_nowait()
    rig.land_all()
    assert rig.tier_has(1, 2, 3, 4) == [True, True, True, False]
    assert rig.manager.tier_statistics()[0].refused_writes == 0
    rig.assert_at_rest()


def test_what_leaves_while_a_tier_is_not_ready_is_dropped_and_counted() -> None:
    rig = make_rig(2)
    rig.tier.is_ready = False
    rig.store(1, 2)
    rig.store(3)
    rig.tier.is_ready = True
    rig.manager.poll_nowait()
    rig.land_all()
    counts = rig.manager.tier_statistics()[0]
    assert (counts.written, counts.dropped_writes, counts.refused_writes) == (2, 1, 0)
    rig.assert_at_rest()


def test_a_tier_that_ceases_to_be_ready_gets_the_blocks_once_more_and_no_more_often() -> None:
    rig = make_rig(8)
    rig.store(1, 2)
    rig.tier.land(1)
    rig.tier.is_ready = False
    rig.tier.land(1)
    rig.manager.poll_nowait()
    counts = rig.manager.tier_statistics()[0]
    assert (counts.written, counts.refused_writes, counts.waiting_write_bytes) == (1, 0, 16)
    rig.tier.is_ready = True
    rig.manager.poll_nowait()
    rig.tier.land(1, result=refusal(Reason.NOT_READY))
    counts = rig.manager.tier_statistics()[0]
    assert (counts.written, counts.refused_writes, counts.waiting_write_bytes) == (1, 1, 0)
    rig.assert_at_rest()


def test_the_next_block_of_a_slot_is_written_too() -> None:
    rig = make_rig(1)
    for number in (1, 2, 3):
        rig.store(number)
        rig.land_all()
    assert rig.tier_has(1, 2, 3) == [True] * 3


def test_what_a_tier_has_is_not_written_to_it_again() -> None:
    rig = make_rig(4, TierPlan(cascade="ahead", clean_share=1.0))
    rig.put_into_tier(1)
    assert rig.finish(rig.load(1)) == 1
    rig.store(2)
    rig.land_all()
    rig.manager.touch(make_keys(1, 2), rig.context())
    rig.store(3)
    rig.land_all()
    assert rig.tier.statistics().stores == 3
    rig.store(10, 11, 12, 13)
    assert rig.manager.tier_statistics()[0].dirty_evictions == 0


def test_what_a_reset_has_dropped_is_neither_written_nor_missed() -> None:
    rig = make_rig(4, TierPlan(cascade="ahead", clean_share=0.25))
    rig.store(1, 2, 3, 4)
    rig.manager.reset_nowait()
    rig.store(5, 6, 7, 8)
    assert rig.manager.tier_statistics()[0].dirty_evictions == 0
    rig = make_rig(4, TierPlan(write_bytes=1))
    rig.store(1, 2, 3)
    rig.manager.reset_nowait()
    rig.land_all()
    assert rig.tier_has(1, 2, 3) == [True, False, False]
    assert rig.manager.tier_statistics()[0].dropped_writes == 0
    rig.assert_at_rest()


def test_a_load_that_is_given_up_in_the_line_reads_nothing() -> None:
    rig = make_rig(8, TierPlan(cascade="reused", min_uses=1_000, read_bytes=20))
    rig.put_into_tier(1, 2)
    first, second = rig.load(1), rig.load(2)
    rig.tier.land(2)
    rig.manager.complete_load_nowait(second)
    assert rig.finish(first) == 1
    assert rig.manager.tier_statistics()[0].promoted == 1
    rig.assert_at_rest()


def test_what_was_read_from_a_tier_is_written_to_those_above_it_only() -> None:
    rig = make_rig(8, TierPlan(), TierPlan(), TierPlan())
    rig.put_into_tier(1, tier=1)
    assert rig.finish(rig.load(1)) == 1
    assert [rig.tier_has(1, tier=tier) for tier in range(3)] == [[True], [True], [False]]
    assert [counts.written for counts in rig.manager.tier_statistics()] == [1, 0, 0]
    rig.assert_at_rest()


def test_a_block_that_leaves_and_comes_back_while_it_is_being_written_is_written_again() -> None:
    rig = make_rig(1, TierPlan(cascade="write-through"))
    rig.store(1)
    rig.tier.begin_work()
    rig.manager.reset_nowait()
    rig.tier.land(1, result=refusal(Reason.FAILED))
    rig.store(1)
    rig.land_all()
    assert rig.tier_has(1) == [True]
    rig.manager.reset_nowait()
    assert rig.finish(rig.load(1)) == 1
    rig.assert_at_rest()


def test_a_block_that_leaves_before_it_is_written_is_looked_up_stored_again_and_written() -> None:
    rig = make_rig(4)
    rig.store(1, 2, 3, 4)
    rig.tier.begin_work()  # the first is being written, the others wait
    rig.store(10, 11, 12)
    assert rig.manager.lookup_nowait(make_keys(2)) == [LookupResult.MISS]
    ticket = rig.load(2)
    assert ticket.is_waiting  # a tier may have it
    rig.tier.land(1)
    rig.store(2)
    rig.land_all()
    assert rig.finish(ticket) == 1
    assert rig.tier_has(1, 2) == [True, True]
    rig.manager.reset_nowait()
    assert rig.finish(rig.load(2)) == 1
    rig.assert_at_rest()


# Which tiers


def test_a_request_may_leave_the_tiers_alone() -> None:
    rig = make_rig(8, NEVER)
    rig.put_into_tier(1)
    ticket = rig.load(1, ctx=ReqContext("a", tier_filter=TierFilter.CPU))
    assert ticket.result is LookupResult.MISS
    assert rig.tier.waiting_count == 0
    rig.manager.complete_load_nowait(ticket)


def test_accesses_count_in_the_tiers_too() -> None:
    rig = make_rig(8, TierPlan(), tier_blocks=[2])
    rig.store(1)
    rig.land_all()
    rig.store(2)
    rig.land_all()
    rig.manager.touch(make_keys(1), rig.context())
    rig.land_all()
    capacity = len(rig.tier.blocks)
    number = 3
    while len(rig.tier.blocks) >= capacity and all(rig.tier_has(1, 2)):
        rig.store(number)
        rig.land_all()
        number += 1
        capacity = len(rig.tier.blocks)
    assert rig.tier_has(1, 2) == [True, False]


def test_a_tier_that_is_slower_than_computing_again_is_not_read() -> None:
    rig = make_rig(8, NEVER, speed=10.0)
    rig.put_into_tier(1, 2)
    ticket = rig.load(1)
    rig.tier.land()
    rig.tier.begin_work()
    rig.clock.advance(1.0)  # a second for a block of one token, of which the engine computes ten
    assert rig.finish(ticket) == 1
    assert rig.finish(rig.load(2)) == 0
    assert rig.manager.tier_statistics()[0].too_slow == 1
    rig.assert_at_rest()


# Awaiting


@on_both_loops
@pytest.mark.parametrize("landed", [0, 1, 2, 3, 4])
def test_a_cancelled_wait_leaves_nothing_behind(backend: str, landed: int) -> None:
    async def main() -> None:
        rig = make_rig(8, NEVER)
        rig.store(1)
        rig.put_into_tier(2, 3)
        scope = anyio.CancelScope()
        tokens: list[int] = []

        async def load() -> None:
            with scope:
                async with rig.manager.loading(make_keys(1, 2, 3), rig.context(), take="leading") as ticket:
                    tokens.append(ticket.token_count)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(load)
            await settle()
            rig.land(landed)
            await settle()
            scope.cancel()
        assert tokens == ([3] if landed == 4 else [])
        rig.land_all()
        rig.assert_at_rest()

    anyio.run(main, backend=backend)


@on_both_loops
def test_a_tier_that_answers_in_a_thread_of_its_own_wakes_who_waits(backend: str) -> None:
    async def main() -> None:
        rig = make_rig(8, NEVER)
        rig.put_into_tier(1, 2)
        stop = anyio.Event()

        async def work() -> None:
            while not stop.is_set():
                await anyio.to_thread.run_sync(partial(work_once, rig))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(work)
            async with rig.manager.loading(make_keys(1, 2), rig.context(), take="leading") as ticket:
                assert ticket.token_count == 2
                rig.check_bytes(ticket)
            stop.set()
        rig.assert_at_rest()

    anyio.run(main, backend=backend)


@on_both_loops
def test_a_tier_that_never_answers_costs_one_deadline(backend: str) -> None:
    async def main() -> None:
        rig = make_rig(8, TierPlan(cascade="reused", min_uses=1_000, lookup_seconds=2.0))
        rig.store(1)
        found: list[int] = []

        async def load() -> None:
            async with rig.manager.loading(make_keys(1, 2), rig.context(), take="leading") as ticket:
                found.append(ticket.token_count)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(load)
            await settle()
            rig.clock.advance(2.0)
        assert found == [1]
        rig.land_all()
        rig.assert_at_rest()

    anyio.run(main, backend=backend)


def work_once(rig: Rig) -> None:
    """Do a step of the tier's work as its thread would, without polling."""
    tier = rig.tier
    if tier.waiting_count:
        tier.begin_work(1)
    if tier.begun_count:
        call, index = tier._begun.popleft()
        tier.work_on(call, [index])


async def settle() -> None:
    for _ in range(10):
        await checkpoint()


# Mistakes


@pytest.mark.parametrize(
    "mistake",
    [
        lambda: TierPlan(cascade="later"),  # type: ignore[arg-type]
        lambda: TierPlan(clean_share=0.0),
        lambda: TierPlan(clean_share=1.5),
        lambda: TierPlan(read_bytes=0),
        lambda: TierPlan(lookup_seconds=-1.0),
    ],
)
def test_a_plan_that_cannot_work_is_refused(mistake: Callable[[], object]) -> None:
    with pytest.raises(ConfigurationError, match="must be"):
        mistake()


def test_a_tier_given_twice_and_a_speed_of_nothing_are_refused() -> None:
    rig = make_rig(8)
    with pytest.raises(ConfigurationError, match="given twice"):
        TieredOffloadingManager(rig.manager._backing, [(rig.tier, TierPlan())] * 2, rig.slots)
    with pytest.raises(ConfigurationError, match="above 0"):
        make_rig(8, speed=0.0)


def test_events_are_those_of_cpu_memory() -> None:
    rig = make_rig(1, NEVER)
    rig.store(1)
    rig.put_into_tier(2)
    assert rig.finish(rig.load(2)) == 1
    assert [event.kind for event in rig.events] == [EventKind.STORED, EventKind.REMOVED, EventKind.STORED]


def test_a_foreign_ticket_changes_nothing() -> None:
    rig = make_rig(8)
    foreign = PrepareLoadOutput(make_rig(1).manager, 0, 0)
    assert rig.manager.complete_load_nowait(foreign) is Completion.FOREIGN


def test_nothing_is_remembered_of_misses_and_refusals_that_nobody_completes() -> None:
    rig = make_rig(2)
    for number in range(5):
        ticket = rig.load(number)
        rig.land_all()
        assert ticket.result is LookupResult.MISS
        rig.manager.prepare_store_nowait(make_keys(*range(10)))
    waiting = rig.manager.prepare_store_nowait(make_keys(*range(10, 12)), when_full="wait")
    behind = rig.manager.prepare_store_nowait(make_keys(20), when_full="wait")
    rig.manager.settle_nowait(behind)
    assert not rig.manager._loads
    assert list(rig.manager._offered) == [waiting]
    rig.manager.complete_store_nowait(waiting)
    assert not rig.manager._offered
    assert rig.manager.complete_load_nowait(ticket) is Completion.APPLIED
    assert rig.manager.complete_load_nowait(ticket) is Completion.REPEATED


# What is asked, of whom, and what counts


def test_an_answer_from_before_a_weight_update_says_nothing_after_it() -> None:
    rig = make_rig(8)
    rig.store(1)
    rig.land_all()
    rig.manager.reset_nowait()
    before = rig.load(1)
    rig.manager.bump_epoch_nowait()
    after = rig.load(1)
    assert rig.tier.waiting_count == 2
    assert rig.finish(after) == 0
    assert rig.manager.tier_statistics()[0].failed_promotions == 0
    rig.manager.complete_load_nowait(before)
    rig.assert_at_rest()


def test_a_tier_that_its_owner_has_closed_is_a_miss_and_takes_nothing() -> None:
    rig = make_rig(8)
    rig.put_into_tier(1)
    rig.tier.close()
    assert rig.load(1).result is LookupResult.MISS
    rig.manager.touch(make_keys(1, 2), rig.context())
    rig.store(2)
    rig.manager.poll_nowait()
    rig.assert_at_rest()


def test_a_tier_that_is_closed_between_lookup_and_read_is_a_miss() -> None:
    rig = make_rig(8, TierPlan(cascade="reused", min_uses=1_000, read_bytes=20))
    rig.put_into_tier(1, 2)
    loads = [rig.load(1), rig.load(2)]
    rig.tier.land(2)
    assert [load.is_waiting for load in loads] == [True, True]
    rig.tier.begin_work()
    rig.tier.close(drain_seconds=0.0)
    rig.tier.land()
    rig.manager.poll_nowait()
    assert [load.result for load in loads] == [LookupResult.MISS] * 2
    rig.assert_at_rest()


def test_tiers_asked_after_a_closed_one_are_asked_all_the_same() -> None:
    rig = make_rig(8, NEVER, NEVER)
    rig.put_into_tier(1, tier=1)
    ticket = rig.load(1)
    rig.tiers[0].close(drain_seconds=0.0)
    assert rig.finish(ticket) == 1
    assert rig.finish(rig.load(1)) == 1


def test_a_tier_that_was_too_slow_is_tried_again_after_a_while_by_one_load() -> None:
    rig = make_rig(8, TierPlan(cascade="reused", min_uses=1_000, retry_seconds=30.0), speed=10.0)
    rig.put_into_tier(*range(1, 6))
    ticket = rig.load(1)
    rig.tier.land()
    rig.tier.begin_work()
    rig.clock.advance(1.0)
    assert rig.finish(ticket) == 1
    assert rig.finish(rig.load(2)) == 0
    rig.clock.advance(30.0)
    trial = rig.load(3)
    assert trial.is_waiting
    assert rig.finish(rig.load(4)) == 0
    for _ in range(20):  # it has become fast
        rig.finish(trial)
        rig.manager.reset_nowait()
        rig.clock.advance(30.0)
        trial = rig.load(3)
    assert rig.finish(trial) == 1
    assert rig.finish(rig.load(5)) == 1


def test_a_read_is_no_access() -> None:
    class Witness(LRUPolicy):
        def touch(self, slots: Sequence[int], access: Access) -> None:
            seen.append(access.tick)
            super().touch(slots, access)

        def miss(self, keys: Sequence[OffloadKey], access: Access) -> None:
            seen.append(access.tick)

    seen: list[int] = []
    rig = make_rig(8, NEVER, policy=Witness)
    rig.put_into_tier(1, 2)
    ctx = rig.context()
    assert rig.finish(rig.load(1, 2, ctx=ctx)) == 2
    assert seen == []
    rig.manager.touch(make_keys(1, 2), ctx)
    assert len(seen) == 1


def test_a_policy_that_stores_nothing_new_keeps_no_read_from_its_load() -> None:
    class Closed(LRUPolicy):
        def admit(self, keys: Sequence[OffloadKey], access: Access) -> Sequence[OffloadKey]:
            return ()

    rig = make_rig(8, NEVER, policy=Closed)
    rig.put_into_tier(1)
    assert rig.finish(rig.load(1)) == 1


def test_a_load_that_needs_nothing_from_tiers_stands_in_no_line() -> None:
    rig = make_rig(8, TierPlan(cascade="reused", min_uses=1_000, read_bytes=20))
    rig.put_into_tier(1, 2, 3)
    loads = [rig.load(1, 2), rig.load(3), rig.load(99)]
    rig.tier.land(4)
    assert [load.is_waiting for load in loads] == [True, True, False]
    assert rig.manager.statistics().waiting_loads == 2
    assert [rig.finish(load) for load in loads] == [2, 1, 0]


def test_tiers_are_not_asked_for_what_the_gpu_has_nor_for_requests_of_an_older_epoch() -> None:
    rig = make_rig(8, NEVER)
    rig.manager.prepare_load_nowait(make_keys(1, 2, 3), take="leading", resident_tokens=2)
    assert rig.tier.waiting_count == 1
    rig.land_all()
    old = rig.context()
    rig.manager.lookup_nowait(make_keys(1), old)
    rig.manager.bump_epoch_nowait()
    assert rig.load(1, ctx=old).result is LookupResult.MISS
    assert rig.tier.waiting_count == 0


def test_a_request_uses_a_block_once_however_often_it_calls_also_if_it_only_stores() -> None:
    rig = make_rig(8, TierPlan(cascade="reused", min_uses=2))
    ctx = rig.context()
    rig.manager.touch(make_keys(1), ctx)
    rig.manager.touch(make_keys(1), ctx)
    rig.store(1, 2, ctx=ctx)
    rig.land_all()
    assert rig.tier_has(1, 2) == [False, False]
    rig.store(1)
    rig.land_all()
    assert rig.tier_has(1, 2) == [True, False]


def test_a_block_that_an_offer_in_line_pushes_out_at_its_commit_is_not_taken_for_the_new_one() -> None:
    rig = make_rig(1, TierPlan(cascade="ahead", clean_share=1.0))
    first = rig.manager.prepare_store_nowait(make_keys(1))
    second = rig.manager.prepare_store_nowait(make_keys(2), when_full="wait")
    rig.manager.complete_store_nowait(first)
    assert second.slots
    rig.manager.complete_store_nowait(second, success=False)
    rig.store(3)
    assert rig.manager.tier_statistics()[0].dirty_evictions == 1
    rig.land_all()
    assert rig.tier_has(1, 2, 3) == [False, False, True]


@on_both_loops
def test_awaited_lookups_ask_tiers_for_each_block_once_and_pin_nothing(backend: str) -> None:
    rig = make_rig(8, NEVER)
    rig.put_into_tier(1, 2, 4)
    rig.store(3)
    found: list[object] = []

    async def look() -> None:
        found.append(await rig.manager.lookup(make_keys(1, 2, 3, 9)))

    async def measure() -> None:
        found.append(await rig.manager.lookup_prefix(make_keys(1, 2, 3, 4, 9)))

    async def main() -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(look)
            tasks.start_soon(measure)
            await settle()
            assert rig.tier.waiting_count == 4  # 1, 2, 9 and 4: each is asked for once
            rig.land_all()
        assert rig.manager.statistics().pinned == 0
        assert rig.manager.lookup_prefix_nowait(make_keys(1, 2, 3)) == 0

    anyio.run(main, backend=backend)
    assert sorted(found, key=str) == [
        4,
        [LookupResult.PENDING, LookupResult.PENDING, LookupResult.HIT, LookupResult.MISS],
    ]


@on_both_loops
def test_a_cancelled_lookup_leaves_the_question_to_others_and_one_out_of_time_says_what_is_known(backend: str) -> None:
    rig = make_rig(8, NEVER)
    rig.put_into_tier(1)
    rig.store(7)
    found: list[int] = []
    scopes: list[anyio.CancelScope] = []

    async def give_up() -> None:
        with anyio.CancelScope() as scope:
            scopes.append(scope)
            await rig.manager.lookup(make_keys(1))

    async def wait(timeout_seconds: float | None) -> None:
        found.append(await rig.manager.lookup_prefix(make_keys(7, 1), timeout_seconds=timeout_seconds))

    async def main() -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(give_up)
            tasks.start_soon(wait, 0.001)
            tasks.start_soon(wait, None)
            await settle()
            scopes[0].cancel()
            rig.clock.advance(0.002)
            await settle()
            assert found == [1]
            assert rig.tier.waiting_count == 1
            rig.land_all()
        assert found == [1, 2]

    anyio.run(main, backend=backend)


@on_both_loops
def test_a_reuse_filter_lets_lookups_see_the_tiers(backend: str) -> None:
    rig = make_rig(8, NEVER)
    rig.put_into_tier(1)
    manager = FilterReusedOffloadingManager(rig.manager)

    async def look() -> None:
        assert await manager.lookup(make_keys(1)) == [LookupResult.PENDING]
        assert await manager.lookup_prefix(make_keys(1, 2)) == 1

    async def main() -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(look)
            await settle()
            rig.land_all()
            await settle()
            rig.land_all()

    anyio.run(main, backend=backend)


@on_both_loops
def test_a_lookup_across_a_weight_update_finds_nothing(backend: str) -> None:
    rig = make_rig(8, NEVER)
    rig.put_into_tier(1)

    async def look() -> None:
        assert await rig.manager.lookup_prefix(make_keys(1)) == 0

    async def main() -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(look)
            await settle()
            rig.manager.bump_epoch_nowait()
            rig.land_all()

    anyio.run(main, backend=backend)


def test_misses_and_waits_are_those_of_the_whole_load() -> None:
    rig = make_rig()
    rig.put_into_tier(3)
    rig.store(1, 2)
    old = ReqContext("old")
    rig.manager.touch(make_keys(1), old)
    rig.land_all()
    ticket = rig.load(1, 2, 3, 4, 5)
    assert ticket.is_waiting
    rig.clock.advance(0.5)
    assert rig.finish(ticket) == 3
    statistics = rig.manager.statistics()
    assert (statistics.hit_blocks, statistics.misses_by_reason) == (3, {"absent": 2})
    assert (statistics.waited_loads, statistics.load_wait_seconds) == (1, 0.5)
    rig.finish(rig.load(1, 2))
    given_up = rig.load(1, 6)
    rig.clock.advance(0.25)
    rig.manager.complete_load_nowait(given_up)
    rig.land_all()
    statistics = rig.manager.statistics()
    assert (statistics.waited_loads, statistics.load_wait_seconds) == (2, 0.75)
    rig.manager.bump_epoch_nowait()
    assert rig.finish(rig.load(1, 2, ctx=old)) == 0
    assert rig.manager.statistics().misses_by_reason == {"absent": 2, "stale": 2}
    with_all = rig.manager.prepare_load_nowait(make_keys(1, 2), take="all")
    rig.land_all()
    rig.manager.complete_load_nowait(with_all)
    assert rig.manager.statistics().misses_by_reason == {"absent": 4, "stale": 2}
    rig.assert_at_rest()


def test_what_closing_ends_is_stale_or_absent_but_no_error() -> None:
    rig = make_rig()
    ticket = rig.load(1)
    rig.manager.close_nowait()
    assert not ticket.is_waiting
    assert rig.manager.statistics().misses_by_reason == {"absent": 1}


def test_a_load_may_start_while_another_is_being_started() -> None:
    rig = make_rig(8, NEVER)
    rig.put_into_tier(1, 2)
    search = rig.manager.search_nowait(make_keys(1), rig.context(), lambda _: None)
    rig.land_all()
    second = rig.load(2)
    rig.tier.begin_work()
    for call, index in rig.tier._begun:  # it has the answer, which the next call of the tier collects
        rig.tier.work_on(call, [index])
    rig.tier._begun.clear()
    first = rig.manager.prepare_found_load_nowait(make_keys(1), rig.context(), search.sources)
    third = rig.load(99)
    assert [rig.finish(load) for load in (first, second, third)] == [1, 1, 0]
    rig.assert_at_rest()
