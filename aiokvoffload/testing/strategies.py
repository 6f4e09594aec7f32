"""hypothesis strategies for keys, KV groups, policy accesses and request traces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from aiokvoffload.keys import CacheIdentity, OffloadKey, block_hashes, make_offload_key, offload_keys, root_hash
from aiokvoffload.kv_caches import KVGroup
from aiokvoffload.policies.base import Access
from aiokvoffload.specs import ReqContext

MAX_GROUP_INDEX = (1 << 32) - 1


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace.

    Attributes:
        ctx: Its context, one per request.
        token_ids: The prompt; requests of one session extend each other's.
        keys: Keys of its full blocks, in token order.
        depths: Token position of each block's end.
    """

    ctx: ReqContext
    token_ids: tuple[int, ...]
    keys: tuple[OffloadKey, ...]
    depths: tuple[int, ...]


def make_keys(*numbers: int, group_index: int = 0) -> list[OffloadKey]:
    """Return a key for each number: the same number, the same key."""
    return [make_offload_key(number.to_bytes(16, "big"), group_index) for number in numbers]


def keys(*, max_group_index: int = MAX_GROUP_INDEX) -> st.SearchStrategy[OffloadKey]:
    """Any key: hashes of 16 to 32 bytes, as engines have them.

    Args:
        max_group_index: Largest KV group index.
    """
    return st.builds(
        make_offload_key, st.binary(min_size=16, max_size=32), st.integers(min_value=0, max_value=max_group_index)
    )


def key_batches(*, key_count: int = 12, max_size: int = 8) -> st.SearchStrategy[list[OffloadKey]]:
    """Lists of keys from a small pool, so that they meet again; a key may be given twice.

    Args:
        key_count: Keys in the pool.
        max_size: Longest list.
    """
    pool = make_keys(*range(key_count))
    return st.lists(st.sampled_from(pool), max_size=max_size)


@st.composite
def key_chains(
    draw: st.DrawFn, *, min_blocks: int = 0, max_blocks: int = 8, block_tokens: int = 1, group_index: int = 0
) -> list[OffloadKey]:
    """Keys of one request's blocks, chained from a root: chains with the same beginning share the same keys.

    Args:
        draw: Passed by hypothesis.
        min_blocks: Fewest blocks.
        max_blocks: Most blocks.
        block_tokens: Tokens of a block.
        group_index: The KV group.
    """
    root = root_hash(CacheIdentity(model="test"), adapter=draw(st.sampled_from(["", "adapter"])))
    block_count = draw(st.integers(min_value=min_blocks, max_value=max_blocks))
    token_ids = draw(
        st.lists(st.integers(0, 2), min_size=block_count * block_tokens, max_size=block_count * block_tokens)
    )
    return offload_keys(block_hashes(root, token_ids, block_tokens), group_index=group_index)


@st.composite
def group_layouts(
    draw: st.DrawFn,
    *,
    max_groups: int = 3,
    block_tokens: Sequence[int] = (1, 2, 3, 4),
    max_window_tokens: int = 12,
    layers_per_group: int = 1,
) -> list[KVGroup]:
    """KV groups of every kind, each with layers and a block size of its own.

    Args:
        draw: Passed by hypothesis.
        max_groups: Most groups, at least 1.
        block_tokens: Block sizes to choose from.
        max_window_tokens: Widest attention window.
        layers_per_group: Layers of each group.
    """
    groups: list[KVGroup] = []
    for index in range(draw(st.integers(1, max_groups))):
        layers = range(index * layers_per_group, (index + 1) * layers_per_group)
        tokens = draw(st.sampled_from(block_tokens))
        match draw(st.sampled_from(["full", "window", "state"])):
            case "full":
                groups.append(KVGroup(tokens, layers))
            case "window":
                groups.append(KVGroup(tokens, layers, "window", draw(st.integers(1, max_window_tokens))))
            case _:
                groups.append(KVGroup(tokens, layers, "state"))
    return groups


def accesses(tick: int, size: int, *, max_depth: int = 8) -> st.SearchStrategy[Access]:
    """Accesses of one request to a batch, with and without depths.

    Args:
        tick: Of the request, at least 1.
        size: Slots or keys of the batch.
        max_depth: Largest token position.
    """
    depths: st.SearchStrategy[Any] = st.lists(st.integers(0, max_depth), min_size=size, max_size=size)
    return st.builds(
        Access,
        tick=st.just(tick),
        time=st.just(float(tick)),
        turn=st.integers(0, 3),
        priority=st.integers(0, 3),
        depths=st.none() | depths,
    )


@st.composite
def request_traces(
    draw: st.DrawFn,
    *,
    max_requests: int = 12,
    max_sessions: int = 3,
    max_blocks_per_turn: int = 4,
    block_tokens: int = 4,
) -> list[TraceRequest]:
    """Requests of conversations: each turn repeats its session's tokens and adds some; sessions may begin alike.

    Args:
        draw: Passed by hypothesis.
        max_requests: Most requests.
        max_sessions: Conversations they belong to.
        max_blocks_per_turn: Most blocks that a turn adds; it may end inside a block.
        block_tokens: Tokens of a block.
    """
    root = root_hash(CacheIdentity(model="test"))
    sessions: dict[int, list[int]] = {}
    turns: dict[int, int] = {}
    requests: list[TraceRequest] = []
    for number in range(draw(st.integers(0, max_requests))):
        session = draw(st.integers(0, max_sessions - 1))
        tokens = sessions.setdefault(session, [])
        # Few different tokens, so that sessions share beginnings.
        token = draw(st.integers(0, 1))
        tokens += [token] * draw(st.integers(0, max_blocks_per_turn * block_tokens))
        chain = offload_keys(block_hashes(root, tokens, block_tokens))
        requests.append(
            TraceRequest(
                ReqContext(f"request-{number}", session_id=f"session-{session}", turn=turns.get(session, 0)),
                tuple(tokens),
                tuple(chain),
                tuple((block + 1) * block_tokens for block in range(len(chain))),
            )
        )
        turns[session] = turns.get(session, 0) + 1
    return requests
