"""The contract of a tier as tests: subclass `TierContract` and say how to open the tier."""

# ruff: noqa: S101 - assertions are what a contract suite consists of

from __future__ import annotations

import random
import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass

import anyio
import anyio.lowlevel
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from aiokvoffload.clock import Clock, SystemClock
from aiokvoffload.errors import ClosedError, InvalidRequestError, WrongThreadError
from aiokvoffload.keys import CacheIdentity, OffloadKey
from aiokvoffload.testing.clock import ManualClock
from aiokvoffload.testing.strategies import make_keys
from aiokvoffload.tiers.arguments import Buffer
from aiokvoffload.tiers.base import DEFAULT_DRAIN_SECONDS, Tier
from aiokvoffload.tiers.breaker import BreakerState
from aiokvoffload.tiers.outcomes import BlockOutcome, BlockResult, Reason

BLOCK_BYTES = 5000
CAPACITY_BLOCKS = 64
PATIENCE_SECONDS = 60.0
"""Bounds a failing test; a passing one never waits for it."""

IDENTITY = CacheIdentity(model="contract")
OTHER_IDENTITY = CacheIdentity(model="contract", epoch=1)

Run = Callable[[Callable[[], Awaitable[None]]], None]


def payload(number: int, byte_count: int = BLOCK_BYTES) -> bytearray:
    """Return the bytes of a block: the same number, the same bytes."""
    return bytearray(random.Random(number).randbytes(byte_count))  # noqa: S311  reproducible, not secret


def outcomes(results: tuple[BlockResult, ...]) -> list[BlockOutcome]:
    """Return just the outcomes."""
    return [result.outcome for result in results]


def reasons(results: tuple[BlockResult, ...]) -> list[Reason | None]:
    """Return just the reasons."""
    return [result.reason for result in results]


@dataclass(frozen=True, slots=True)
class Hold:
    """What holds up a tier.

    Attributes:
        is_reached: Returns whether work on a block has begun, so that the tier alone can give its buffer back.
        let_go: Lets everything go on.
    """

    is_reached: Callable[[], bool]
    let_go: Callable[[], None]

    async def reached(self) -> None:
        """Wait until work on a block has begun."""
        with anyio.fail_after(PATIENCE_SECONDS):
            while not self.is_reached():  # noqa: ASYNC110 - whatever it is that is reached, it rings no bell
                await anyio.sleep(0.001)


