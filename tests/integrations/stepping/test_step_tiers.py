"""Tiers are asked and read in one batch at the end of a step, and what they answer is collected by a later one."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from aiokvoffload.integrations.stepping.manager import StepManager
from aiokvoffload.integrations.stepping.requests import Answer, EngineRequest
from aiokvoffload.keys import CacheIdentity, OffloadKey, make_offload_key
from aiokvoffload.managers.cpu import CPUOffloadingManager
from aiokvoffload.managers.tier_plan import TierPlan
from aiokvoffload.managers.tiered import TieredOffloadingManager
from aiokvoffload.testing.clock import ManualClock
from aiokvoffload.testing.manual_tier import ManualTier
from aiokvoffload.tiers.outcomes import Reason, miss

BLOCK_BYTES = 64
HOLD_SECONDS = 5.0
KEYS = [make_offload_key(bytes([number]) * 16) for number in range(16)]
SECOND_GROUP = [make_offload_key(bytes([number]) * 16, 1) for number in range(16)]


class Slots:
    """Bytes of slots, for blocks of one size."""

    def __init__(self, slot_count: int) -> None:
        self.rows = np.zeros((slot_count, BLOCK_BYTES), dtype=np.uint8)

    def group_bytes(self, group: int) -> int:
        return BLOCK_BYTES

    def view(self, slot: int, group: int) -> memoryview:
        return memoryview(self.rows[slot])


class Rig:
    """A step manager over one tier in which nothing happens by itself."""

    def __init__(self, slot_count: int = 8) -> None:
        self.clock = ManualClock()
        self.slots = Slots(slot_count)
        self.tier = ManualTier(CacheIdentity(), block_bytes=BLOCK_BYTES, clock=self.clock)
        cpu = CPUOffloadingManager(slot_count, clock=self.clock)
        self.tiered = TieredOffloadingManager(cpu, [(self.tier, TierPlan())], self.slots)
        self.manager = StepManager(cpu, self.tiered, self.tiered, hold_seconds=HOLD_SECONDS)

    def put_below(self, keys: list[OffloadKey]) -> None:
        """Let the tier have blocks that CPU memory has not; each has its own number in every byte."""
        buffers = [np.full(BLOCK_BYTES, key[0], dtype=np.uint8).data for key in keys]
        self.tier.start_put(keys, buffers, deadline=self.clock.now() + 1)
        self.tier.land()

    def store(self, keys: list[OffloadKey]) -> None:
        """Store blocks in CPU memory; the tier is not heard."""
        request = self.manager.open_request("before")
        assert self.manager.prepare_store(request, keys) is not None
        self.manager.complete_store(set(keys))

    def step(self, request: EngineRequest, keys: list[OffloadKey]) -> list[Answer]:
        """Look blocks up as an engine does, up to the first miss, and end the step."""
        answers = []
        for key in keys:
            answers.append(self.manager.lookup(request, key))
            if answers[-1] is Answer.MISS:
                break
        self.manager.end_step()
        return answers


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.manager.close()
    rig.tier.close(drain_seconds=0.0)


def test_blocks_are_asked_for_once_then_read_once_then_hit(rig: Rig) -> None:
    rig.put_below(KEYS[:3])
    request = rig.manager.open_request("first")
    assert rig.step(request, KEYS[:5]) == [Answer.UNKNOWN] * 5
    assert rig.tier.waiting_count == 5
    assert rig.step(request, KEYS[:5]) == [Answer.UNKNOWN] * 5
    assert rig.tier.waiting_count == 5
    rig.tier.land()
    assert rig.step(request, KEYS[:5]) == [*[Answer.PENDING] * 3, Answer.MISS]
    assert rig.tier.waiting_count == 3
    assert rig.step(request, KEYS[:5]) == [*[Answer.PENDING] * 3, Answer.MISS]
    assert rig.tier.waiting_count == 3
    rig.tier.land()
    assert rig.step(request, KEYS[:5]) == [*[Answer.HIT] * 3, Answer.MISS]
    decision = rig.manager.prepare_load(request, KEYS[:3])
    assert decision.slots is not None
    assert [int(rig.slots.rows[slot][0]) for slot in decision.slots] == [0, 1, 2]


def test_only_what_is_still_wanted_is_read(rig: Rig) -> None:
    """As with windows, where the last blocks are enough, and which they are is known once tiers have answered."""
    rig.put_below(KEYS[:6])
    request = rig.manager.open_request("window")
    rig.step(request, KEYS[:6])
    rig.tier.land()
    rig.step(request, KEYS[5:3:-1])
    assert rig.tier.waiting_count == 2


def test_what_is_found_stays_while_the_rest_is_read(rig: Rig) -> None:
    rig.store(KEYS[:2])
    rig.tier.land()
    rig.put_below(KEYS[2:4])
    request = rig.manager.open_request("first")
    assert rig.step(request, KEYS[:4]) == [Answer.HIT, Answer.HIT, Answer.UNKNOWN, Answer.UNKNOWN]
    rig.tier.land()
    rig.step(request, KEYS[:4])
    rig.store(KEYS[8:12])  # all the room there is beside the four
    assert rig.manager.prepare_store(rig.manager.open_request("more"), KEYS[12:14]) is not None
    rig.tier.land()
    assert rig.step(request, KEYS[:4]) == [Answer.HIT] * 4


def test_request_that_ends_unpins(rig: Rig) -> None:
    rig.put_below(KEYS[:2])
    request = rig.manager.open_request("first")
    for _ in range(2):
        rig.step(request, KEYS[:2])
        rig.tier.land()
    assert rig.manager.statistics().pinned == 2
    rig.manager.close_request(request)
    assert rig.manager.statistics().pinned == 0


def test_request_that_waits_too_long_unpins(rig: Rig) -> None:
    rig.put_below(KEYS[:2])
    request = rig.manager.open_request("first")
    for _ in range(2):
        rig.step(request, KEYS[:2])
        rig.tier.land()
    rig.clock.advance(HOLD_SECONDS)
    rig.manager.end_step()
    assert rig.manager.statistics().pinned == 0
    assert rig.step(request, KEYS[:2]) == [Answer.HIT] * 2


def test_what_cannot_be_read_is_a_miss_for_good(rig: Rig) -> None:
    rig.put_below(KEYS[:1])
    request = rig.manager.open_request("first")
    rig.step(request, KEYS[:1])
    rig.tier.land()
    rig.step(request, KEYS[:1])
    rig.tier.land(result=miss(Reason.WRONG_CHECKSUM))
    for _ in range(2):
        assert rig.step(request, KEYS[:1]) == [Answer.MISS]
    assert rig.tier.waiting_count == 0


def test_tier_that_does_not_answer_is_a_miss_by_its_deadline(rig: Rig) -> None:
    rig.put_below(KEYS[:1])
    request = rig.manager.open_request("first")
    assert rig.step(request, KEYS[:1]) == [Answer.UNKNOWN]
    rig.clock.advance(TierPlan().lookup_seconds)
    rig.manager.end_step()
    assert rig.step(request, KEYS[:1]) == [Answer.MISS]


def test_more_than_fits_is_read_as_far_as_there_is_room() -> None:
    rig = Rig(slot_count=4)
    rig.put_below(KEYS[:6])
    request = rig.manager.open_request("long")
    rig.step(request, KEYS[:6])
    rig.tier.land()
    rig.step(request, KEYS[:6])
    rig.tier.land()
    assert rig.step(request, KEYS[:6]) == [*[Answer.HIT] * 4, Answer.MISS]


def test_groups_are_read_each_by_itself(rig: Rig) -> None:
    """That one group misses its first block says nothing about the other."""
    rig.put_below([KEYS[0], SECOND_GROUP[0]])
    request = rig.manager.open_request("two groups")
    keys = [KEYS[0], SECOND_GROUP[0]]
    for _ in range(2):
        rig.step(request, keys)
        rig.tier.land()
    assert rig.step(request, keys) == [Answer.HIT] * 2


def test_request_that_may_not_read_below_asks_nobody(rig: Rig) -> None:
    rig.put_below(KEYS[:1])
    request = rig.manager.open_request("near", may_read_below=False)
    assert rig.step(request, KEYS[:1]) == [Answer.UNKNOWN]
    assert rig.tier.waiting_count == 0
    assert rig.step(request, KEYS[:1]) == [Answer.MISS]


def test_weight_update_ends_waits_and_hides_what_is_below(rig: Rig) -> None:
    rig.put_below(KEYS[:2])
    request = rig.manager.open_request("old")
    rig.step(request, KEYS[:2])
    rig.tier.land()
    rig.step(request, KEYS[:2])
    rig.manager.reset(starts_epoch=True)
    rig.tier.land()
    assert rig.step(request, KEYS[:2]) == [Answer.MISS]
    fresh = rig.manager.open_request("new")
    assert rig.step(fresh, KEYS[:2]) == [Answer.UNKNOWN] * 2
    rig.tier.land()
    assert rig.step(fresh, KEYS[:2]) == [Answer.MISS]


def test_reset_of_the_same_weights_keeps_tiers(rig: Rig) -> None:
    rig.put_below(KEYS[:1])
    rig.manager.reset(starts_epoch=False)
    request = rig.manager.open_request("new")
    for _ in range(2):
        rig.step(request, KEYS[:1])
        rig.tier.land()
    assert rig.step(request, KEYS[:1]) == [Answer.HIT]


def test_engine_steps_on_while_blocks_are_written_down(rig: Rig) -> None:
    rig.store(KEYS[:2])
    assert rig.manager.has_work_below
    rig.tier.land()
    rig.manager.end_step()
    assert not rig.manager.has_work_below
