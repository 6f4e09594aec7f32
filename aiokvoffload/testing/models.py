"""Plain, slow models of policies and managers, to compare the real ones with.

A model finds everything by looking at everything, so that it can be checked by reading it.
"""

from __future__ import annotations

import copy
import math
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Self

from aiokvoffload.events import EventKind
from aiokvoffload.keys import OffloadKey
from aiokvoffload.kv_caches import KVGroup
from aiokvoffload.policies.base import Access, CachePolicy
from aiokvoffload.specs import Completion, LookupResult

Keys = Sequence[OffloadKey]


@dataclass(slots=True)
class RankedEntry:
    """One resident slot of a model policy.

    Attributes:
        slot: Its number.
        key: The key in it.
        tick: Of its last access; 0 if it was demoted since.
        depth: Of its last access; infinite if unknown.
        order: Counts up with every ranking.
        is_pinned: Not evictable.
        is_written: Was unpinned before.
        is_frequent: Was accessed again after it had been written.
    """

    slot: int
    key: OffloadKey
    tick: int = 0
    depth: float = math.inf
    order: int = 0
    is_pinned: bool = True
    is_written: bool = False
    is_frequent: bool = False

    @property
    def rank(self) -> tuple[int, float, int]:
        """Lower leaves first: older request, deeper block, ranked earlier."""
        return self.tick, -self.depth, self.order


