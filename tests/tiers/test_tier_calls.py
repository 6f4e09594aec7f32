"""Deadlines, cancellation, ownership and the breaker, one step at a time."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import anyio
import pytest

from aiokvoffload.errors import ClosedError
from aiokvoffload.testing.clock import ManualClock
from aiokvoffload.testing.manual_tier import ManualTier
from aiokvoffload.testing.strategies import make_keys
from aiokvoffload.testing.tier_contract import IDENTITY, outcomes, payload, reasons
from aiokvoffload.tiers.breaker import BreakerState
from aiokvoffload.tiers.calls import TierCall
from aiokvoffload.tiers.outcomes import BlockOutcome, Reason, miss

FAILED = miss(Reason.FAILED, "the disk is gone")


class Rig:
    def __init__(self) -> None:
        self.clock = ManualClock(1000.0)
        self.tier = ManualTier(
            IDENTITY, block_bytes=100, capacity_bytes=1 << 20, clock=self.clock, timeout_seconds=10.0
        )
        self.released: Counter[int] = Counter()

    def release(self, index: int) -> None:
        self.released[index] += 1

    def put(self, count: int = 3, *, seconds: float | None = None) -> TierCall:
        deadline = None if seconds is None else self.clock.now() + seconds
        buffers = [payload(number, 100) for number in range(count)]
        return self.tier.start_put(make_keys(*range(count)), buffers, deadline=deadline, on_release=self.release)

    def get(self, count: int = 3, *, seconds: float | None = None) -> TierCall:
        deadline = None if seconds is None else self.clock.now() + seconds
        buffers = [bytearray(100) for _ in range(count)]
        return self.tier.start_get_into(make_keys(*range(count)), buffers, deadline=deadline, on_release=self.release)


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_blocks_are_answered_and_released_one_by_one(rig: Rig) -> None:
    call = rig.put()
    rig.tier.land(2)
    assert rig.released == {0: 1, 1: 1}
    assert not call.is_answered
    rig.tier.land()
    assert call.is_answered
    assert call.is_over
    assert call.buffers == ()
    assert rig.released == {0: 1, 1: 1, 2: 1}


def test_the_deadline_answers_takes_back_and_abandons(rig: Rig) -> None:
    rig.put(1)
    rig.tier.land()
    rig.released.clear()
    call = rig.get(seconds=2.0)
    rig.tier.begin_work(2)
    rig.clock.advance(1.9)
    rig.tier.poll()
    assert not call.is_answered
    assert rig.tier.next_deadline == 1002.0
    rig.clock.advance(0.1)
    rig.tier.poll()
    assert reasons(call.results) == [Reason.DEADLINE] * 3
    assert rig.released == {2: 1}
    assert rig.tier.abandoned == [call]
    assert rig.tier.next_deadline is None
    rig.clock.advance(100.0)
    rig.tier.land()
    assert rig.released == {0: 1, 1: 1, 2: 1}
    assert call.is_over
    assert reasons(call.results) == [Reason.DEADLINE] * 3
    assert rig.tier.statistics().late_blocks == 2
    assert rig.tier.statistics().loaded_blocks == 0


def test_a_call_never_takes_longer_than_the_timeout_of_the_tier(rig: Rig) -> None:
    unbounded, late = rig.put(1), rig.put(1, seconds=99.0)
    assert unbounded.deadline == late.deadline == 1010.0
    rig.clock.advance(10.0)
    rig.tier.poll()
    assert unbounded.is_answered
    assert late.is_answered


def test_a_short_deadline_is_one_failure_and_a_stall_is_enough(rig: Rig) -> None:
    rig.put(1, seconds=0.1)
    rig.tier.begin_work()
    rig.clock.advance(0.1)
    rig.tier.poll()
    assert rig.tier.statistics().breaker is BreakerState.CLOSED
    rig.put(1)
    rig.tier.begin_work()
    rig.clock.advance(10.0)
    rig.tier.poll()
    assert rig.tier.statistics().breaker is BreakerState.OPEN
    assert rig.tier.breaker.reason == "a put has not come back within 10 s"
    assert reasons(rig.get(1).results) == [Reason.BREAKER_OPEN]


def test_waiting_in_line_is_no_failure_of_the_tier(rig: Rig) -> None:
    for _ in range(5):
        rig.put(1, seconds=0.1)
        rig.clock.advance(0.1)
        rig.tier.poll()
    assert rig.tier.breaker.state is BreakerState.CLOSED
    assert rig.tier.statistics().refusals_by_reason == {"deadline": 5}


def test_failures_in_a_row_open_the_breaker(rig: Rig) -> None:
    call = rig.get(3)
    rig.tier.land(result=FAILED)
    assert reasons(call.results) == [Reason.FAILED] * 3
    assert rig.tier.breaker.state is BreakerState.OPEN
    assert "the disk is gone" in rig.tier.statistics().breaker_reason


def test_a_probe_is_one_block(rig: Rig) -> None:
    rig.tier.breaker.record_stall("stalled", is_probe=False)
    rig.clock.advance(5.0)
    call = rig.put(3)
    assert rig.tier.waiting_count == 1
    assert rig.released == {1: 1, 2: 1}
    assert reasons(rig.get(1).results) == [Reason.BREAKER_OPEN]
    rig.tier.land()
    assert outcomes(call.results) == [BlockOutcome.STORED, BlockOutcome.REFUSED, BlockOutcome.REFUSED]
    assert rig.tier.breaker.state is BreakerState.CLOSED


@pytest.mark.parametrize("has_begun", [True, False])
def test_a_probe_that_does_not_come_back_opens_the_breaker_again(rig: Rig, has_begun: bool) -> None:
    rig.tier.breaker.record_stall("stalled", is_probe=False)
    rig.clock.advance(5.0)
    rig.put(1)
    if has_begun:
        rig.tier.begin_work()
    rig.clock.advance(10.0)
    rig.tier.poll()
    assert rig.tier.breaker.state is BreakerState.OPEN
    rig.tier.land()  # late news
    rig.clock.advance(9.9)
    assert reasons(rig.put(1).results) == [Reason.BREAKER_OPEN]
    rig.clock.advance(0.1)
    assert not rig.put(1).is_answered


def test_a_cancelled_probe_lets_the_next_call_probe(rig: Rig) -> None:
    rig.tier.breaker.record_stall("stalled", is_probe=False)
    rig.clock.advance(5.0)
    rig.put(1).cancel()
    call = rig.put(1)
    assert not call.is_answered
    rig.tier.land()
    assert rig.tier.breaker.state is BreakerState.CLOSED


@pytest.mark.parametrize("reason", [Reason.FULL, Reason.READ_ONLY, Reason.BUSY, Reason.NOT_READY])
def test_a_refusal_without_asking_the_storage_closes_no_breaker(rig: Rig, reason: Reason) -> None:
    rig.tier.breaker.record_stall("stalled", is_probe=False)
    rig.clock.advance(5.0)
    rig.put(1)
    rig.tier.land(result=miss(reason))
    assert rig.tier.breaker.state is BreakerState.OPEN


def test_cancelling_takes_back_what_has_not_begun(rig: Rig) -> None:
    call = rig.put()
    rig.tier.begin_work(1)
    call.cancel()
    assert reasons(call.results) == [Reason.CANCELLED] * 3
    assert rig.released == {1: 1, 2: 1}
    rig.tier.land()
    assert rig.released == {0: 1, 1: 1, 2: 1}
    call.cancel()
    assert rig.released == {0: 1, 1: 1, 2: 1}


def test_a_cancelled_call_is_still_abandoned_at_its_deadline(rig: Rig) -> None:
    call = rig.get(1)
    rig.tier.begin_work()
    call.cancel()
    rig.clock.advance(10.0)
    rig.tier.poll()
    assert rig.tier.abandoned == [call]
    assert rig.tier.breaker.state is BreakerState.OPEN


def test_a_callback_that_raises_keeps_nobody_else_waiting(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    def fail(_index: int = 0) -> None:
        raise ValueError("on purpose")

    seen: list[str] = []
    call = rig.tier.start_put(make_keys(1, 2), [payload(1, 100), payload(2, 100)], on_release=fail)
    call.on_answered(fail)
    call.on_answered(lambda: seen.append("answered"))
    call.on_over(fail)
    call.on_over(lambda: seen.append("over"))
    rig.tier.land()
    assert seen == ["answered", "over"]
    assert caplog.text.count("a callback of a tier call raised") == 4


def test_a_callback_may_post_the_next_call(rig: Rig) -> None:
    calls: list[TierCall] = []
    first = rig.put(1)
    first.on_answered(lambda: calls.append(rig.get(1)))
    rig.tier.land(1)
    assert not calls[0].is_answered
    rig.tier.land()
    assert outcomes(calls[0].results) == [BlockOutcome.HIT]
    late: list[str] = []
    calls[0].on_answered(lambda: late.append("answered"))
    calls[0].on_over(lambda: late.append("over"))
    assert late == ["answered", "over"]


def test_latencies_are_those_of_calls(rig: Rig) -> None:
    for seconds in (1.0, 2.0, 3.0):
        rig.put(2)
        rig.clock.advance(seconds)
        rig.tier.land()
    found = rig.tier.statistics()
    assert (found.p50_ms, found.p99_ms) == (2000.0, 3000.0)


def test_a_host_without_a_loop_waits_until_the_deadline_at_most(rig: Rig) -> None:
    assert reasons(rig.tier.wait(rig.get(1, seconds=0.01))) == [Reason.DEADLINE]


def test_closing_without_a_loop_is_bounded(rig: Rig) -> None:
    call = rig.put()
    rig.tier.begin_work(1)
    rig.tier.close(drain_seconds=1.0)
    assert rig.clock.now() >= 1001.0
    assert reasons(call.results) == [Reason.CLOSED] * 3
    assert rig.released == {1: 1, 2: 1}
    assert rig.tier.has_stopped
    with pytest.raises(ClosedError):
        rig.put()
    rig.tier.land()
    assert rig.released == {0: 1, 1: 1, 2: 1}


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_waiter_goes_on_at_the_deadline(rig: Rig, backend: str) -> None:
    async def work() -> None:
        results = []

        async def wait() -> None:
            keys, buffers = make_keys(1), [bytearray(100)]
            results.append(await rig.tier.get_into(keys, buffers, deadline=1002.0, on_release=rig.release))

        async with anyio.create_task_group() as group:
            group.start_soon(wait)
            await anyio.wait_all_tasks_blocked()
            rig.tier.begin_work()
            rig.clock.advance(2.0)
        assert reasons(results[0]) == [Reason.DEADLINE]
        assert rig.released == {}
        rig.tier.land()
        assert rig.released == {0: 1}

    anyio.run(work, backend=backend)


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
@pytest.mark.parametrize("begun_count", [0, 1, 2])
def test_a_cancelled_waiter_leaves_what_has_begun_to_the_tier(rig: Rig, backend: str, begun_count: int) -> None:
    async def work() -> None:
        async def wait() -> None:
            buffers = [payload(number, 100) for number in range(2)]
            await rig.tier.put(make_keys(0, 1), buffers, on_release=rig.release)

        async with anyio.create_task_group() as group:
            group.start_soon(wait)
            await anyio.wait_all_tasks_blocked()
            rig.tier.begin_work(begun_count)
            group.cancel_scope.cancel()
        assert sum(rig.released.values()) == 2 - begun_count
        rig.tier.land()
        assert rig.released == {0: 1, 1: 1}
        assert rig.tier.statistics().calls_in_flight == 0

    anyio.run(work, backend=backend)


@pytest.mark.asyncio
async def test_native_cancellation_is_cancellation(rig: Rig) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await rig.tier.put(make_keys(1), [payload(1, 100)], on_release=rig.release)
    assert rig.released == {0: 1}
    assert rig.tier.waiting_count == 0


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_cancelled_close_closes_all_the_same(rig: Rig, backend: str) -> None:
    async def work() -> None:
        call = rig.put(2)
        rig.tier.begin_work(1)
        async with anyio.create_task_group() as group:
            group.start_soon(rig.tier.aclose)
            await anyio.wait_all_tasks_blocked()
            group.cancel_scope.cancel()
        assert rig.tier.has_stopped
        assert reasons(call.results) == [Reason.CLOSED] * 2
        with pytest.raises(ClosedError):
            rig.put()

    anyio.run(work, backend=backend)


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_closing_waits_for_what_has_begun(rig: Rig, backend: str) -> None:
    async def work() -> None:
        call = rig.put(2)
        rig.tier.begin_work(1)
        async with anyio.create_task_group() as group:
            group.start_soon(rig.tier.aclose)
            await anyio.wait_all_tasks_blocked()
            assert not rig.tier.has_stopped
            rig.tier.land()
        assert rig.tier.has_stopped
        assert reasons(call.results) == [None, Reason.CLOSED]

    anyio.run(work, backend=backend)


def test_a_tier_may_be_used_in_one_loop_after_the_other(rig: Rig) -> None:
    async def work() -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(rig.tier.contains, make_keys(1))
            await anyio.wait_all_tasks_blocked()
            rig.tier.land()

    for backend in ("asyncio", "trio", "asyncio"):
        anyio.run(work, backend=backend)
    assert rig.tier.statistics().lookups == 3


def test_a_bell_that_nobody_heard_rings_again_for_who_comes_late(rig: Rig) -> None:
    call = rig.put(1)
    rig.tier.begin_work()
    rig.tier._land(call, [0], [miss(Reason.ABSENT)])
    heard: list[str] = []
    silence = rig.tier.add_doorbell(lambda: heard.append("late"))
    assert heard == ["late"]
    rig.tier.poll()
    assert call.is_answered
    silence()
    rig.put(1)
    rig.tier.land()
    assert heard == ["late"]


class HastyClock(ManualClock):
    """Ends the first wait before its deadline, as the timer of an event loop may by a moment."""

    def __init__(self) -> None:
        super().__init__(1000.0)
        self.wait_count = 0

    @contextmanager
    def cancel_at(self, deadline: float | None) -> Iterator[anyio.CancelScope]:
        self.wait_count += 1
        if self.wait_count > 1 and deadline is not None:
            self.advance(deadline - self.now())
        with anyio.CancelScope() as scope:
            scope.cancel()
            yield scope


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_timer_that_is_early_loses_no_answer(backend: str) -> None:
    clock = HastyClock()
    tier = ManualTier(IDENTITY, block_bytes=100, clock=clock)

    async def work() -> None:
        assert reasons(await tier.contains(make_keys(1, 2), deadline=1001.0)) == [Reason.DEADLINE] * 2

    anyio.run(work, backend=backend)
    assert clock.wait_count == 2
