"""Decisions for an engine that asks block by block, completes by keys, and resets while copies are under way."""

from __future__ import annotations

import pytest

from aiokvoffload.integrations.stepping.manager import StepManager
from aiokvoffload.integrations.stepping.requests import Answer
from aiokvoffload.keys import OffloadKey, make_offload_key
from aiokvoffload.managers.cpu import CPUOffloadingManager

KEYS = [make_offload_key(bytes([number]) * 16) for number in range(16)]


@pytest.fixture
def manager() -> StepManager:
    cpu = CPUOffloadingManager(8)
    return StepManager(cpu, cpu)


def stored(manager: StepManager, keys: list[OffloadKey], req_id: str = "before") -> None:
    """Store blocks, as a request of its own."""
    request = manager.open_request(req_id)
    decision = manager.prepare_store(request, keys)
    assert decision is not None
    manager.complete_store(set(decision.keys))
    manager.close_request(request)


def states(manager: StepManager) -> tuple[int, int, int, int]:
    """Return how many slots are free, ready, being written, and leased without a key."""
    found = manager.statistics()
    return found.free, found.ready, found.writing, found.leased_without_key


def test_blocks_are_pending_then_hits(manager: StepManager) -> None:
    first, second = manager.open_request("first"), manager.open_request("second")
    assert manager.lookup(second, KEYS[0]) is Answer.MISS
    decision = manager.prepare_store(first, KEYS[:2])
    assert decision is not None
    assert list(decision.keys) == KEYS[:2]
    assert manager.lookup(second, KEYS[0]) is Answer.PENDING
    manager.complete_store(set(KEYS[:2]))
    assert manager.lookup(second, KEYS[0]) is Answer.HIT
    load = manager.prepare_load(second, KEYS[:2])
    assert load.slots == decision.slots
    assert load.number != decision.number
    assert manager.statistics().pinned == 2
    manager.complete_load(second)
    assert manager.statistics().pinned == 0


def test_lookups_count_nothing_and_loads_do(manager: StepManager) -> None:
    for number in range(8):
        stored(manager, [KEYS[number]])
    waiting = manager.open_request("waiting")
    for _ in range(10):
        manager.lookup(waiting, KEYS[0])
    loading = manager.open_request("loading")
    manager.prepare_load(loading, [KEYS[1]])
    manager.complete_load(loading)
    stored(manager, [KEYS[8], KEYS[9]])
    answers = [manager.lookup(waiting, key) for key in KEYS[:4]]
    assert answers == [Answer.MISS, Answer.HIT, Answer.MISS, Answer.HIT]


def test_offers_count_as_use_of_what_is_stored(manager: StepManager) -> None:
    """An engine whose own cache has served a request offers its blocks again; then they must not be the coldest."""
    for number in range(8):
        stored(manager, [KEYS[number]])
    request = manager.open_request("served by the GPU")
    for key in KEYS[:2]:  # in chunks, as prefill goes on
        decision = manager.prepare_store(request, [key])
        assert decision is not None
        assert not decision.keys
    stored(manager, KEYS[8:10])
    assert [manager.lookup(request, key) for key in KEYS[:4]] == [Answer.HIT, Answer.HIT, Answer.MISS, Answer.MISS]


def test_requests_of_one_name_are_told_apart(manager: StepManager) -> None:
    for number in range(8):
        stored(manager, [KEYS[number]], req_id="same")
    stored(manager, [KEYS[8]], req_id="same")
    request = manager.open_request("same")
    assert manager.lookup(request, KEYS[0]) is Answer.MISS
    assert manager.lookup(request, KEYS[1]) is Answer.HIT


def test_offer_without_room_may_be_made_again(manager: StepManager) -> None:
    first, second = manager.open_request("first"), manager.open_request("second")
    assert manager.prepare_store(first, KEYS[:6]) is not None
    assert manager.prepare_store(second, KEYS[6:10]) is None
    manager.complete_store(set(KEYS[:6]))
    decision = manager.prepare_store(second, KEYS[6:10])
    assert decision is not None
    assert len(decision.keys) == 4


