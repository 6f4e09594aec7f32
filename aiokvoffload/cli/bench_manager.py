"""What a manager's bookkeeping costs, beside the bare loop that does the same steps with plain containers.

All times are processor time of this thread, so that other load on the machine does not count. Both sides work on
the same random keys, in turns.
"""

from __future__ import annotations

import gc
import random
import time
import tracemalloc
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from aiokvoffload.keys import HASH_BYTES, OffloadKey, make_offload_key
from aiokvoffload.managers.cpu import CPUOffloadingManager
from aiokvoffload.specs import PrepareLoadOutput, PrepareStoreOutput

OPERATIONS = ("prepare_store", "complete_store", "lookup", "prepare_load", "complete_load")
BLOCK_TOKENS = 16


@dataclass(frozen=True, slots=True)
class OperationCost:
    """What one operation costs at one size.

    Attributes:
        blocks_per_second: Keys handled per second of processor time.
        share_of_bare_loop: The same, as a share of what the bare loop handles.
        p50_ms: Median of a call.
        p99_ms: What 99 % of the calls take at most.
        max_ms: The longest call.
    """

    blocks_per_second: float
    share_of_bare_loop: float
    p50_ms: float
    p99_ms: float
    max_ms: float


@dataclass(frozen=True, slots=True)
class ManagerCost:
    """What a manager of one size costs under one policy.

    Attributes:
        policy: Name of the policy.
        block_count: Blocks held.
        batch_size: Keys of a call.
        operations: By name.
        bytes_per_block: Memory besides the keys.
        collector_pause_ms: What a full garbage collection takes longer with the blocks than without.
        hostile_max_ms: The longest call of each hostile case, by name.
    """

    policy: str
    block_count: int
    batch_size: int
    operations: dict[str, OperationCost]
    bytes_per_block: float
    collector_pause_ms: float
    hostile_max_ms: dict[str, float]

    def to_dict(self) -> dict[str, Any]:
        """Return the figures as plain values."""
        return asdict(self)


class BareLoop:
    """The yardstick: a dict from key to slot, an ordered dict of what may leave, an array of readers."""

    def __init__(self, block_count: int) -> None:
        self._slot_of: dict[OffloadKey, int] = {}
        self._evictable: OrderedDict[OffloadKey, None] = OrderedDict()
        self._readers = [0] * block_count
        self._free = list(range(block_count - 1, -1, -1))

    def prepare_store(self, keys: Sequence[OffloadKey]) -> None:
        """Give missing keys a slot, evicting the oldest."""
        missing = [key for key in keys if key not in self._slot_of]
        for _ in range(len(missing) - len(self._free)):
            victim, _none = self._evictable.popitem(last=False)
            self._free.append(self._slot_of.pop(victim))
        for key in missing:
            slot = self._free.pop()
            self._slot_of[key] = slot
            self._readers[slot] = -1

    def complete_store(self, keys: Sequence[OffloadKey]) -> None:
        """Make keys ready."""
        for key in keys:
            self._readers[self._slot_of[key]] = 0
            self._evictable[key] = None

    def lookup(self, keys: Sequence[OffloadKey]) -> None:
        """Find keys."""
        [self._slot_of.get(key) for key in keys]

    def prepare_load(self, keys: Sequence[OffloadKey]) -> None:
        """Pin keys."""
        for key in keys:
            slot = self._slot_of[key]
            if not self._readers[slot]:
                del self._evictable[key]
            self._readers[slot] += 1

    def complete_load(self, keys: Sequence[OffloadKey]) -> None:
        """Unpin keys."""
        for key in keys:
            slot = self._slot_of[key]
            self._readers[slot] -= 1
            if not self._readers[slot]:
                self._evictable[key] = None


