"""The bytes of KV events, as vLLM 0.32 writes them and routers read them.

A batch is an array, `[seconds since 1970, events, data parallel rank]`; each event is a map that names its kind under
"type". Names of fields are part of the format, and a field at its default is left out.
"""

from __future__ import annotations

from typing import Literal, get_args

from aiokvoffload.errors import ConfigurationError

try:
    import msgspec
except ImportError as exc:
    raise ConfigurationError("KV events need the package msgspec: pip install 'aiokvoffload[kv-events]'") from exc

BlockName = int | bytes
"""What a block is called on the wire."""

BlockNameFormat = Literal["int", "bytes"]
"""The last 8 bytes of a block's hash as an unsigned integer, which is vLLM's default, or the whole hash."""

_NAME_BYTES = 8


class BlockStored(msgspec.Struct, tag=True, omit_defaults=True):
    """Blocks that follow each other can be loaded from now on.

    Attributes:
        block_hashes: Their names, in token order.
        parent_block_hash: The block before the first of them; None for the first block of a request.
        token_ids: Of all of them; empty where unknown.
        block_size: Tokens of one of them; 0 where `token_ids` is unknown.
        lora_id: Always None; `lora_name` is the adapter.
        medium: Where they are.
        lora_name: The adapter that has shaped them.
        extra_keys: What else their content depends on, one entry for each block; None if nothing.
        group_idx: Their KV group.
        kv_cache_spec_kind: Which blocks of a prefix that group needs.
        kv_cache_spec_sliding_window: The tokens that its window has.
    """

    block_hashes: list[BlockName]
    parent_block_hash: BlockName | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[str, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class BlockRemoved(msgspec.Struct, tag=True, omit_defaults=True):
    """Blocks of one KV group are gone from a medium."""

    block_hashes: list[BlockName]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, tag=True):
    """Nothing that was announced is there any more, in whatever medium."""


WireEvent = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True):
    """The events of one message."""

    ts: float
    events: list[WireEvent]
    data_parallel_rank: int | None = None


def check_name_format(name_format: object) -> None:
    """Refuse what is no format.

    Raises:
        ConfigurationError: It is none.
    """
    known = get_args(BlockNameFormat)
    if name_format not in known:
        raise ConfigurationError(f"block_names is {name_format!r}; it must be one of {', '.join(known)}")


def name_of(block_hash: bytes, name_format: BlockNameFormat) -> BlockName:
    """Return what a block with this hash is called."""
    return int.from_bytes(block_hash[-_NAME_BYTES:], "big") if name_format == "int" else block_hash


def encode_batch(batch: EventBatch) -> bytes:
    """Return the payload of a message."""
    return msgspec.msgpack.encode(batch)
