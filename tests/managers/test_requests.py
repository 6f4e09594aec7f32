from __future__ import annotations

import pytest

from aiokvoffload.errors import InvalidRequestError
from aiokvoffload.keys import OffloadKey
from aiokvoffload.managers import requests
from aiokvoffload.managers.cpu import CPUOffloadingManager
from aiokvoffload.managers.requests import RequestTable
from aiokvoffload.policies.arc import ARCPolicy
from aiokvoffload.specs import ReqContext
from aiokvoffload.testing.clock import ManualClock
from aiokvoffload.testing.strategies import make_keys


def stored(block_count: int, *batches: tuple[int, ...]) -> CPUOffloadingManager:
    """A manager that holds these batches of keys, each stored by a request of its own."""
    manager = CPUOffloadingManager(block_count)
    for batch in batches:
        manager.complete_store_nowait(manager.prepare_store_nowait(make_keys(*batch)))
    return manager


def leaving_order(manager: CPUOffloadingManager, count: int) -> list[OffloadKey]:
    """Evict `count` blocks."""
    ticket = manager.prepare_store_nowait(make_keys(*range(1000, 1000 + count)))
    return list(ticket.evicted_keys)


@pytest.mark.parametrize("is_made_anew", [False, True])
def test_a_request_counts_once_however_often_it_touches(is_made_anew: bool) -> None:
    manager = stored(3, (1,), (2,), (3,))
    one = ReqContext("one")
    manager.touch(make_keys(1), one)
    manager.touch(make_keys(2), ReqContext("two"))
    # A second touch by the first request does not make its block younger than the second request's.
    manager.touch(make_keys(1), ReqContext("one") if is_made_anew else one)
    assert leaving_order(manager, 3) == make_keys(3, 1, 2)


@pytest.mark.parametrize("is_made_anew", [False, True])
def test_what_a_request_stores_later_stands_at_its_access(is_made_anew: bool) -> None:
    manager = stored(3)
    one = ReqContext("one")
    manager.touch(make_keys(1), one)
    manager.touch(make_keys(2), ReqContext("two"))
    two = manager.prepare_store_nowait(make_keys(2), ReqContext("two"), depths=[16])
    manager.complete_store_nowait(two)
    for number, depth in ((1, 16), (3, 32)):
        again = ReqContext("one") if is_made_anew else one
        manager.complete_store_nowait(manager.prepare_store_nowait(make_keys(number), again, depths=[depth]))
    assert leaving_order(manager, 3) == make_keys(3, 1, 2)


def test_a_store_without_a_touch_counts_the_access_itself() -> None:
    manager = stored(3, (1,), (2,))
    ticket = manager.prepare_store_nowait(make_keys(1, 3), ReqContext("one"))
    manager.complete_store_nowait(ticket)
    assert leaving_order(manager, 3) == make_keys(2, 1, 3)


def test_a_store_after_a_touch_does_not_count_again() -> None:
    manager = stored(3, (1,), (2,), (3,))
    one = ReqContext("one")
    manager.touch(make_keys(3), one)
    manager.touch(make_keys(1), ReqContext("two"))
    assert manager.prepare_store_nowait(make_keys(2, 3), one).resident_keys == make_keys(2, 3)
    assert leaving_order(manager, 3) == make_keys(2, 3, 1)


def test_looking_and_loading_count_nothing() -> None:
    manager = stored(3, (1,), (2,), (3,))
    ctx = ReqContext("one")
    manager.lookup_nowait(make_keys(1), ctx)
    manager.lookup_prefix_nowait(make_keys(1), ctx)
    manager.complete_load_nowait(manager.prepare_load_nowait(make_keys(1), ctx))
    manager.complete_load_nowait(manager.watch_nowait(make_keys(1)))
    assert leaving_order(manager, 3) == make_keys(1, 2, 3)


def test_requests_without_an_id_are_all_different() -> None:
    manager = stored(2, (1,), (2,))
    manager.touch(make_keys(1), ReqContext(""))
    manager.touch(make_keys(2), ReqContext(""))
    manager.touch(make_keys(1))
    assert leaving_order(manager, 2) == make_keys(2, 1)
    # But one context is one request, with or without an id.
    manager = stored(2, (1,), (2,))
    nameless = ReqContext("")
    manager.touch(make_keys(1), nameless)
    manager.touch(make_keys(2))
    manager.touch(make_keys(1), nameless)
    assert leaving_order(manager, 2) == make_keys(1, 2)


def test_one_context_can_serve_several_managers() -> None:
    managers = [stored(2, (1,), (2,)) for _ in range(2)]
    ctx = ReqContext("one")
    managers[0].touch(make_keys(1), ctx)
    managers[0].bump_epoch_nowait()
    managers[1].touch(make_keys(1), ctx)
    assert managers[0].prepare_store_nowait(make_keys(1), ctx).is_refused
    assert leaving_order(managers[1], 2) == make_keys(2, 1)


def test_depths_decide_within_a_request() -> None:
    manager = stored(4)
    ticket = manager.prepare_store_nowait(make_keys(1, 2, 3, 4), depths=[16, 32, 48, 64])
    manager.complete_store_nowait(ticket)
    assert leaving_order(manager, 4) == make_keys(4, 3, 2, 1)


def test_a_key_given_twice_has_its_first_depth() -> None:
    manager = stored(2)
    ticket = manager.prepare_store_nowait(make_keys(1, 2, 1), depths=[16, 32, 48])
    manager.complete_store_nowait(ticket)
    assert leaving_order(manager, 2) == make_keys(2, 1)


