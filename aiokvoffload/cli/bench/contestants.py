"""Ways to keep the books of a cache, all asked for the same: the manager, and a bare loop as the yardstick."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from aiokvoffload.cli.bench.timing import CallTimer
from aiokvoffload.keys import OffloadKey
from aiokvoffload.managers.cpu import CPUOffloadingManager
from aiokvoffload.policies.base import CachePolicy
from aiokvoffload.specs import LookupResult, ReqContext

Keys = Sequence[OffloadKey]
Seconds = dict[str, float]
"""What each operation took, by its name."""

STORE_OPERATIONS = ("prepare_store", "complete_store")
LOAD_OPERATIONS = ("lookup", "touch", "prepare_load", "complete_load")
OPERATIONS = (*STORE_OPERATIONS, *LOAD_OPERATIONS)
BLOCK_TOKENS = 16


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """A request that finds some of its blocks stored and stores the others.

    Attributes:
        number: Unlike that of any other request.
        loaded: Blocks that are stored.
        stored: Blocks that are not.
    """

    number: int
    loaded: Keys
    stored: Keys


class Contestant(ABC):
    """Keeps the books, each operation timed by itself."""

    @abstractmethod
    def holds(self, key: OffloadKey) -> bool:
        """Return whether a block is stored."""

    @abstractmethod
    def use(self, keys: Keys) -> None:
        """Count a use of blocks that are stored, untimed."""

    @abstractmethod
    async def store(self, keys: Keys, timer: CallTimer) -> Seconds:
        """Store blocks that are missing."""

    @abstractmethod
    async def load(self, keys: Keys, timer: CallTimer) -> Seconds:
        """Look up, use, pin and unpin blocks; nothing is told if one of them has left meanwhile."""


class RequestServer(Contestant):
    """One that knows requests."""

    @abstractmethod
    async def serve(self, request: BenchRequest, timer: CallTimer) -> Seconds:
        """Do all that a request needs; nothing is told or done if a block has left meanwhile."""


class OwnManager(RequestServer):
    """The manager through its public coroutines, without events.

    Args:
        block_count: Blocks that it holds.
        policy: Name, class or instance of the eviction policy.
    """

    def __init__(self, block_count: int, policy: str | CachePolicy) -> None:
        self.manager = CPUOffloadingManager(block_count, policy=policy)

    def holds(self, key: OffloadKey) -> bool:
        """Return whether a block is stored."""
        return self.manager.lookup_nowait([key]) == [LookupResult.HIT]

    def use(self, keys: Keys) -> None:
        """Touch blocks."""
        self.manager.touch(keys, depths=depths_of(keys))

    async def store(self, keys: Keys, timer: CallTimer) -> Seconds:
        """Store blocks; the offer counts their access, as no touch has come before it."""
        own: Seconds = {}
        own["prepare_store"], ticket = await timer.awaited(self.manager.prepare_store(keys, depths=depths_of(keys)))
        own["complete_store"], _ = await timer.awaited(self.manager.complete_store(ticket))
        return own

    async def load(self, keys: Keys, timer: CallTimer) -> Seconds:
        """Look up, use, pin and unpin blocks."""
        depths = depths_of(keys)
        own: Seconds = {}
        own["lookup"], results = await timer.awaited(self.manager.lookup(keys))
        if LookupResult.MISS in results:
            return {}
        own["touch"] = timer.seconds(lambda: self.manager.touch(keys, depths=depths))
        own["prepare_load"], ticket = await timer.awaited(self.manager.prepare_load(keys))
        own["complete_load"], _ = await timer.awaited(self.manager.complete_load(ticket))
        return own

    async def serve(self, request: BenchRequest, timer: CallTimer) -> Seconds:
        """Count the request's one access, load what is there, and store the rest."""
        manager, ctx = self.manager, ReqContext(str(request.number))
        keys = [*request.loaded, *request.stored]
        depths = depths_of(keys)
        own: Seconds = {}
        own["lookup"], results = await timer.awaited(manager.lookup(request.loaded, ctx))
        if LookupResult.MISS in results:
            return {}
        own["touch"] = timer.seconds(lambda: manager.touch(keys, ctx, depths=depths))
        own["prepare_load"], load = await timer.awaited(manager.prepare_load(request.loaded, ctx))
        own["complete_load"], _ = await timer.awaited(manager.complete_load(load))
        offer = manager.prepare_store(request.stored, ctx, depths=depths[len(request.loaded) :])
        own["prepare_store"], store = await timer.awaited(offer)
        own["complete_store"], _ = await timer.awaited(manager.complete_store(store))
        return own


class BareLoop(Contestant):
    """The yardstick: a dict from key to slot, an ordered dict of what may leave, an array of readers.

    Args:
        block_count: Blocks that it holds.
    """

    def __init__(self, block_count: int) -> None:
        self._slot_of: dict[OffloadKey, int] = {}
        self._evictable: OrderedDict[OffloadKey, None] = OrderedDict()
        self._readers = [0] * block_count
        self._free = list(range(block_count - 1, -1, -1))
        self._found: list[int | None] = []

    def holds(self, key: OffloadKey) -> bool:
        """Return whether a block is stored."""
        return key in self._slot_of

    def use(self, keys: Keys) -> None:
        """Make blocks the last to leave."""
        for key in keys:
            if key in self._evictable:
                self._evictable.move_to_end(key)

    async def store(self, keys: Keys, timer: CallTimer) -> Seconds:
        """Store blocks, least recently used ones leaving for them."""
        steps = (self._prepare_store, self._complete_store)
        return {name: timer.seconds(step, keys) for name, step in zip(STORE_OPERATIONS, steps, strict=True)}

    async def load(self, keys: Keys, timer: CallTimer) -> Seconds:
        """Look up, use, pin and unpin blocks."""
        lookup = timer.seconds(self._lookup, keys)
        if None in self._found:
            return {}
        steps = (self.use, self._prepare_load, self._complete_load)
        others = {name: timer.seconds(step, keys) for name, step in zip(LOAD_OPERATIONS[1:], steps, strict=True)}
        return {"lookup": lookup, **others}

    def _prepare_store(self, keys: Keys) -> None:
        missing = [key for key in keys if key not in self._slot_of]
        for _ in range(len(missing) - len(self._free)):
            victim, _none = self._evictable.popitem(last=False)
            self._free.append(self._slot_of.pop(victim))
        for key in missing:
            slot = self._free.pop()
            self._slot_of[key] = slot
            self._readers[slot] = -1

    def _complete_store(self, keys: Keys) -> None:
        for key in keys:
            self._readers[self._slot_of[key]] = 0
            self._evictable[key] = None

    def _lookup(self, keys: Keys) -> None:
        self._found = [self._slot_of.get(key) for key in keys]

    def _prepare_load(self, keys: Keys) -> None:
        for key in keys:
            slot = self._slot_of[key]
            if not self._readers[slot]:
                del self._evictable[key]
            self._readers[slot] += 1

    def _complete_load(self, keys: Keys) -> None:
        for key in keys:
            slot = self._slot_of[key]
            self._readers[slot] -= 1
            if not self._readers[slot]:
                self._evictable[key] = None


def depths_of(keys: Keys) -> range:
    """Return the token position of each block's end, in a request that consists of these blocks."""
    return range(BLOCK_TOKENS, BLOCK_TOKENS * (len(keys) + 1), BLOCK_TOKENS)


def batches(keys: Keys, size: int) -> Iterator[Keys]:
    """Return the keys in parts of `size`."""
    for start in range(0, len(keys), size):
        yield keys[start : start + size]