class PolicyModel(CachePolicy):
    """What all model policies share: a list of entries that is sorted whenever the order matters.

    Args:
        capacity: Number of slots.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.entries: dict[int, RankedEntry] = {}
        self._rankings = 0

    @property
    def evictable_count(self) -> int:
        """How many entries are not pinned."""
        return sum(not entry.is_pinned for entry in self.entries.values())

    def insert(self, slots: Sequence[int], keys: Sequence[OffloadKey], access: Access) -> None:
        """Add an entry for each slot."""
        for position, (slot, key) in enumerate(zip(slots, keys, strict=True)):
            self.entries[slot] = RankedEntry(slot, key)
            self._rank(self.entries[slot], access, position)

    def touch(self, slots: Sequence[int], access: Access) -> None:
        """Rank those anew that were last used before."""
        for position, slot in enumerate(slots):
            entry = self.entries[slot]
            if entry.tick < access.tick:
                self._rank(entry, access, position)
                entry.is_frequent = entry.is_frequent or entry.is_written

    def pin(self, slots: Collection[int]) -> None:
        """Mark the entries."""
        for slot in slots:
            self.entries[slot].is_pinned = True

    def unpin(self, slots: Collection[int]) -> None:
        """Mark the entries."""
        for slot in slots:
            self.entries[slot].is_pinned = False
            self.entries[slot].is_written = True

    def demote(self, slots: Sequence[int]) -> None:
        """Rank the entries before every tick, as given."""
        for position, slot in enumerate(slots):
            self._rank(self.entries[slot], Access(tick=0), position)
            self.entries[slot].is_frequent = False

    def rescue(self, slots: Sequence[int], access: Access) -> None:
        """Rank the entries as new; whether they are frequent stays as it is."""
        for position, slot in enumerate(slots):
            if self.entries[slot].tick < access.tick:
                self._rank(self.entries[slot], access, position)

    def coldest(self, count: int) -> list[int]:
        """Evict from a copy."""
        return self.fork().evict(min(count, self.evictable_count)) or []

    def evict(self, count: int, protected: Collection[int] = ()) -> list[int] | None:
        """Choose one victim after the other, once there are known to be enough."""
        candidates = [entry for entry in self.entries.values() if not entry.is_pinned and entry.slot not in protected]
        if len(candidates) < count:
            return None
        victims: list[int] = []
        for _ in range(count):
            victim = self.choose(sorted(candidates, key=lambda entry: entry.rank))
            candidates.remove(victim)
            del self.entries[victim.slot]
            self.leave_ghost(victim)
            victims.append(victim.slot)
        return victims

    def remove(self, slots: Collection[int]) -> None:
        """Delete the entries."""
        for slot in slots:
            del self.entries[slot]

    def clear(self) -> None:
        """Delete all entries."""
        self.entries.clear()

    def fork(self) -> Self:
        """Return a copy in which evictions do not show here."""
        forked = copy.copy(self)
        forked.entries = dict(self.entries)
        return forked

    @abstractmethod
    def choose(self, candidates: Sequence[RankedEntry]) -> RankedEntry:
        """Return the next victim among `candidates`, lowest rank first, at least one."""

    def leave_ghost(self, victim: RankedEntry) -> None:
        """Remember an evicted entry."""
        return

    def _rank(self, entry: RankedEntry, access: Access, position: int) -> None:
        self._rankings += 1
        entry.tick = access.tick
        entry.depth = math.inf if access.depths is None else access.depths[position]
        entry.order = self._rankings


class LRUModel(PolicyModel):
    """Least recently used: the lowest rank leaves first."""

    def choose(self, candidates: Sequence[RankedEntry]) -> RankedEntry:
        """Return the lowest rank."""
        return candidates[0]


class ARCModel(PolicyModel):
    """Adaptive replacement, one block at a time.

    New blocks are recent (T1), blocks used again after they were written are frequent (T2). A victim comes from T1
    while that has at least the target size, else from T2, and from the other if one has nothing to give; what was
    demoted leaves before both. Evicted keys become ghosts (B1, B2), each list no longer than the capacity. The
    first miss of a ghost in a request moves the target by `max(1, other list / own list)`: up for B1, down for B2.

    Args:
        capacity: Number of slots.
        are_ghosts_frequent: Whether a block that comes back from a ghost list is frequent (T2) or recent (T1).
    """

    def __init__(self, capacity: int, *, are_ghosts_frequent: bool = True) -> None:
        super().__init__(capacity)
        self.are_ghosts_frequent = are_ghosts_frequent
        self.target_recent_count = 0.0
        self.recent_ghosts: list[OffloadKey] = []
        self.frequent_ghosts: list[OffloadKey] = []
        self._missed_at: dict[OffloadKey, int] = {}

    def insert(self, slots: Sequence[int], keys: Sequence[OffloadKey], access: Access) -> None:
        """Add entries to T1, or to T2 where the key is a ghost, and end the ghosts."""
        super().insert(slots, keys, access)
        for slot, key in zip(slots, keys, strict=True):
            for ghosts in (self.recent_ghosts, self.frequent_ghosts):
                if key in ghosts:
                    ghosts.remove(key)
                    self.entries[slot].is_frequent = self.are_ghosts_frequent

    def miss(self, keys: Sequence[OffloadKey], access: Access) -> None:
        """Move the target, the deepest block first."""
        for key in reversed(keys):
            recent_count, frequent_count = len(self.recent_ghosts), len(self.frequent_ghosts)
            if self._missed_at.get(key, 0) >= access.tick:
                continue
            if key in self.recent_ghosts:
                step = max(1.0, frequent_count / recent_count)
                self.target_recent_count = min(self.target_recent_count + step, float(self.capacity))
                self.recent_ghosts.remove(key)
                self.recent_ghosts.append(key)
                self._missed_at[key] = access.tick
            elif key in self.frequent_ghosts:
                step = max(1.0, recent_count / frequent_count)
                self.target_recent_count = max(self.target_recent_count - step, 0.0)
                self.frequent_ghosts.remove(key)
                self.frequent_ghosts.append(key)
                self._missed_at[key] = access.tick

    def fork(self) -> Self:
        """Return a copy with ghosts of its own."""
        forked = super().fork()
        forked.recent_ghosts = list(self.recent_ghosts)
        forked.frequent_ghosts = list(self.frequent_ghosts)
        forked._missed_at = dict(self._missed_at)
        return forked

    def clear(self) -> None:
        """Forget everything."""
        super().clear()
        self.target_recent_count = 0.0
        self.recent_ghosts.clear()
        self.frequent_ghosts.clear()
        self._missed_at.clear()

    def choose(self, candidates: Sequence[RankedEntry]) -> RankedEntry:
        """Return the lowest rank of the list that has to give."""
        demoted = [entry for entry in candidates if entry.tick == 0]
        recent = [entry for entry in candidates if entry.tick > 0 and not entry.is_frequent]
        frequent = [entry for entry in candidates if entry.tick > 0 and entry.is_frequent]
        recent_size = sum(entry.tick > 0 and not entry.is_frequent for entry in self.entries.values())
        if demoted:
            return demoted[0]
        if recent and (recent_size >= int(self.target_recent_count) or not frequent):
            return recent[0]
        return frequent[0]

    def leave_ghost(self, victim: RankedEntry) -> None:
        """Remember the key, unless it was demoted."""
        if victim.tick > 0:
            ghosts = self.frequent_ghosts if victim.is_frequent else self.recent_ghosts
            ghosts.append(victim.key)
            self._missed_at[victim.key] = 0
            if len(ghosts) > self.capacity:
                del ghosts[0]


def needed_blocks(group: KVGroup, block_tokens: int, end_tokens: int, resident_tokens: int = 0) -> list[int]:
    """Return which blocks a group must load to go on from `end_tokens`, by the words of the design.

    Args:
        group: The group.
        block_tokens: Tokens of one of its offloaded blocks.
        end_tokens: A boundary.
        resident_tokens: Tokens that the GPU holds.
    """
    blocks = range(end_tokens // block_tokens)
    if group.kind == "state":
        blocks = blocks[-1:]
    elif group.window_tokens is not None:
        blocks = blocks[-math.ceil((group.window_tokens - 1 + block_tokens) / block_tokens) :]
    if end_tokens <= resident_tokens:
        return []
    return [block for block in blocks if (block + 1) * block_tokens > resident_tokens]


def longest_prefix(
    groups: Sequence[KVGroup],
    block_tokens: Sequence[int],
    parts: Sequence[Keys],
    is_usable: Callable[[OffloadKey], bool],
    resident_tokens: int = 0,
) -> int:
    """Return the largest boundary, in tokens, by trying every one.

    Args:
        groups: The KV groups.
        block_tokens: Tokens of an offloaded block, per group.
        parts: Keys of each group from the start of the request.
        is_usable: Whether a block can be loaded.
        resident_tokens: Tokens that the GPU holds; the answer is never less.
    """
    limit = min(len(part) * tokens for part, tokens in zip(parts, block_tokens, strict=True))
    found = resident_tokens
    for end_tokens in range(resident_tokens + 1, limit + 1):
        if all(end_tokens % tokens == 0 for tokens in block_tokens) and all(
            is_usable(part[block])
            for group, tokens, part in zip(groups, block_tokens, parts, strict=True)
            for block in needed_blocks(group, tokens, end_tokens, resident_tokens)
        ):
            found = end_tokens
    return found


@dataclass(slots=True, eq=False)
class ModelBlock:
    """A slot that is not free.

    Attributes:
        slot: Its number.
        key: The key in it; None once its block is gone.
        is_ready: Can be loaded.
        users: Tickets and leases on it.
        sessions: Who has used it; None for requests that name no session.
        kept_until: When a hint stops to keep it.
    """

    slot: int
    key: OffloadKey | None
    is_ready: bool = False
    users: int = 1
    sessions: set[str | None] = field(default_factory=set)
    kept_until: float | None = None

    @property
    def is_idle(self) -> bool:
        """May be evicted."""
        return self.is_ready and not self.users and self.kept_until is None


@dataclass(slots=True)
class ModelBinding:
    """The one access and the one epoch of a request."""

    epoch: int
    tick: int = 0


@dataclass(slots=True, eq=False)
class ModelStore:
    """What a manager should answer to an offer; see `PrepareStoreOutput`."""

    keys: list[OffloadKey]
    access: Access
    binding: ModelBinding
    epoch: int
    generation: int
    session: str | None = None
    is_open: bool = True
    is_waiting: bool = False
    blocks: list[ModelBlock] = field(default_factory=list)
    keys_to_store: list[OffloadKey] = field(default_factory=list)
    evicted_keys: list[OffloadKey] = field(default_factory=list)
    resident_keys: list[OffloadKey] = field(default_factory=list)
    pending_keys: list[OffloadKey] = field(default_factory=list)
    refused_keys: list[OffloadKey] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class ModelLoad:
    """What a manager should answer to a load; see `PrepareLoadOutput`."""

    parts: list[list[OffloadKey]]
    take: Literal["all", "leading"]
    resident_tokens: int
    epoch: int
    generation: int = 0
    is_open: bool = True
    is_waiting: bool = False
    blocks: list[ModelBlock] = field(default_factory=list)
    keys: list[OffloadKey] = field(default_factory=list)
    group_sizes: tuple[int, ...] = ()
    first_indices: tuple[int, ...] = ()
    token_count: int = 0
    writes: list[ModelStore] = field(default_factory=list)

    @property
    def result(self) -> LookupResult:
        """See `PrepareLoadOutput.result`."""
        if self.is_waiting:
            return LookupResult.PENDING
        return LookupResult.HIT if self.keys else LookupResult.MISS


class ManagerModel:
    """What a manager of CPU memory should answer.

    Args:
        block_count: Number of slots.
        policy: A model policy of this capacity.
        groups: The KV groups; without any, one full group that counts blocks.
        block_size_factor: GPU blocks per slot.

    Attributes:
        now: What the clock shows.
        session_of: The session that each request names.
    """

    def __init__(
        self, block_count: int, policy: CachePolicy, groups: Sequence[KVGroup] = (), block_size_factor: int = 1
    ) -> None:
        self.block_count = block_count
        self.policy = policy
        self.groups = tuple(groups) or (KVGroup(block_tokens=1, layers=()),)
        self.block_tokens = [group.block_tokens * block_size_factor for group in self.groups]
        self.blocks: list[ModelBlock] = []
        self.offers: list[ModelStore] = []
        self.loads: list[ModelLoad] = []
        self.events: list[tuple[EventKind, tuple[OffloadKey, ...]]] = []
        self.epoch = 0
        self.generation = 0
        self.now = 0.0
        self.session_of: dict[str, str] = {}
        self.stored = self.evicted = self.refused = self.failed = self.hits = self.rejected = 0
        self.taken_along = self.rescued = self.waited_loads = self.waited_stores = 0
        self.misses: dict[str, int] = {}
        self._bindings: dict[str, ModelBinding] = {}
        self._open_stores: list[ModelStore] = []
        self._last_tick = 0
        self._next_fresh_slot = 0
        self._freed_slots: list[int] = []

    def find(self, key: OffloadKey) -> ModelBlock | None:
        """Return where a key is."""
        return next((block for block in self.blocks if block.key == key), None)

    def is_ready(self, key: OffloadKey) -> bool:
        """Whether a key can be loaded now."""
        block = self.find(key)
        return block is not None and block.is_ready

    def lookup(self, keys: Keys, req_id: str = "") -> list[LookupResult]:
        """See `OffloadingManager.lookup_nowait`; an empty `req_id` is a request that makes this one call."""
        is_current = self._bind(req_id).epoch == self.epoch
        found = [self.find(key) if is_current else None for key in keys]
        return [
            LookupResult.MISS if block is None else LookupResult.HIT if block.is_ready else LookupResult.PENDING
            for block in found
        ]

    def lookup_prefix(self, parts: Sequence[Keys], req_id: str = "", resident_tokens: int = 0) -> int:
        """See `OffloadingManager.lookup_prefix_nowait`."""
        is_current = self._bind(req_id).epoch == self.epoch
        return self._boundary(parts, lambda key: is_current and self.find(key) is not None, resident_tokens)

    def touch(self, keys: Keys, req_id: str = "", depths: Sequence[int] | None = None) -> None:
        """See `OffloadingManager.touch`."""
        binding = self._bind(req_id)
        if binding.epoch == self.epoch:
            self._open_access(binding)
            self._touch(*_unique(keys, depths), binding.tick)
            self._note_session(keys, req_id)

    def prepare_load(
        self,
        parts: Sequence[Keys],
        req_id: str = "",
        *,
        take: Literal["all", "leading"] = "all",
        resident_tokens: int = 0,
    ) -> ModelLoad:
        """See `OffloadingManager.prepare_load_nowait`."""
        is_current = self._bind(req_id).epoch == self.epoch
        load = ModelLoad(
            [list(dict.fromkeys(part)) for part in parts], take, resident_tokens, self.epoch, self.generation
        )
        self._pin(load, lambda key: is_current and self.find(key) is not None)
        self.hits += len(load.keys)
        self._note_misses(self._missed_count(load), "absent" if is_current else "stale")
        load.writes = [store for store in self._open_stores if any(block in store.blocks for block in load.blocks)]
        if load.writes:
            load.is_waiting = True
            self.loads.append(load)
        return load

    def complete_load(self, load: ModelLoad, *, take_along: bool = False) -> Completion:
        """See `OffloadingManager.complete_load_nowait`."""
        if not load.is_open:
            self.rejected += 1
            return Completion.REPEATED
        load.is_open = False
        if load.is_waiting:
            load.is_waiting = False
            self.waited_loads += 1
            load.keys = []
            self.loads.remove(load)
        self._release(load.blocks)
        if take_along and load.generation == self.generation:
            depth_of = {
                load.parts[group][first + index]: (first + index + 1) * self.block_tokens[group]
                for group, (first, size) in enumerate(zip(load.first_indices, load.group_sizes, strict=True))
                for index in range(size if load.keys else 0)
            }
            self.taken_along += self._demote(load.keys, [depth_of[key] for key in load.keys])
        self._serve_offers()
        return Completion.STALE if load.epoch != self.epoch else Completion.APPLIED

    def prepare_store(
        self,
        keys: Keys,
        req_id: str = "",
        *,
        when_full: Literal["refuse", "leading", "wait"] = "refuse",
        depths: Sequence[int] | None = None,
    ) -> ModelStore:
        """See `OffloadingManager.prepare_store_nowait`."""
        binding = self._bind(req_id)
        unique, unique_depths = _unique(keys, depths)
        store = ModelStore(unique, Access(0), binding, self.epoch, self.generation, self.session_of.get(req_id))
        self._open_stores.append(store)
        if binding.epoch != self.epoch:
            store.refused_keys = unique
            self.refused += len(unique)
            return store
        if self._open_access(binding):
            self._touch(unique, unique_depths, binding.tick)
        self._note_session(unique, req_id)
        store.access = Access(binding.tick, depths=unique_depths)
        missing = [key for key in unique if self.find(key) is None]
        if (missing and self.offers) or not self._grant(store, is_leading_enough=when_full == "leading"):
            if when_full == "wait" and len(unique) <= self.block_count:
                store.is_waiting = True
                self.offers.append(store)
            else:
                self._refuse(store)
        return store

    def prepare_demotion(self, keys: Keys, req_id: str = "", depths: Sequence[int] | None = None) -> ModelStore:
        """See `OffloadingManager.prepare_demotion_nowait`."""
        binding = self._bind(req_id)
        unique, unique_depths = _unique(keys, range(len(keys)) if depths is None else depths)
        store = ModelStore(unique, Access(0), binding, self.epoch, self.generation, self.session_of.get(req_id))
        self._open_stores.append(store)
        if binding.epoch != self.epoch:
            store.refused_keys = unique
            self.refused += len(unique)
            return store
        self._last_tick += 1
        store.access = Access(self._last_tick, depths=unique_depths)
        for key, depth in zip(unique, unique_depths or (), strict=True):
            block = self.find(key)
            if block is not None and block.is_ready:
                self.rescued += 1
                self.policy.rescue([block.slot], Access(self._last_tick, depths=[depth]))
        missing = [key for key in unique if self.find(key) is None]
        if (missing and self.offers) or not self._grant(store, is_leading_enough=True):
            self._refuse(store)
        return store

    def hint(
        self,
        keys: Keys,
        *,
        session_ended: bool = False,
        keep_seconds: float = 0.0,
        depths: Sequence[int] | None = None,
    ) -> int:
        """See `OffloadingManager.hint`."""
        self._expire()
        unique, unique_depths = _unique(keys, range(len(keys)) if depths is None else depths)
        blocks = [block for key in unique if (block := self.find(key)) is not None and block.is_ready]
        if session_ended:
            for block in [block for block in blocks if len(block.sessions) == 1 and None not in block.sessions]:
                self._let_go(block)
            count = self._demote(unique, unique_depths or [], is_alone=True)
        elif not keep_seconds:
            count = 0
            for block in blocks:
                self._let_go(block)
        else:
            for block in blocks:
                if block.kept_until is None and sum(it.kept_until is not None for it in self.blocks) < (
                    self.block_count // 2
                ):
                    block.kept_until = self.now
                    if not block.users:
                        self.policy.pin([block.slot])
                if block.kept_until is not None:
                    block.kept_until = self.now + keep_seconds
            count = sum(block.kept_until is not None for block in blocks)
        self._serve_offers()
        return count

    def complete_store(self, store: ModelStore, success: bool = True) -> Completion:
        """See `OffloadingManager.complete_store_nowait`."""
        if not store.is_open:
            self.rejected += 1
            return Completion.REPEATED
        store.is_open = False
        self._open_stores.remove(store)
        if store.is_waiting:
            self.settle(store)
            return Completion.APPLIED
        if store.generation != self.generation:
            self.rejected += 1
            self.release(store.blocks)
            return Completion.STALE
        for block in store.blocks:
            if success:
                block.is_ready = True
            else:
                block.key = None
        if success:
            self.stored += len(store.blocks)
            self._announce(EventKind.STORED, store.keys_to_store)
        else:
            self.failed += len(store.blocks)
            self.policy.remove([block.slot for block in store.blocks])
        for load in [load for load in self.loads if store in load.writes]:
            load.writes.remove(store)
            if not load.writes or (load.take == "all" and not success):
                self._settle_load(load)
        self.release(store.blocks)
        return Completion.APPLIED

    def settle(self, ticket: ModelStore | ModelLoad) -> None:
        """See `OffloadingManager.settle_nowait`."""
        if isinstance(ticket, ModelLoad) and ticket.is_waiting:
            self._settle_load(ticket)
        elif isinstance(ticket, ModelStore) and ticket.is_waiting:
            ticket.is_waiting = False
            self.waited_stores += 1
            self.offers.remove(ticket)
            self._refuse(ticket)
        self._serve_offers()

    def hold(self, blocks: Iterable[ModelBlock]) -> None:
        """Count one more user of each block."""
        for block in blocks:
            block.users += 1
            if block.users == 1 and block.kept_until is None:
                self.policy.pin([block.slot])

    def release(self, blocks: Iterable[ModelBlock]) -> None:
        """Count one user less of each block, and serve those who wait for room."""
        self._release(blocks)
        self._serve_offers()

    def reset(self) -> None:
        """See `OffloadingManager.reset_nowait`."""
        self.generation += 1
        self.policy.clear()
        self.blocks = [block for block in self.blocks if block.users]
        for block in self.blocks:
            block.key = None
            block.is_ready = False
            block.kept_until = None
        self._next_fresh_slot = 0
        self._freed_slots.clear()
        self._announce(EventKind.CLEARED, ())
        for load in list(self.loads):
            self._settle_load(load)
        self._serve_offers()

    def bump_epoch(self) -> None:
        """See `OffloadingManager.bump_epoch_nowait`."""
        self.epoch += 1
        self.reset()

    def counts(self) -> dict[str, int | dict[str, int]]:
        """Return what `OffloadingManager.statistics` should say, as far as a model can know."""
        return {
            "total": self.block_count,
            "free": self._free_count,
            "ready": sum(block.key is not None and block.is_ready for block in self.blocks),
            "writing": sum(block.key is not None and not block.is_ready for block in self.blocks),
            "promoting": 0,
            "leased_without_key": sum(block.key is None for block in self.blocks),
            "pinned": sum(block.is_ready and block.users > 0 for block in self.blocks),
            "kept": sum(block.kept_until is not None for block in self.blocks),
            "waiting_stores": len(self.offers),
            "waiting_loads": len(self.loads),
            "waited_stores": self.waited_stores,
            "waited_loads": self.waited_loads,
            "stored_blocks": self.stored,
            "evicted_blocks": self.evicted,
            "refused_blocks": self.refused,
            "failed_blocks": self.failed,
            "hit_blocks": self.hits,
            "misses_by_reason": self.misses,
            "taken_along_blocks": self.taken_along,
            "rescued_blocks": self.rescued,
            "rejected_completions": self.rejected,
            "detached_sinks": 0,
        }

    @property
    def _free_count(self) -> int:
        return self.block_count - len(self.blocks)

    def _bind(self, req_id: str) -> ModelBinding:
        if not req_id:
            return ModelBinding(self.epoch)
        return self._bindings.setdefault(req_id, ModelBinding(self.epoch))

    def _open_access(self, binding: ModelBinding) -> bool:
        if binding.tick:
            return False
        self._last_tick += 1
        binding.tick = self._last_tick
        return True

    def _touch(self, keys: Keys, depths: Sequence[int] | None, tick: int) -> None:
        resident: list[tuple[int, int | None]] = []
        missing: list[OffloadKey] = []
        for position, key in enumerate(keys):
            block = self.find(key)
            if block is None:
                missing.append(key)
            else:
                resident.append((block.slot, None if depths is None else depths[position]))
        known_depths = [depth for _, depth in resident if depth is not None]
        self.policy.touch([slot for slot, _ in resident], Access(tick, depths=None if depths is None else known_depths))
        self.policy.miss(missing, Access(tick))

    def _note_session(self, keys: Keys, req_id: str) -> None:
        for key in keys:
            block = self.find(key)
            if block is not None:
                block.sessions.add(self.session_of.get(req_id))

    def _demote(self, keys: Keys, depths: Sequence[int], *, is_alone: bool = False) -> int:
        """Demote the idle ones of some blocks one by one, the deepest first, and return how many they are."""
        count = 0
        for _, key in sorted(zip(depths, keys, strict=True), key=lambda pair: -pair[0]):
            block = self.find(key)
            if block is None or not block.is_idle:
                continue
            if not is_alone or (len(block.sessions) == 1 and None not in block.sessions):
                self.policy.demote([block.slot])
                count += 1
        return count

    def _let_go(self, block: ModelBlock) -> None:
        if block.kept_until is not None:
            block.kept_until = None
            if not block.users:
                self.policy.unpin([block.slot])

    def _expire(self) -> None:
        for block in self.blocks:
            if block.kept_until is not None and block.kept_until <= self.now:
                self._let_go(block)

    def _boundary(self, parts: Sequence[Keys], is_usable: Callable[[OffloadKey], bool], resident_tokens: int) -> int:
        return longest_prefix(self.groups, self.block_tokens, parts, is_usable, resident_tokens)

    def _pin(self, load: ModelLoad, is_usable: Callable[[OffloadKey], bool]) -> None:
        if load.take == "all":
            is_complete = all(is_usable(key) for part in load.parts for key in part)
            needed = [list(range(len(part) if is_complete else 0)) for part in load.parts]
            load.token_count = min(len(run) * tokens for run, tokens in zip(needed, self.block_tokens, strict=True))
            load.first_indices = (0,) * len(load.parts)
        else:
            end = load.token_count = self._boundary(load.parts, is_usable, load.resident_tokens)
            needed = [
                needed_blocks(group, tokens, end, load.resident_tokens)
                for group, tokens in zip(self.groups, self.block_tokens, strict=True)
            ]
            load.first_indices = tuple(
                run[0] if run else end // tokens for run, tokens in zip(needed, self.block_tokens, strict=True)
            )
        load.group_sizes = tuple(map(len, needed))
        load.keys = [part[block] for part, run in zip(load.parts, needed, strict=True) for block in run]
        load.blocks = [block for key in load.keys if (block := self.find(key)) is not None]
        self.hold(load.blocks)

    def _settle_load(self, load: ModelLoad) -> None:
        self.loads.remove(load)
        load.is_waiting = False
        self.waited_loads += 1
        if not all(block.is_ready for block in load.blocks):
            held = load.blocks
            self._pin(load, self.is_ready)
            self._release(held)
            self._note_misses(len(held) - len(load.blocks), "failed")

    def _missed_count(self, load: ModelLoad) -> int:
        if load.take == "all":
            return 0 if load.keys else sum(map(len, load.parts))
        ends = [load.token_count // tokens for tokens in self.block_tokens]
        return sum(len(part[end:]) for part, end in zip(load.parts, ends, strict=True))

    def _note_misses(self, count: int, reason: str) -> None:
        if count:
            self.misses[reason] = self.misses.get(reason, 0) + count

    def _grant(self, store: ModelStore, *, is_leading_enough: bool) -> bool:
        self._expire()
        missing = [key for key in store.keys if self.find(key) is None]
        resident = [key for key in store.keys if self.is_ready(key)]
        kept = [block.slot for block in self.blocks if block.key in resident]
        idle_count = sum(block.is_idle and block.key not in resident for block in self.blocks)
        room = self._free_count + idle_count
        if len(missing) > room and not is_leading_enough:
            return False
        taken = missing[:room]
        victims = self.policy.evict(max(0, len(taken) - self._free_count), kept) or []
        self._note_present(store)
        for slot in victims:
            block = next(block for block in self.blocks if block.slot == slot)
            if block.key is not None:
                store.evicted_keys.append(block.key)
            self._free(block)
        self.evicted += len(victims)
        self._announce(EventKind.REMOVED, store.evicted_keys)
        store.refused_keys = missing[room:]
        self.refused += len(store.refused_keys)
        store.keys_to_store = taken
        for key in taken:
            store.blocks.append(ModelBlock(self._take_slot(), key, sessions={store.session}))
            self.blocks.append(store.blocks[-1])
        depths = store.access.depths
        depth_of = {} if depths is None else dict(zip(store.keys, depths, strict=True))
        self.policy.insert(
            [block.slot for block in store.blocks],
            taken,
            Access(store.access.tick, depths=None if depths is None else [depth_of[key] for key in taken]),
        )
        return True

    def _refuse(self, store: ModelStore) -> None:
        self._note_present(store)
        store.refused_keys = [key for key in store.keys if self.find(key) is None]
        self.refused += len(store.refused_keys)

    def _note_present(self, store: ModelStore) -> None:
        store.resident_keys = [key for key in store.keys if self.is_ready(key)]
        store.pending_keys = [key for key in store.keys if self.find(key) is not None and not self.is_ready(key)]

    def _serve_offers(self) -> None:
        while self.offers:
            store = self.offers[0]
            if store.binding.epoch != self.epoch:
                self._refuse(store)
            elif not self._grant(store, is_leading_enough=False):
                return
            del self.offers[0]
            store.is_waiting = False
            self.waited_stores += 1
            store.epoch, store.generation = self.epoch, self.generation

    def _release(self, blocks: Iterable[ModelBlock]) -> None:
        for block in blocks:
            block.users -= 1
            if block.users == 0 and block.is_ready and block.kept_until is None:
                self.policy.unpin([block.slot])
            elif block.users == 0 and not block.is_ready:
                self._free(block)

    def _take_slot(self) -> int:
        """Slots never used since the last reset come first, in order, then the one freed last."""
        slots_in_use = [block.slot for block in self.blocks]
        while self._next_fresh_slot < self.block_count:
            slot = self._next_fresh_slot
            self._next_fresh_slot += 1
            if slot not in slots_in_use:
                return slot
        return self._freed_slots.pop()

    def _free(self, block: ModelBlock) -> None:
        self.blocks.remove(block)
        if block.slot < self._next_fresh_slot:
            self._freed_slots.append(block.slot)

    def _announce(self, kind: EventKind, keys: Keys) -> None:
        if keys or kind is EventKind.CLEARED:
            self.events.append((kind, tuple(keys)))


def _unique(keys: Keys, depths: Sequence[int] | None) -> tuple[list[OffloadKey], list[int] | None]:
    """Return each key once, with its first depth."""
    first_positions = [position for position, key in enumerate(keys) if key not in keys[:position]]
    unique = [keys[position] for position in first_positions]
    return unique, None if depths is None else [depths[position] for position in first_positions]
