"""The worker: what goes first, what waits for what, and how every transfer ends."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transfers_rig import BLOCK_BYTES, BLOCK_COUNT, LANDING_SECONDS, SLOT_COUNT, WorkerRig

from aiokvoffload.devices.base import CopyPlan, Direction, Event, Stream
from aiokvoffload.errors import DeviceError, InvalidRequestError
from aiokvoffload.specs import CPULoadStoreSpec, GPULoadStoreSpec
from aiokvoffload.testing.device import ManualDevice
from aiokvoffload.testing.streams import ManualEvent
from aiokvoffload.transfers.base import Transfer, TransferState
from aiokvoffload.transfers.worker import MAX_PASSED_OVER

QUEUED, SENT, OVER = TransferState.QUEUED, TransferState.SENT, TransferState.OVER


def states(*transfers: Transfer) -> list[TransferState]:
    return [transfer.state for transfer in transfers]


def fill(rig: WorkerRig) -> Transfer:
    """Fill a byte budget of one block, so that what follows is queued."""
    return rig.store((15, 15))


# What goes first


def test_loads_go_before_stores() -> None:
    rig = WorkerRig(in_flight_blocks=1)
    fill(rig)
    store, load, second_load = rig.store((0, 0)), rig.load((1, 1)), rig.load((2, 2))
    assert states(store, load, second_load) == [QUEUED] * 3
    rig.land()
    assert states(store, load, second_load) == [QUEUED, SENT, QUEUED]
    rig.land()
    assert states(store, load, second_load) == [QUEUED, OVER, SENT]
    rig.land()
    assert states(store, load, second_load) == [SENT, OVER, OVER]
    assert [transfer.success for transfer in rig.over] == [True] * 3


def test_a_store_that_was_passed_over_often_enough_goes_next() -> None:
    rig = WorkerRig(in_flight_blocks=1)
    fill(rig)
    store, later_store = rig.store((0, 0)), rig.store((1, 1))
    passed = 0
    loads = [rig.load((2, 2))]
    while store.state is QUEUED:
        loads.append(rig.load((2, 2 + len(loads) % 8)))
        rig.land()
        passed += store.state is QUEUED
    assert passed == MAX_PASSED_OVER
    assert later_store.state is QUEUED
    # The next one has waited as long, but was not passed over: loads go again.
    rig.land()
    assert later_store.state is QUEUED
    while rig.land():
        pass
    assert later_store.state is OVER


def test_a_byte_budget_holds_back_what_exceeds_it() -> None:
    rig = WorkerRig(in_flight_blocks=3)
    first, second, third = rig.store((0, 0), (1, 1)), rig.store((2, 2)), rig.store((3, 3))
    assert states(first, second, third) == [SENT, SENT, QUEUED]
    assert rig.worker.in_flight_bytes == 3 * BLOCK_BYTES
    assert (rig.worker.sent_count, rig.worker.queued_count) == (2, 1)
    rig.device.land_next()
    assert rig.worker.poll() == [first]
    assert states(second, third) == [SENT, SENT]
    assert set(rig.land()) == {second, third}
    assert (rig.worker.in_flight_bytes, rig.worker.sent_count, rig.worker.queued_count) == (0, 0, 0)


def test_what_is_small_does_not_wait_behind_what_is_larger_than_the_budget() -> None:
    rig = WorkerRig(in_flight_blocks=2)
    small_before = rig.load((0, 0))
    large = rig.load(*((number, number) for number in range(1, 6)))
    second_large = rig.load(*((number, number) for number in range(6, 11)))
    small, too_much = rig.load((11, 11)), rig.store((12, 12), (13, 13))
    assert states(small_before, large, small) == [SENT, SENT, SENT]
    assert small.stream is not large.stream
    assert states(second_large, too_much) == [QUEUED, QUEUED]
    assert rig.worker.in_flight_bytes == 7 * BLOCK_BYTES
    while rig.device.land_next(large.stream):
        pass
    rig.worker.poll()
    assert states(large, second_large, small, too_much) == [OVER, SENT, SENT, QUEUED]
    rig.land()
    assert states(second_large, too_much) == [OVER, SENT]
    rig.land()
    assert (rig.worker.in_flight_bytes, rig.worker.sendable_bytes()) == (0, None)


def test_transfers_spread_over_the_streams() -> None:
    rig = WorkerRig()
    first, second = rig.store((0, 0)), rig.store((1, 1))
    third = rig.load((2, 2))
    assert len({first.stream, second.stream, third.stream}) == 3
    rig.land()


# What waits for what


@pytest.mark.parametrize("seed", range(8))
def test_a_load_into_a_block_waits_for_the_store_that_reads_it(seed: int) -> None:
    rig = WorkerRig(device=ManualDevice(random_order=random.Random(seed)))
    rig.store((1, 1))
    rig.load((5, 1))
    rig.land()
    assert rig.slots()[1] == 2
    assert rig.blocks()[1] == 106


@pytest.mark.parametrize("seed", range(8))
def test_a_store_of_a_block_waits_for_the_load_that_writes_it(seed: int) -> None:
    rig = WorkerRig(device=ManualDevice(random_order=random.Random(seed)))
    rig.load((5, 1))
    rig.store((1, 7))
    rig.load((7, 2))
    rig.land()
    assert rig.slots()[7] == 106
    assert rig.blocks()[2] == 106


def test_what_reads_the_same_does_not_wait() -> None:
    rig = WorkerRig()
    rig.device.hang_direction(Direction.STORE)
    first, second = rig.store((1, 1)), rig.store((1, 2))
    third, fourth = rig.load((5, 6)), rig.load((5, 7))
    assert first.waits_for == second.waits_for == third.waits_for == fourth.waits_for == []
    rig.device.release()
    rig.land()


def test_a_load_takes_the_queued_store_along_that_it_waits_for() -> None:
    rig = WorkerRig(in_flight_blocks=1)
    fill(rig)
    unrelated, store, load = rig.store((0, 0)), rig.store((1, 1)), rig.load((1, 2))
    rig.land()
    # The load is next, so what it reads must be written first.
    assert states(unrelated, store, load) == [QUEUED, SENT, QUEUED]
    rig.land()
    assert states(unrelated, store, load) == [QUEUED, OVER, SENT]
    rig.land()
    assert rig.blocks()[2] == 2
    rig.land()


def test_withdrawal_keeps_the_order_of_what_stood_around_it() -> None:
    rig = WorkerRig(in_flight_blocks=1)
    rig.device.hang_direction(Direction.LOAD)
    first = rig.load((5, 1))
    second = rig.load((6, 1))
    third = rig.store((1, 7))
    assert rig.worker.withdraw(second)
    assert second.is_withdrawn
    assert not second.success
    assert rig.over == [second]
    rig.device.land_all()
    assert rig.slots()[7] == 108, "the store overtook the load of before the withdrawn one"
    rig.device.release()
    rig.land()
    rig.land()
    assert states(first, third) == [OVER, OVER]
    assert rig.slots()[7] == 106


def test_withdrawing_what_is_sent_or_over_does_nothing() -> None:
    rig = WorkerRig()
    transfer = rig.store((0, 0))
    assert not rig.worker.withdraw(transfer)
    rig.land()
    assert not rig.worker.withdraw(transfer)
    assert transfer.success


def test_everything_queued_is_withdrawn_last_first() -> None:
    rig = WorkerRig(in_flight_blocks=1)
    filler = fill(rig)
    first, joiner, last = rig.load((5, 1)), rig.load((5, 1)), rig.store((1, 2))
    rig.worker.withdraw_all()
    # What has joined is over together with what it joined.
    assert rig.over == [last, first, joiner]
    assert filler.state is SENT
    rig.land()


def test_after_an_event_of_the_engine() -> None:
    rig = WorkerRig()
    compute = rig.device.create_stream("compute")

    def compute_block() -> None:
        rig.gpu[1] = 77

    rig.device.hang(compute)
    rig.device.launch(compute, compute_block)
    transfer = rig.store((1, 1), after=rig.device.record(compute))
    rig.land()
    assert transfer.state is SENT
    rig.device.release()
    rig.land()
    assert transfer.success
    assert rig.slots()[1] == 77


# Joining


def test_identical_pairs_join_the_copy_that_is_under_way() -> None:
    rig = WorkerRig()
    first = rig.load((5, 1), (6, 2))
    second = rig.load((5, 1), (6, 3))
    third = rig.load((5, 1))
    assert [plan.total_bytes // BLOCK_BYTES for plan in rig.device.copies] == [2, 1]
    assert rig.worker.joined_block_count == 2
    assert (first.byte_count, second.byte_count, third.byte_count) == (16, 8, 0)
    assert third.state is SENT
    assert rig.worker.sent_count == 3
    assert set(rig.land()) == {first, second, third}
    assert rig.blocks()[1:4] == [106, 107, 107]
    fourth = rig.load((5, 1))
    assert fourth.byte_count == BLOCK_BYTES, "what has landed is not joined"
    rig.land()


def test_a_joiner_is_not_over_before_what_it_joined() -> None:
    rig = WorkerRig(device=ManualDevice())
    first = rig.load((5, 1))
    second = rig.load((5, 1), (6, 2))
    rig.device.hang(first.stream)  # type: ignore[arg-type]
    assert rig.land() == []
    assert rig.worker.in_flight_bytes == BLOCK_BYTES
    assert states(first, second) == [SENT, SENT]
    rig.device.release()
    assert rig.land() == [first, second]


def test_what_has_come_in_between_keeps_from_joining() -> None:
    rig = WorkerRig()
    rig.load((5, 1))
    rig.load((6, 1))
    third = rig.load((5, 1))
    assert third.byte_count == BLOCK_BYTES
    rig.land()
    assert rig.blocks()[1] == 106


def test_the_end_of_an_earlier_load_does_not_keep_from_joining_the_last_one() -> None:
    rig = WorkerRig()
    first, second = rig.load((5, 1)), rig.load((6, 1))
    rig.device.land_next()
    assert rig.worker.poll() == [first]
    joiner = rig.load((6, 1))
    assert joiner.joined == [second]
    rig.land()
    assert joiner.success
    assert rig.blocks()[1] == 107


def test_a_store_that_rewrites_the_slot_keeps_from_joining() -> None:
    rig = WorkerRig(device=ManualDevice(random_order=random.Random(1)))
    rig.load((5, 1))
    rig.store((3, 5))
    third = rig.load((5, 1))
    assert third.byte_count == BLOCK_BYTES
    rig.land()
    assert rig.blocks()[1] == 4


def test_what_others_have_joined_cannot_be_withdrawn() -> None:
    rig = WorkerRig(in_flight_blocks=1)
    fill(rig)
    first, second = rig.load((5, 1)), rig.load((5, 1))
    assert not rig.worker.withdraw(first)
    assert rig.worker.withdraw(second)
    # The first one may still go and write into the block of the second one.
    assert rig.over == []
    assert rig.worker.withdraw(first)
    assert rig.over == [first, second]
    rig.land()
    assert rig.blocks()[1] == 2


def test_a_queued_transfer_that_is_withdrawn_is_not_over_while_a_copy_it_joined_touches_its_block() -> None:
    rig = WorkerRig(in_flight_blocks=1)
    first = rig.load((5, 1))
    second = rig.load((5, 1), (6, 2))
    assert states(first, second) == [SENT, QUEUED]
    assert rig.worker.withdraw(second)
    assert not second.is_over
    assert rig.land() == [first, second]
    assert second.is_withdrawn
    assert not second.success
    assert rig.blocks()[1:3] == [106, 3]


def test_the_failure_of_a_copy_is_that_of_all_who_joined_it() -> None:
    rig = WorkerRig()
    rig.device.fail_next_copy(Direction.LOAD, "link lost")
    first, second = rig.load((5, 1)), rig.load((5, 1), (6, 2))
    rig.land()
    assert first.error is not None
    assert "link lost" in first.error
    assert second.error == f"the copy it joined has failed: {first.error}"
    assert not first.success
    assert not second.success


def test_a_joiner_that_is_sent_after_the_landing_is_over_at_once() -> None:
    rig = WorkerRig(in_flight_blocks=1)
    first = rig.load((5, 1))
    blocking = rig.load((6, 2))
    joiner = rig.load((5, 1))
    rig.land()
    assert states(first, blocking, joiner) == [OVER, SENT, OVER]
    assert joiner.success
    rig.land()


def test_what_a_transfer_has_joined_is_sent_before_it() -> None:
    rig = WorkerRig(in_flight_blocks=1)
    fill(rig)
    for number in range(MAX_PASSED_OVER):
        rig.load((number, 8 + number % 4))
    first = rig.load((5, 1))
    joiner = rig.load((5, 1), (6, 2))
    store = rig.store((2, 7))
    while store.passed_over_count < MAX_PASSED_OVER:
        assert states(first, joiner) == [QUEUED, QUEUED]
        rig.land()
    rig.land()
    # The store is next; it waits for the joiner, and the joiner for what it has joined.
    assert states(first, joiner, store) == [SENT, QUEUED, QUEUED]
    for _ in range(3):
        rig.land()
    assert states(first, joiner, store) == [OVER, OVER, OVER]
    assert rig.slots()[7] == 107


@dataclass(frozen=True, slots=True)
class Step:
    direction: Direction | None
    pairs: tuple[tuple[int, int], ...] = ()
    number: int = 0


NUMBERS = st.integers(0, 4)
TRANSFERS = st.builds(
    lambda direction, blocks, slots: Step(direction, tuple(zip(blocks, slots, strict=False))),
    st.sampled_from(Direction),
    st.lists(NUMBERS, min_size=1, max_size=3, unique=True),
    st.lists(NUMBERS, min_size=1, max_size=3, unique=True),
)
OTHERS = st.builds(lambda number: Step(None, number=number), st.integers(0, 6))


@given(
    steps=st.lists(st.one_of(TRANSFERS, TRANSFERS, OTHERS), max_size=24),
    in_flight_blocks=st.integers(1, 6),
    streams=st.integers(1, 3),
    seed=st.integers(0, 1 << 16),
)
def test_any_order_of_landing_leaves_what_doing_one_after_the_other_leaves(
    steps: list[Step], in_flight_blocks: int, streams: int, seed: int
) -> None:
    device = ManualDevice(random_order=random.Random(seed))
    rig = WorkerRig(in_flight_blocks=in_flight_blocks, device=device, streams_per_direction=streams)
    submitted: list[tuple[Step, Transfer]] = []
    for step in steps:
        if step.direction is not None:
            submitted.append((step, rig.submit(step.direction, step.pairs)))
        elif step.number < 4:
            for _ in range(step.number):
                device.land_next()
            rig.worker.poll()
        elif submitted:
            rig.worker.withdraw(submitted[seed % len(submitted)][1])
        budget = in_flight_blocks * BLOCK_BYTES
        sent = [transfer.byte_count for _, transfer in submitted if transfer.state is SENT]
        assert len([size for size in sent if size > budget]) <= 1
        assert sum(size for size in sent if size <= budget) <= budget
        assert rig.worker.in_flight_bytes == sum(sent)
    while device.land_next() or rig.worker.sent_count or rig.worker.queued_count:
        rig.worker.poll()
    blocks, slots = list(range(1, BLOCK_COUNT + 1)), list(range(101, SLOT_COUNT + 101))
    for step, transfer in submitted:
        assert transfer.success is not transfer.is_withdrawn
        if transfer.success:
            before_blocks, before_slots = list(blocks), list(slots)
            for block, slot in step.pairs:
                if step.direction is Direction.STORE:
                    slots[slot] = before_blocks[block]
                else:
                    blocks[block] = before_slots[slot]
    assert rig.blocks() == blocks
    assert rig.slots() == slots
    assert sorted(map(id, rig.over)) == sorted(id(transfer) for _, transfer in submitted)
    assert (rig.worker.in_flight_bytes, rig.worker.sent_count, rig.worker.queued_count) == (0, 0, 0)


# Failures


def test_a_refused_submission_ends_the_transfer_and_no_other() -> None:
    rig = WorkerRig()
    first = rig.store((0, 0))
    rig.device.refuse_next("no memory")
    second = rig.store((1, 1))
    assert (second.state, second.error) == (OVER, "no memory")
    assert rig.over == [second]
    third = rig.store((1, 1))
    assert set(rig.land()) == {first, second, third}
    assert third.success


def test_a_failing_copy_ends_its_transfer_and_no_other() -> None:
    rig = WorkerRig(streams_per_direction=1)
    rig.device.fail_next(None, "link lost")
    first, second = rig.store((0, 0)), rig.store((1, 1))
    rig.land()
    assert not first.success
    assert "link lost" in str(first.error)
    assert second.success


def test_what_does_not_fit_is_not_taken_over() -> None:
    rig = WorkerRig()
    with pytest.raises(InvalidRequestError, match="out of range"):
        rig.store((0, SLOT_COUNT))
    with pytest.raises(InvalidRequestError, match="out of range"):
        rig.load((0, BLOCK_COUNT))
    with pytest.raises(InvalidRequestError, match="need 2 slots, not 1"):
        rig.worker.submit(Transfer(Direction.LOAD, GPULoadStoreSpec([0, 1], [2], [0]), CPULoadStoreSpec([0])))
    assert (rig.worker.queued_count, rig.worker.sent_count) == (0, 0)
    following = rig.load((0, 0))
    assert following.waits_for == []
    rig.land()


class FaultyDevice(ManualDevice):
    """Raises what no caller expects, at the calls it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.broken_event: Event | None = None
        self.broken_calls: set[str] = set()
        self.is_accepting = False

    def is_done(self, event: Event) -> bool:
        if event is self.broken_event:
            raise RuntimeError("is_done is broken")
        return super().is_done(event)

    def elapsed_seconds(self, start: Event, end: Event) -> float:
        self._break("elapsed_seconds")
        return super().elapsed_seconds(start, end)

    def wait_event(self, stream: Stream, event: Event) -> None:
        self._break("wait_event")
        super().wait_event(stream, event)

    def copy_batch(self, plan: CopyPlan, stream: Stream) -> None:
        if "copy_batch" in self.broken_calls and self.is_accepting:
            super().copy_batch(plan, stream)
        self._break("copy_batch")
        super().copy_batch(plan, stream)
        if "record afterwards" in self.broken_calls:
            self.broken_calls.add("record")

    def record(self, stream: Stream) -> ManualEvent:
        self._break("record")
        return super().record(stream)

    def _break(self, name: str) -> None:
        if name in self.broken_calls:
            raise RuntimeError(f"{name} is broken")


