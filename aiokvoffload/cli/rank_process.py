"""A rank of a replay with several worker processes: an engine's worker, over a simulated GPU of its own."""

from __future__ import annotations

import random
import time
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection

from aiokvoffload.cli.children import is_alone
from aiokvoffload.cli.gpu import SimulatedGpu
from aiokvoffload.cli.options import ReplayOptions
from aiokvoffload.cli.trace import TRACE_BLOCK_TOKENS
from aiokvoffload.cluster import WorkerPort, join_offloader
from aiokvoffload.devices.base import CopyPlan, SimulatedDevice, Stream
from aiokvoffload.devices.host import HostDevice
from aiokvoffload.errors import StateError
from aiokvoffload.kv_caches import CanonicalKVCaches
from aiokvoffload.memory.base import PreparationProgress
from aiokvoffload.testing.order import OrderChecker

JOIN_SECONDS = 120.0
_LONGEST_DELAY_SECONDS = 0.001
_DELAYED_SHARE = 0.25
_LANDING_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Step:
    """The engine's message for one step, the same for all ranks.

    Attributes:
        jobs: From `Offloader.take_jobs`.
        loaded: Hash of each GPU block to read and check.
        computed: Hash of each GPU block to write.
    """

    jobs: bytes
    loaded: dict[int, bytes]
    computed: dict[int, bytes]


@dataclass(frozen=True, slots=True)
class RankReport:
    """What one rank has found.

    Attributes:
        verified_count: Loaded blocks whose bytes were compared.
        mismatch_count: Those with a wrong byte.
        violation_count: Reads and overwrites that came too early; None if they were not looked for.
    """

    verified_count: int
    mismatch_count: int
    violation_count: int | None


class DelayingHostDevice(HostDevice):
    """Lets some copies wait for a moment before they begin, so that whatever relies on their speed is found.

    Args:
        seed: Which ones, and for how long.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._random = random.Random(seed)  # noqa: S311  reproducible, not secret

    def copy_batch(self, plan: CopyPlan, stream: Stream) -> None:
        """Put the copies into `stream`, some of them behind a delay."""
        if self._random.random() < _DELAYED_SHARE:
            seconds = self._random.uniform(0.0, _LONGEST_DELAY_SECONDS)
            self.launch(stream, lambda: time.sleep(seconds))
        super().copy_batch(plan, stream)


class RankProcess:
    """Runs in a process of its own, and does what the scheduler's messages say.

    Args:
        options: What is replayed.
        block_count: GPU blocks.
        engine_id: Which engine to join.
        rank: Which one this is.
        pipe: Steps come in, None at their end; a `RankReport` goes out.
    """

    def __init__(self, options: ReplayOptions, block_count: int, engine_id: str, rank: int, pipe: Connection) -> None:
        self.options = options
        self.rank = rank
        self._engine_id = engine_id
        self._pipe = pipe
        self.device = self.make_device()
        self._gpu = SimulatedGpu(options, block_count, self.device)

    @classmethod
    def work(cls, options: ReplayOptions, block_count: int, engine_id: str, rank: int, pipe: Connection) -> None:
        """Be that process.

        Raises:
            OffloadError: The rank could not join, or its engine has ended on the way.
        """
        cls(options, block_count, engine_id, rank, pipe).run()

    def make_device(self) -> SimulatedDevice:
        """Return what runs kernels and copies."""
        device = DelayingHostDevice(1000 * self.options.seed + self.rank)
        return OrderChecker(device) if self.options.check_order else device

    def run(self) -> None:
        """Serve all steps, report, and leave once the scheduler has closed the engine."""
        caches = CanonicalKVCaches.from_layers(self._gpu.layers, block_tokens=TRACE_BLOCK_TOKENS)
        with join_offloader(
            caches,
            engine_id=self._engine_id,
            rank=self.rank,
            device=self.device,
            compute_stream=self._gpu.compute_stream,
            block_size_factor=self.options.block_size_factor,
            timeout_seconds=JOIN_SECONDS,
            on_progress=self._check_wanted,
        ) as port:
            if isinstance(self.device, OrderChecker):
                memory = port.memory
                self.device.watch(
                    "slots",
                    memory.address,
                    memory.slot_count,
                    memory.slot_bytes,
                    cell_bytes=self.options.page_bytes,
                    row_stride_bytes=memory.slot_stride_bytes,
                )
            while (step := self._next_step()) is not None:
                self.take(port, step)
            report = self._report()
            with suppress(OSError):  # the scheduler has gone: nobody wants it
                self._pipe.send(report)
            self._next_step()
        self.device.close()

    def _check_wanted(self, _progress: PreparationProgress) -> None:
        """Refuse to join an engine whose scheduler has left."""
        if is_alone(self._pipe):
            raise StateError(f"rank {self.rank}: the replay has ended before it has begun")

    def _next_step(self) -> Step | None:
        """Return the next message; None at the end, and once the scheduler has gone."""
        try:
            step: Step | None = self._pipe.recv()
        except (EOFError, OSError):
            return None
        return step

    def take(self, port: WorkerPort, step: Step) -> None:
        """Do one step: its jobs first, then its kernels."""
        port.submit(step.jobs)
        self.launch(step)

    def launch(self, step: Step) -> None:
        """Launch a step's kernels; each rank's blocks hold other bytes, so that a mix-up of ranks is found."""
        mark = self.rank.to_bytes(4, "big")
        loaded, computed = (
            {block: mark + block_hash for block, block_hash in blocks.items()}
            for blocks in (step.loaded, step.computed)
        )
        self._gpu.step(loaded, computed)

    def _report(self) -> RankReport:
        self.device.synchronize(self.device.record(self._gpu.compute_stream), _LANDING_SECONDS)
        return RankReport(
            self._gpu.verified_count,
            self._gpu.mismatch_count,
            self.device.violation_count if isinstance(self.device, OrderChecker) else None,
        )
