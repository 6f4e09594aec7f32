"""What a tier has done so far."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from aiokvoffload.tiers.breaker import BreakerState
from aiokvoffload.tiers.calls import Operation, TierCall
from aiokvoffload.tiers.outcomes import BlockOutcome, BlockResult, Reason

_REMEMBERED_LATENCIES = 1024
_MOVES_BYTES = frozenset({(Operation.GET_INTO, BlockOutcome.HIT), (Operation.PUT, BlockOutcome.STORED)})


@dataclass(frozen=True, slots=True)
class Holdings:
    """What a tier holds, where it knows.

    Attributes:
        block_count: Blocks.
        used_bytes: Bytes they take, envelopes included.
        capacity_bytes: Bytes they may take.
        evicted_blocks: Blocks that left for others.
    """

    block_count: int | None = None
    used_bytes: int | None = None
    capacity_bytes: int | None = None
    evicted_blocks: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TierStatistics:
    """Counts of blocks since the tier was opened, and its state.

    Attributes:
        url: The tier's URL without its credentials.
        lookups: Blocks asked for by `contains`.
        hits: Of these, those that were there.
        loads: Blocks asked for by `get_into`.
        loaded_blocks: Of these, those that arrived.
        stores: Blocks given to `put`.
        stored_blocks: Of these, those that were written.
        bytes_read: Payload of the loaded blocks.
        bytes_written: Payload of the stored blocks.
        misses_by_reason: Blocks that `contains` and `get_into` missed.
        refusals_by_reason: Blocks that `put` did not store.
        removed_by_reason: Blocks removed because something was wrong with them.
        breaker: State of the breaker.
        breaker_reason: Why it is not closed.
        breaker_openings: How often it has opened.
        calls_in_flight: Calls that are not over.
        stuck_threads: Threads that have not come back from a call past its deadline.
        late_blocks: Blocks whose work ended after they had been answered.
        lookup_seconds: How long calls of `contains` took from posting to their answer, together.
        read_seconds: The same of `get_into`.
        write_seconds: The same of `put`.
        p50_ms: Median time of a call from posting to its answer.
        p99_ms: The time that one call in a hundred exceeds.
        holdings: What it holds.
    """

    url: str = ""
    lookups: int = 0
    hits: int = 0
    loads: int = 0
    loaded_blocks: int = 0
    stores: int = 0
    stored_blocks: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    misses_by_reason: Mapping[str, int] = field(default_factory=dict)
    refusals_by_reason: Mapping[str, int] = field(default_factory=dict)
    removed_by_reason: Mapping[str, int] = field(default_factory=dict)
    breaker: BreakerState = BreakerState.CLOSED
    breaker_reason: str = ""
    breaker_openings: int = 0
    calls_in_flight: int = 0
    stuck_threads: int = 0
    late_blocks: int = 0
    lookup_seconds: float = 0.0
    read_seconds: float = 0.0
    write_seconds: float = 0.0
    p50_ms: float = 0.0
    p99_ms: float = 0.0
    holdings: Holdings = Holdings()


class TierCounts:
    """Counts what calls were answered."""

    def __init__(self) -> None:
        self.blocks: Counter[tuple[Operation, BlockOutcome]] = Counter()
        self.misses: Counter[str] = Counter()
        self.refusals: Counter[str] = Counter()
        self.bytes: Counter[Operation] = Counter()
        self.late_blocks = 0
        self.seconds: dict[Operation, float] = dict.fromkeys(Operation, 0.0)
        self._last_seconds: deque[float] = deque(maxlen=_REMEMBERED_LATENCIES)

    def add(self, call: TierCall, index: int, result: BlockResult) -> None:
        """Count the answer to one block."""
        operation, outcome = call.operation, result.outcome
        self.blocks[operation, outcome] += 1
        if (operation, outcome) in _MOVES_BYTES:
            self.bytes[operation] += call.buffers[index].nbytes
        elif outcome is BlockOutcome.REFUSED:
            self.refusals[_name(result.reason)] += 1
        elif outcome is BlockOutcome.MISS and operation in (Operation.CONTAINS, Operation.GET_INTO):
            self.misses[_name(result.reason)] += 1

    def add_latency(self, operation: Operation, seconds: float) -> None:
        """Count the time of one call."""
        self.seconds[operation] += seconds
        self._last_seconds.append(seconds)

    def total(self, operation: Operation) -> int:
        """Return the blocks of all answered calls of one kind."""
        return sum(count for (counted, _), count in self.blocks.items() if counted is operation)

    def percentile_ms(self, share: float) -> float:
        """Return the latency that `share` of the last calls did not exceed."""
        if not self._last_seconds:
            return 0.0
        ordered = sorted(self._last_seconds)
        return 1000.0 * ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1)]


def _name(reason: Reason | None) -> str:
    return reason.value if reason else "unknown"