def test_a_fault_of_one_stream_does_not_keep_others_from_landing() -> None:
    device = FaultyDevice()
    rig = WorkerRig(device=device)
    first, second, load = rig.store((0, 0)), rig.store((1, 1)), rig.load((2, 2))
    device.broken_event = first.end_event
    device.land_all()
    with pytest.raises(RuntimeError, match="is_done is broken"):
        rig.worker.poll()
    assert states(first, second, load) == [SENT, OVER, OVER]
    device.broken_event = None
    assert set(rig.worker.poll()) == {first, second, load}


def test_a_transfer_is_not_lost_when_its_time_cannot_be_measured() -> None:
    device = FaultyDevice()
    rig = WorkerRig(device=device)
    first = rig.store((0, 0))
    device.broken_calls = {"elapsed_seconds"}
    device.land_all()
    with pytest.raises(RuntimeError, match="elapsed_seconds is broken"):
        rig.worker.poll()
    assert first.success
    assert rig.worker.sent_count == 0


@pytest.mark.parametrize("call", ["record", "wait_event"])
def test_what_raises_before_the_submission_ends_the_transfer(call: str) -> None:
    device = FaultyDevice()
    rig = WorkerRig(device=device)
    event = device.record(device.create_stream("compute"))
    device.broken_calls = {call}
    transfer = rig.store((0, 0), after=event)
    assert (transfer.state, transfer.error) == (OVER, f"{call} is broken")
    assert device.copies == []
    device.broken_calls = set()
    assert rig.store((0, 0)).waits_for == []
    rig.land()


