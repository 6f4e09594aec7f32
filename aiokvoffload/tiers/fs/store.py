"""Blocks as files: found, written, read, checked, removed. All of it blocks, and may be called from any thread."""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress

from aiokvoffload.clock import Clock
from aiokvoffload.keys import CacheIdentity, OffloadKey
from aiokvoffload.policies.base import Access
from aiokvoffload.tiers.calls import Use
from aiokvoffload.tiers.envelope import FILE_ALIGNMENT_BYTES, Envelope
from aiokvoffload.tiers.fs.direct import BlockIO
from aiokvoffload.tiers.fs.files import Files
from aiokvoffload.tiers.fs.layout import Layout
from aiokvoffload.tiers.fs.ledger import Ledger
from aiokvoffload.tiers.fs.writers import Writer
from aiokvoffload.tiers.names import BlockId, block_id, block_name, identity_name
from aiokvoffload.tiers.outcomes import DELETED, HIT, PRESENT, STORED, BlockResult, Reason, miss, refusal
from aiokvoffload.tiers.requests import RequestTicks

READ_ONLY_SECONDS = 30.0
"""A file system that has refused a write as read-only is tried again after so long."""
_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT})
_NOT_OURS = frozenset({errno.ELOOP, errno.ENXIO, errno.EINVAL, errno.EISDIR, errno.ESPIPE})
"""What the system says of a pipe, a socket, a directory or a link where there should be a file."""