def test_offer_larger_than_memory_takes_its_leading_part(manager: StepManager) -> None:
    decision = manager.prepare_store(manager.open_request("long"), KEYS)
    assert decision is not None
    assert list(decision.keys) == KEYS[:8]


def test_failed_store_is_no_hit(manager: StepManager) -> None:
    request = manager.open_request("first")
    decision = manager.prepare_store(request, KEYS[:2])
    assert decision is not None
    manager.note_failure(decision.number)
    manager.complete_store(set(KEYS[:2]))
    assert manager.lookup(request, KEYS[0]) is Answer.MISS
    assert states(manager) == (8, 0, 0, 0)


def test_failed_load_is_a_miss_for_its_request_alone(manager: StepManager) -> None:
    stored(manager, KEYS[:2])
    request, other = manager.open_request("failed"), manager.open_request("other")
    decision = manager.prepare_load(request, KEYS[:2])
    manager.note_failure(decision.number)
    manager.complete_load(request)
    assert manager.lookup(request, KEYS[0]) is Answer.MISS
    assert manager.lookup(other, KEYS[0]) is Answer.HIT
    assert manager.statistics().pinned == 0


def test_load_of_what_has_gone_has_failed_and_pins_nothing(manager: StepManager) -> None:
    stored(manager, KEYS[:1])
    request = manager.open_request("late")
    decision = manager.prepare_load(request, KEYS[:2])
    assert decision.slots is None
    assert manager.statistics().pinned == 0
    assert manager.lookup(request, KEYS[0]) is Answer.MISS
    manager.complete_load(request)


@pytest.mark.parametrize("starts_epoch", [False, True])
def test_reset_keeps_slots_until_workers_have_let_go(manager: StepManager, starts_epoch: bool) -> None:
    stored(manager, KEYS[:2])
    loading, storing = manager.open_request("loading"), manager.open_request("storing")
    load = manager.prepare_load(loading, KEYS[:2])
    store = manager.prepare_store(storing, KEYS[2:4])
    assert store is not None
    void = manager.reset(starts_epoch=starts_epoch)
    assert void == ([load.number] if starts_epoch else [])
    assert states(manager) == (4, 0, 0, 4)
    assert manager.has_overtaken
    manager.complete_store(set(KEYS[2:4]))  # of before the reset: it changes nothing
    manager.complete_load(loading)
    assert states(manager) == (4, 0, 0, 4)
    manager.note_flushed()
    assert states(manager) == (8, 0, 0, 0)
    assert not manager.has_overtaken
    stored(manager, KEYS[2:4])
    assert states(manager) == (6, 2, 0, 0)


def test_requests_of_before_a_weight_update_store_and_load_no_more(manager: StepManager) -> None:
    old = manager.open_request("old")
    manager.reset(starts_epoch=True)
    decision = manager.prepare_store(old, KEYS[:2])
    assert decision is not None
    assert not decision.keys
    stored(manager, KEYS[:2])
    assert manager.lookup(old, KEYS[0]) is Answer.MISS
    assert manager.lookup(manager.open_request("new"), KEYS[0]) is Answer.HIT


def test_requests_of_before_a_reset_of_the_same_weights_go_on(manager: StepManager) -> None:
    old = manager.open_request("old")
    manager.reset(starts_epoch=False)
    assert manager.prepare_store(old, KEYS[:2]) is not None
    manager.complete_store(set(KEYS[:2]))
    assert manager.lookup(old, KEYS[0]) is Answer.HIT


def test_store_outlives_its_request(manager: StepManager) -> None:
    request = manager.open_request("short")
    decision = manager.prepare_store(request, KEYS[:2])
    assert decision is not None
    manager.close_request(request)
    manager.complete_store(set(decision.keys))
    assert states(manager) == (6, 2, 0, 0)


def test_request_that_may_not_load_misses(manager: StepManager) -> None:
    stored(manager, KEYS[:1])
    assert manager.lookup(manager.open_request("fresh", may_load=False), KEYS[0]) is Answer.MISS
