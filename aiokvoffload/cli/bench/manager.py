"""What a manager's bookkeeping costs: each operation beside the bare loop, hostile cases, memory, the collector."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import anyio

from aiokvoffload.cli.bench.contestants import OPERATIONS, BareLoop, OwnManager, Seconds
from aiokvoffload.cli.bench.footprint import Footprint, measure_footprint
from aiokvoffload.cli.bench.hostile import HostileCall, measure_hostile_cases
from aiokvoffload.cli.bench.rounds import (
    REPETITIONS,
    BenchSize,
    KeySource,
    fill,
    operation_rounds,
    shorter_calls,
    times_of,
)
from aiokvoffload.cli.bench.timing import CallTimer, CallTimes, CollectorPause, without_rebuilds

WITH_ROOM = "prepare_store, with room"
MEASURED = (WITH_ROOM, *OPERATIONS)


@dataclass(frozen=True, slots=True)
class OperationCost:
    """One operation beside the bare loop.

    Attributes:
        times: Of the manager.
        bare_blocks_per_second: Of the bare loop, its rebuilds of large dicts left out.
    """

    times: CallTimes
    bare_blocks_per_second: float

    @property
    def share_of_bare_loop(self) -> float:
        """Blocks handled in the time in which the bare loop handles one."""
        return self.times.blocks_per_second / self.bare_blocks_per_second


@dataclass(frozen=True, slots=True, kw_only=True)
class ManagerCost:
    """What a manager costs at one size under one policy.

    Attributes:
        policy: Name of the policy.
        size: How much was measured.
        operations: By name.
        longest_collection_ms: The longest pause of the collector meanwhile, which no call is charged with.
        collector_pause_ms: What a full collection takes for the manager alone.
        bare_collector_pause_ms: The same for the bare loop.
        footprint: Memory.
        hostile: The longest call of each hostile case, by name.
    """

    policy: str
    size: BenchSize
    operations: dict[str, OperationCost]
    longest_collection_ms: float
    collector_pause_ms: float
    bare_collector_pause_ms: float
    footprint: Footprint
    hostile: dict[str, HostileCall]

    def to_dict(self) -> dict[str, Any]:
        """Return the figures as plain values."""
        figures = {"bench": "manager", **asdict(self)}
        for name, operation in self.operations.items():
            figures["operations"][name]["share_of_bare_loop"] = operation.share_of_bare_loop
        return figures


def measure_manager(policy: str, size: BenchSize) -> ManagerCost:
    """Measure every operation of a full manager beside the bare loop, and all else that it costs.

    Raises:
        ConfigurationError: The policy is unknown.
    """
    return anyio.run(_measure_manager, policy, size)


@dataclass(frozen=True, slots=True)
class _Repetition:
    """What one pass over all operations took.

    Attributes:
        own: Calls of the manager: those that fill it, and those after.
        bare: The same of the bare loop.
        longest_collection_ms: See `ManagerCost`.
        collector_pause_ms: See `ManagerCost`.
        bare_collector_pause_ms: See `ManagerCost`.
    """

    own: tuple[list[Seconds], list[Seconds]]
    bare: tuple[list[Seconds], list[Seconds]]
    longest_collection_ms: float
    collector_pause_ms: float
    bare_collector_pause_ms: float


async def _measure_manager(policy: str, size: BenchSize) -> ManagerCost:
    repetitions = [await _repetition(policy, size) for _ in range(REPETITIONS)]
    own_fill, own_rounds = (shorter_calls([each.own[part] for each in repetitions]) for part in (0, 1))
    bare_fill, bare_rounds = (shorter_calls([each.bare[part] for each in repetitions]) for part in (0, 1))
    operations = {WITH_ROOM: _cost("prepare_store", own_fill, bare_fill, size.batch_size)}
    operations |= {name: _cost(name, own_rounds, bare_rounds, size.batch_size) for name in OPERATIONS}
    return ManagerCost(
        policy=policy,
        size=size,
        operations=operations,
        longest_collection_ms=max(each.longest_collection_ms for each in repetitions),
        collector_pause_ms=min(each.collector_pause_ms for each in repetitions),
        bare_collector_pause_ms=min(each.bare_collector_pause_ms for each in repetitions),
        footprint=measure_footprint(policy, KeySource(size.block_count).new(size.block_count), size.batch_size),
        hostile=measure_hostile_cases(policy, size),
    )


async def _repetition(policy: str, size: BenchSize) -> _Repetition:
    """Take all operations once, with a new manager and a new bare loop; the same calls each time."""
    keys = KeySource(size.block_count)
    first_keys = keys.new(size.block_count)
    with CallTimer() as timer:
        with CollectorPause() as pause:
            bare = BareLoop(size.block_count)
            bare_fill = await fill(bare, first_keys, size, timer)
            bare_pause_ms = pause.milliseconds()
        with CollectorPause() as pause:
            own = OwnManager(size.block_count, policy)
            own_fill = await fill(own, first_keys, size, timer)
            pause_ms = pause.milliseconds()
    with CallTimer() as timer:
        own_rounds, bare_rounds = await operation_rounds((own, bare), keys, size, timer)
    own.manager.close_nowait()
    return _Repetition(
        (own_fill, own_rounds), (bare_fill, bare_rounds), timer.longest_collection_ms, pause_ms, bare_pause_ms
    )


def _cost(name: str, own: list[Seconds], bare: list[Seconds], batch_size: int) -> OperationCost:
    bare_seconds = without_rebuilds(times_of(name, bare))
    return OperationCost(
        CallTimes.of(times_of(name, own), batch_size), CallTimes.of(bare_seconds, batch_size).blocks_per_second
    )
