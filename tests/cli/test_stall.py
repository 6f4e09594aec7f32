"""The clock is a fake: it moves only when a test says so, so every lateness is exact."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

import anyio
import anyio.lowlevel
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiokvoffload.cli.stall import DurationHistogram, LoopStallMeter
from aiokvoffload.clock import SystemClock
from aiokvoffload.errors import InvalidRequestError, StateError


class FakeClock:
    def __init__(self) -> None:
        self._now = 100.0
        self.waits: list[tuple[float, anyio.CancelScope]] = []

    def now(self) -> float:
        return self._now

    @contextmanager
    def cancel_at(self, deadline: float | None) -> Iterator[anyio.CancelScope]:
        with anyio.CancelScope() as scope:
            wait = (self._now if deadline is None else deadline, scope)
            self.waits.append(wait)
            try:
                yield scope
            finally:
                self.waits.remove(wait)

    def pause(self, seconds: float) -> None:
        self.advance(seconds)

    def advance(self, seconds: float) -> None:
        self._now += seconds
        for deadline, scope in self.waits:
            if deadline <= self._now + 1e-12:
                scope.cancel()


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await anyio.lowlevel.checkpoint()


async def beat(clock: FakeClock, meter: LoopStallMeter, seconds: float) -> None:
    """Let the heartbeat wait, move the clock and let it notice."""
    beat_count = meter.beat_count
    await until(lambda: bool(clock.waits))
    clock.advance(seconds)
    await until(lambda: meter.beat_count > beat_count)


async def records_how_late_each_wait_ends() -> None:
    clock = FakeClock()
    async with LoopStallMeter(clock) as meter:
        for _ in range(98):
            await beat(clock, meter, 0.001)
        await beat(clock, meter, 0.003)
        await beat(clock, meter, 0.051)
    assert meter.beat_count == 100
    assert meter.max_stall_ms == pytest.approx(50)
    assert meter.p99_stall_ms == pytest.approx(2, rel=1 / 32)
    assert meter.p50_stall_ms == pytest.approx(0, abs=1e-5)
    assert clock.waits == []


async def counts_a_stall_that_lasts_to_the_end() -> None:
    clock = FakeClock()
    async with LoopStallMeter(clock) as meter:
        clock.advance(0.5)
    assert meter.beat_count == 1
    assert meter.max_stall_ms == pytest.approx(499)


async def records_nothing_when_nothing_was_late() -> None:
    async with LoopStallMeter(FakeClock()) as meter:
        await anyio.lowlevel.checkpoint()
    assert (meter.beat_count, meter.max_stall_ms, meter.p50_stall_ms, meter.p99_stall_ms) == (0, 0, 0, 0)


async def passes_the_exception_of_the_body() -> None:
    clock = FakeClock()
    with pytest.raises(KeyError):  # noqa: PT012 - the body is what raises
        async with LoopStallMeter(clock) as meter:
            await beat(clock, meter, 0.001)
            raise KeyError
    assert clock.waits == []


async def ends_when_a_scope_outside_is_cancelled() -> None:
    clock = FakeClock()
    passed = False
    with anyio.CancelScope() as scope:
        async with LoopStallMeter(clock) as meter:
            await beat(clock, meter, 0.001)
            scope.cancel()
            await anyio.lowlevel.checkpoint()
            passed = True
    assert scope.cancelled_caught
    assert not passed
    assert clock.waits == []
    await anyio.lowlevel.checkpoint()


async def leaves_the_scopes_around_it_in_order() -> None:
    clock = FakeClock()
    with anyio.CancelScope() as outer:
        async with LoopStallMeter(clock) as meter:
            with anyio.CancelScope() as inner:
                await beat(clock, meter, 0.001)
                inner.cancel()
                await anyio.lowlevel.checkpoint()
            await beat(clock, meter, 0.001)
        await anyio.lowlevel.checkpoint()
    assert inner.cancelled_caught
    assert not outer.cancelled_caught


async def measures_only_once() -> None:
    meter = LoopStallMeter(FakeClock())
    async with meter:
        pass
    with pytest.raises(StateError, match="once"):
        async with meter:
            pass


async def works_with_the_clock_of_the_machine() -> None:
    async with LoopStallMeter(SystemClock()) as meter:
        await until(lambda: meter.beat_count >= 3)
    assert 0 <= meter.p50_stall_ms <= meter.p99_stall_ms <= meter.max_stall_ms


SCENARIOS = [
    records_how_late_each_wait_ends,
    counts_a_stall_that_lasts_to_the_end,
    records_nothing_when_nothing_was_late,
    passes_the_exception_of_the_body,
    ends_when_a_scope_outside_is_cancelled,
    leaves_the_scopes_around_it_in_order,
    measures_only_once,
    works_with_the_clock_of_the_machine,
]
every_scenario = pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)


@every_scenario
@pytest.mark.asyncio
async def test_meter_on_asyncio(scenario: Callable[[], Awaitable[None]]) -> None:
    await scenario()


@every_scenario
def test_meter_on_trio(scenario: Callable[[], Awaitable[None]]) -> None:
    anyio.run(scenario, backend="trio")


@pytest.mark.asyncio
async def test_native_cancellation_passes_through() -> None:
    clock = FakeClock()
    measuring = asyncio.Event()

    async def measure() -> None:
        async with LoopStallMeter(clock):
            measuring.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(measure())
    await measuring.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert clock.waits == []


@pytest.mark.asyncio
async def test_native_timeout_passes_through() -> None:
    clock = FakeClock()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0), LoopStallMeter(clock):
            await asyncio.Event().wait()
    assert clock.waits == []
    await anyio.lowlevel.checkpoint()


@pytest.mark.asyncio
async def test_a_meter_that_was_not_entered_cannot_be_left() -> None:
    with pytest.raises(StateError, match="not entered"):
        await LoopStallMeter(FakeClock()).__aexit__(None, None, None)


@pytest.mark.parametrize("interval_seconds", [0.0, -1.0, float("nan")])
def test_an_interval_that_is_not_positive_is_refused(interval_seconds: float) -> None:
    with pytest.raises(InvalidRequestError, match="interval_seconds"):
        LoopStallMeter(FakeClock(), interval_seconds=interval_seconds)


@given(st.lists(st.floats(0, 1e12), min_size=1, max_size=200), st.floats(0, 100))
def test_percentiles_are_at_most_a_bucket_above_the_true_ones(durations: list[float], percent: float) -> None:
    histogram = DurationHistogram()
    for seconds in durations:
        histogram.record(seconds)
    ordered = sorted(durations)
    needed = max(1.0, len(ordered) * percent / 100)
    true_seconds = next(seconds for rank, seconds in enumerate(ordered, start=1) if rank >= needed)
    found = histogram.percentile_seconds(percent)
    assert true_seconds - 1e-9 <= found * (1 + 1e-12)
    if true_seconds < 1e10:  # above are 300 years
        assert found <= true_seconds * (1 + 1 / 32) + 1e-9
    assert histogram.count == len(durations)
    assert histogram.max_seconds == ordered[-1]


def test_an_empty_histogram_and_early_times() -> None:
    histogram = DurationHistogram()
    assert (histogram.count, histogram.max_seconds, histogram.percentile_seconds(99)) == (0, 0, 0)
    histogram.record(-1.0)
    assert (histogram.count, histogram.max_seconds, histogram.percentile_seconds(99)) == (1, 0, 0)


@pytest.mark.parametrize("percent", [-1.0, 101.0, float("nan")])
def test_a_percentile_that_does_not_exist_is_refused(percent: float) -> None:
    with pytest.raises(InvalidRequestError, match="between 0 and 100"):
        DurationHistogram().percentile_seconds(percent)
