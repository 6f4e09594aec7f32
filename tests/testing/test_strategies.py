from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import find, given, settings
from hypothesis import strategies as st

from aiokvoffload.keys import OffloadKey, offload_block_hash, offload_group_index
from aiokvoffload.kv_caches import KVGroup
from aiokvoffload.testing import strategies
from aiokvoffload.testing.policy_contract import CONTRACT_SETTINGS
from aiokvoffload.testing.strategies import TraceRequest


@CONTRACT_SETTINGS
@given(strategies.keys(max_group_index=7))
def test_keys_are_keys(key: OffloadKey) -> None:
    assert offload_group_index(key) <= 7
    assert 16 <= len(offload_block_hash(key)) <= 32


def test_made_keys_are_equal_for_equal_numbers_only() -> None:
    assert strategies.make_keys(1, 2, 1) == [*strategies.make_keys(1), *strategies.make_keys(2, 1)]
    assert len({*strategies.make_keys(1, 2), *strategies.make_keys(1, 2, group_index=1)}) == 4


@CONTRACT_SETTINGS
@given(strategies.key_chains(min_blocks=1, max_blocks=5, group_index=2), strategies.key_chains(min_blocks=1))
def test_chains_share_beginnings_only(chain: list[OffloadKey], other: list[OffloadKey]) -> None:
    assert len({*chain}) == len(chain) <= 5
    assert {offload_group_index(key) for key in chain} == {2}
    hashes, other_hashes = [*map(offload_block_hash, chain)], [*map(offload_block_hash, other)]
    assert all(
        hashes[:index] == other_hashes[:index]
        for index, (one, two) in enumerate(zip(hashes, other_hashes, strict=False))
        if one == two
    )


@pytest.mark.parametrize("kind", ["full", "window", "state"])
def test_layouts_have_every_kind_and_several_block_sizes(kind: str) -> None:
    def is_wanted(groups: list[KVGroup]) -> bool:
        return len({group.block_tokens for group in groups}) == 2 and groups[-1].kind == kind

    groups = find(
        strategies.group_layouts(layers_per_group=2),
        is_wanted,
        settings=settings(CONTRACT_SETTINGS, max_examples=5_000),
    )
    assert [layer for group in groups for layer in group.layers] == list(range(2 * len(groups)))


@CONTRACT_SETTINGS
@given(strategies.request_traces(block_tokens=4))
def test_turns_of_a_conversation_extend_each_other(trace: list[TraceRequest]) -> None:
    last: dict[str | None, TraceRequest] = {}
    for request in trace:
        assert len(request.keys) == len(request.depths) == len(request.token_ids) // 4
        before = last.get(request.ctx.session_id)
        if before is not None:
            assert request.keys[: len(before.keys)] == before.keys
            assert request.ctx.turn == before.ctx.turn + 1
        last[request.ctx.session_id] = request
    assert len({request.ctx.req_id for request in trace}) == len(trace)


def test_traces_have_sessions_that_begin_alike() -> None:
    def is_wanted(trace: list[TraceRequest]) -> bool:
        return len(trace) == 2 and bool({*trace[0].keys} & {*trace[1].keys}) and trace[1].ctx.turn == 0

    assert find(strategies.request_traces(), is_wanted, settings=settings(CONTRACT_SETTINGS, max_examples=5_000))


@CONTRACT_SETTINGS
@given(st.data())
def test_batches_and_accesses_fit_each_other(data: st.DataObject) -> None:
    batch = data.draw(strategies.key_batches(key_count=3, max_size=5))
    assert len(batch) <= 5
    assert {*batch} <= {*strategies.make_keys(0, 1, 2)}
    access = data.draw(strategies.accesses(3, len(batch)))
    assert access.tick == 3
    assert access.depths is None or len(access.depths) == len(batch)


@pytest.mark.parametrize("module", ["", ".models", ".clock"])
def test_only_contracts_import_pytest(module: str) -> None:
    check = "import sys; assert 'pytest' not in sys.modules"
    subprocess.run([sys.executable, "-c", f"import aiokvoffload.testing{module}\n{check}"], check=True)
