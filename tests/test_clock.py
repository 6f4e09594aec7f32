from __future__ import annotations

import time

import anyio
import pytest
from anyio.lowlevel import checkpoint

from aiokvoffload.clock import Clock, SystemClock, deadline_after
from aiokvoffload.testing.clock import ManualClock
from aiokvoffload.testing.manager_contract import BACKENDS, some_turns

backends = pytest.mark.parametrize("backend", BACKENDS)


def test_the_system_clock_is_monotonic_time() -> None:
    clock: Clock = SystemClock()
    before = time.monotonic()
    assert before <= clock.now() <= time.monotonic()


def test_the_system_clock_pauses_the_thread() -> None:
    clock = SystemClock()
    before = clock.now()
    clock.pause(0.001)
    assert clock.now() - before >= 0.001
    clock.pause(-1.0)


def test_a_manual_clock_stands_still() -> None:
    clock: Clock = ManualClock(5.0)
    assert clock.now() == clock.now() == 5.0
    clock.pause(2.0)
    assert clock.now() == 7.0


def test_deadlines_are_absolute() -> None:
    clock = ManualClock(5.0)
    assert deadline_after(clock, 2.5) == 7.5
    assert deadline_after(clock, 0) == 5.0
    assert deadline_after(clock, None) is None


@backends
def test_the_system_clock_ends_a_wait(backend: str) -> None:
    async def main() -> None:
        clock = SystemClock()
        with clock.cancel_at(clock.now() + 0.001) as scope:
            await anyio.sleep_forever()
        assert scope.cancelled_caught
        with clock.cancel_at(clock.now() - 1.0) as scope:
            await anyio.sleep_forever()
        assert scope.cancelled_caught
        with clock.cancel_at(None) as scope:
            await checkpoint()
        assert not scope.cancelled_caught

    anyio.run(main, backend=backend)


@backends
def test_a_manual_clock_ends_the_waits_that_it_passes(backend: str) -> None:
    async def main() -> None:
        clock = ManualClock()
        ended: list[float] = []

        async def wait(deadline: float) -> None:
            with clock.cancel_at(deadline) as scope:
                await anyio.sleep_forever()
            assert scope.cancelled_caught
            ended.append(deadline)

        async with anyio.create_task_group() as group:
            for deadline in (3.0, 1.0, 2.0):
                group.start_soon(wait, deadline)
            await some_turns()
            assert clock.next_deadline == 1.0
            clock.advance(0.5)
            await some_turns()
            assert not ended
            clock.advance(0.5)
            await some_turns()
            assert ended == [1.0]
            assert clock.next_deadline == 2.0
            clock.pause(10.0)
        assert sorted(ended) == [1.0, 2.0, 3.0]
        assert clock.next_deadline is None

    anyio.run(main, backend=backend)


@backends
def test_a_manual_clock_forgets_waits_that_are_over(backend: str) -> None:
    async def main() -> None:
        clock = ManualClock(5.0)
        with clock.cancel_at(6.0) as scope:
            assert clock.next_deadline == 6.0
        assert clock.next_deadline is None
        clock.advance(2.0)
        assert not scope.cancel_called
        with pytest.raises(LookupError), clock.cancel_at(9.0):
            raise LookupError
        assert clock.next_deadline is None
        with clock.cancel_at(7.0) as scope:
            await anyio.sleep_forever()
        assert scope.cancelled_caught
        with clock.cancel_at(None) as scope:
            clock.advance(1e9)
            await checkpoint()
        assert not scope.cancel_called

    anyio.run(main, backend=backend)
