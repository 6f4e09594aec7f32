"""A store of values seen from outside, whoever's blocks are there."""

from __future__ import annotations

from collections import Counter

from aiokvoffload.keys import OffloadKey
from aiokvoffload.tiers.administration import StoredIdentity, TierAdministration, Verification
from aiokvoffload.tiers.envelope import FIXED_BYTES, checksum_of, claimed_header_bytes, decode_header
from aiokvoffload.tiers.names import IDENTITY, block_name, is_block_id, read_description
from aiokvoffload.tiers.outcomes import Reason
from aiokvoffload.tiers.value_store import ValueStore

_LARGEST_DESCRIPTION_BYTES = 1 << 20
_LARGEST_BLOCK_BYTES = 1 << 30


class ValueAdministration(TierAdministration):
    """Looks at the blocks of a store; processes may use it meanwhile.

    Args:
        store: The store.
    """

    def __init__(self, store: ValueStore) -> None:
        self._store = store

    def stored(self) -> list[StoredIdentity]:
        """Return what is there, by identity."""
        counts: Counter[str] = Counter()
        byte_counts: Counter[str] = Counter()
        for place, size in self._blocks():
            identity = place.split("/")[0]
            counts[identity] += 1
            byte_counts[identity] += size
        return [
            StoredIdentity(identity, self._description(identity), counts[identity], byte_counts[identity])
            for identity in sorted(counts)
        ]

    def verify(self, *, remove_bad: bool = False) -> Verification:
        """Read every block and check its header, its place, its length and its sum."""
        good_count = removed_count = 0
        bad: Counter[str] = Counter()
        for place, size in self._blocks():
            fault = self._find_fault(place, size)
            if fault is Reason.ABSENT:
                continue  # somebody has removed it meanwhile
            if fault is None:
                good_count += 1
                continue
            bad[fault.value] += 1
            if remove_bad:
                removed_count += self._store.remove([place])[0]
        return Verification(good_count, dict(bad), removed_count)

    def purge(self) -> int:
        """Remove every block."""
        return sum(self._store.remove([place])[0] for place, _ in self._blocks())

    def _blocks(self) -> list[tuple[str, int]]:
        return sorted({place: size for place, size in self._store.names() if is_block_id(place)}.items())

    def _description(self, identity: str) -> dict[str, object]:
        place = f"{identity}/{IDENTITY}"
        size = self._store.sizes([place], is_use=False)[0]
        if isinstance(size, Reason) or size > _LARGEST_DESCRIPTION_BYTES:
            return {}
        stored = bytearray(size)
        return {} if self._store.read_into(place, [memoryview(stored)]) else read_description(bytes(stored))

    def _find_fault(self, place: str, size: int) -> Reason | None:
        if not FIXED_BYTES < size <= _LARGEST_BLOCK_BYTES:
            return Reason.WRONG_LENGTH
        stored = memoryview(bytearray(size))
        fault = self._store.read_into(place, [stored])
        if fault is not None:
            return fault
        header_bytes = claimed_header_bytes(bytes(stored[:FIXED_BYTES]))
        header = decode_header(bytes(stored[:header_bytes]))
        if isinstance(header, Reason):
            return header
        identity, _, name = place.split("/")
        if not header.fingerprint.hex().startswith(identity):
            return Reason.WRONG_IDENTITY
        if block_name(OffloadKey(header.key)) != name:
            return Reason.WRONG_KEY
        payload = stored[header_bytes:]
        if payload.nbytes != header.payload_bytes:
            return Reason.WRONG_LENGTH
        return None if checksum_of(payload) == header.checksum else Reason.WRONG_CHECKSUM
