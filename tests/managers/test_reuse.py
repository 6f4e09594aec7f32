from __future__ import annotations

import pytest

from aiokvoffload.errors import ConfigurationError, InvalidRequestError
from aiokvoffload.managers.cpu import CPUOffloadingManager
from aiokvoffload.managers.reuse import FilterReusedOffloadingManager
from aiokvoffload.specs import LookupResult, ReqContext, StoreOutcome
from aiokvoffload.testing.strategies import make_keys

MISS, HIT, PENDING = LookupResult.MISS, LookupResult.HIT, LookupResult.PENDING


def filtering(block_count: int = 8, *, threshold: int = 2, tracker: int = 100) -> FilterReusedOffloadingManager:
    return FilterReusedOffloadingManager(
        CPUOffloadingManager(block_count), store_threshold=threshold, max_tracker_size=tracker
    )


@pytest.mark.parametrize("threshold", [2, 3, 5])
def test_a_block_is_stored_once_it_was_used_often_enough(threshold: int) -> None:
    manager = filtering(threshold=threshold)
    for use in range(1, threshold + 1):
        ctx = ReqContext(f"request {use}")
        manager.touch(make_keys(1, 2), ctx)
        ticket = manager.prepare_store_nowait(make_keys(1, 2), ctx)
        if use < threshold:
            assert not ticket.keys_to_store
            assert ticket.filtered_keys == make_keys(1, 2)
            assert ticket.outcomes(make_keys(1)) == (StoreOutcome.FILTERED,)
            assert not ticket.is_refused
        else:
            assert ticket.keys_to_store == make_keys(1, 2)
            assert not ticket.filtered_keys


def test_a_request_counts_once_per_block() -> None:
    manager = filtering()
    for _ in range(3):
        manager.touch(make_keys(1, 1), ReqContext("one"))
    assert not manager.prepare_store_nowait(make_keys(1), ReqContext("one")).keys_to_store
    manager.touch(make_keys(1), ReqContext("two"))
    assert manager.prepare_store_nowait(make_keys(1), ReqContext("two")).keys_to_store == make_keys(1)


def test_an_offer_without_a_touch_counts() -> None:
    manager = filtering()
    assert not manager.prepare_store_nowait(make_keys(1), ReqContext("one")).keys_to_store
    assert not manager.prepare_store_nowait(make_keys(1), ReqContext("one")).keys_to_store
    assert manager.prepare_store_nowait(make_keys(1)).keys_to_store == make_keys(1)


def test_blocks_that_are_never_offered_count_too() -> None:
    """The GPU served them, so there was nothing to store."""
    manager = filtering()
    manager.touch(make_keys(1, 2, 3), ReqContext("served from the GPU"))
    ctx = ReqContext("two")
    manager.touch(make_keys(1, 2, 3), ctx)
    assert manager.prepare_store_nowait(make_keys(3), ctx).keys_to_store == make_keys(3)


def test_looking_and_loading_count_nothing() -> None:
    manager = filtering()
    for number in range(5):
        ctx = ReqContext(str(number))
        assert manager.lookup_nowait(make_keys(1), ctx) == [MISS]
        assert manager.lookup_prefix_nowait(make_keys(1), ctx) == 0
        manager.complete_load_nowait(manager.prepare_load_nowait(make_keys(1), ctx))
    assert manager.tracked_count == 0
    assert not manager.prepare_store_nowait(make_keys(1)).keys_to_store


def test_a_caller_can_pass_the_filter() -> None:
    manager = filtering()
    ticket = manager.prepare_store_nowait(make_keys(1), filtered=False)
    assert ticket.keys_to_store == make_keys(1)
    manager.complete_store_nowait(ticket)
    assert manager.lookup_nowait(make_keys(1)) == [HIT]


def test_what_is_stored_already_is_listed_as_such() -> None:
    manager = filtering()
    manager.complete_store_nowait(manager.prepare_store_nowait(make_keys(1), filtered=False))
    writing = manager.prepare_store_nowait(make_keys(2), filtered=False)
    ticket = manager.prepare_store_nowait(make_keys(3, 1, 2))
    assert ticket.resident_keys == make_keys(1)
    assert ticket.pending_keys == make_keys(2)
    assert ticket.filtered_keys == make_keys(3)
    manager.complete_store_nowait(writing)


def test_the_tracker_forgets_the_block_used_longest_ago() -> None:
    manager = filtering(tracker=3)
    for number in (1, 2, 3):
        manager.touch(make_keys(number))
    manager.touch(make_keys(4))
    assert manager.tracked_count == 3
    assert not manager.prepare_store_nowait(make_keys(1)).keys_to_store
    # 1 has come back for the second time and pushed 2 out.
    assert manager.prepare_store_nowait(make_keys(3)).keys_to_store == make_keys(3)


def test_blocks_of_one_call_never_push_each_other_out() -> None:
    manager = filtering(block_count=20, tracker=4)
    manager.touch(make_keys(101, 102))
    manager.touch(make_keys(*range(10)))
    assert manager.tracked_count == 4
    second = ReqContext("two")
    manager.touch(make_keys(*range(10)), second)
    assert manager.prepare_store_nowait(make_keys(*range(10)), second).keys_to_store == make_keys(0, 1, 2, 3)


def test_a_block_that_has_left_may_come_back() -> None:
    manager = filtering(block_count=1)
    for number in (1, 2):
        for _ in range(2):
            ticket = manager.prepare_store_nowait(make_keys(number))
        manager.complete_store_nowait(ticket)
    assert manager.lookup_nowait(make_keys(1, 2)) == [MISS, HIT]
    assert manager.prepare_store_nowait(make_keys(1)).keys_to_store == make_keys(1)


def test_depths_belong_to_the_blocks_that_pass() -> None:
    manager = filtering(block_count=3)
    manager.touch(make_keys(1, 3, 4))
    ctx = ReqContext("two")
    ticket = manager.prepare_store_nowait(make_keys(1, 2, 3, 4), ctx, depths=[10, 20, 40, 30])
    assert ticket.keys_to_store == make_keys(1, 3, 4)
    manager.complete_store_nowait(ticket)
    left = manager.prepare_store_nowait(make_keys(7, 8, 9), filtered=False)
    assert left.evicted_keys == make_keys(3, 4, 1)


@pytest.mark.parametrize("depths", [[1], [1, 2, 3], [1, -1]])
@pytest.mark.parametrize("is_touched", [False, True])
def test_bad_depths_are_refused_and_not_counted(depths: list[int], is_touched: bool) -> None:
    manager = filtering()
    ctx = ReqContext("one")
    if is_touched:
        manager.touch(make_keys(5), ctx)
    with pytest.raises(InvalidRequestError, match="2 keys need as many depths"):
        manager.prepare_store_nowait(make_keys(1, 2), ctx, depths=depths, filtered=False)
    assert manager.tracked_count == is_touched


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"threshold": 1}, "store_threshold is 1; give at least 2, or use the manager without this filter"),
        ({"threshold": 0}, "store_threshold is 0"),
        ({"tracker": 0}, "max_tracker_size is 0; it must be at least 1"),
    ],
)
def test_settings_that_filter_nothing_or_everything_are_refused(options: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        filtering(**options)
