"""Frames: pieces are put together, and what is no message says why."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiokvoffload.cluster.messages import (
    MAX_FRAME_BYTES,
    PROTOCOL_VERSION,
    Fault,
    FrameError,
    FrameReader,
    Landing,
    Landings,
    Leaving,
    Message,
    Refused,
    Welcome,
    encode,
    join_of,
    name_ranks,
    shortened,
)
from aiokvoffload.kv_caches import CacheShape, KVGroup

CACHE = CacheShape(
    groups=(KVGroup(16, [0, 2]), KVGroup(32, [1], "window", 100)), block_count=7, group_page_bytes=((8, 16), (24,))
)
MESSAGES: list[Message] = [
    join_of(CACHE, 1, world_size=2, dtype="bfloat16", boot_id="b"),
    Welcome("engine-1", 2, 100, False, 30.0),
    Refused("no"),
    Landings((Landing(1, 64, 0.5, None), Landing(2, 0, 0.0, "broken")), 3),
    Fault("f"),
    Leaving("done", is_drained=True),
]


@given(st.lists(st.integers(1, 40), min_size=1))
def test_messages_arrive_whole_in_whatever_pieces_their_bytes_come(sizes: list[int]) -> None:
    data = b"".join(map(encode, MESSAGES))
    reader = FrameReader()
    found: list[Message] = []
    position = step = 0
    while position < len(data):
        size = sizes[step % len(sizes)]
        found += reader.feed(data[position : position + size])
        position += size
        step += 1
    assert found == MESSAGES


def test_a_join_brings_the_shape_of_the_cache() -> None:
    join = MESSAGES[0]
    assert not isinstance(join, Welcome | Refused | Landings | Fault | Leaving)
    assert join.cache() == CACHE


@given(st.binary(min_size=10, max_size=100))
def test_garbage_is_told_from_messages_and_raises_nothing_else(data: bytes) -> None:
    with pytest.raises(FrameError):
        list(FrameReader().feed(data))


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"GET / HTTP/1.1\r\n", "no messages of aiokvoffload"),
        (struct.pack(">4sHI", b"akvo", PROTOCOL_VERSION + 1, 0), "use the same version of aiokvoffload"),
        (struct.pack(">4sHI", b"akvo", PROTOCOL_VERSION, MAX_FRAME_BYTES + 1), "is longer than"),
        (struct.pack(">4sHI", b"akvo", PROTOCOL_VERSION, 3) + b"\xc1ab", "a message does not read"),
        (struct.pack(">4sHI", b"akvo", PROTOCOL_VERSION, 1) + b"\x80", "a message does not read"),
    ],
)
def test_a_frame_that_is_none_says_why(data: bytes, reason: str) -> None:
    with pytest.raises(FrameError, match=reason):
        list(FrameReader().feed(data))


def test_what_goes_into_messages_is_bounded() -> None:
    assert len(shortened("x" * 10_000)) == 500
    assert shortened("short") == "short"
    assert name_ranks([3]) == "rank 3"
    assert name_ranks(range(10)) == "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 2 more"
