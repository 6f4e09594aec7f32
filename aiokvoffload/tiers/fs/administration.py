"""A directory seen from outside, whoever's blocks lie there."""

from __future__ import annotations

import os
from collections import Counter

import xxhash

from aiokvoffload.errors import ConfigurationError
from aiokvoffload.keys import OffloadKey
from aiokvoffload.tiers.administration import StoredIdentity, TierAdministration, Verification
from aiokvoffload.tiers.envelope import FILE_ALIGNMENT_BYTES, decode_header
from aiokvoffload.tiers.fs.files import Files, read_fully
from aiokvoffload.tiers.fs.layout import Layout
from aiokvoffload.tiers.names import BlockId, block_name
from aiokvoffload.tiers.outcomes import Reason

_PIECE_BYTES = 4 << 20


class DirectoryAdministration(TierAdministration):
    """Looks at the block files of a directory; processes may use it meanwhile.

    Args:
        directory: The directory.
        files: The file system.

    Raises:
        ConfigurationError: There is no such directory, or it holds something else.
    """

    def __init__(self, directory: str, files: Files | None = None) -> None:
        self._files = files or Files()
        self._layout = Layout(directory)
        if not self._files.list(directory):
            raise ConfigurationError(f"{directory} is no directory, or an empty one; there are no blocks")
        self._layout.check(self._files)

    def stored(self) -> list[StoredIdentity]:
        """Return what is there, by identity."""
        found = []
        for identity in self._layout.identities(self._files):
            sizes = [status.st_size for _, status in self._layout.stored_blocks(self._files, identity)]
            found.append(StoredIdentity(identity, self._layout.description(identity), len(sizes), sum(sizes)))
        return found

    def verify(self, *, remove_bad: bool = False) -> Verification:
        """Read every block and check its header, its place, its length and its sum."""
        good_count = removed_count = 0
        bad: Counter[str] = Counter()
        for identity in self._layout.identities(self._files):
            for block, _ in self._layout.stored_blocks(self._files, identity):
                try:
                    fault = self._find_fault(block)
                    if fault is None:
                        good_count += 1
                        continue
                    bad[fault.value] += 1
                    if remove_bad:
                        self._files.unlink(self._layout.path(block))
                        removed_count += 1
                except FileNotFoundError:
                    continue  # somebody has removed it meanwhile
        return Verification(good_count, dict(bad), removed_count)

    def purge(self) -> int:
        """Remove every block; the process that evicts finds out when it comes to them."""
        removed_count = 0
        for identity in self._layout.identities(self._files):
            for block, _ in self._layout.stored_blocks(self._files, identity):
                try:
                    self._files.unlink(self._layout.path(block))
                except FileNotFoundError:
                    continue
                removed_count += 1
        return removed_count

    def _find_fault(self, block: BlockId) -> Reason | None:
        descriptor = self._files.open(self._layout.path(block), os.O_RDONLY)
        try:
            return self._check(block, descriptor, self._files.stat_open(descriptor).st_size)
        finally:
            self._files.close(descriptor)

    def _check(self, block: BlockId, descriptor: int, file_bytes: int) -> Reason | None:
        stored = bytearray(FILE_ALIGNMENT_BYTES)
        if not read_fully(self._files, descriptor, [memoryview(stored)]):
            return Reason.WRONG_LENGTH
        header = decode_header(bytes(stored))
        if isinstance(header, Reason):
            return header
        identity, _, name = block.split("/")
        if not header.fingerprint.hex().startswith(identity):
            return Reason.WRONG_IDENTITY
        if block_name(OffloadKey(header.key)) != name:
            return Reason.WRONG_KEY
        padded_bytes = -(-header.payload_bytes // FILE_ALIGNMENT_BYTES) * FILE_ALIGNMENT_BYTES
        if file_bytes != header.header_bytes + padded_bytes:
            return Reason.WRONG_LENGTH
        checksum, offset, end = xxhash.xxh3_128(), header.header_bytes, header.header_bytes + header.payload_bytes
        piece = memoryview(bytearray(min(_PIECE_BYTES, padded_bytes)))
        while offset < file_bytes:
            read_bytes = self._files.read(descriptor, [piece], offset)
            if not read_bytes:
                return Reason.WRONG_LENGTH
            payload_bytes = max(0, min(read_bytes, end - offset))
            checksum.update(piece[:payload_bytes])
            if bytes(piece[payload_bytes:read_bytes]).strip(b"\0"):
                return Reason.WRONG_PADDING
            offset += read_bytes
        return None if checksum.digest() == header.checksum else Reason.WRONG_CHECKSUM
