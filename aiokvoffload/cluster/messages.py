"""What the processes of an engine say to each other: typed messages in frames of bounded length, no pickle."""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterator

from aiokvoffload.errors import ConfigurationError
from aiokvoffload.kv_caches import CacheShape, KVGroup, KVGroupKind

try:
    import msgspec
except ImportError as exc:
    raise ConfigurationError(
        "an engine of several processes needs the package msgspec: pip install 'aiokvoffload[cluster]'"
    ) from exc

PROTOCOL_VERSION = 1
"""Changes with any of the structs here and in `jobs.py`; all processes of an engine need the same."""

MAX_FRAME_BYTES = 1 << 20
MAX_REASON_LETTERS = 500
_MAX_NAMED_RANKS = 8

_HEADER = struct.Struct(">4sHI")
_MAGIC = b"akvo"


class FrameError(Exception):
    """Bytes that are no message of this version; says why."""


class GroupFields(msgspec.Struct, frozen=True, array_like=True):
    """A `KVGroup`."""

    block_tokens: int
    layers: tuple[int, ...]
    kind: KVGroupKind
    window_tokens: int | None

    def group(self) -> KVGroup:
        """Return the group.

        Raises:
            ConfigurationError: There is no such group.
        """
        return KVGroup(self.block_tokens, self.layers, self.kind, self.window_tokens)


class Join(msgspec.Struct, frozen=True, tag="join"):
    """A rank wants to belong to the engine.

    Attributes:
        rank: Which one.
        world_size: How many it thinks there are; None if it does not know.
        groups: Its KV groups.
        block_count: GPU blocks that it holds.
        group_page_bytes: See `CacheShape`.
        block_size_factor: GPU blocks per offloaded block.
        dtype: Element type of its KV cache, as the engine names it.
        layout: How a page is laid out, in the engine's words.
        has_compute_stream: Whether fences can hold its engine back.
        boot_id: The machine, since it was started.
    """

    rank: int
    world_size: int | None
    groups: tuple[GroupFields, ...]
    block_count: int
    group_page_bytes: tuple[tuple[int, ...], ...]
    block_size_factor: int
    dtype: str
    layout: str
    has_compute_stream: bool
    boot_id: str

    def cache(self) -> CacheShape:
        """Return the shape of the rank's KV cache.

        Raises:
            ConfigurationError: There is no such cache.
        """
        return CacheShape(
            groups=tuple(group.group() for group in self.groups),
            block_count=self.block_count,
            group_page_bytes=self.group_page_bytes,
            block_size_factor=self.block_size_factor,
        )


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """All ranks have joined, and agree.

    Attributes:
        engine: Names this opening of the engine; jobs carry it, and the shared memory is found by it.
        world_size: Ranks.
        slot_count: Slots of CPU memory.
        is_replicated: All ranks hold the same bytes, and rank 0 stores them.
        landing_seconds: How long a copy may take.
    """

    engine: str
    world_size: int
    slot_count: int
    is_replicated: bool
    landing_seconds: float


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """The rank, or the whole engine, cannot start."""

    reason: str


class Landing(msgspec.Struct, frozen=True, array_like=True):
    """A transfer is over on one rank.

    Attributes:
        transfer_id: Which one.
        byte_count: Bytes that this rank has moved.
        seconds: Device time of it.
        error: Why it failed, if it did.
    """

    transfer_id: int
    byte_count: int
    seconds: float
    error: str | None


class Landings(msgspec.Struct, frozen=True, tag="landings"):
    """Transfers that are over on one rank, and how many blocks have joined copies there so far."""

    landings: tuple[Landing, ...]
    joined_block_count: int


class Fault(msgspec.Struct, frozen=True, tag="fault"):
    """Something is wrong inside a rank; it goes on as well as it can."""

    reason: str


class Leaving(msgspec.Struct, frozen=True, tag="leaving"):
    """The last message of a process that ends in order.

    Attributes:
        reason: Why it goes, to follow "rank 1 has left: ".
        is_drained: None of its copies is under way any more.
    """

    reason: str
    is_drained: bool


Message = Join | Welcome | Refused | Landings | Fault | Leaving

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Message)


def join_of(
    cache: CacheShape,
    rank: int,
    *,
    world_size: int | None = None,
    dtype: str = "",
    layout: str = "",
    has_compute_stream: bool = True,
    boot_id: str = "",
) -> Join:
    """Return what a rank with that KV cache says first."""
    return Join(
        rank=rank,
        world_size=world_size,
        groups=tuple(
            GroupFields(group.block_tokens, tuple(group.layers), group.kind, group.window_tokens)
            for group in cache.groups
        ),
        block_count=cache.block_count,
        group_page_bytes=cache.group_page_bytes,
        block_size_factor=cache.block_size_factor,
        dtype=dtype,
        layout=layout,
        has_compute_stream=has_compute_stream,
        boot_id=boot_id,
    )


def encode(message: Message) -> bytes:
    """Return a message as a frame."""
    body = _encoder.encode(message)
    return _HEADER.pack(_MAGIC, PROTOCOL_VERSION, len(body)) + body


class FrameReader:
    """Puts messages together from bytes that arrive in pieces."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Message]:
        """Yield the messages that are complete with `data`.

        Raises:
            FrameError: What came is no message of this version.
        """
        self._buffer += data
        while len(self._buffer) >= _HEADER.size:
            magic, version, length = _HEADER.unpack_from(self._buffer)
            if magic != _MAGIC:
                raise FrameError("these are no messages of aiokvoffload")
            if version != PROTOCOL_VERSION:
                raise FrameError(
                    f"it speaks version {version} of the protocol, but this process version {PROTOCOL_VERSION}; "
                    "use the same version of aiokvoffload in all processes"
                )
            if length > MAX_FRAME_BYTES:
                raise FrameError(f"a message of {length} bytes is longer than {MAX_FRAME_BYTES}")
            end = _HEADER.size + length
            if len(self._buffer) < end:
                return
            body = bytes(self._buffer[_HEADER.size : end])
            del self._buffer[:end]
            try:
                message: Message = _decoder.decode(body)
            except (msgspec.MsgspecError, UnicodeDecodeError) as exc:
                raise FrameError(f"a message does not read: {exc}") from exc
            yield message


def name_ranks(ranks: Collection[int]) -> str:
    """Return "rank 3", or "ranks 1, 3"; not more than a few of them."""
    named = ", ".join(map(str, sorted(ranks)[:_MAX_NAMED_RANKS]))
    more = len(ranks) - _MAX_NAMED_RANKS
    return f"rank{'s' if len(ranks) > 1 else ''} {named}" + (f" and {more} more" if more > 0 else "")


def shortened(reason: str) -> str:
    """Return a reason short enough for a message."""
    return reason if len(reason) <= MAX_REASON_LETTERS else reason[: MAX_REASON_LETTERS - 3] + "..."
