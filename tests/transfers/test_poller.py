"""The poller: it sleeps while there is nothing to do, and ends whatever happens around it."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable, Coroutine
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from aiokvoffload.testing.clock import ManualClock
from aiokvoffload.testing.device import ManualDevice
from aiokvoffload.transfers.poller import Poller, PollStep

pytestmark = pytest.mark.timeout(30)

PARKED = PollStep(has_news=False, seconds_to_landing=None, seconds_to_deadline=None)


def on_each_loop(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[str], None]:
    @functools.wraps(test)
    def run(backend: str) -> None:
        anyio.run(test, backend=backend)

    run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter("backend", inspect.Parameter.POSITIONAL_OR_KEYWORD)]
    )
    on_each: Callable[[str], None] = pytest.mark.parametrize("backend", ["asyncio", "trio"])(run)
    return on_each


async def go_on() -> None:
    """Let the poller go on as far as it can."""
    with anyio.CancelScope(shield=True):
        for _ in range(20):
            await anyio.lowlevel.checkpoint()


class SilentDevice(ManualDevice):
    """Has no doorbell."""

    def add_doorbell(self, ring: Callable[[], None]) -> Callable[[], None]:
        none: Callable[[], None] = None  # type: ignore[assignment]  # a ManualDevice promises to have one
        return none


class PollerRig:
    def __init__(self, device: ManualDevice | None = None) -> None:
        self.device = device or ManualDevice()
        self.clock = ManualClock()
        self.step = PARKED
        self.step_count = 0
        self.drain_count = 0
        self.error: Exception | None = None
        self.on_step: Callable[[], object] = lambda: None
        self.poller = Poller(self._take_step, self._drain, self.device, self.clock)

    def _take_step(self) -> PollStep:
        self.step_count += 1
        self.on_step()
        if self.error is not None:
            raise self.error
        return self.step

    def _drain(self) -> None:
        self.drain_count += 1


@on_each_loop
async def test_it_is_parked_while_nothing_is_under_way() -> None:
    rig = PollerRig()
    rig.poller.start()
    await go_on()
    assert rig.poller.poll_count == 1
    rig.clock.advance(1e6)
    await go_on()
    assert rig.poller.poll_count == 1
    assert rig.clock.next_deadline is None
    rig.poller.wake()
    await go_on()
    assert rig.poller.poll_count == rig.step_count == 2
    await rig.poller.stop()
    assert rig.drain_count == 0


@on_each_loop
async def test_a_doorbell_wakes_it() -> None:
    rig = PollerRig()
    rig.poller.start()
    await go_on()
    stream = rig.device.create_stream("copies")
    rig.device.launch(stream, lambda: None)
    rig.device.record(stream)
    await go_on()
    assert rig.poller.poll_count == 1
    rig.device.land_all()
    await go_on()
    assert rig.poller.poll_count == 2
    await rig.poller.stop()
    # Nobody listens any more.
    rig.device.record(stream)
    await go_on()
    assert rig.poller.poll_count == 2


@on_each_loop
async def test_without_a_doorbell_it_polls_at_the_estimated_landing_and_then_less_and_less_often() -> None:
    rig = PollerRig(SilentDevice())
    rig.step = PollStep(has_news=True, seconds_to_landing=0.5, seconds_to_deadline=30)
    rig.poller.start()
    await go_on()
    assert rig.clock.next_deadline == 0.5
    # It is late now. The first sleep is a millisecond long, each further one twice as long.
    rig.step = PollStep(has_news=False, seconds_to_landing=-0.1, seconds_to_deadline=30)
    sleeps = []
    for _ in range(9):
        deadline = rig.clock.next_deadline
        assert deadline is not None
        rig.clock.advance(deadline - rig.clock.now())
        await go_on()
        assert rig.clock.next_deadline is not None
        sleeps.append(round(1000 * (rig.clock.next_deadline - rig.clock.now())))
    assert sleeps == [1, 2, 4, 8, 16, 32, 64, 64, 64]
    rig.step = PollStep(has_news=True, seconds_to_landing=-0.1, seconds_to_deadline=30)
    rig.poller.wake()
    await go_on()
    assert rig.clock.next_deadline == pytest.approx(rig.clock.now() + 0.001)
    # What is asked for after a pause is looked for after a millisecond again, though nothing has landed meanwhile.
    for seconds_to_landing in (-0.1, None, 1e-6):
        rig.step = PollStep(has_news=False, seconds_to_landing=seconds_to_landing, seconds_to_deadline=30)
        rig.poller.wake()
        await go_on()
    assert rig.clock.next_deadline == pytest.approx(rig.clock.now() + 0.001)
    await rig.poller.stop()


@on_each_loop
async def test_with_a_doorbell_it_is_in_no_hurry() -> None:
    rig = PollerRig()
    rig.step = PollStep(has_news=False, seconds_to_landing=1e-6, seconds_to_deadline=30)
    rig.poller.start()
    await go_on()
    assert rig.clock.next_deadline == pytest.approx(0.064)
    await rig.poller.stop()


@on_each_loop
async def test_it_never_sleeps_past_a_deadline() -> None:
    rig = PollerRig()
    rig.step = PollStep(has_news=False, seconds_to_landing=10, seconds_to_deadline=3)
    rig.poller.start()
    await go_on()
    assert rig.clock.next_deadline == 3
    rig.step = PollStep(has_news=False, seconds_to_landing=None, seconds_to_deadline=2)
    rig.poller.wake()
    await go_on()
    assert rig.clock.next_deadline == 2
    rig.clock.advance(2)
    await go_on()
    assert rig.poller.poll_count == 3
    await rig.poller.stop()


@on_each_loop
async def test_a_deadline_that_is_almost_there_does_not_make_it_spin() -> None:
    rig = PollerRig()
    rig.clock.advance(5)
    rig.step = PollStep(has_news=False, seconds_to_landing=None, seconds_to_deadline=1e-17)
    rig.poller.start()
    await go_on()
    assert rig.poller.poll_count == 1
    assert rig.clock.next_deadline == pytest.approx(5.001)
    await rig.poller.stop()


@on_each_loop
async def test_a_scope_around_its_start_does_not_end_it() -> None:
    rig = PollerRig()
    with anyio.CancelScope() as scope:
        rig.poller.start()
        scope.cancel()
        await anyio.lowlevel.checkpoint()
    assert scope.cancelled_caught
    rig.poller.wake()
    await go_on()
    assert rig.poller.is_running
    assert rig.poller.poll_count >= 1
    await rig.poller.stop()


@on_each_loop
async def test_stopping_waits_for_its_end_even_if_cancelled() -> None:
    rig = PollerRig()
    rig.poller.start()
    await go_on()
    found: list[bool] = []
    with anyio.CancelScope() as scope:
        scope.cancel()
        await rig.poller.stop()
        found.append(rig.poller.is_running)
    assert found == [False]
    assert rig.drain_count == 0
    await rig.poller.stop()


@on_each_loop
async def test_a_step_that_raises_ends_it_and_nobody_else() -> None:
    rig = PollerRig()
    rig.error = RuntimeError("a broken step")
    rig.poller.start()
    await go_on()
    assert not rig.poller.is_running
    # Whoever waits for a copy under way is told by the drain.
    assert rig.drain_count == 1
    await rig.poller.stop()


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
@pytest.mark.parametrize("has_run", [True, False])
def test_the_end_of_its_loop_drains(backend: str, has_run: bool) -> None:
    rig = PollerRig()

    async def main() -> None:
        rig.poller.start()
        if has_run:
            await go_on()

    anyio.run(main, backend=backend)
    assert not rig.poller.is_running
    assert rig.drain_count == 1


@pytest.mark.parametrize("ticks", [0, 1, 5])
def test_whoever_cancels_all_tasks_of_the_loop_makes_it_drain_even_before_it_ever_ran(ticks: int) -> None:
    rig = PollerRig()

    async def main() -> None:
        rig.poller.start()
        for _ in range(ticks):
            await anyio.lowlevel.checkpoint()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        await go_on()
        assert not rig.poller.is_running
        assert rig.drain_count == 1
        await rig.poller.stop()

    asyncio.run(main())


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_doorbell_that_rings_after_the_end_of_the_loop_is_harmless(backend: str) -> None:
    rings: list[Callable[[], None]] = []

    class LateDevice(ManualDevice):
        def add_doorbell(self, ring: Callable[[], None]) -> Callable[[], None]:
            rings.append(ring)
            return super().add_doorbell(ring)

    rig = PollerRig(LateDevice())

    async def main() -> None:
        rig.poller.start()
        await go_on()

    anyio.run(main, backend=backend)
    rings[0]()
    assert rig.poller.poll_count == 1


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_it_knows_its_loop(backend: str) -> None:
    rig = PollerRig()
    found: list[bool] = []

    async def elsewhere() -> None:
        found.append(rig.poller.is_elsewhere)

    async def main() -> None:
        rig.poller.start()
        found.append(rig.poller.is_elsewhere)
        await go_on()

    anyio.run(main, backend=backend)
    assert not rig.poller.is_elsewhere
    anyio.run(elsewhere, backend=backend)
    assert found == [False, False], "one that has ended is nowhere"


def test_a_loop_beside_its_own_is_elsewhere() -> None:
    rig = PollerRig()
    home, other = asyncio.new_event_loop(), asyncio.new_event_loop()

    async def start() -> None:
        rig.poller.start()
        await go_on()

    async def ask() -> bool:
        return rig.poller.is_elsewhere

    home.run_until_complete(start())
    assert not rig.poller.is_elsewhere, "no loop runs at all"
    assert other.run_until_complete(ask())
    assert not home.run_until_complete(ask())
    home.run_until_complete(rig.poller.stop())
    for loop in (home, other):
        loop.close()


@on_each_loop
async def test_a_ring_during_a_step_is_not_lost() -> None:
    rig = PollerRig()
    rig.poller.start()
    await go_on()
    rings = [rig.poller.wake]
    rig.on_step = lambda: rings.pop()() if rings else None
    rig.poller.wake()
    await go_on()
    assert rig.poller.poll_count == 3
    await rig.poller.stop()