class TierContract(ABC):
    """What `aiokvoffload.tiers.base` promises of every tier.

    ::

        class TestMyTier(TierContract):
            def open_tier(self, identity: CacheIdentity, clock: Clock | None = None) -> MyTier:
                return MyTier(identity, block_bytes=BLOCK_BYTES, clock=clock)

    A tier that lives in one event loop is opened in it: set `backends` to those it can live in.

    Attributes:
        backends: Event loops that the tier works in.
        keeps_over_restart: Whether a tier that is opened again finds what was stored before.
    """

    backends: tuple[str, ...] = ("asyncio", "trio")
    keeps_over_restart = True

    @abstractmethod
    def open_tier(self, identity: CacheIdentity, clock: Clock | None = None) -> Tier:
        """Open a tier with room for `CAPACITY_BLOCKS` blocks of `BLOCK_BYTES`; in one test, always the same storage."""

    def hold(self, tier: Tier) -> Hold:
        """Keep blocks that are begun from now on from coming back.

        A tier that answers before a call returns skips the tests that need it.
        """
        pytest.skip("nothing holds up this tier")

    @pytest.fixture(params=["asyncio", "trio"])
    def run(self, request: pytest.FixtureRequest) -> Run:
        """Runs a coroutine function in each event loop."""
        if request.param not in self.backends:
            pytest.skip(f"this tier does not work on {request.param}")
        return lambda work: anyio.run(work, backend=request.param)

    @pytest.fixture
    def tier(self) -> Iterator[Tier]:
        """A tier without an event loop, closed after the test."""
        tier = self.open_tier(IDENTITY)
        yield tier
        tier.close(drain_seconds=0.0)

    # What is stored

    def test_what_was_never_stored_is_a_miss(self, run: Run) -> None:
        """For every operation, with the same reason."""

        async def work() -> None:
            async with self.open_tier(IDENTITY) as tier:
                keys = make_keys(1, 2)
                for results in (
                    await tier.contains(keys),
                    await tier.get_into(keys, [bytearray(BLOCK_BYTES), bytearray(BLOCK_BYTES)]),
                    await tier.touch(keys),
                    await tier.delete(keys),
                ):
                    assert outcomes(results) == [BlockOutcome.MISS] * 2
                    assert reasons(results) == [Reason.ABSENT] * 2

        run(work)

    def test_what_was_stored_comes_back(self, run: Run) -> None:
        """From any kind of buffer, into any, and no byte beside it changes."""

        async def work() -> None:
            async with self.open_tier(IDENTITY) as tier:
                keys = make_keys(1, 2, 3)
                big = memoryview(bytearray(3 * BLOCK_BYTES))
                big[BLOCK_BYTES : 2 * BLOCK_BYTES] = payload(3)
                sources: list[Buffer] = [bytes(payload(1)), payload(2), big[BLOCK_BYTES : 2 * BLOCK_BYTES]]
                assert outcomes(await tier.put(keys, sources)) == [BlockOutcome.STORED] * 3
                assert outcomes(await tier.contains(keys)) == [BlockOutcome.HIT] * 3
                into = bytearray(b"\xa5" * (3 * BLOCK_BYTES + 30))
                parts = [memoryview(into)[10 + at : 10 + at + BLOCK_BYTES] for at in range(0, 15030, BLOCK_BYTES + 10)]
                assert outcomes(await tier.get_into(keys, parts)) == [BlockOutcome.HIT] * 3
                assert [bytes(part) for part in parts] == [bytes(payload(number)) for number in (1, 2, 3)]
                for part in parts:
                    part[:] = b"\xa5" * BLOCK_BYTES
                assert into == b"\xa5" * len(into)

        run(work)

    def test_a_batch_has_an_outcome_for_each_block(self, run: Run) -> None:
        """In the order of the keys; a key may be there twice, and a batch may be empty."""

        async def work() -> None:
            async with self.open_tier(IDENTITY) as tier:
                first, second, third = make_keys(1, 2, 3)
                await tier.put([first, third], [payload(1), payload(3)])
                found = await tier.contains([third, second, first, third])
                assert [result.is_good for result in found] == [True, False, True, True]
                buffers = [bytearray(BLOCK_BYTES) for _ in range(4)]
                loaded = await tier.get_into([third, second, first, third], buffers)
                assert [result.is_good for result in loaded] == [True, False, True, True]
                assert [buffers[0], buffers[2], buffers[3]] == [payload(3), payload(1), payload(3)]
                assert await tier.contains([]) == await tier.put([], []) == await tier.get_into([], []) == ()

        run(work)

    def test_storing_again_writes_nothing(self, run: Run) -> None:
        """The first copy stays."""

        async def work() -> None:
            async with self.open_tier(IDENTITY) as tier:
                keys = make_keys(1)
                await tier.put(keys, [payload(1)])
                assert outcomes(await tier.put(keys, [payload(1)])) == [BlockOutcome.PRESENT]
                assert tier.statistics().bytes_written == BLOCK_BYTES

        run(work)

    def test_deleted_blocks_are_gone(self, run: Run) -> None:
        """And can be stored again."""

        async def work() -> None:
            async with self.open_tier(IDENTITY) as tier:
                keys = make_keys(1, 2)
                await tier.put(keys, [payload(1), payload(2)])
                assert outcomes(await tier.delete(keys[:1])) == [BlockOutcome.DELETED]
                assert [result.is_good for result in await tier.contains(keys)] == [False, True]
                assert outcomes(await tier.put(keys, [payload(1), payload(2)])) == [
                    BlockOutcome.STORED,
                    BlockOutcome.PRESENT,
                ]

        run(work)

    def test_a_buffer_of_another_size_is_a_miss(self, run: Run) -> None:
        """A block is never cut and never padded."""

        async def work() -> None:
            async with self.open_tier(IDENTITY) as tier:
                for byte_count in (BLOCK_BYTES - 1, BLOCK_BYTES + 1, 1, 2 * BLOCK_BYTES):
                    keys = make_keys(byte_count)
                    await tier.put(keys, [payload(1)])
                    results = await tier.get_into(keys, [bytearray(byte_count)])
                    assert reasons(results) == [Reason.WRONG_LENGTH]

        run(work)

    @pytest.mark.parametrize("byte_count", [1, 4095, 4096, 4097, 8192])
    def test_blocks_of_any_size(self, tier: Tier, byte_count: int) -> None:
        """Aligned or not."""
        keys = make_keys(1)
        assert tier.wait(tier.start_put(keys, [payload(1, byte_count)]))[0].is_good
        buffer = bytearray(byte_count)
        assert tier.wait(tier.start_get_into(keys, [buffer]))[0].is_good
        assert buffer == payload(1, byte_count)

    def test_two_identities_never_see_each_others_blocks(self, run: Run) -> None:
        """The same key means two blocks."""

        async def work() -> None:
            async with self.open_tier(IDENTITY) as tier, self.open_tier(OTHER_IDENTITY) as other:
                keys = make_keys(1)
                assert outcomes(await tier.put(keys, [payload(1)])) == [BlockOutcome.STORED]
                assert not (await other.contains(keys))[0].is_good
                assert not (await other.get_into(keys, [bytearray(BLOCK_BYTES)]))[0].is_good
                assert not (await other.delete(keys))[0].is_good
                assert (await tier.contains(keys))[0].is_good

        run(work)

    def test_a_restart_finds_what_was_stored(self, run: Run) -> None:
        """The same identity only needs to open the storage again."""
        if not self.keeps_over_restart:
            pytest.skip("this tier forgets")

        async def store() -> None:
            async with self.open_tier(IDENTITY) as tier:
                assert (await tier.put(make_keys(1), [payload(1)]))[0].is_good

        async def load() -> None:
            async with self.open_tier(IDENTITY) as tier:
                buffer = bytearray(BLOCK_BYTES)
                assert (await tier.get_into(make_keys(1), [buffer]))[0].is_good
                assert buffer == payload(1)

        run(store)
        run(load)

    def test_more_blocks_than_fit_never_give_wrong_bytes(self, tier: Tier) -> None:
        """What had to leave is a miss; what is there is right."""
        for number in range(3 * CAPACITY_BLOCKS):
            tier.wait(tier.start_put(make_keys(number), [payload(number)]))
        for number in range(3 * CAPACITY_BLOCKS):
            buffer = bytearray(BLOCK_BYTES)
            if tier.wait(tier.start_get_into(make_keys(number), [buffer]))[0].is_good:
                assert buffer == payload(number)
        holdings = tier.statistics().holdings
        if holdings.capacity_bytes is not None and holdings.used_bytes is not None:
            assert holdings.used_bytes <= holdings.capacity_bytes

    @settings(
        derandomize=True,
        database=None,
        deadline=None,
        max_examples=25,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.differing_executors],
    )
    @given(
        steps=st.lists(
            st.tuples(st.sampled_from(["put", "get", "contains", "delete", "touch"]), st.integers(0, 5)), max_size=30
        )
    )
    def test_it_behaves_as_a_dict(self, tier: Tier, steps: list[tuple[str, int]]) -> None:
        """As long as there is room."""
        tier.wait(tier.start_delete(make_keys(*range(6))))
        stored: set[int] = set()
        for operation, number in steps:
            keys, is_there = make_keys(number), number in stored
            match operation:
                case "put":
                    expected = BlockOutcome.PRESENT if is_there else BlockOutcome.STORED
                    assert outcomes(tier.wait(tier.start_put(keys, [payload(number)]))) == [expected]
                    stored.add(number)
                case "get":
                    buffer = bytearray(BLOCK_BYTES)
                    assert tier.wait(tier.start_get_into(keys, [buffer]))[0].is_good is is_there
                    assert not is_there or buffer == payload(number)
                case "contains":
                    assert tier.wait(tier.start_contains(keys))[0].is_good is is_there
                case "delete":
                    assert tier.wait(tier.start_delete(keys))[0].is_good is is_there
                    stored.discard(number)
                case _:
                    assert tier.wait(tier.start_touch(keys, request_id="r", depths=[3]))[0].is_good is is_there

    # Who owns the buffers

    def test_every_buffer_is_released_once(self, run: Run) -> None:
        """Whatever became of its block."""

        async def work() -> None:
            async with self.open_tier(IDENTITY) as tier:
                keys = make_keys(1, 2, 3)
                released: Counter[int] = Counter()
                await tier.put(keys[:2], [payload(1), payload(2)], on_release=lambda index: released.update([index]))
                assert released == {0: 1, 1: 1}
                released.clear()
                buffers = [bytearray(BLOCK_BYTES) for _ in keys]
                await tier.get_into(keys, buffers, on_release=lambda index: released.update([index]))
                assert released == {0: 1, 1: 1, 2: 1}

        run(work)

    def test_a_deadline_that_has_passed_is_a_miss_at_once(self, run: Run) -> None:
        """Nothing is begun, and the buffers are released."""

        async def work() -> None:
            async with self.open_tier(IDENTITY) as tier:
                released: list[int] = []
                keys, now = make_keys(1), tier.clock.now()
                stored = await tier.put(keys, [payload(1)], deadline=now, on_release=released.append)
                assert (outcomes(stored), reasons(stored)) == ([BlockOutcome.REFUSED], [Reason.DEADLINE])
                loaded = await tier.get_into(
                    keys, [bytearray(BLOCK_BYTES)], deadline=now - 1.0, on_release=released.append
                )
                assert reasons(loaded) == [Reason.DEADLINE]
                assert reasons(await tier.contains(keys, deadline=now)) == [Reason.DEADLINE]
                assert released == [0, 0]

        run(work)

    def test_a_cancelled_caller_posts_nothing(self, run: Run) -> None:
        """Cancellation is looked for first."""

        async def work() -> None:
            async with self.open_tier(IDENTITY) as tier:
                with anyio.CancelScope() as scope:
                    scope.cancel()
                    await tier.put(make_keys(1), [payload(1)])
                assert scope.cancelled_caught
                assert tier.statistics().stores == 0

        run(work)

    def test_the_deadline_ends_the_wait_and_not_the_ownership(self, run: Run) -> None:
        """The caller goes on at its deadline; the buffer is released when the tier is really done."""

        async def work() -> None:
            clock = ManualClock()
            async with self.open_tier(IDENTITY, clock) as tier:
                keys = make_keys(1)
                await tier.put(keys, [payload(1)])
                released = Released(1)
                results: list[BlockResult] = []

                async def wait() -> None:
                    buffers = [bytearray(BLOCK_BYTES)]
                    results.extend(
                        await tier.get_into(keys, buffers, deadline=clock.now() + 2.0, on_release=released.add)
                    )

                hold = self.hold(tier)
                async with anyio.create_task_group() as group:
                    group.start_soon(wait)
                    await hold.reached()
                    clock.advance(2.0)
                assert reasons(tuple(results)) == [Reason.DEADLINE]
                assert (released.counts, tier.statistics().calls_in_flight) == ({}, 1)
                hold.let_go()
                await released.all()
                assert (released.counts, tier.statistics().calls_in_flight) == ({0: 1}, 0)
                assert tier.statistics().late_blocks == 1

        run(work)

    def test_cancelling_the_wait_does_not_end_the_ownership(self, run: Run) -> None:
        """Blocks that are not begun come back at once, those that are begun when the tier is done."""

        async def work() -> None:
            async with self.open_tier(IDENTITY) as tier:
                numbers = range(40)
                released = Released(len(numbers))
                hold = self.hold(tier)

                async def wait() -> None:
                    buffers = [payload(number) for number in numbers]
                    await tier.put(make_keys(*numbers), buffers, on_release=released.add)

                async with anyio.create_task_group() as group:
                    group.start_soon(wait)
                    await hold.reached()
                    group.cancel_scope.cancel()
                assert tier.statistics().calls_in_flight == 1
                assert len(released.counts) < len(numbers)
                hold.let_go()
                await released.all()
                assert set(released.counts.values()) == {1}
                assert tier.statistics().calls_in_flight == 0

        run(work)

    def test_a_cancelled_call_is_answered_at_once(self, tier: Tier) -> None:
        """Without an event loop."""
        hold = self.hold(tier)
        call = tier.start_put(make_keys(1), [payload(1)])
        call.cancel()
        assert call.is_answered
        assert reasons(call.results) == [Reason.CANCELLED]
        call.cancel()
        hold.let_go()
        wait_until_over(tier, lambda: call.is_over)

    # Without an event loop

    def test_a_host_without_a_loop_posts_and_polls(self, tier: Tier) -> None:
        """A doorbell says when there is something to collect."""
        rung = threading.Event()
        silence = tier.add_doorbell(rung.set)
        answered: list[str] = []
        call = tier.start_put(make_keys(1), [payload(1)])
        call.on_answered(lambda: answered.append("answered"))
        call.on_over(lambda: answered.append("over"))
        assert rung.wait(PATIENCE_SECONDS)
        wait_until_over(tier, lambda: call.is_over)
        assert answered == ["answered", "over"]
        assert outcomes(call.results) == [BlockOutcome.STORED]
        assert tier.next_deadline is None
        silence()

    def test_many_calls_at_once(self, run: Run) -> None:
        """Each gets its own answer."""

        async def work() -> None:
            async with self.open_tier(IDENTITY) as tier:

                async def store_and_load(number: int) -> None:
                    keys, buffer = make_keys(number), bytearray(BLOCK_BYTES)
                    assert (await tier.put(keys, [payload(number)]))[0].is_good
                    assert (await tier.get_into(keys, [buffer]))[0].is_good
                    assert buffer == payload(number)

                async with anyio.create_task_group() as group:
                    for number in range(24):
                        group.start_soon(store_and_load, number)
                assert tier.statistics().loaded_blocks == 24

        run(work)

    # Trouble

    def test_an_open_breaker_answers_at_once(self, run: Run) -> None:
        """A miss to loads and lookups, a refusal to stores."""

        async def work() -> None:
            async with self.open_tier(IDENTITY) as tier:
                keys = make_keys(1)
                await tier.put(keys, [payload(1)])
                tier.breaker.record_stall("the test says so", is_probe=False)
                released: list[int] = []
                refused = await tier.put(keys, [payload(1)], on_release=released.append)
                assert (outcomes(refused), reasons(refused)) == ([BlockOutcome.REFUSED], [Reason.BREAKER_OPEN])
                assert reasons(await tier.contains(keys)) == [Reason.BREAKER_OPEN]
                missed = await tier.get_into(keys, [bytearray(BLOCK_BYTES)], on_release=released.append)
                assert reasons(missed) == [Reason.BREAKER_OPEN]
                assert released == [0, 0]
                found = tier.statistics()
                assert (found.breaker, found.breaker_reason) == (BreakerState.OPEN, "the test says so")

        run(work)

    def test_closing_is_bounded_and_gives_back_what_has_not_begun(self, run: Run) -> None:
        """Also with work that does not come back."""

        async def work() -> None:
            clock = ManualClock()
            tier = self.open_tier(IDENTITY, clock)
            released = Released(40)
            hold = self.hold(tier)
            call = tier.start_put(
                make_keys(*range(40)), [payload(number) for number in range(40)], on_release=released.add
            )
            await hold.reached()
            async with anyio.create_task_group() as group:
                group.start_soon(tier.aclose)
                await anyio.wait_all_tasks_blocked()
                assert not call.is_answered
                clock.advance(DEFAULT_DRAIN_SECONDS)
            assert set(reasons(call.results)) == {Reason.CLOSED}
            assert not call.is_over
            hold.let_go()
            await released.all()
            assert set(released.counts.values()) == {1}

        run(work)

    def test_a_closed_tier_is_refused(self, run: Run) -> None:
        """Closing twice is fine."""

        async def work() -> None:
            tier = self.open_tier(IDENTITY)
            await tier.aclose()
            await tier.aclose()
            tier.close()
            with pytest.raises(ClosedError):
                await tier.contains(make_keys(1))
            assert tier.statistics().calls_in_flight == 0

        run(work)

    def test_mistakes_of_the_caller_are_errors(self, tier: Tier) -> None:
        """Nothing is begun."""
        keys = make_keys(1)
        mistakes: list[Callable[[], object]] = [
            lambda: tier.start_put(keys, []),
            lambda: tier.start_get_into(keys, [bytes(BLOCK_BYTES)]),
            lambda: tier.start_get_into(keys, [bytearray()]),
            lambda: tier.start_put(keys, [b""]),
            lambda: tier.start_put(keys, [memoryview(payload(1))[::2]]),
            lambda: tier.start_put(keys, [payload(1)], depths=[1, 2]),
            lambda: tier.start_contains([OffloadKey(b"")]),
            lambda: tier.start_contains([OffloadKey(b"k" * 2000)]),
            lambda: tier.start_contains(["text"]),  # type: ignore[list-item]  # on purpose
        ]
        for mistake in mistakes:
            with pytest.raises(InvalidRequestError):
                mistake()
        assert tier.statistics().stores == 0

    def test_another_thread_is_refused(self, tier: Tier) -> None:
        """One thread owns a tier."""
        tier.wait(tier.start_contains(make_keys(1)))
        raised: list[BaseException] = []

        def intrude() -> None:
            try:
                tier.start_contains(make_keys(1))
            except WrongThreadError as exc:
                raised.append(exc)

        intruder = threading.Thread(target=intrude)
        intruder.start()
        intruder.join(PATIENCE_SECONDS)
        assert len(raised) == 1

    def test_statistics_count_blocks(self, run: Run) -> None:
        """By operation and by reason."""

        async def work() -> None:
            async with self.open_tier(IDENTITY) as tier:
                keys = make_keys(1, 2)
                await tier.put(keys[:1], [payload(1)])
                await tier.contains(keys)
                await tier.get_into(keys, [bytearray(BLOCK_BYTES), bytearray(BLOCK_BYTES)])
                found = tier.statistics()
                assert (found.stores, found.stored_blocks, found.bytes_written) == (1, 1, BLOCK_BYTES)
                assert (found.lookups, found.hits) == (2, 1)
                assert (found.loads, found.loaded_blocks, found.bytes_read) == (2, 1, BLOCK_BYTES)
                assert found.misses_by_reason == {"absent": 2}
                assert found.refusals_by_reason == {}
                assert (found.breaker, found.calls_in_flight) == (BreakerState.CLOSED, 0)
                assert 0.0 <= found.p50_ms <= found.p99_ms

        run(work)


def wait_until_over(tier: Tier, is_over: Callable[[], bool]) -> None:
    """Poll until something is over, in real time whatever the tier's clock is; bounded for a test that fails."""
    for _ in range(int(PATIENCE_SECONDS / 0.001)):
        tier.poll()
        if is_over():
            return
        SystemClock().pause(0.001)
    raise AssertionError("it is not over in time")


class Released:
    """Counts which buffers were released, and how often.

    Args:
        block_count: How many there are.
    """

    def __init__(self, block_count: int) -> None:
        self.counts: Counter[int] = Counter()
        self._block_count = block_count
        self._are_all = anyio.Event()

    def add(self, index: int) -> None:
        """Count one."""
        self.counts[index] += 1
        if len(self.counts) == self._block_count:
            self._are_all.set()

    async def all(self) -> None:
        """Wait for the last one."""
        with anyio.fail_after(PATIENCE_SECONDS):
            await self._are_all.wait()
