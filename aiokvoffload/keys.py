"""Keys of offloaded blocks: which tokens, of which model, under which conditions.

A block's hash is chained: it covers the block's tokens and, through its predecessor's hash, all tokens before
it. The chain starts at a *root* that covers the `CacheIdentity` and whatever else of a request changes its KV
(adapter, salt). Every field is written with its name, type and length, so no two different inputs give the
same bytes, and everything is the same in every process and on every machine.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from hashlib import blake2b
from typing import NewType

import numpy as np
from numpy.typing import NDArray

from aiokvoffload.errors import InvalidRequestError

OffloadKey = NewType("OffloadKey", bytes)
"""A block hash followed by the index of its KV group, 4 bytes, big-endian; opaque to managers."""

HASH_BYTES = 32
GROUP_INDEX_BYTES = 4
MIN_ENGINE_HASH_BYTES = 16


def make_offload_key(block_hash: bytes, group_index: int = 0) -> OffloadKey:
    """Return the key of the block with this hash in one KV group.

    Raises:
        InvalidRequestError: The hash is not `bytes`, or the group index does not fit 4 bytes.
    """
    if not isinstance(block_hash, bytes):
        raise InvalidRequestError(f"a block hash is bytes, not a {type(block_hash).__name__}")
    if not 0 <= group_index < 1 << (8 * GROUP_INDEX_BYTES):
        raise InvalidRequestError(f"group index {group_index} is not between 0 and 2**32 - 1")
    return OffloadKey(block_hash + group_index.to_bytes(GROUP_INDEX_BYTES, "big"))


def offload_block_hash(key: OffloadKey) -> bytes:
    """Return the block hash inside a key."""
    return key[:-GROUP_INDEX_BYTES]


def offload_group_index(key: OffloadKey) -> int:
    """Return the index of the KV group inside a key."""
    return int.from_bytes(key[-GROUP_INDEX_BYTES:], "big")


@dataclass(frozen=True, slots=True)
class CacheIdentity:
    """What must agree for the bytes of a block to mean the same to two engines.

    Attributes:
        model: Name of the model.
        revision: Version of its weights.
        epoch: Counts weight updates within one run, see `Offloader.bump_epoch`.
        dtype: Element type of the KV cache, as the engine names it.
        layout: How a page is laid out, in the engine's words.
        page_bytes: Bytes of every reference of every group, group after group.
        block_tokens: Tokens of an offloaded block, per group.
        parallel_shape: Sizes of the parallel dimensions, such as `(("tensor", 2),)`.
        rank: The rank, only where a block holds one rank's slice.
    """

    model: str = ""
    revision: str = ""
    epoch: int = 0
    dtype: str = ""
    layout: str = ""
    page_bytes: tuple[tuple[int, ...], ...] = ()
    block_tokens: tuple[int, ...] = ()
    parallel_shape: tuple[tuple[str, int], ...] = ()
    rank: int | None = None

    @property
    def fingerprint(self) -> bytes:
        """32 bytes that differ for any two different identities."""
        named = tuple((field.name, getattr(self, field.name)) for field in fields(self))
        return _digest(b"identity", encode_value(named))

    def next_epoch(self) -> CacheIdentity:
        """Return the identity after a weight update."""
        return replace(self, epoch=self.epoch + 1)


def encode_value(value: object) -> bytes:
    """Encode None, int, str, bytes and tuples of them so that different values give different bytes.

    Each value is its type's letter, the length of its payload (8 bytes, big-endian) and the payload.

    Raises:
        InvalidRequestError: The value is of another type.
    """
    match value:
        case None:
            letter, payload = b"n", b""
        case bool():
            letter, payload = b"?", bytes([value])
        case int():
            letter, payload = b"i", value.to_bytes(value.bit_length() // 8 + 1, "big", signed=True)
        case str():
            letter, payload = b"s", value.encode("utf-8", "surrogatepass")
        case bytes():
            letter, payload = b"b", value
        case tuple():
            letter, payload = b"t", b"".join(map(encode_value, value))
        case _:
            raise InvalidRequestError(f"cannot hash a {type(value).__name__}; use None, int, str, bytes or tuples")
    return letter + len(payload).to_bytes(8, "big") + payload


def root_hash(identity: CacheIdentity, /, **additions: object) -> bytes:
    """Return the start of a request's hash chain.

    Args:
        identity: What all requests of this cache share.
        additions: What else changes the KV of this request, by name: `adapter="..."`, `salt="..."`.
    """
    return _digest(b"root", identity.fingerprint + encode_value(tuple(sorted(additions.items()))))


def block_hashes(root: bytes, token_ids: Sequence[int] | NDArray[np.integer], block_tokens: int) -> list[bytes]:
    """Return the chained hash of every full block of `token_ids`; a partly filled last block has none.

    Args:
        root: See `root_hash`.
        token_ids: Token ids of one request from its start, each within 64 bits, signed.
        block_tokens: Tokens of one block.

    Raises:
        InvalidRequestError: `block_tokens` is not positive, `root` does not come from `root_hash`, or the token
            ids are not a flat sequence of integers of 64 bits.
    """
    if not isinstance(root, bytes) or len(root) != HASH_BYTES:
        # Of another length, it could spell a root followed by tokens.
        raise InvalidRequestError(f"a hash chain starts at {HASH_BYTES} bytes from root_hash(), not at {root!r}")
    if block_tokens < 1:
        raise InvalidRequestError(f"block_tokens is {block_tokens}, it must be at least 1")
    try:
        tokens = np.asarray(token_ids)
        if tokens.ndim != 1 or (tokens.size and tokens.dtype.kind not in "iu"):
            raise TypeError(f"they are {tokens.dtype} of shape {tokens.shape}")
        if tokens.dtype.kind == "u" and tokens.size and int(tokens.max()) >= 1 << 63:
            raise OverflowError(f"there is a {int(tokens.max())}")
        encoded = tokens.astype("<i8").tobytes()
    except (TypeError, ValueError, OverflowError) as exc:
        raise InvalidRequestError(f"token ids must be a flat sequence of integers of 64 bits: {exc}") from exc
    width = 8 * block_tokens
    hashes = []
    parent = root
    for start in range(0, len(encoded) - width + 1, width):
        parent = _digest(b"block", parent + encoded[start : start + width])
        hashes.append(parent)
    return hashes


def offload_keys(
    engine_hashes: Iterable[bytes], *, block_size_factor: int = 1, group_index: int = 0
) -> list[OffloadKey]:
    """Return the keys of offloaded blocks for an engine that hashes its own GPU blocks.

    Args:
        engine_hashes: The engine's chained hash of each GPU block, in token order.
        block_size_factor: GPU blocks per offloaded block; its key is the hash of its last GPU block.
        group_index: The KV group that the blocks belong to.

    Raises:
        InvalidRequestError: A hash is not `bytes`, or has under 16, which is too few to tell blocks apart safely.
    """
    if block_size_factor < 1:
        raise InvalidRequestError(f"block_size_factor is {block_size_factor}, it must be at least 1")
    last_hashes = list(engine_hashes)[block_size_factor - 1 :: block_size_factor]
    for block_hash in last_hashes:
        if isinstance(block_hash, bytes) and len(block_hash) < MIN_ENGINE_HASH_BYTES:
            raise InvalidRequestError(
                f"a block hash of {len(block_hash)} bytes cannot tell blocks apart safely; "
                f"use at least {MIN_ENGINE_HASH_BYTES} bytes"
            )
    return [make_offload_key(block_hash, group_index) for block_hash in last_hashes]


def _digest(purpose: bytes, content: bytes) -> bytes:
    return blake2b(content, digest_size=HASH_BYTES, person=b"aiokv-" + purpose).digest()