@pytest.mark.parametrize("is_accepting", [False, True])
def test_copies_that_may_be_running_in_spite_of_an_error_are_waited_for(is_accepting: bool) -> None:
    device = FaultyDevice()
    rig = WorkerRig(device=device)
    device.broken_calls, device.is_accepting = {"copy_batch"}, is_accepting
    transfer = rig.load((5, 1))
    device.broken_calls = set()
    assert transfer.state is SENT if is_accepting else transfer.error
    rig.land()
    assert (transfer.state, transfer.error) == (OVER, "copy_batch is broken")


def test_a_copy_whose_end_could_not_be_recorded_lands_with_a_later_mark() -> None:
    device = FaultyDevice()
    rig = WorkerRig(device=device)
    device.broken_calls = {"record afterwards"}
    transfer = rig.load((5, 1))
    assert (transfer.state, transfer.end_event) == (SENT, None)
    with pytest.raises(RuntimeError, match="record is broken"):
        rig.worker.poll()
    device.broken_calls = set()
    follower = rig.store((1, 7))
    rig.land()
    assert transfer.success
    assert follower.success
    assert rig.slots()[7] == 106


# Deadlines


def test_an_overdue_transfer_is_told_once_and_may_land_late() -> None:
    rig = WorkerRig()
    rig.device.hang_direction(Direction.STORE)
    transfer = rig.store((0, 0))
    assert rig.worker.seconds_to_deadline() == LANDING_SECONDS
    rig.clock.advance(LANDING_SECONDS - 1)
    rig.worker.poll()
    assert rig.overdue == []
    rig.clock.advance(1)
    rig.worker.poll()
    rig.worker.poll()
    assert rig.overdue == [transfer]
    assert transfer.state is SENT
    assert rig.worker.seconds_to_deadline() is None
    assert rig.worker.under_way() == [transfer]
    rig.device.release()
    assert rig.land() == [transfer]
    assert transfer.is_over
    assert transfer.is_overdue


