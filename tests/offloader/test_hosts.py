"""Every kind of host: asyncio, uvloop, trio and none, several in a process, and processes that just leave."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import textwrap
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest
import torch
import uvloop
from offloader_rig import BLOCK_BYTES, BLOCK_TOKENS, LAYER_COUNT, PAGE_BYTES, Rig, keys_of, on_both_loops, settle

from aiokvoffload import (
    CacheIdentity,
    LookupResult,
    Offloader,
    ReqContext,
    StateError,
    StoreOutcome,
    SyncOffloader,
    WrongThreadError,
    open_offloader,
)
from aiokvoffload.testing.asserts import assert_idle
from aiokvoffload.tiers.calls import Operation, TierCall
from aiokvoffload.tiers.memory import MemoryTier

pytestmark = pytest.mark.timeout(60)
PATIENCE_SECONDS = 30.0


def run_on(loop: str, main: Callable[..., Coroutine[Any, Any, None]], *args: object) -> None:
    if loop == "uvloop":
        anyio.run(main, *args, backend="asyncio", backend_options={"use_uvloop": True})
    else:
        anyio.run(main, *args, backend=loop)


on_each_loop = pytest.mark.parametrize("loop", ["asyncio", "uvloop", "trio"])


class Engine:
    """A few GPU blocks with bytes of their own, over real streams and real tiers."""

    def __init__(self, seed: int = 1) -> None:
        generator = torch.Generator().manual_seed(seed)
        shape = (16, PAGE_BYTES)
        self.layers = [torch.randint(0, 255, shape, dtype=torch.uint8, generator=generator) for _ in range(LAYER_COUNT)]

    def open(self, *, slot_count: int = 4, **options: Any) -> Any:
        return open_offloader(
            self.layers,
            cpu_bytes=slot_count * BLOCK_BYTES,
            block_tokens=BLOCK_TOKENS,
            identity=CacheIdentity("m"),
            **options,
        )

    def holds(self, copies: list[int], originals: list[int]) -> bool:
        return all(torch.equal(layer[copies], layer[originals]) for layer in self.layers)

    async def serve(self, offloader: Offloader, salt: str = "") -> None:
        """Store eight blocks, four of which only a tier has in the end, and load half of them."""
        keys = keys_of(offloader, 8, salt=salt)
        for first in range(0, 8, 2):
            blocks = [first, first + 1]
            outcomes = await offloader.store(keys[first : first + 2], blocks, first_block=first)
            assert outcomes == (StoreOutcome.ACCEPTED,) * 2
            assert await offloader.wait_written(timeout_seconds=PATIENCE_SECONDS)
        assert await offloader.load(keys[:4], [12, 13, 14, 15]) == 4 * BLOCK_TOKENS
        assert self.holds([12, 13, 14, 15], [0, 1, 2, 3])


# Loops


@on_each_loop
def test_one_loop_after_the_other_in_one_process(loop: str, tmp_path: Path) -> None:
    engine = Engine()
    url = f"file://{tmp_path}/kv?capacity=1MiB&keep_free=1KiB"

    async def main() -> None:
        async with engine.open(tiers=[url]) as offloader:
            await engine.serve(offloader)
            assert_idle(offloader)

    for _ in range(2):
        run_on(loop, main)


@on_each_loop
def test_a_cancelled_store_has_its_blocks_back(loop: str) -> None:
    rig = Rig()

    async def main() -> None:
        async with rig.open() as offloader:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(offloader.store, keys_of(offloader, 1), [0])
                await settle()
                tasks.cancel_scope.cancel()
                await rig.land()
            assert_idle(offloader)
            assert offloader.statistics().manager.ready == 1

    run_on(loop, main)


def test_the_loop_is_uvloop_where_the_tests_say_so() -> None:
    async def main() -> None:
        assert isinstance(asyncio.get_running_loop(), uvloop.Loop)

    run_on("uvloop", main)


@pytest.mark.parametrize(("home", "elsewhere"), [("asyncio", "trio"), ("trio", "asyncio"), ("asyncio", "uvloop")])
def test_an_offloader_of_one_kind_of_loop_is_refused_in_another(home: str, elsewhere: str) -> None:
    rig = Rig()
    made: list[Offloader] = []

    async def open_it() -> None:
        made.append(await rig.open().__aenter__())
        await settle()

    async def use() -> None:
        (offloader,) = made
        keys = keys_of(offloader, 1)
        calls: list[Callable[[], Awaitable[object]]] = [
            lambda: offloader.store(keys, [0]),
            lambda: offloader.load(keys, [0]),
            lambda: offloader.lookup_prefix(keys),
            lambda: offloader.demote(keys, [0]),
            offloader.reset,
            offloader.bump_epoch,
            offloader.wait_written,
        ]
        for call in calls:
            with pytest.raises(StateError, match="the event loop this offloader was opened in has ended; open a new"):
                await call()
        await offloader.aclose()

    run_on(home, open_it)
    run_on(elsewhere, use)
    assert_idle(made[0])


def test_waiting_in_a_loop_that_stands_beside_is_refused_instead_of_forever() -> None:
    rig = Rig()
    home, elsewhere = asyncio.new_event_loop(), asyncio.new_event_loop()
    offloader = home.run_until_complete(rig.open().__aenter__())
    keys = keys_of(offloader, 1)
    handle, ticket = offloader.store_soon(keys, [0]), offloader.prepare_load(keys)

    async def use() -> None:
        waits: list[Callable[[], Awaitable[object]]] = [lambda: handle, handle.sent, ticket.ready]
        for wait in waits:
            with pytest.raises(WrongThreadError, match="this offloader belongs to another event loop; open one in"):
                await wait()

    elsewhere.run_until_complete(use())
    elsewhere.close()
    ticket.abort()
    rig.manual_device.land_all()
    home.run_until_complete(offloader.aclose())
    home.close()
    assert handle.outcomes == (StoreOutcome.ACCEPTED,)
    assert_idle(offloader)


@on_both_loops
async def test_waiting_in_a_loop_of_another_thread_is_refused_instead_of_forever() -> None:
    rig = Rig()
    async with rig.open() as offloader:
        keys = keys_of(offloader, 1)
        handle, ticket = offloader.store_soon(keys, [0]), offloader.prepare_load(keys)
        events = offloader.events()

        async def use() -> None:
            waits: list[Callable[[], Awaitable[object]]] = [
                lambda: handle,
                handle.sent,
                ticket.ready,
                lambda: anext(events),
            ]
            for wait in waits:
                with pytest.raises(WrongThreadError, match="belongs to another thread; call it from there"):
                    await wait()
            with pytest.raises(WrongThreadError, match="belongs to another thread"):
                handle.on_idle(print)

        await anyio.to_thread.run_sync(partial(anyio.run, use))
        ticket.abort()
        await rig.land()
        assert handle.is_idle
        assert_idle(offloader)


@on_each_loop
def test_two_offloaders_of_one_loop_know_nothing_of_each_other(loop: str, tmp_path: Path) -> None:
    engines = [Engine(1), Engine(2)]

    async def main() -> None:
        first_url, second_url = (f"file://{tmp_path}/{name}?capacity=1MiB&keep_free=1KiB" for name in "ab")
        async with engines[0].open(tiers=[first_url]) as first, engines[1].open(tiers=[second_url]) as second:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(engines[0].serve, first)
                tasks.start_soon(engines[1].serve, second)
            await first.reset()
            assert first.statistics().manager.ready == 0
            assert second.statistics().manager.ready == 4
            await first.aclose()
            await engines[1].serve(second, "after the other is closed")
            assert_idle(second)

    run_on(loop, main)


def test_offloaders_of_several_threads_run_side_by_side(tmp_path: Path) -> None:
    """A loop of each kind, and a host without one, each in a thread of its own, over one directory."""
    url = f"file://{tmp_path}/kv?capacity=1MiB&keep_free=1KiB"
    barrier = threading.Barrier(4, timeout=PATIENCE_SECONDS)

    async def main(engine: Engine, salt: str) -> None:
        async with engine.open(tiers=[url]) as offloader:
            barrier.wait()
            await engine.serve(offloader, salt)
            assert_idle(offloader)

    def main_without_a_loop(engine: Engine) -> None:
        with engine.open(tiers=[url]) as offloader:
            barrier.wait()
            keys = keys_of(offloader, 4, salt="none")
            offloader.store(keys, range(4))
            offloader.block_until(lambda: offloader.manager.is_at_rest, PATIENCE_SECONDS)
            offloader.reset()
            assert offloader.load(keys, [12, 13, 14, 15]) == 4 * BLOCK_TOKENS
            assert engine.holds([12, 13, 14, 15], [0, 1, 2, 3])
            assert_idle(offloader)

    with ThreadPoolExecutor(4) as threads:
        runs = [
            threads.submit(run_on, loop, partial(main, Engine(seed), loop))
            for seed, loop in enumerate(("asyncio", "uvloop", "trio"))
        ]
        runs.append(threads.submit(main_without_a_loop, Engine(4)))
        for run in runs:
            run.result(PATIENCE_SECONDS)


# Without a loop


class WatchedTier(MemoryTier):
    """Works on each call in a thread of its own when the gate is open, and notes what was posted and where."""

    def __init__(self) -> None:
        super().__init__(CacheIdentity(), block_bytes=BLOCK_BYTES, capacity_bytes=1 << 16)
        self.posted: list[tuple[Operation, int]] = []
        self.threads: set[int] = set()
        self.gate = threading.Event()
        self.gate.set()

    def begin(self, call: TierCall) -> None:
        if call.operation is Operation.CLOSE:
            super().begin(call)
            return
        self.posted.append((call.operation, call.block_count))
        threading.Thread(target=self._work, args=[call], daemon=True).start()

    def _work(self, call: TierCall) -> None:
        self.gate.wait(PATIENCE_SECONDS)
        self.threads.add(threading.get_ident())
        self.work_on(call, call.unanswered())

    def take_back(self, call: TierCall) -> list[int]:
        return []


def test_a_synchronous_host_posts_a_batch_and_collects_it_by_polling() -> None:
    engine, tier = Engine(), WatchedTier()
    with engine.open(slot_count=16, tiers=[tier]) as offloader:
        keys = keys_of(offloader, 4)
        offloader.store(keys, range(4))
        offloader.block_until(lambda: offloader.manager.is_at_rest, PATIENCE_SECONDS)
        assert [posted for posted in tier.posted if posted[0] is Operation.PUT] == [(Operation.PUT, 4)]
        offloader.reset()
        tier.posted.clear()
        tier.gate.clear()
        tickets = [offloader.prepare_load(keys, ReqContext(name)) for name in ("one", "the same")]
        offloader.poll()
        # It is posted, nobody works on it, and the thread that asks is not held up.
        assert [ticket.result for ticket in tickets] == [LookupResult.PENDING] * 2
        assert Counter(tier.posted)[Operation.CONTAINS, 4] == 1
        tier.gate.set()
        offloader.block_until(lambda: tickets[0].result is not LookupResult.PENDING, PATIENCE_SECONDS)
        assert [ticket.result for ticket in tickets] == [LookupResult.HIT] * 2
        assert Counter(tier.posted)[Operation.CONTAINS, 4] == Counter(tier.posted)[Operation.GET_INTO, 4] == 1
        tickets[1].abort()
        handle = tickets[0].start([12, 13, 14, 15])
        assert handle.wait(timeout_seconds=PATIENCE_SECONDS).success
        assert engine.holds([12, 13, 14, 15], [0, 1, 2, 3])
        assert_idle(offloader)
    tier.close()
    assert threading.get_ident() not in tier.threads


def test_files_are_read_and_written_by_threads_of_the_tier(tmp_path: Path) -> None:
    engine = Engine()
    url = f"file://{tmp_path}/kv?capacity=1MiB&keep_free=1KiB"
    before = set(threading.enumerate())
    with engine.open(tiers=[url]) as offloader:
        keys = keys_of(offloader, 4)
        offloader.store(keys, range(4))
        started = set(threading.enumerate()) - before
        assert any(thread.name.startswith("aiokvoffload-FileTier") for thread in started)
        assert all(thread.daemon for thread in started)
        offloader.block_until(lambda: offloader.manager.is_at_rest, PATIENCE_SECONDS)
        offloader.reset()
        ticket = offloader.prepare_load(keys)
        while ticket.result is LookupResult.PENDING:
            offloader.poll()
            os.sched_yield()
        assert ticket.token_count == 4 * BLOCK_TOKENS
        ticket.abort()


def test_another_thread_is_refused_by_every_call_of_a_synchronous_offloader() -> None:
    rig = Rig(compute_stream=True)
    with rig.open() as offloader:
        assert isinstance(offloader, SyncOffloader)
        keys = keys_of(offloader, 2)
        offloader.store(keys, [0, 1])
        handle = offloader.store_soon(keys_of(offloader, 1, salt="sent"), [2])
        ticket = offloader.prepare_load(keys)
        before = offloader.statistics()
        calls: list[Callable[[], object]] = [
            lambda: offloader.store(keys, [0, 1]),
            lambda: offloader.store_soon(keys, [0, 1]),
            lambda: offloader.load(keys, [4, 5]),
            lambda: offloader.lookup_prefix(keys),
            lambda: offloader.prepare_load(keys),
            lambda: offloader.demote(keys, [0, 1]),
            lambda: offloader.demote_soon(keys, [0, 1]),
            lambda: offloader.hint(keys, session_ended=True),
            lambda: offloader.add_event_sink(print),
            lambda: offloader.block_until(lambda: True, 1),
            offloader.poll,
            offloader.take_jobs,
            offloader.reset,
            offloader.bump_epoch,
            offloader.statistics,
            offloader.close,
            lambda: handle.wait(timeout_seconds=1),
            handle.cancel,
            handle.fence,
            lambda: ticket.start([4, 5]),
            ticket.abort,
        ]
        with ThreadPoolExecutor(1) as other:
            for call in calls:
                error = other.submit(call).exception()
                assert isinstance(error, WrongThreadError), call
                assert "belongs to another thread; call it from there" in str(error)
        assert offloader.statistics() == before
        assert ticket.start([4, 5]).wait(timeout_seconds=1).success
        assert handle.wait(timeout_seconds=1).success
        assert_idle(offloader)


@on_both_loops
async def test_a_synchronous_offloader_may_live_in_a_thread_beside_a_loop() -> None:
    def serve() -> int:
        engine = Engine()
        with engine.open() as offloader:
            keys = keys_of(offloader, 2)
            offloader.store(keys, [0, 1])
            tokens: int = offloader.load(keys, [4, 5])
            return tokens

    assert await anyio.to_thread.run_sync(serve) == 2 * BLOCK_TOKENS


# Leaving

LEAVES = """
import asyncio, sys, threading
import anyio, torch
from aiokvoffload import CacheIdentity, Deadlines, open_offloader
from aiokvoffload.devices.host import HostDevice

