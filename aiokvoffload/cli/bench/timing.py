"""Processor time of single calls, with the garbage collector's own pauses taken out.

The collector runs as it does in production, but which call it falls into is chance, and how long it takes depends on
whatever else the process holds. So its callbacks time it, and its time is taken out of the call and told apart.
Processor time is that of the calling thread: other load on the machine does not count.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Self

_COLLECTIONS = 5
_REBUILD_MEDIANS = 3.0


class CallTimer:
    """Times calls while it is entered.

    Attributes:
        collector_seconds: What collections have taken so far.
        longest_collection_ms: The longest of them.
    """

    def __init__(self) -> None:
        self.collector_seconds = 0.0
        self.longest_collection_ms = 0.0
        self._started = 0.0

    def __enter__(self) -> Self:
        gc.callbacks.append(self._on_collection)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        gc.callbacks.remove(self._on_collection)

    def seconds(self, work: Callable[..., object], *arguments: object) -> float:
        """Call `work` and return what that took."""
        collected, started = self.collector_seconds, time.thread_time()
        work(*arguments)
        return time.thread_time() - started - (self.collector_seconds - collected)

    async def awaited(self, operation: Coroutine[Any, Any, Any]) -> tuple[float, Any]:
        """Await `operation` and return what that took, and its answer."""
        collected, started = self.collector_seconds, time.thread_time()
        answer = await operation
        return time.thread_time() - started - (self.collector_seconds - collected), answer

    def _on_collection(self, phase: Literal["start", "stop"], _info: dict[str, int]) -> None:
        if phase == "start":
            self._started = time.thread_time()
        else:
            seconds = time.thread_time() - self._started
            self.collector_seconds += seconds
            self.longest_collection_ms = max(self.longest_collection_ms, 1e3 * seconds)


@dataclass(frozen=True, slots=True)
class CallTimes:
    """How long the calls of one operation took.

    Attributes:
        blocks_per_second: Keys handled per second.
        p50_ms: Median of a call.
        p99_ms: What 99 % of the calls take at most.
        max_ms: The longest call.
    """

    blocks_per_second: float
    p50_ms: float
    p99_ms: float
    max_ms: float

    @classmethod
    def of(cls, seconds: Sequence[float], keys_per_call: int) -> CallTimes:
        """Sum up the calls."""
        ordered = sorted(seconds)
        return cls(
            blocks_per_second=keys_per_call * len(ordered) / max(sum(ordered), 1e-9),
            p50_ms=1e3 * ordered[len(ordered) // 2],
            p99_ms=1e3 * ordered[len(ordered) * 99 // 100],
            max_ms=1e3 * ordered[-1],
        )


def without_rebuilds(seconds: Sequence[float]) -> list[float]:
    """Return the calls of a yardstick with those in which one large dict was rebuilt counted as a usual one."""
    usual = statistics.median(seconds)
    return [usual if call > _REBUILD_MEDIANS * usual else call for call in seconds]


class CollectorPause:
    """Measures what a full collection takes for the objects that are made after this one, whatever was there before."""

    def __enter__(self) -> Self:
        gc.collect()
        gc.freeze()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        gc.unfreeze()

    def milliseconds(self) -> float:
        """Return the median of a few full collections."""
        pauses = []
        for _ in range(_COLLECTIONS):
            started = time.thread_time()
            gc.collect()
            pauses.append(time.thread_time() - started)
        return 1e3 * statistics.median(pauses)