def test_what_cannot_be_sent_in_time_fails_with_what_has_joined_it() -> None:
    rig = WorkerRig(in_flight_blocks=1)
    rig.device.hang_direction(Direction.STORE)
    filler = fill(rig)
    rig.clock.advance(1)
    first = rig.load((5, 1))
    rig.clock.advance(1)
    joiner = rig.load((5, 1))
    rig.worker.poll()
    rig.clock.advance(LANDING_SECONDS - 2)
    rig.worker.poll()
    assert (rig.overdue, first.state) == ([filler], QUEUED)
    assert rig.worker.seconds_to_deadline() == 1
    rig.clock.advance(1)
    rig.worker.poll()
    assert (first.state, first.error) == (OVER, "it could not be sent within 5 s")
    rig.clock.advance(1)
    rig.worker.poll()
    assert joiner.state is OVER
    assert not joiner.success
    rig.device.release()
    rig.land()
    assert rig.blocks()[1] == 2


def test_everything_sent_can_be_made_overdue_at_once() -> None:
    rig = WorkerRig()
    first, joiner = rig.load((5, 1)), rig.load((5, 1))
    rig.worker.expire_all()
    assert rig.overdue == [first, joiner]
    rig.land()
    assert rig.over == [first, joiner]


def test_a_callback_that_raises_loses_no_other_transfer() -> None:
    rig = WorkerRig(streams_per_direction=1)

    def fail() -> None:
        raise DeviceError("the callback is broken")

    faulty = Transfer(
        Direction.STORE, GPULoadStoreSpec([0], [1], [0]), CPULoadStoreSpec([0]), on_over=fail, on_overdue=fail
    )
    rig.worker.submit(faulty)
    following, load = rig.store((1, 1)), rig.load((2, 2))
    rig.device.land_all()
    with pytest.raises(DeviceError, match="the callback is broken"):
        rig.worker.poll()
    rig.worker.poll()
    assert states(faulty, following, load) == [OVER] * 3


