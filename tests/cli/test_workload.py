from collections import defaultdict
from dataclasses import astuple
from hashlib import blake2b
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiokvoffload.cli.trace import TRACE_BLOCK_TOKENS, TraceRequest
from aiokvoffload.cli.workload import WorkloadShape, generate_workload
from aiokvoffload.errors import ConfigurationError


def unbounded_hit_rate(requests: list[TraceRequest]) -> float:
    seen: set[int] = set()
    hit_count = 0
    for request in requests:
        for hash_id in request.hash_ids:
            if hash_id not in seen:
                break
            hit_count += 1
        seen.update(request.hash_ids)
    return hit_count / sum(len(request.hash_ids) for request in requests)


@pytest.mark.parametrize("seed", range(5))
def test_default_shape_has_about_1500_requests_of_which_most_blocks_can_hit(seed: int) -> None:
    requests = generate_workload(seed)
    assert 1_350 < len(requests) < 1_650
    assert 0.55 < unbounded_hit_rate(requests) < 0.72


def test_requests_are_the_same_on_every_machine() -> None:
    content = repr([astuple(request) for request in generate_workload(7)]).encode()
    assert blake2b(content, digest_size=8).hexdigest() == "b874fe6d1643e542"
    assert generate_workload(7) == generate_workload(7)
    assert generate_workload(7) != generate_workload(8)


def test_limit_keeps_the_first_requests() -> None:
    assert generate_workload(3, limit=10) == generate_workload(3)[:10]


@given(st.integers(0, 2**32), st.integers(1, 30), st.integers(0, 5))
def test_prompts_grow_and_ids_stand_for_what_precedes_them(seed: int, session_count: int, one_off_count: int) -> None:
    shape = WorkloadShape(session_count=session_count, one_off_count=one_off_count, system_prompt_count=2)
    requests = generate_workload(seed, shape=shape)
    assert [request.timestamp_ms for request in requests] == sorted(request.timestamp_ms for request in requests)
    turns: dict[str, list[TraceRequest]] = defaultdict(list)
    parents: dict[int, int | None] = {}
    for request in requests:
        assert len(request.hash_ids) == request.input_length // TRACE_BLOCK_TOKENS > 0
        previous = None
        for hash_id in request.hash_ids:
            assert parents.setdefault(hash_id, previous) == previous
            previous = hash_id
        if request.session is not None:
            turns[request.session].append(request)
    assert len(turns) == session_count
    assert sum(request.session is None for request in requests) == one_off_count
    for history in turns.values():
        for earlier, later in pairwise(history):
            assert later.hash_ids[: len(earlier.hash_ids)] == earlier.hash_ids
            assert later.input_length > earlier.input_length + earlier.output_length
            assert later.timestamp_ms > earlier.timestamp_ms


def test_conversations_with_one_system_prompt_share_its_full_blocks_only() -> None:
    shape = WorkloadShape(
        session_count=20,
        turns=(1, 1),
        one_off_count=0,
        system_prompt_count=1,
        system_prompt_tokens=(1_100, 1_100),
        opening_tokens=(2_048, 2_048),
    )
    requests = generate_workload(0, shape=shape)
    assert len({request.hash_ids[:2] for request in requests}) == 1
    assert len({request.hash_ids[2] for request in requests}) == 20


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("turns", (0, 3)),
        ("turns", (4, 3)),
        ("think_ms", (-1, 3)),
        ("session_count", -1),
        ("system_prompt_count", 0),
    ],
)
def test_a_shape_that_cannot_be_drawn_is_refused(field: str, value: object) -> None:
    with pytest.raises(ConfigurationError, match=field):
        WorkloadShape(**{field: value})  # type: ignore[arg-type]


def test_a_workload_without_requests_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="at least one"):
        WorkloadShape(session_count=0, one_off_count=0)
