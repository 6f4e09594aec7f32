"""What `adaptive` promises, beside the others, on workloads and traces."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from workloads import documents, nightly, retrieval

from aiokvoffload.cli.trace import TraceRequest, read_trace
from aiokvoffload.policies.adaptive import AdaptivePolicy
from aiokvoffload.policies.base import POLICIES, Access, CachePolicy
from aiokvoffload.policies.metadata import MetadataCache, MetadataCacheCounts
from aiokvoffload.testing.strategies import make_keys

OTHERS = ("lru", "lru2", "lrfu", "arc", "s3fifo")
TRACES = Path(__file__).parents[3] / "shared" / "traces"


def replay(policy: CachePolicy, requests: Sequence[TraceRequest]) -> MetadataCacheCounts:
    cache = MetadataCache(policy)
    for tick, request in enumerate(requests, 1):
        keys = list(dict.fromkeys(make_keys(*request.hash_ids)))
        cache.request(keys, Access(tick, request.timestamp_ms / 1000, depths=range(512, 512 * len(keys) + 1, 512)))
    return cache.counts


def hit_percent(policy: CachePolicy, requests: Sequence[TraceRequest]) -> float:
    counts = replay(policy, requests)
    return 100 * counts.blocks_hit / counts.blocks_looked_up


def capacity_of(requests: Sequence[TraceRequest], percent: float) -> int:
    return int(len({block for request in requests for block in request.hash_ids}) * percent / 100)


def check_promise(requests: Sequence[TraceRequest], percent: float, *, points: float = 1.0) -> None:
    capacity = capacity_of(requests, percent)
    rates = {name: hit_percent(POLICIES.resolve(name)(capacity), requests) for name in OTHERS}
    adaptive = hit_percent(AdaptivePolicy(capacity), requests)
    assert adaptive >= 0.99 * rates["lru"]
    assert adaptive >= max(rates.values()) - points


@pytest.mark.parametrize(
    ("make", "percent"),
    [(lambda: documents(0, 1_200), 2), (lambda: retrieval(0, 1_500), 10), (lambda: nightly(0, 1), 5)],
    ids=["documents", "retrieval", "nightly"],
)
def test_soon_nearly_as_good_as_the_best(make: Callable[[], list[TraceRequest]], percent: float) -> None:
    # Twice the distance of whole workloads: in short ones there is little time to find out who is best.
    check_promise(make(), percent, points=2.0)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("percent", [1, 2, 5, 10, 20, 50])
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("make", [documents, retrieval, nightly])
def test_nearly_as_good_as_the_best_on_whole_workloads(
    make: Callable[[int], list[TraceRequest]], seed: int, percent: float
) -> None:
    check_promise(make(seed), percent)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.skipif(not TRACES.is_dir(), reason="the real traces are not in this checkout")
@pytest.mark.parametrize(
    ("name", "percent"),
    [
        *(("mooncake_conversation.jsonl", percent) for percent in (1, 2, 5, 10, 20, 30, 50)),
        *(("weka_agentic_512.jsonl.gz", percent) for percent in (2, 5, 10)),
    ],
)
def test_nearly_as_good_as_the_best_on_traces(name: str, percent: float) -> None:
    check_promise(read_trace(TRACES / name), percent)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.skipif(not TRACES.is_dir(), reason="the real traces are not in this checkout")
@pytest.mark.parametrize("percent", [1, 2])
def test_a_cost_of_stores_saves_most_of_them(percent: float) -> None:
    requests = read_trace(TRACES / "mooncake_conversation.jsonl")
    capacity = capacity_of(requests, percent)
    dear = replay(AdaptivePolicy(capacity, store_cost=0.1), requests)
    lru = replay(POLICIES.resolve("lru")(capacity), requests)
    assert dear.blocks_stored <= 0.4 * lru.blocks_stored
    assert dear.blocks_hit >= lru.blocks_hit