class BlockStore:
    """The blocks of one identity in a directory.

    Args:
        files: The file system.
        layout: The directory.
        identity: Whose blocks.
        writer: This process.
        block_io: How bytes are moved.
        ledger: Who may write how much; replaced when this process becomes the one that evicts.
        clock: For the pause after a write to a read-only file system.
    """

    def __init__(
        self,
        files: Files,
        layout: Layout,
        identity: CacheIdentity,
        writer: Writer,
        block_io: BlockIO,
        ledger: Ledger,
        clock: Clock,
    ) -> None:
        self._files = files
        self._layout = layout
        self._identity = identity_name(identity)
        self._writer = writer
        self._io = block_io
        self._clock = clock
        self._envelope = Envelope(identity.fingerprint)
        self._tick_guard = threading.Lock()
        self._ticks = RequestTicks(self._make_tick)
        self._writes_again_at = clock.now()
        self.ledger = ledger
        self.removed: Counter[str] = Counter()

    def find(self, key: OffloadKey) -> BlockResult:
        """Return whether a file that could be the block is there."""
        found = self._stat(self._place(key))
        if found is None:
            return miss(Reason.ABSENT)
        if not stat.S_ISREG(found.st_mode):
            return miss(Reason.NOT_A_FILE)
        if found.st_size % FILE_ALIGNMENT_BYTES or found.st_size <= self._envelope.header_bytes(key):
            return miss(Reason.WRONG_LENGTH)
        return HIT

    def put(self, key: OffloadKey, payload: memoryview, use: Use, index: int) -> BlockResult:
        """Write a block, after making room for it."""
        if self._clock.now() < self._writes_again_at:
            return refusal(Reason.READ_ONLY)
        byte_count = self._envelope.stored_bytes(key, payload.nbytes)
        try:
            try:
                return self._put(key, payload, byte_count, use, index)
            except OSError as exc:
                if exc.errno not in _NO_ROOM:
                    raise
                if not self.ledger.make_space(byte_count):
                    return refusal(Reason.FULL, str(exc))
            return self._put(key, payload, byte_count, use, index)
        except OSError as exc:
            if exc.errno in _NO_ROOM:
                return refusal(Reason.FULL, str(exc))
            if exc.errno != errno.EROFS:
                raise
            self._writes_again_at = self._clock.now() + READ_ONLY_SECONDS
            return refusal(Reason.READ_ONLY, str(exc))

    def get(self, key: OffloadKey, buffer: memoryview) -> BlockResult:
        """Read a block and check it; one that is wrong is removed."""
        block = self._place(key)
        path = self._layout.path(block)
        try:
            descriptor = self._files.open(path, os.O_RDONLY | self._io.open_flags)
        except FileNotFoundError:
            return miss(Reason.ABSENT)
        except OSError as exc:
            if exc.errno in _NOT_OURS and self.find(key).reason is Reason.NOT_A_FILE:
                return miss(Reason.NOT_A_FILE)
            raise
        try:
            fault = self._read(descriptor, key, buffer)
            if fault is None:
                return HIT
            found = self._files.stat_open(descriptor)
        finally:
            self._files.close(descriptor)
        if not stat.S_ISREG(found.st_mode):
            return miss(Reason.NOT_A_FILE)
        self._remove_bad(block, found, fault)
        return miss(fault)

    def delete(self, key: OffloadKey) -> BlockResult:
        """Remove a block."""
        block = self._place(key)
        try:
            self._files.unlink(self._layout.path(block))
        except FileNotFoundError:
            return miss(Reason.ABSENT)
        except IsADirectoryError:
            return miss(Reason.NOT_A_FILE)
        self.ledger.forget(block)
        return DELETED

    def count_uses(self, keys: Sequence[OffloadKey], use: Use, indices: Sequence[int]) -> None:
        """Note a use of blocks in the books."""
        self.ledger.touch([self._place(keys[index]) for index in indices], *self._access(use, indices))

    def touch(self, key: OffloadKey, use: Use, index: int) -> BlockResult:
        """Note a use on the file, where whoever evicts will see it."""
        found = self.find(key)
        if found.is_good:
            _, (used_ns,) = self._access(use, [index])
            self._note_use(self._place(key), used_ns)
        return found

    def _put(self, key: OffloadKey, payload: memoryview, byte_count: int, use: Use, index: int) -> BlockResult:
        block = self._place(key)
        path = self._layout.path(block)
        access, (used_ns,) = self._access(use, [index])
        found = self._stat(block)
        if found is not None:
            if not stat.S_ISREG(found.st_mode):
                return refusal(Reason.NOT_A_FILE)
            if found.st_size == byte_count:
                self.ledger.touch([block], access, [used_ns])
                self._note_use(block, used_ns)
                return PRESENT
        ledger = self.ledger  # reserved, it is this one's to commit, whoever evicts meanwhile
        if found is not None:
            self._files.unlink(path)
            ledger.forget(block)
        reason = ledger.reserve(block, byte_count, access, used_ns)
        if reason is not None:
            return refusal(reason)
        try:
            self._write(path, key, payload, used_ns)
        except BaseException:
            ledger.cancel(block, byte_count)
            raise
        ledger.commit(block, byte_count)
        return STORED

    def _write(self, path: str, key: OffloadKey, payload: memoryview, used_ns: int) -> None:
        """Write a block beside its place, and put it there."""
        files, temporary = self._files, self._writer.new_path()
        header = self._envelope.seal(key, payload)
        descriptor = files.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY | self._io.open_flags)
        try:
            try:
                self._io.write(descriptor, header, payload)
            finally:
                files.close(descriptor)
            files.set_times(temporary, used_ns)
            try:
                files.rename(temporary, path)
            except FileNotFoundError:
                files.make_directories(os.path.dirname(path))
                files.rename(temporary, path)
        except BaseException:
            with suppress(OSError):  # what matters is why it could not be written
                files.unlink(temporary)
            raise

    def _note_use(self, block: BlockId, used_ns: int) -> None:
        """Set the times of a block's file."""
        try:
            self._files.set_times(self._layout.path(block), used_ns)
        except FileNotFoundError:
            return
        except OSError as exc:
            if exc.errno != errno.EROFS:
                raise

    def _read(self, descriptor: int, key: OffloadKey, buffer: memoryview) -> Reason | None:
        """Read a block, and return what is wrong with it."""
        try:
            around = self._io.read(descriptor, self._envelope.header_bytes(key), buffer)
        except OSError as exc:
            if exc.errno in _NOT_OURS and not stat.S_ISREG(self._files.stat_open(descriptor).st_mode):
                return Reason.NOT_A_FILE
            raise
        if around is None:
            return Reason.WRONG_LENGTH
        header, padding = around
        return self._envelope.find_fault(key, header, buffer, padding)

    def _remove_bad(self, block: BlockId, read: os.stat_result, fault: Reason) -> None:
        """Remove the file that was read, unless another one stands there by now."""
        found = self._stat(block)
        if found is None or (found.st_dev, found.st_ino) != (read.st_dev, read.st_ino):
            return
        try:
            self._files.unlink(self._layout.path(block))
        except FileNotFoundError:
            return
        except OSError as exc:
            if exc.errno != errno.EROFS:
                raise
            return
        self.ledger.forget(block)
        self.removed[fault.value] += 1

    def _access(self, use: Use, indices: Sequence[int]) -> tuple[Access, list[int]]:
        """Return the use of blocks, and the times that say the same on their files: of equals, the deeper is older."""
        with self._tick_guard:
            tick = self._ticks.tick(use.request)
        access = Access(tick, self._clock.now(), depths=use.depths_of(indices))
        return access, [tick - use.depth(index) for index in indices]

    def _make_tick(self, last_tick: int) -> int:
        try:
            return self._writer.now_ns()
        except OSError:
            return last_tick + 1  # a read-only file system tells no time; nor does anything leave it

    def _place(self, key: OffloadKey) -> BlockId:
        return block_id(self._identity, block_name(key))

    def _stat(self, block: BlockId) -> os.stat_result | None:
        try:
            return self._files.stat(self._layout.path(block))
        except FileNotFoundError:
            return None