kind, ending, url = sys.argv[1:]
layers = [torch.zeros((8, 64), dtype=torch.int8)]
device = HostDevice(close_timeout_seconds=0.05)
compute = device.create_stream("compute")
context = open_offloader(
    layers, cpu_bytes=4 * 64, tiers=[url], identity=CacheIdentity("m"), device=device, compute_stream=compute,
    deadlines=Deadlines(landing_seconds=0.1, drain_seconds=0.1) if ending == "hangs" else Deadlines(),
)

def leave():
    print("leaves", flush=True)
    if ending == "exits":
        sys.exit(3)
    if ending == "raises":
        raise KeyboardInterrupt

def hang():
    if ending == "hangs":
        device.launch(compute, threading.Event().wait)

def main_without_a_loop():
    global offloader, ticket
    offloader = context.__enter__()
    keys = offloader.keys(range(64))
    if ending != "hangs":  # nothing has to land in its short time
        offloader.store(keys, [0, 1, 2, 3])
        offloader.reset()
    ticket = offloader.prepare_load(keys)
    hang()
    offloader.store_soon(offloader.keys(range(16), salt="more"), [4])
    leave()

async def main():
    global offloader, ticket
    offloader = await context.__aenter__()
    keys = offloader.keys(range(64))
    if ending != "hangs":
        await offloader.store(keys, [0, 1, 2, 3])
        await offloader.reset()
    ticket = offloader.prepare_load(keys)
    hang()
    offloader.store_soon(offloader.keys(range(16), salt="more"), [4])
    leave()

if kind == "none":
    main_without_a_loop()
elif kind == "uvloop":
    anyio.run(main, backend_options={"use_uvloop": True})
else:
    anyio.run(main, backend=kind)
"""


@pytest.mark.parametrize(
    ("kind", "ending"),
    [
        *(("none", ending) for ending in ("returns", "exits", "raises", "hangs")),
        *(("asyncio", ending) for ending in ("returns", "exits", "raises", "hangs")),
        *(("trio", ending) for ending in ("returns", "raises", "hangs")),
        ("uvloop", "hangs"),
    ],
)
def test_a_process_that_leaves_without_closing_ends_soon_and_without_a_word_of_ours(
    kind: str, ending: str, tmp_path: Path
) -> None:
    url = f"file://{tmp_path}/kv?capacity=1MiB&keep_free=1KiB"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(LEAVES), kind, ending, url],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.stdout == "leaves\n"
    if ending == "raises":
        assert done.returncode == -2
        assert done.stderr.rstrip().endswith("KeyboardInterrupt")
        assert "Exception ignored" not in done.stderr
    else:
        assert (done.returncode, done.stderr) == (3 if ending == "exits" else 0, "")
