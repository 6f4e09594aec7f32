"""The books of the process that evicts."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from aiokvoffload.keys import OffloadKey
from aiokvoffload.policies.base import Access, CachePolicy
from aiokvoffload.tiers.fs.files import Files
from aiokvoffload.tiers.fs.layout import Layout
from aiokvoffload.tiers.fs.ledger import Ledger
from aiokvoffload.tiers.names import BlockId
from aiokvoffload.tiers.outcomes import Reason
from aiokvoffload.tiers.slots import BlockSlots
from aiokvoffload.tiers.statistics import Holdings

_MOST_VICTIMS = 1000
"""For one block; a guard against others who use blocks faster than they can be chosen."""
_BEFORE_ALL = 1


@dataclass(frozen=True, slots=True, order=True)
class FoundBlock:
    """A block that lies in the directory.

    Attributes:
        used_ns: Its last use, on the clock of the file system.
        byte_count: Bytes of its file.
        block: The block.
    """

    used_ns: int
    byte_count: int
    block: BlockId


class EvictingLedger(Ledger):
    """Counts every block of the directory, and removes some to make room; for the holder of the directory's lock.

    The files are removed before their bytes are given to another block, so the directory never takes more than its
    capacity. Ticks are times of the file system, which all who share the directory set on the files they use: a
    victim that someone else has used meanwhile stays, at the rank of that use.

    Args:
        files: The file system.
        layout: The directory.
        capacity_bytes: What the files of blocks may take.
        slot_count: Blocks at most.
        policy: Class of the eviction policy.
        keep_free_bytes: What stays free on the file system.
    """

    def __init__(
        self,
        files: Files,
        layout: Layout,
        *,
        capacity_bytes: int,
        slot_count: int,
        policy: type[CachePolicy],
        keep_free_bytes: int,
    ) -> None:
        self._files = files
        self._layout = layout
        self._slot_count = slot_count
        self._keep_free_bytes = keep_free_bytes
        # Held for bookkeeping only, never while the file system is asked.
        self._guard = threading.Lock()
        self._slots = BlockSlots(capacity_bytes, slot_count, policy)
        self._writing: set[BlockId] = set()
        self._used_ns: dict[BlockId, int] = {}

    def load(self, found: Iterable[FoundBlock]) -> None:
        """Count the blocks that lie there; those that do not fit are removed, the longest unused first."""
        newest_first = sorted(found, reverse=True)
        byte_count = kept_count = 0
        for block in newest_first[: self._slot_count]:
            if byte_count + block.byte_count > self._slots.capacity_bytes:
                break
            byte_count += block.byte_count
            kept_count += 1
        for block in newest_first[kept_count:]:
            self._unlink(block.block)
        for block in reversed(newest_first[:kept_count]):
            self.discover(block)

    def discover(self, found: FoundBlock) -> bool:
        """Count a block that somebody else has written; return whether there was room for it."""

        def add() -> Reason | None:
            if self._is_changing(found.block):
                return Reason.BUSY
            self._slots.remove(_key(found.block))
            return self._add(found.block, found.byte_count, Access(found.used_ns), found.used_ns, is_ready=True)

        return self._add_making_room(found.byte_count, add) in (None, Reason.BUSY)

    def reserve(self, block: BlockId, byte_count: int, access: Access, used_ns: int) -> Reason | None:
        """Reserve room, and remove the blocks that must leave for it."""
        key = _key(block)
        with self._guard:
            if not self._slots.is_worth_room(key, access):
                return Reason.NOT_ADMITTED
        shortage = byte_count + self._keep_free_bytes - self._files.free_bytes(self._layout.root)
        if shortage > 0 and not self.make_space(shortage):
            return Reason.FULL

        def add() -> Reason | None:
            if self._is_changing(block):
                return Reason.BUSY
            self._slots.remove(key)  # whoever writes it has found that it is not there
            reason = self._add(block, byte_count, access, used_ns, is_ready=False)
            if reason is None:
                self._writing.add(block)
            return reason

        return self._add_making_room(byte_count, add)

    def commit(self, block: BlockId, byte_count: int) -> None:
        """Let the block leave from now on."""
        with self._guard:
            self._writing.discard(block)
            self._slots.make_ready(_key(block))

    def cancel(self, block: BlockId, byte_count: int) -> None:
        """Free the bytes."""
        with self._guard:
            self._writing.discard(block)
            self._drop(_key(block))

    def touch(self, blocks: Sequence[BlockId], access: Access, used_ns: Sequence[int]) -> None:
        """Tell the policy."""
        with self._guard:
            self._slots.touch(list(map(_key, blocks)), access)
            for block, used in zip(blocks, used_ns, strict=True):
                if used > self._used_ns.get(block, used):
                    self._used_ns[block] = used

    def forget(self, block: BlockId) -> None:
        """Free the bytes of a block that is gone."""
        with self._guard:
            if not self._is_changing(block):
                self._drop(_key(block))

    def make_space(self, byte_count: int) -> bool:
        """Remove blocks of at least so many bytes; return False, having removed none, if there are not as many."""
        if byte_count > self._slots.used_bytes:
            return False
        freed = 0
        for _ in range(_MOST_VICTIMS):
            with self._guard:
                victim = self._slots.pick_victim()
            if victim is None:
                break
            freed += self._evict(victim)
            if freed >= byte_count:
                return True
        return False

    def holdings(self) -> Holdings:
        """Return the sums."""
        with self._guard:
            slots = self._slots
            return Holdings(slots.block_count, slots.used_bytes, slots.capacity_bytes, slots.evicted_blocks)

    def _is_changing(self, block: BlockId) -> bool:
        """Return whether another thread is writing or evicting a block; it will keep the books right."""
        return block in self._writing or self._slots.is_leaving(_key(block))

    def _add(self, block: BlockId, byte_count: int, access: Access, used_ns: int, *, is_ready: bool) -> Reason | None:
        if not self._slots.has_room(byte_count):
            return Reason.FULL
        self._slots.add(_key(block), byte_count, access, is_ready=is_ready)
        self._used_ns[block] = used_ns
        return None

    def _add_making_room(self, byte_count: int, add: Callable[[], Reason | None]) -> Reason | None:
        """Evict one block after the other until `add` says something else than that there is no room."""
        if byte_count > self._slots.capacity_bytes:
            return Reason.FULL
        for _ in range(_MOST_VICTIMS):
            with self._guard:
                reason = add()
                if reason is not Reason.FULL:
                    return reason
                victim = self._slots.pick_victim()
            if victim is None:
                return Reason.FULL
            self._evict(victim)
        return Reason.FULL

    def _evict(self, victim: OffloadKey) -> int:
        """Remove the file of a victim and return the bytes that this frees; none if it has been used meanwhile."""
        block = BlockId(victim.decode())
        try:
            used_ns = self._files.stat(self._layout.path(block)).st_mtime_ns
            if used_ns > self._used_ns.get(block, used_ns):
                with self._guard:
                    self._slots.keep(victim, Access(used_ns))
                    self._used_ns[block] = used_ns
                return 0
            self._files.unlink(self._layout.path(block))
        except (FileNotFoundError, IsADirectoryError):
            pass  # whatever stands there now is none of our blocks
        except OSError:
            with self._guard:
                self._slots.keep(victim, Access(_BEFORE_ALL))
            raise
        with self._guard:
            return self._drop(victim)

    def _drop(self, key: OffloadKey) -> int:
        self._used_ns.pop(BlockId(key.decode()), None)
        return self._slots.remove(key)

    def _unlink(self, block: BlockId) -> None:
        try:
            self._files.unlink(self._layout.path(block))
        except FileNotFoundError:
            return


def _key(block: BlockId) -> OffloadKey:
    """Return what the policy knows a block by."""
    return OffloadKey(block.encode())