def test_depths_belong_to_the_keys_that_are_stored() -> None:
    manager = stored(4, (2,))
    ticket = manager.prepare_store_nowait(make_keys(1, 2, 3, 4), depths=[10, 20, 40, 30])
    assert ticket.keys_to_store == make_keys(1, 3, 4)
    manager.complete_store_nowait(ticket)
    assert leaving_order(manager, 4) == make_keys(3, 4, 2, 1)


def test_bad_depths_do_not_use_up_the_access() -> None:
    manager = stored(3, (1,), (2,), (3,))
    ctx = ReqContext("one")
    for depths in ([1], [-1, 2]):
        with pytest.raises(InvalidRequestError, match="2 keys need as many depths"):
            manager.touch(make_keys(1, 2), ctx, depths=depths)
        with pytest.raises(InvalidRequestError, match="2 keys need as many depths"):
            manager.prepare_store_nowait(make_keys(1, 2), ctx, depths=depths)
    manager.touch(make_keys(3), ReqContext("two"))
    manager.touch(make_keys(1), ctx)
    assert leaving_order(manager, 3) == make_keys(2, 3, 1)


def test_ghosts_learn_once_per_request() -> None:
    policy = ARCPolicy(2)
    manager = CPUOffloadingManager(2, policy=policy)
    for number in range(4):
        manager.complete_store_nowait(manager.prepare_store_nowait(make_keys(number)))
    ctx = ReqContext("one")
    manager.touch(make_keys(0), ctx)
    assert policy.target_recent_count == 1.0
    manager.touch(make_keys(0), ctx)
    manager.touch(make_keys(0), ReqContext("one"))
    assert policy.target_recent_count == 1.0
    manager.touch(make_keys(0), ReqContext("two"))
    assert policy.target_recent_count == 2.0


def test_only_the_latest_requests_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "REMEMBERED_REQUESTS", 3)
    table = RequestTable()
    contexts = [ReqContext(str(number)) for number in range(5)]
    bindings = [table.bind(ctx, epoch=0) for ctx in contexts]
    for binding in bindings:
        assert table.open_access(binding)
        assert not table.open_access(binding)
    assert [binding.tick for binding in bindings] == [1, 2, 3, 4, 5]
    # A context carries its own, made anew it is found among the latest only.
    assert [table.bind(ctx, epoch=0) for ctx in contexts] == bindings
    assert table.bind(ReqContext("4"), epoch=1) is bindings[4]
    assert table.bind(ReqContext("0"), epoch=1) is not bindings[0]


def beside_each_other(policy: str) -> tuple[CPUOffloadingManager, CPUOffloadingManager]:
    """Two managers with the same blocks: eight stored, one of them just being written, the first four used again."""
    clock = ManualClock()
    managers = CPUOffloadingManager(9, policy=policy, clock=clock), CPUOffloadingManager(9, policy=policy, clock=clock)
    for manager in managers:
        for start in (0, 4):
            ticket = manager.prepare_store_nowait(make_keys(*range(start, start + 4)), depths=[16, 32, 48, 64])
            manager.complete_store_nowait(ticket)
        manager.touch(make_keys(*range(4)), ReqContext("again"))
        manager.prepare_store_nowait(make_keys(8), ReqContext("writing"))
    return managers


@pytest.mark.parametrize("policy", ["lru", "arc"])
@pytest.mark.parametrize(
    "numbers", [(4, 5, 6), (4,), (1, 1, 7, 1), (4, 8), (4, 30), (30,), ()], ids=lambda numbers: f"{numbers}"
)
@pytest.mark.parametrize("is_stale", [False, True])
def test_a_use_is_a_touch_and_a_load_in_one(policy: str, numbers: tuple[int, ...], is_stale: bool) -> None:
    one, other = beside_each_other(policy)
    keys, depths = make_keys(*numbers), list(range(16, 16 * len(numbers) + 1, 16))
    contexts = ReqContext("used"), ReqContext("used")
    if is_stale:
        for manager, ctx in zip((one, other), contexts, strict=True):
            manager.lookup_nowait([], ctx)
            manager.bump_epoch_nowait()
    one.touch(keys, contexts[0], depths=depths)
    expected = one.prepare_load_nowait(keys, contexts[0])
    ticket = other.prepare_use_nowait(keys, contexts[1], depths=depths)
    assert (list(ticket.keys), ticket.slots, ticket.result) == (list(expected.keys), expected.slots, expected.result)
    assert ticket.token_count == expected.token_count
    assert ticket.is_waiting == expected.is_waiting == (not is_stale and 8 in numbers)
    assert other.statistics() == one.statistics()
    one.complete_load_nowait(expected)
    other.complete_load_nowait(ticket)
    assert other.statistics() == one.statistics()
    assert leaving_order(other, 8) == leaving_order(one, 8)


@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_a_store_may_touch_its_blocks_although_the_request_has_been_counted(policy: str) -> None:
    one, other = beside_each_other(policy)
    keys, ctx, same = make_keys(4, 5), ReqContext("one"), ReqContext("one")
    for manager, used in ((one, ctx), (other, same)):
        manager.touch(make_keys(7), used)
        manager.touch(make_keys(0), ReqContext("in between"))
    one.touch(keys, ctx)
    one.complete_store_nowait(one.prepare_store_nowait(keys, ctx))
    other.complete_store_nowait(other.prepare_store_nowait(keys, same, is_access=True))
    assert other.statistics() == one.statistics()
    assert leaving_order(other, 8) == leaving_order(one, 8)
