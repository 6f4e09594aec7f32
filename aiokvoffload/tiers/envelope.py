"""The header that precedes every stored block, and says whose block it is and whether its bytes are right.

========  =====  ==============================================================
offset    bytes  content (integers are big-endian)
========  =====  ==============================================================
0         8      magic, `aiokvblk`
8         2      version, 1
10        2      bytes of the key
12        4      bytes of the whole header
16        8      bytes of the payload
24        16     XXH3-128 of the payload
40        32     fingerprint of the `CacheIdentity`
72        ...    the key, then zeros up to the end of the header
========  =====  ==============================================================

The payload follows, and zeros up to a multiple of the alignment. In files header and alignment are 4096 bytes, so
that direct I/O can read header and payload in one call, the payload straight into its place; where nothing needs
alignment it is 1 and the header is as long as it must be. Every bit is checked: one that is not what it was when the
block was stored makes the block a miss.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import xxhash

from aiokvoffload.keys import HASH_BYTES, OffloadKey
from aiokvoffload.tiers.outcomes import Reason

MAGIC = b"aiokvblk"
VERSION = 1
FILE_ALIGNMENT_BYTES = 4096
CHECKSUM_BYTES = 16
_FIELDS = struct.Struct(f">8sHHIQ{CHECKSUM_BYTES}s{HASH_BYTES}s")
FIXED_BYTES = _FIELDS.size


@dataclass(frozen=True, slots=True)
class Header:
    """The fields of a header.

    Attributes:
        header_bytes: Length of the whole header.
        payload_bytes: Length of the payload.
        checksum: Of the payload.
        fingerprint: Of the identity.
        key: The block's key.
    """

    header_bytes: int
    payload_bytes: int
    checksum: bytes
    fingerprint: bytes
    key: bytes

    def encode(self) -> bytes:
        """Return the header as it is stored."""
        fields = _FIELDS.pack(
            MAGIC, VERSION, len(self.key), self.header_bytes, self.payload_bytes, self.checksum, self.fingerprint
        )
        return (fields + self.key).ljust(self.header_bytes, b"\0")


def checksum_of(payload: bytes | bytearray | memoryview) -> bytes:
    """Return the checksum of a payload."""
    return xxhash.xxh3_128_digest(payload)


def claimed_header_bytes(start: bytes) -> int:
    """Return how long a header says it is, from its first `FIXED_BYTES`; nothing is checked yet."""
    return int(_FIELDS.unpack(start)[3])


def decode_header(stored: bytes) -> Header | Reason:
    """Return what a stored header says, or what is wrong with it."""
    if len(stored) < FIXED_BYTES:
        return Reason.WRONG_LENGTH
    magic, version, key_bytes, header_bytes, payload_bytes, checksum, fingerprint = _FIELDS.unpack_from(stored)
    if magic != MAGIC:
        return Reason.WRONG_MAGIC
    if version != VERSION:
        return Reason.WRONG_VERSION
    key = stored[FIXED_BYTES : FIXED_BYTES + key_bytes]
    if header_bytes != len(stored) or len(key) != key_bytes:
        return Reason.WRONG_LENGTH
    header = Header(header_bytes, payload_bytes, checksum, fingerprint, key)
    return header if header.encode() == stored else Reason.WRONG_PADDING


class Envelope:
    """Makes and checks the headers of one identity's blocks.

    Args:
        fingerprint: Of the identity.
        alignment_bytes: Header and payload take a multiple of it.
    """

    def __init__(self, fingerprint: bytes, *, alignment_bytes: int = FILE_ALIGNMENT_BYTES) -> None:
        self._fingerprint = fingerprint
        self._alignment_bytes = alignment_bytes

    def header_bytes(self, key: OffloadKey) -> int:
        """Return the length of a block's header."""
        return self.padded(FIXED_BYTES + len(key))

    def padded(self, byte_count: int) -> int:
        """Return the next multiple of the alignment."""
        return -(-byte_count // self._alignment_bytes) * self._alignment_bytes

    def stored_bytes(self, key: OffloadKey, payload_bytes: int) -> int:
        """Return the length of a stored block with its header and padding."""
        return self.header_bytes(key) + self.padded(payload_bytes)

    def seal(self, key: OffloadKey, payload: memoryview) -> bytes:
        """Return the header of a block."""
        header_bytes = self.header_bytes(key)
        fields = _FIELDS.pack(
            MAGIC, VERSION, len(key), header_bytes, payload.nbytes, checksum_of(payload), self._fingerprint
        )
        return (fields + key).ljust(header_bytes, b"\0")

    def find_fault(self, key: OffloadKey, stored_header: bytes, payload: memoryview, padding: bytes) -> Reason | None:
        """Return what is wrong with a block that was read, or None.

        Args:
            key: The key that was asked for.
            stored_header: The header that was read.
            payload: As many bytes as were asked for.
            padding: What follows them.
        """
        if stored_header == self.seal(key, payload) and not padding.strip(b"\0"):
            return None
        return self._name_fault(key, stored_header, payload, padding)

    def _name_fault(self, key: OffloadKey, stored_header: bytes, payload: memoryview, padding: bytes) -> Reason:
        header = decode_header(stored_header)
        if isinstance(header, Reason):
            return header
        if header.fingerprint != self._fingerprint:
            return Reason.WRONG_IDENTITY
        if header.key != key:
            return Reason.WRONG_KEY
        if header.payload_bytes != payload.nbytes:
            return Reason.WRONG_LENGTH
        return Reason.WRONG_PADDING if padding.strip(b"\0") else Reason.WRONG_CHECKSUM
