"""Hit rates of request traces: what the policies are for."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import pytest

from aiokvoffload.keys import OffloadKey
from aiokvoffload.managers.base import OffloadingManager
from aiokvoffload.managers.cpu import CPUOffloadingManager
from aiokvoffload.managers.reuse import FilterReusedOffloadingManager
from aiokvoffload.specs import ReqContext
from aiokvoffload.testing.manager_contract import assert_at_rest
from aiokvoffload.testing.models import ARCModel, LRUModel, ManagerModel
from aiokvoffload.testing.strategies import make_keys

CONVERSATIONS = Path(__file__).parents[3] / "shared" / "traces" / "mooncake_conversation.jsonl"


def made_up_trace(seed: int, request_count: int) -> Iterator[list[OffloadKey]]:
    """Conversations that go on for some turns, and a few popular beginnings."""
    rng = random.Random(seed)
    numbers = iter(range(1_000, 1_000_000))
    sessions: list[list[int]] = []
    for _ in range(request_count):
        if not sessions or rng.random() < 0.3:
            sessions.append(list(range(100 * rng.randrange(3), 100 * rng.randrange(3) + rng.randrange(8))))
        session = rng.choice(sessions[-6:])
        session += [next(numbers) for _ in range(rng.randrange(1, 6))]
        yield make_keys(*session[:40])


def real_trace(path: Path) -> Iterator[list[OffloadKey]]:
    with path.open() as lines:
        for line in lines:
            yield make_keys(*json.loads(line)["hash_ids"])


def replay(manager: OffloadingManager, trace: Iterable[Sequence[OffloadKey]]) -> list[int]:
    """Serve each request to its end before the next comes, and return the hits of each."""
    hits = []
    for number, keys in enumerate(trace):
        ctx = ReqContext(str(number))
        hits.append(manager.lookup_prefix_nowait(keys, ctx))
        manager.touch(keys, ctx, depths=range(len(keys)))
        ticket = manager.prepare_store_nowait(keys, ctx, when_full="leading", depths=range(len(keys)))
        manager.complete_store_nowait(ticket)
    return hits


def replay_model(model: ManagerModel, trace: Iterable[Sequence[OffloadKey]]) -> list[int]:
    hits = []
    for number, keys in enumerate(trace):
        req_id = str(number)
        hits.append(model.lookup_prefix([keys], req_id))
        model.touch(keys, req_id, range(len(keys)))
        model.complete_store(model.prepare_store(keys, req_id, when_full="leading", depths=range(len(keys))))
    return hits


def possible_hits(trace: Iterable[Sequence[OffloadKey]]) -> int:
    """Hits of a cache that forgets nothing."""
    seen: set[OffloadKey] = set()
    hits = 0
    for keys in trace:
        hits += next((index for index, key in enumerate(keys) if key not in seen), len(keys))
        seen.update(keys)
    return hits


@pytest.mark.parametrize("block_count", [10, 60])
@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_a_made_up_trace_hits_as_in_the_model(policy: str, block_count: int) -> None:
    trace = list(made_up_trace(1, 200))
    manager = CPUOffloadingManager(block_count, policy=policy)
    model = LRUModel(block_count) if policy == "lru" else ARCModel(block_count)
    hits = replay(manager, trace)
    assert hits == replay_model(ManagerModel(block_count, model), trace)
    assert 0 < sum(hits) < possible_hits(trace)
    assert_at_rest(manager)


def test_a_manager_that_holds_everything_hits_all_that_can_be_hit() -> None:
    trace = list(made_up_trace(2, 300))
    block_count = len({key for keys in trace for key in keys})
    for policy in ("lru", "arc"):
        assert sum(replay(CPUOffloadingManager(block_count, policy=policy), trace)) == possible_hits(trace)


@pytest.mark.skipif(not CONVERSATIONS.exists(), reason="the trace of real conversations is not here")
@pytest.mark.parametrize(
    ("policy", "block_count", "store_threshold", "percent"),
    [
        ("lru", 1_827, 0, 5.25),
        ("lru", 18_279, 0, 27.89),
        ("arc", 1_827, 0, 7.74),
        ("arc-reference", 1_827, 0, 5.90),
        ("arc", 18_279, 0, 28.66),
        ("arc-reference", 18_279, 0, 27.75),
        ("lru", 1_827, 2, 8.63),
    ],
)
def test_real_conversations_hit_as_published(
    policy: str, block_count: int, store_threshold: int, percent: float
) -> None:
    manager: OffloadingManager = CPUOffloadingManager(block_count, policy=policy)
    if store_threshold:
        manager = FilterReusedOffloadingManager(manager, store_threshold=store_threshold)
    trace = list(real_trace(CONVERSATIONS))
    hits = replay(manager, trace)
    assert round(100 * sum(hits) / sum(map(len, trace)), 2) == percent
    assert_at_rest(manager)
