"""Cases in which a manager might do far more than its share: what the longest call of each takes.

They run one after the other on the same manager, so each meets what the earlier ones have left behind. All of it is
done twice, on a manager each, and of the same call the shorter time counts: what the manager has to do is the same,
and what else the machine does meanwhile hits other calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice

from aiokvoffload.cli.bench.contestants import Keys, batches
from aiokvoffload.cli.bench.rounds import REPETITIONS, BenchSize, KeySource
from aiokvoffload.cli.bench.timing import CallTimer
from aiokvoffload.keys import OffloadKey
from aiokvoffload.managers.cpu import CPUOffloadingManager
from aiokvoffload.specs import LookupResult, PrepareLoadOutput

_PINNED_SHARE = 0.9
_CALLS = 100
_TURNED_OVER_SHARE = 0.25
"""So many of the first blocks have left before the first case."""


@dataclass(frozen=True, slots=True)
class HostileCall:
    """The longest call of a case.

    Attributes:
        max_ms: What it took.
        key_count: Its keys.
    """

    max_ms: float
    key_count: int


@dataclass(frozen=True, slots=True)
class _Bench:
    """What a case works with."""

    manager: CPUOffloadingManager
    source: KeySource
    size: BenchSize
    timer: CallTimer

    def stored(self) -> list[OffloadKey]:
        """Return the keys of all stored blocks."""
        keys = self.source.perhaps_stored
        results = self.manager.lookup_nowait(keys)
        return [key for key, result in zip(keys, results, strict=True) if result is LookupResult.HIT]

    def new_batches(self, count: int = _CALLS) -> Iterator[Keys]:
        """Return batches of keys that are not stored."""
        for _ in range(count):
            yield self.source.new(self.size.batch_size)

    def store(self, keys: Keys, *, success: bool = True) -> Iterator[HostileCall]:
        """Time the two calls of a store."""
        tickets = []
        manager = self.manager
        yield self.call(lambda: tickets.append(manager.prepare_store_nowait(keys)), len(keys))
        yield self.call(lambda: manager.complete_store_nowait(tickets[0], success), len(keys))

    def call(self, work: Callable[[], object], key_count: int) -> HostileCall:
        """Time a call."""
        return HostileCall(1e3 * self.timer.seconds(work), key_count)


def _after_touches(bench: _Bench) -> Iterator[HostileCall]:
    stored = bench.stored()
    for batch in batches(stored[len(stored) // 10 :], bench.size.batch_size):
        bench.manager.touch(batch)
    for _ in range(_CALLS):
        yield from bench.store(bench.source.new(1))


def _under_pins(bench: _Bench) -> Iterator[HostileCall]:
    stored = bench.stored()
    loads: list[PrepareLoadOutput] = []
    for batch in batches(stored[: int(len(stored) * _PINNED_SHARE)], bench.size.batch_size):
        yield bench.call(partial(_pin, bench.manager, batch, loads), len(batch))
    for batch in bench.new_batches():
        yield from bench.store(batch)
    for load in loads:
        yield bench.call(partial(bench.manager.complete_load_nowait, load), len(load.slots))


def _pin(manager: CPUOffloadingManager, keys: Keys, loads: list[PrepareLoadOutput]) -> None:
    loads.append(manager.prepare_load_nowait(keys))


def _mostly_stored(bench: _Bench) -> Iterator[HostileCall]:
    for batch in islice(batches(bench.stored(), max(1, bench.size.batch_size - 1)), _CALLS):
        yield from bench.store([*batch, *bench.source.new(1)])


def _all_stored(bench: _Bench) -> Iterator[HostileCall]:
    yield from bench.store([*bench.stored(), *bench.source.new(1)])


def _refusals(bench: _Bench) -> Iterator[HostileCall]:
    manager = bench.manager
    loads = [manager.prepare_load_nowait(batch) for batch in batches(bench.stored(), bench.size.batch_size)]
    for batch in bench.new_batches():
        yield from bench.store(batch)
    for load in loads:
        manager.complete_load_nowait(load)


def _failing_writes(bench: _Bench) -> Iterator[HostileCall]:
    for batch in bench.new_batches():
        yield from bench.store(batch, success=False)


def _reset(bench: _Bench) -> Iterator[HostileCall]:
    yield bench.call(bench.manager.reset_nowait, bench.size.batch_size)
    for batch in bench.new_batches(3 * _CALLS):
        yield from bench.store(batch)


HOSTILE_CASES: dict[str, Callable[[_Bench], Iterator[HostileCall]]] = {
    "evict one block after most were touched": _after_touches,
    "pin 90 %, store beside them, unpin": _under_pins,
    "offer stored blocks and one more": _mostly_stored,
    "offer all stored blocks and one more": _all_stored,
    "refuse, all being pinned": _refusals,
    "failing writes": _failing_writes,
    "reset when full, and store again": _reset,
}


def measure_hostile_cases(policy: str, size: BenchSize) -> dict[str, HostileCall]:
    """Return the longest call of each case."""
    with CallTimer() as timer:
        repetitions = [_calls_of_cases(policy, size, timer) for _ in range(REPETITIONS)]
    longest = {}
    for name in HOSTILE_CASES:
        shorter = (min(same, key=_length) for same in zip(*(calls[name] for calls in repetitions), strict=True))
        longest[name] = max(shorter, key=_length)
    return longest


def _calls_of_cases(policy: str, size: BenchSize, timer: CallTimer) -> dict[str, list[HostileCall]]:
    """Return all calls of each case, on a new manager that is full; the same ones each time."""
    manager = CPUOffloadingManager(size.block_count, policy=policy)
    bench = _Bench(manager, KeySource(size.block_count), size, timer)
    stored_count = int(size.block_count * (1 + _TURNED_OVER_SHARE))
    for batch in batches(bench.source.new(stored_count), size.batch_size):
        manager.complete_store_nowait(manager.prepare_store_nowait(batch))
    found = {name: list(calls(bench)) for name, calls in HOSTILE_CASES.items()}
    manager.close_nowait()
    return found


def _length(call: HostileCall) -> float:
    return call.max_ms