async def measure_manager(policy: str, block_count: int, batch_size: int, call_count: int) -> ManagerCost:
    """Measure every operation of a full manager, then the hostile cases."""
    rng = random.Random(block_count)  # noqa: S311  reproducible, not secret
    keys = [make_offload_key(rng.randbytes(HASH_BYTES)) for _ in range(block_count)]
    new_keys = [make_offload_key(rng.randbytes(HASH_BYTES)) for _ in range((call_count + 1) * batch_size)]
    bytes_per_block = _bytes_per_block(policy, keys, batch_size)
    pause_without = _collector_seconds()
    manager = _filled(policy, keys, batch_size)
    pause = _collector_seconds() - pause_without
    bare = BareLoop(block_count)
    for batch in _batches(keys, batch_size):
        bare.prepare_store(batch)
        bare.complete_store(batch)
    seconds: dict[str, list[float]] = {name: [] for name in OPERATIONS}
    bare_seconds = dict.fromkeys(OPERATIONS, 0.0)
    history = [*keys, *new_keys]
    for number, batch in enumerate(_batches(new_keys, batch_size)):
        end = block_count + number * batch_size
        chosen = rng.sample(history[end - block_count // 3 : end], batch_size)
        # The first round warms both sides up.
        own, others = await _one_round(manager, bare, batch, chosen)
        for name in OPERATIONS if number else ():
            seconds[name].append(own[name])
            bare_seconds[name] += others[name]
    operations = {}
    for name, calls in seconds.items():
        calls.sort()
        operations[name] = OperationCost(
            len(calls) * batch_size / sum(calls),
            bare_seconds[name] / sum(calls),
            1e3 * calls[len(calls) // 2],
            1e3 * calls[len(calls) * 99 // 100],
            1e3 * calls[-1],
        )
    hostile = {
        name: 1e3 * max(calls(_filled(policy, keys, batch_size), keys, new_keys, batch_size))
        for name, calls in HOSTILE_CASES.items()
    }
    return ManagerCost(policy, block_count, batch_size, operations, bytes_per_block, 1e3 * max(0.0, pause), hostile)


async def _one_round(
    manager: CPUOffloadingManager, bare: BareLoop, batch: Sequence[OffloadKey], chosen: Sequence[OffloadKey]
) -> tuple[dict[str, float], dict[str, float]]:
    """Let both sides store a batch and load another; return what each operation took."""
    depths = range(BLOCK_TOKENS, BLOCK_TOKENS * (len(batch) + 1), BLOCK_TOKENS)
    own: dict[str, float] = {}
    own["prepare_store"], store = await _timed(manager.prepare_store(batch, depths=depths))
    own["complete_store"], _ = await _timed(manager.complete_store(store))
    own["lookup"], _ = await _timed(manager.lookup(chosen))
    own["prepare_load"], load = await _timed(manager.prepare_load(chosen))
    own["complete_load"], _ = await _timed(manager.complete_load(load))
    others = {
        name: _processor_seconds(getattr(bare, name), batch if "store" in name else chosen) for name in OPERATIONS
    }
    return own, others


def _after_touches(
    manager: CPUOffloadingManager, keys: Sequence[OffloadKey], new_keys: Sequence[OffloadKey], batch_size: int
) -> Iterator[float]:
    """Evict one block after most were touched."""
    for batch in _batches(keys[len(keys) // 10 :], batch_size):
        manager.touch(batch)
    for key in new_keys[:batch_size]:
        yield _processor_seconds(_store, manager, [key])


def _under_pins(
    manager: CPUOffloadingManager, keys: Sequence[OffloadKey], new_keys: Sequence[OffloadKey], batch_size: int
) -> Iterator[float]:
    """Store while the oldest 90 % are pinned."""
    loads: list[PrepareLoadOutput] = []

    def pin(batch: Sequence[OffloadKey]) -> None:
        loads.append(manager.prepare_load_nowait(batch))

    for batch in _batches(keys[: len(keys) * 9 // 10], batch_size):
        yield _processor_seconds(pin, batch)
    for batch in list(_batches(new_keys, batch_size))[:50]:
        yield _processor_seconds(_store, manager, batch)
    for load in loads:
        yield _processor_seconds(manager.complete_load_nowait, load)


def _mostly_resident(
    manager: CPUOffloadingManager, keys: Sequence[OffloadKey], new_keys: Sequence[OffloadKey], batch_size: int
) -> Iterator[float]:
    """Offer the oldest blocks, which are stored, and one more."""
    for number, batch in enumerate(list(_batches(keys, batch_size - 1))[:50]):
        offer = [*batch, new_keys[number]]
        yield _processor_seconds(_store, manager, offer)


def _after_a_reset(
    manager: CPUOffloadingManager, keys: Sequence[OffloadKey], new_keys: Sequence[OffloadKey], batch_size: int
) -> Iterator[float]:
    """Reset, and store again."""
    yield _processor_seconds(manager.reset_nowait)
    for batch in list(_batches(keys, batch_size))[:300]:
        yield _processor_seconds(_store, manager, batch)


def _after_failures(
    manager: CPUOffloadingManager, keys: Sequence[OffloadKey], new_keys: Sequence[OffloadKey], batch_size: int
) -> Iterator[float]:
    """Let every write fail."""
    for batch in list(_batches(new_keys, batch_size))[:100]:
        yield _processor_seconds(_store, manager, batch, False)


HOSTILE_CASES: dict[
    str, Callable[[CPUOffloadingManager, Sequence[OffloadKey], Sequence[OffloadKey], int], Iterator[float]]
] = {
    "evict one after most were touched": _after_touches,
    "90 % pinned": _under_pins,
    "offer of stored blocks plus one": _mostly_resident,
    "reset": _after_a_reset,
    "failing writes": _after_failures,
}


def _store(manager: CPUOffloadingManager, keys: Sequence[OffloadKey], success: bool = True) -> None:
    manager.complete_store_nowait(manager.prepare_store_nowait(keys), success)


def _filled(policy: str, keys: Sequence[OffloadKey], batch_size: int) -> CPUOffloadingManager:
    manager = CPUOffloadingManager(len(keys), policy=policy)
    for batch in _batches(keys, batch_size):
        depths = range(BLOCK_TOKENS, BLOCK_TOKENS * (len(batch) + 1), BLOCK_TOKENS)
        ticket: PrepareStoreOutput = manager.prepare_store_nowait(batch, depths=depths)
        manager.complete_store_nowait(ticket)
    return manager


def _bytes_per_block(policy: str, keys: Sequence[OffloadKey], batch_size: int) -> float:
    tracemalloc.start()
    manager = _filled(policy, keys, batch_size)
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    manager.close_nowait()
    return used / len(keys)


def _batches(keys: Sequence[OffloadKey], size: int) -> Iterator[Sequence[OffloadKey]]:
    for start in range(0, len(keys), size):
        yield keys[start : start + size]


def _collector_seconds() -> float:
    return sorted(_processor_seconds(gc.collect) for _ in range(5))[2]


async def _timed(operation: Coroutine[Any, Any, Any]) -> tuple[float, Any]:
    started = time.thread_time()
    answer = await operation
    return time.thread_time() - started, answer


def _processor_seconds(work: Callable[..., object], *arguments: object) -> float:
    started = time.thread_time()
    work(*arguments)
    return time.thread_time() - started