def test_estimates() -> None:
    rig = WorkerRig()
    assert rig.worker.seconds_to_landing() is None
    assert rig.worker.seconds_to_deadline() is None
    transfer = rig.store((0, 0))
    seconds = rig.worker.seconds_to_landing()
    assert seconds is not None
    assert 0 < seconds < 1e-6
    rig.clock.advance(1)
    late = rig.worker.seconds_to_landing()
    assert late is not None
    assert late < 0
    rig.land()
    # A landed operation of the device counts a millisecond: the next estimate has learnt from it.
    assert transfer.seconds == pytest.approx(0.001)
    assert rig.worker.byte_count[Direction.STORE] == BLOCK_BYTES
    assert rig.worker.busy_seconds[Direction.STORE] == pytest.approx(0.001)
    rig.store((0, 0))
    slower = rig.worker.seconds_to_landing()
    assert slower is not None
    assert slower > seconds
    rig.land()


@given(start=st.floats(0, 1e6), delay=st.floats(0, 10))
def test_what_has_no_time_left_is_overdue(start: float, delay: float) -> None:
    rig = WorkerRig(in_flight_blocks=1)
    rig.clock.advance(start)
    rig.device.hang_direction(Direction.STORE)
    sent, queued = fill(rig), rig.load((5, 1))
    rig.clock.advance(delay)
    while (seconds := rig.worker.seconds_to_deadline()) is not None and seconds > 0:
        rig.clock.advance(seconds)
    rig.worker.poll()
    assert rig.overdue == [sent]
    assert queued.state is OVER
