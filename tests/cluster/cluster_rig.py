"""An engine of a few ranks in this process: each rank a port with a device of its own, joined by real sockets."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from aiokvoffload.clock import Clock, SystemClock
from aiokvoffload.cluster import WorkerPort, join_offloader
from aiokvoffload.devices.base import Stream
from aiokvoffload.memory.base import PreparationProgress
from aiokvoffload.offloader import Deadlines, OffloaderContext, SyncOffloader, open_offloader
from aiokvoffload.testing.clock import ManualClock
from aiokvoffload.testing.device import ManualDevice

PAGE_BYTES = 8
LAYER_COUNT = 2
BLOCK_TOKENS = 4
BLOCK_BYTES = PAGE_BYTES * LAYER_COUNT
PATIENCE_SECONDS = 20.0
"""Bounds a failing test; a passing one never waits for it."""
ENGINE = "engine"

Step = tuple[Callable[[int], object], Callable[[], object]]
"""Whether it is ready, by the number of ranks that have joined; and what it does."""


class PatientClock(ManualClock):
    """Stands still but for `advance`: a pause takes real time, as other threads have work to do meanwhile."""

    def pause(self, seconds: float) -> None:
        SystemClock().pause(min(seconds, 0.001))


class Rank:
    """One rank: its blocks, its device, and its port once it has joined.

    Args:
        number: Which one.
        options: Of `join_offloader`.
        block_count: GPU blocks.
    """

    def __init__(self, number: int, *, block_count: int = 16, page_bytes: int = PAGE_BYTES, **options: Any) -> None:
        self.number = number
        self.layers = [torch.zeros((block_count, page_bytes), dtype=torch.uint8) for _ in range(LAYER_COUNT)]
        self.options: dict[str, Any] = {}
        self.use(ManualDevice())
        self.options |= {
            "engine_id": ENGINE,
            "rank": number,
            "block_tokens": BLOCK_TOKENS,
            "timeout_seconds": PATIENCE_SECONDS,
            **options,
        }
        self.error: BaseException | None = None
        self._port: WorkerPort | None = None
        self._context: AbstractContextManager[WorkerPort] | None = None
        self._thread: threading.Thread | None = None

    def use(self, device: ManualDevice) -> None:
        """Let this be its device."""
        self.device = device
        self.compute: Stream = device.create_stream("compute")
        self.options |= {"device": device, "compute_stream": self.compute}

    @property
    def port(self) -> WorkerPort:
        assert self._port is not None, self.error
        return self._port

    def join_soon(self) -> None:
        """Join in a thread, as a process of its own would."""
        self._context = join_offloader(self.layers, **self.options)
        self._thread = threading.Thread(target=self._join, name=f"rank {self.number}")
        self._thread.start()

    def wait_joined(self) -> Rank:
        """Wait until the rank has joined, or could not."""
        assert self._thread is not None
        self._thread.join(PATIENCE_SECONDS)
        assert not self._thread.is_alive()
        return self

    def leave(self) -> None:
        if self._port is not None and self._context is not None:
            self._context.__exit__(None, None, None)
            self._port = None

    def land(self) -> None:
        """Let all copies land; the port's thread learns of it by itself."""
        with self.port._lock:  # a ManualDevice is for one thread at a time
            self.device.land_all()

    def write(self, blocks: Sequence[int], seed: int) -> None:
        """Fill GPU blocks with bytes of this rank, the seed, and the place in the list."""
        for place, block in enumerate(blocks):
            for layer, tensor in enumerate(self.layers):
                tensor[block] = self._byte(seed, place, layer)

    def holds(self, blocks: Sequence[int], seed: int) -> bool:
        return all(
            tensor[block].tolist() == [self._byte(seed, place, layer)] * len(tensor[block])
            for place, block in enumerate(blocks)
            for layer, tensor in enumerate(self.layers)
        )

    def _byte(self, seed: int, place: int, layer: int) -> int:
        return (self.number * 101 + seed * 37 + place * 11 + layer * 5) % 255 + 1

    def _join(self) -> None:
        assert self._context is not None
        try:
            self._port = self._context.__enter__()
        except BaseException as exc:  # noqa: BLE001  looked at by the test
            self.error = exc


class Cluster:
    """A scheduler and its ranks.

    Args:
        directory: Where sockets are.
        world_size: How many ranks.
        cpu_blocks: Slots.
        rank_options: What ranks join with, by rank.
        clock: Of the scheduler.
        options: Of `open_offloader`.
    """

    def __init__(
        self,
        directory: Path,
        world_size: int = 2,
        *,
        cpu_blocks: int = 8,
        rank_options: Callable[[int], dict[str, Any]] = lambda rank: {},
        clock: Clock | None = None,
        **options: Any,
    ) -> None:
        self.directory = directory
        self.clock = PatientClock()
        self.ranks = [Rank(rank, **{"directory": directory, **rank_options(rank)}) for rank in range(world_size)]
        copies = 1 if options.get("replicated") else world_size
        self._options = {
            "cpu_bytes": cpu_blocks * BLOCK_BYTES * copies,
            "engine_id": ENGINE,
            "world_size": world_size,
            "directory": directory,
            "clock": clock or self.clock,
            "deadlines": Deadlines(join_seconds=PATIENCE_SECONDS, drain_seconds=PATIENCE_SECONDS),
            **options,
        }

    def context(self, **options: Any) -> OffloaderContext:
        return open_offloader(None, **{**self._options, **options})

    def context_doing(self, *steps: Step) -> OffloaderContext:
        """Return a context that does something meanwhile: each step once its turn has come and it is ready."""
        left = list(steps)

        def proceed(progress: PreparationProgress) -> None:
            if left and left[0][0](progress.done_bytes):
                left.pop(0)[1]()

        return self.context(on_progress=proceed)

    def join_soon(self) -> None:
        for rank in self.ranks:
            rank.join_soon()

    @contextmanager
    def open(self) -> Iterator[SyncOffloader]:
        """Open the scheduler, with all its ranks."""
        with ExitStack() as stack:
            stack.callback(self.leave)
            self.join_soon()
            offloader = stack.enter_context(self.context())
            for rank in self.ranks:
                rank.wait_joined()
            yield offloader

    def leave(self) -> None:
        for rank in self.ranks:
            rank.wait_joined().leave()

    def step(self, offloader: SyncOffloader) -> bytes:
        """Let all ranks have the jobs so far."""
        jobs = offloader.take_jobs()
        for rank in self.ranks:
            rank.port.submit(jobs)
        return jobs

    def land(self, *ranks: int) -> None:
        """Let the copies of some ranks land; of all by default."""
        for rank in self.ranks:
            if not ranks or rank.number in ranks:
                rank.land()

    def write(self, blocks: Sequence[int], seed: int = 1) -> None:
        for rank in self.ranks:
            rank.write(blocks, seed)

    def holds(self, blocks: Sequence[int], seed: int = 1) -> list[bool]:
        return [rank.holds(blocks, seed) for rank in self.ranks]


def poll_until(offloader: SyncOffloader, is_over: Callable[[], bool]) -> None:
    """Poll until something that other threads do has happened."""
    clock = SystemClock()
    deadline = clock.now() + PATIENCE_SECONDS
    offloader.poll()
    while not is_over():
        assert clock.now() < deadline
        clock.pause(0.001)
        offloader.poll()
