"""Whatever goes wrong below, the engine lives and generates the same."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from engines import Engine, Generated
    from faulty_spec import FaultyDevice

pytest_plugins = ["vllm_models"]
pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("default"), pytest.mark.timeout(400)]

OVERRUN = [0, 1, 2, 3, 4, 0, 1]
CACHED_TOKENS = 192
MIXED_OVERRUN = [*range(8), 0, 1]


@pytest.fixture(scope="module")
def expected(full_model: Path) -> list[Generated]:
    """What an engine generates that offloads nothing."""
    from engines import engine

    with engine(full_model) as plain:
        return plain.one_by_one(OVERRUN)


def assert_at_rest(tested: Engine) -> None:
    """Check that nothing is pinned, being written, or kept for somebody who has gone."""
    statistics = tested.manager.steps.statistics()
    assert (statistics.writing, statistics.pinned, statistics.leased_without_key) == (0, 0, 0)


def latest_device() -> FaultyDevice:
    from faulty_spec import FaultyDevice

    return FaultyDevice.made[-1]


def test_failed_loads_are_recomputed(full_model: Path, expected: list[Generated]) -> None:
    from engines import engine

    with engine(full_model, {"fault": "fail-load"}) as tested:
        found = tested.one_by_one(OVERRUN)
        assert_at_rest(tested)
        again = tested.one_by_one([4])
    assert latest_device().failed_count == 4  # two loads, each tried twice
    assert found == expected
    assert [one.cached_tokens for one in found[5:]] == [0, 0]
    assert again == expected[4:5]


def test_failed_loads_of_several_groups_are_recomputed(mixed_model: Path) -> None:
    from engines import engine

    with engine(mixed_model, blocks=40) as plain:
        expected = plain.one_by_one(MIXED_OVERRUN)
    with engine(mixed_model, {"fault": "fail-load"}, blocks=40) as tested:
        found = tested.one_by_one(MIXED_OVERRUN)
        assert_at_rest(tested)
    assert latest_device().failed_count > 0
    assert found == expected


@pytest.mark.parametrize("connector", ["AioKVOffloadConnector", "OffloadingConnector"])
@pytest.mark.parametrize("fault", ["fail-load-once", "fail-store-once"])
def test_copies_that_fail_once_are_tried_again(
    full_model: Path, expected: list[Generated], fault: str, connector: str
) -> None:
    from engines import engine

    with engine(full_model, {"fault": fault}, connector=connector) as tested:
        found = tested.one_by_one(OVERRUN)
        assert_at_rest(tested)
    assert latest_device().failed_count == 1
    assert found == expected
    assert [one.cached_tokens for one in found[5:]] == [CACHED_TOKENS] * 2


def test_failed_stores_are_no_hits(full_model: Path, expected: list[Generated]) -> None:
    from engines import engine

    with engine(full_model, {"fault": "fail-store"}) as tested:
        found = tested.one_by_one(OVERRUN)
        assert_at_rest(tested)
        statistics = tested.manager.steps.statistics()
    assert (statistics.ready, statistics.stored_blocks) == (0, 0)
    assert statistics.failed_blocks > 0
    assert found == expected
    assert [one.cached_tokens for one in found] == [0] * 7


def test_dead_tier_costs_no_request(full_model: Path, expected: list[Generated]) -> None:
    from engines import engine

    settings = {"fault": "dead-tier", "tiers": ["memory://"], "drain_seconds": 0.1}
    with engine(full_model, settings) as tested:
        found = tested.one_by_one(OVERRUN)
    assert found == expected
    assert [one.cached_tokens for one in found[5:]] == [CACHED_TOKENS] * 2  # CPU memory has them all the same


def test_abort_while_loading(full_model: Path, expected: list[Generated]) -> None:
    from engines import engine, prompt, sampling

    with engine(full_model, {"fault": "hold-load"}) as tested:
        first = tested.one_by_one(OVERRUN[:5])
        device, front = latest_device(), tested.llm.llm_engine
        front.add_request("aborted", {"prompt_token_ids": prompt(0)}, sampling(4))
        while not device.held_count:
            front.step()
        assert tested.manager.steps.statistics().pinned > 0
        front.abort_request(["aborted"], internal=False)
        front.step()
        assert tested.manager.steps.statistics().pinned > 0  # the copy still reads these slots
        device.gate.set()
        rest = tested.one_by_one(OVERRUN[5:])
        assert_at_rest(tested)
    assert first + rest == expected


@pytest.mark.parametrize("connector", ["AioKVOffloadConnector", "OffloadingConnector"])
def test_reset_while_storing(full_model: Path, expected: list[Generated], connector: str) -> None:
    """The slots that workers still write are given to others only when the workers are known to have finished."""
    from engines import engine, prompt, sampling

    with engine(full_model, {"fault": "hold-store"}, connector=connector) as tested:
        device, front = latest_device(), tested.llm.llm_engine
        front.add_request("running", {"prompt_token_ids": prompt(9)}, sampling(40))
        while not device.held_count:
            front.step()
        tested.llm.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
        statistics = tested.manager.steps.statistics()
        assert (statistics.writing, statistics.ready) == (0, 0)
        assert statistics.leased_without_key > 0
        outputs = []
        while front.has_unfinished_requests():
            outputs += [output for output in front.step() if output.finished]
        assert len(outputs) == 1
        found = tested.one_by_one(OVERRUN)
        assert_at_rest(tested)
    assert found == expected
    assert [one.cached_tokens for one in found[:5]] == [0] * 5
    assert [one.cached_tokens for one in found[5:]] == [CACHED_TOKENS] * 2


def test_reset_while_loading_recomputes(full_model: Path, expected: list[Generated]) -> None:
    """A load of before a weight update must not count, although it lands well."""
    from engines import engine, generated, prompt, sampling

    with engine(full_model, {"fault": "hold-load"}) as tested:
        tested.one_by_one(OVERRUN[:5])
        device, front = latest_device(), tested.llm.llm_engine
        front.add_request("loading", {"prompt_token_ids": prompt(0)}, sampling(4))
        while not device.held_count:
            front.step()
        tested.llm.reset_prefix_cache(reset_connector=True)
        outputs = []
        while front.has_unfinished_requests():
            outputs += [output for output in front.step() if output.finished]
        found = tested.one_by_one(OVERRUN)
        assert_at_rest(tested)
    assert generated(outputs[0]) == expected[0]
    assert outputs[0].num_cached_tokens == 0
    assert found == expected


@pytest.mark.parametrize("fault", ["", "fail-load"])
def test_loads_within_a_step(full_model: Path, expected: list[Generated], fault: str) -> None:
    """The step that asks for them waits for them; vLLM 0.33 and later."""
    from engines import engine
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import TransferJob

    if not hasattr(TransferJob, "sync"):
        pytest.skip("this vLLM loads between steps only")
    with engine(full_model, {"fault": fault, "sync_load_budget_bytes": 1 << 30}) as tested:
        found = tested.one_by_one(OVERRUN)
        assert_at_rest(tested)
    assert found == expected
    assert latest_device().failed_count == (4 if fault else 0)


def test_loads_within_a_step_are_refused_for_several_groups(mixed_model: Path) -> None:
    from engines import engine

    with (
        pytest.raises(Exception, match="sync_load_budget_bytes loads within a step"),
        engine(mixed_model, {"sync_load_budget_bytes": 1 << 20}, blocks=40),
    ):
        pass
