"""The header before each block."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aiokvoffload.keys import CacheIdentity, OffloadKey
from aiokvoffload.testing.strategies import keys, make_keys
from aiokvoffload.tiers.envelope import (
    FIXED_BYTES,
    MAGIC,
    VERSION,
    Envelope,
    Header,
    checksum_of,
    decode_header,
)
from aiokvoffload.tiers.outcomes import Reason

FINGERPRINT = CacheIdentity(model="m").fingerprint
STEADY = settings(derandomize=True, database=None, deadline=None, max_examples=300)


def stored(envelope: Envelope, key: OffloadKey, payload: bytes) -> bytes:
    header = envelope.seal(key, memoryview(payload))
    return (header + payload).ljust(envelope.stored_bytes(key, len(payload)), b"\0")


def fault(envelope: Envelope, key: OffloadKey, found: bytes, payload_bytes: int) -> Reason | None:
    """What a tier does with what it has read."""
    if len(found) != envelope.stored_bytes(key, payload_bytes):
        return Reason.WRONG_LENGTH
    start = envelope.header_bytes(key)
    end = start + payload_bytes
    return envelope.find_fault(key, found[:start], memoryview(found)[start:end], found[end:])


blocks = st.tuples(st.sampled_from([1, 64, 4096]), keys(), st.binary(min_size=1, max_size=300))


@STEADY
@given(blocks)
def test_what_was_stored_has_no_fault(block: tuple[int, OffloadKey, bytes]) -> None:
    alignment, key, payload = block
    envelope = Envelope(FINGERPRINT, alignment_bytes=alignment)
    found = stored(envelope, key, payload)
    assert len(found) % alignment == 0
    assert fault(envelope, key, found, len(payload)) is None


@STEADY
@given(blocks, st.data())
def test_a_flipped_bit_is_a_fault(block: tuple[int, OffloadKey, bytes], data: st.DataObject) -> None:
    alignment, key, payload = block
    envelope = Envelope(FINGERPRINT, alignment_bytes=alignment)
    found = bytearray(stored(envelope, key, payload))
    bit = data.draw(st.integers(0, 8 * len(found) - 1))
    found[bit // 8] ^= 1 << bit % 8
    assert fault(envelope, key, bytes(found), len(payload)) is not None


def test_every_single_bit_counts() -> None:
    envelope, key, payload = Envelope(FINGERPRINT, alignment_bytes=64), make_keys(1)[0], b"payload"
    right = stored(envelope, key, payload)
    for bit in range(8 * len(right)):
        wrong = bytearray(right)
        wrong[bit // 8] ^= 1 << bit % 8
        assert fault(envelope, key, bytes(wrong), len(payload)) is not None, bit


@STEADY
@given(blocks, st.data())
def test_a_cut_is_a_fault(block: tuple[int, OffloadKey, bytes], data: st.DataObject) -> None:
    alignment, key, payload = block
    envelope = Envelope(FINGERPRINT, alignment_bytes=alignment)
    found = stored(envelope, key, payload)
    assert fault(envelope, key, found[: data.draw(st.integers(0, len(found) - 1))], len(payload)) is not None


@STEADY
@given(blocks, blocks)
def test_another_block_in_its_place_is_a_fault(
    block: tuple[int, OffloadKey, bytes], other: tuple[int, OffloadKey, bytes]
) -> None:
    alignment, key, payload = block
    _, other_key, other_payload = other
    if key == other_key:
        return
    envelope = Envelope(FINGERPRINT, alignment_bytes=alignment)
    assert fault(envelope, key, stored(envelope, other_key, other_payload), len(payload)) is not None


@STEADY
@given(blocks, st.integers(1, 40))
def test_a_payload_of_another_length_is_a_fault(block: tuple[int, OffloadKey, bytes], more: int) -> None:
    alignment, key, payload = block
    envelope = Envelope(FINGERPRINT, alignment_bytes=alignment)
    assert fault(envelope, key, stored(envelope, key, payload + bytes(more)), len(payload)) is not None


def test_each_field_has_its_reason() -> None:
    envelope, key, payload = Envelope(FINGERPRINT), make_keys(1)[0], b"payload"
    other_model = Envelope(CacheIdentity(model="other").fingerprint)
    assert fault(envelope, key, stored(other_model, key, payload), 7) is Reason.WRONG_IDENTITY
    assert fault(envelope, key, stored(envelope, make_keys(2)[0], payload), 7) is Reason.WRONG_KEY
    assert fault(envelope, key, stored(envelope, key, b"pay"), 7) is Reason.WRONG_LENGTH
    right = stored(envelope, key, payload)
    for position, reason in (
        (0, Reason.WRONG_MAGIC),
        (8, Reason.WRONG_VERSION),
        (12, Reason.WRONG_LENGTH),
        (24, Reason.WRONG_CHECKSUM),
        (40, Reason.WRONG_IDENTITY),
        (FIXED_BYTES, Reason.WRONG_KEY),
        (4000, Reason.WRONG_PADDING),
        (4096, Reason.WRONG_CHECKSUM),
        (8000, Reason.WRONG_PADDING),
    ):
        wrong = bytearray(right)
        wrong[position] ^= 1
        assert fault(envelope, key, bytes(wrong), 7) is reason, position


def test_the_format_is_what_is_written_down() -> None:
    key = OffloadKey(b"k" * 20)
    header = Envelope(FINGERPRINT).seal(key, memoryview(b"payload"))
    assert len(header) == 4096
    assert header[:8] == MAGIC == b"aiokvblk"
    assert header[8:16] == VERSION.to_bytes(2, "big") + (20).to_bytes(2, "big") + (4096).to_bytes(4, "big")
    assert header[16:24] == (7).to_bytes(8, "big")
    assert header[24:40].hex() == checksum_of(b"payload").hex() == "f3d6e72eb800dea99613f8bbf13ce4e5"
    assert header[40:72] == FINGERPRINT
    assert header[72:92] == key
    assert header[92:] == bytes(4096 - 92)


@STEADY
@given(st.binary(max_size=200))
def test_garbage_is_no_header(garbage: bytes) -> None:
    assert isinstance(decode_header(garbage), Reason)


def test_a_key_longer_than_the_header_says_is_a_fault() -> None:
    header = Header(FIXED_BYTES + 4, 1, bytes(16), bytes(32), b"kkkkkkkk")
    assert isinstance(decode_header(header.encode()), Reason)


@pytest.mark.parametrize(("alignment", "key_bytes", "expected"), [(1, 36, 108), (64, 36, 128), (4096, 36, 4096)])
def test_headers_are_as_long_as_they_must_be(alignment: int, key_bytes: int, expected: int) -> None:
    assert Envelope(FINGERPRINT, alignment_bytes=alignment).header_bytes(OffloadKey(bytes(key_bytes))) == expected
