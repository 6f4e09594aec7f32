"""What `aiokvoffload replay` is asked to do."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from aiokvoffload.errors import ConfigurationError
from aiokvoffload.specs import Placement, check_placement

Backend = Literal["asyncio", "trio"]
CascadeWait = Literal["background", "wait"]

WORD_BYTES = 8
DEFAULT_CPU_BLOCKS = 1024
DEFAULT_CONCURRENCY = 8


DEFAULT_SWEEP_PERCENTS = (1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 50.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepOptions:
    """Which hit rates a sweep finds.

    Attributes:
        traces: Trace files; without any, the built-in workload.
        policies: Names of eviction policies; without any, all that are registered.
        capacity_percents: Capacities in percent of a trace's distinct blocks.
        plot: Image file for the curves.

    Raises:
        ConfigurationError: A capacity is not above 0.
    """

    traces: tuple[Path, ...] = ()
    policies: tuple[str, ...] = ()
    capacity_percents: tuple[float, ...] = DEFAULT_SWEEP_PERCENTS
    plot: Path | None = None

    def __post_init__(self) -> None:
        if not self.capacity_percents or not all(0 < percent < math.inf for percent in self.capacity_percents):
            raise ConfigurationError(f"capacities are {self.capacity_percents}; each must be a percentage above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayOptions:
    """The options of one replay, each checked when it is made.

    Attributes:
        trace: Trace file; None replays the built-in workload.
        limit: Replay only so many requests.
        policy: Name of the eviction policy, or `module:Class`; whether it exists is for the registry to say.
        cpu_blocks: Offloaded blocks that CPU memory holds.
        gpu_blocks: Blocks of the GPU level, a prefix cache; None is no such level: each request finds the GPU empty.
        placement: Whether CPU memory also holds what the GPU level holds.
        tiers: URLs of tiers below CPU memory, the fastest first.
        cascade: Whether a request ends only when its blocks are written to the tiers.
        restart_after: Close everything after so many requests, and open it again.
        engines: Engines that share the requests and the tiers, each in a process of its own.
        page_bytes: Bytes of a GPU block in one layer.
        layers: Layers of the KV cache.
        block_size_factor: GPU blocks per offloaded block.
        store_threshold: Accesses before a block is stored; 0 and 1 store every block.
        concurrency: Requests in work at a time; without data there is only ever one.
        seed: Seed of the built-in workload and of the choice of bytes to corrupt.
        corrupt: Stored bytes to flip on purpose.
        with_data: Whether bytes move; if not, only the bookkeeping runs.
        json_output: Whether the report is JSON.
        backend: The event loop.
        check_order: Whether reads and overwrites that come too early are looked for.
        workers: Worker processes, each with a slice of every block; None replays in this process alone.
        sweep: Find the hit rates of many policies and capacities in place of one replay.

    Raises:
        ConfigurationError: A value cannot work, or two of them contradict each other.
    """

    trace: Path | None = None
    limit: int | None = None
    policy: str = "lru"
    cpu_blocks: int = DEFAULT_CPU_BLOCKS
    gpu_blocks: int | None = None
    placement: Placement = "inclusive"
    tiers: tuple[str, ...] = ()
    cascade: CascadeWait = "background"
    restart_after: int | None = None
    engines: int = 1
    page_bytes: int = 1024
    layers: int = 4
    block_size_factor: int = 1
    store_threshold: int = 0
    concurrency: int = DEFAULT_CONCURRENCY
    seed: int = 0
    corrupt: int = 0
    with_data: bool = True
    json_output: bool = False
    backend: Backend = "asyncio"
    check_order: bool = True
    workers: int | None = None
    sweep: SweepOptions | None = None

    def __post_init__(self) -> None:
        if not self.policy.strip():
            raise ConfigurationError("policy is empty; name an eviction policy, such as lru")
        for name in (
            "limit",
            "cpu_blocks",
            "gpu_blocks",
            "layers",
            "block_size_factor",
            "concurrency",
            "restart_after",
            "engines",
            "workers",
        ):
            _require(name, getattr(self, name), at_least=1)
        for name in ("store_threshold", "seed", "corrupt"):
            _require(name, getattr(self, name), at_least=0)
        if self.page_bytes < 1 or self.page_bytes % WORD_BYTES:
            raise ConfigurationError(f"page_bytes is {self.page_bytes}, it must be a positive multiple of {WORD_BYTES}")
        if self.gpu_blocks is not None and self.gpu_blocks < self.block_size_factor:
            raise ConfigurationError(
                f"gpu_blocks is {self.gpu_blocks}, but one offloaded block is {self.block_size_factor} GPU blocks"
            )
        check_placement(self.placement, self.block_size_factor)
        if self.placement == "exclusive" and self.gpu_blocks is None:
            raise ConfigurationError(
                "exclusive placement needs a level above: give --gpu-blocks, the size of the GPU's"
            )
        if self.corrupt and not self.with_data:
            raise ConfigurationError("without data there are no bytes to corrupt")
        if self.workers is not None and not self.with_data:
            raise ConfigurationError("without data there is nothing for workers to do")
        if self.workers is not None:
            self._check_workers()
        if self.tiers and not self.with_data:
            raise ConfigurationError("without data there is nothing to put into a tier")
        if not self.tiers and (self.cascade == "wait" or self.engines > 1):
            raise ConfigurationError("cascade and engines are about tiers; give --tier")
        if self.sweep is not None and self.with_data:
            raise ConfigurationError("a sweep moves no bytes; replay without data")
        if self.sweep is not None and self.gpu_blocks is not None:
            raise ConfigurationError("a sweep has no GPU level; leave --gpu-blocks out")

    def _check_workers(self) -> None:
        if self.placement == "exclusive":
            raise ConfigurationError("workers replay with inclusive placement only; leave --placement exclusive out")
        if self.engines > 1:
            raise ConfigurationError("workers belong to one engine; leave --engines or --workers out")
        if self.restart_after is not None:
            raise ConfigurationError("workers replay from start to end; leave --restart-after out")

    @property
    def block_bytes(self) -> int:
        """Bytes of one offloaded block."""
        return block_bytes(self.page_bytes, self.layers, self.block_size_factor)

    @property
    def cpu_bytes(self) -> int:
        """Bytes of CPU memory that the offloaded blocks take, of all workers together."""
        return self.cpu_blocks * self.block_bytes * (self.workers or 1)


def require_room(longest: int, gpu_blocks: int) -> None:
    """Refuse a GPU that is too small for the longest request.

    Raises:
        ConfigurationError: It is.
    """
    if longest > gpu_blocks:
        raise ConfigurationError(
            f"a request needs {longest} GPU blocks, but there are {gpu_blocks}; use --gpu-blocks {longest} or more"
        )


def block_bytes(page_bytes: int, layers: int, block_size_factor: int) -> int:
    """Return the bytes of one offloaded block."""
    return page_bytes * layers * block_size_factor


def _require(name: str, value: int | None, *, at_least: int) -> None:
    if value is not None and value < at_least:
        raise ConfigurationError(f"{name} is {value}, it must be at least {at_least}")
