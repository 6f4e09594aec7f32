"""Faults that the field's leading implementation shows: each must not happen here."""

from __future__ import annotations

import anyio
import pytest

from aiokvoffload.managers.cpu import CPUOffloadingManager
from aiokvoffload.managers.reuse import FilterReusedOffloadingManager
from aiokvoffload.specs import Completion, LookupResult, ReqContext
from aiokvoffload.testing.manager_contract import BACKENDS, assert_adds_up, assert_at_rest, some_turns
from aiokvoffload.testing.strategies import make_keys

MISS, HIT, PENDING = LookupResult.MISS, LookupResult.HIT, LookupResult.PENDING


def stored(block_count: int, *numbers: int, policy: str = "lru") -> CPUOffloadingManager:
    """A manager that holds the keys of these numbers."""
    manager = CPUOffloadingManager(block_count, policy=policy)
    manager.complete_store_nowait(manager.prepare_store_nowait(make_keys(*numbers)))
    return manager


@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_a_duplicate_key_in_one_offer_leaks_nothing(policy: str) -> None:
    manager = CPUOffloadingManager(3, policy=policy)
    for _ in range(5):
        ticket = manager.prepare_store_nowait(make_keys(1, 2, 1, 1))
        assert ticket.slots
        manager.complete_store_nowait(ticket, success=False)
        assert manager.statistics().free == 3
    manager.complete_store_nowait(manager.prepare_store_nowait(make_keys(1, 2, 1, 1)))
    assert manager.statistics().ready == 2
    assert manager.prepare_store_nowait(make_keys(3, 4, 5)).evicted_keys
    assert_adds_up(manager)


def test_a_missing_key_in_a_load_pins_nothing() -> None:
    manager = stored(3, 1, 2)
    assert manager.prepare_load_nowait(make_keys(1, 9, 2)).result is MISS
    assert manager.statistics().pinned == 0
    # Everything may still be evicted.
    assert len(manager.prepare_store_nowait(make_keys(3, 4, 5)).keys_to_store) == 3


def test_a_failed_completion_frees_only_its_own_blocks() -> None:
    manager = stored(6, 1)
    other = manager.prepare_store_nowait(make_keys(2))
    failing = manager.prepare_store_nowait(make_keys(1, 2, 3))
    manager.complete_store_nowait(failing, success=False)
    assert manager.lookup_nowait(make_keys(1, 2, 3)) == [HIT, PENDING, MISS]
    manager.complete_store_nowait(other)
    assert manager.lookup_nowait(make_keys(1, 2, 3)) == [HIT, HIT, MISS]
    assert manager.statistics().free == 4
    assert_at_rest(manager)


@pytest.mark.parametrize("success", [True, False])
def test_a_completion_from_before_a_reset_changes_nothing(success: bool) -> None:
    manager = CPUOffloadingManager(4)
    old = manager.prepare_store_nowait(make_keys(1, 2))
    manager.reset_nowait()
    new = manager.prepare_store_nowait(make_keys(1, 2))
    assert not {*old.slots} & {*new.slots}
    assert manager.complete_store_nowait(old, success) is Completion.STALE
    assert manager.lookup_nowait(make_keys(1, 2)) == [PENDING, PENDING]
    manager.complete_store_nowait(new)
    assert manager.lookup_nowait(make_keys(1, 2)) == [HIT, HIT]
    assert_at_rest(manager)


@pytest.mark.parametrize("success", [True, False])
def test_a_double_completion_is_reported_and_harmless(success: bool) -> None:
    manager = CPUOffloadingManager(2)
    ticket = manager.prepare_store_nowait(make_keys(1))
    assert manager.complete_store_nowait(ticket) is Completion.APPLIED
    load = manager.prepare_load_nowait(make_keys(1))
    assert manager.complete_store_nowait(ticket, success) is Completion.REPEATED
    assert manager.statistics().pinned == 1
    assert manager.complete_load_nowait(load) is Completion.APPLIED
    assert manager.complete_load_nowait(load) is Completion.REPEATED
    assert manager.statistics().rejected_completions == 2
    assert manager.lookup_nowait(make_keys(1)) == [HIT]
    assert_at_rest(manager)


@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_keys_of_the_offer_are_never_evicted_by_it(policy: str) -> None:
    manager = stored(4, 1, 2, 3, 4, policy=policy)
    manager.touch(make_keys(3, 4))
    ticket = manager.prepare_store_nowait(make_keys(1, 2, 5))
    assert ticket.evicted_keys == make_keys(3)
    assert ticket.resident_keys == make_keys(1, 2)
    manager.complete_store_nowait(ticket)
    assert manager.prepare_store_nowait(make_keys(1, 2, 4, 5, 6)).is_refused
    assert manager.lookup_nowait(make_keys(1, 2, 3, 4, 5)) == [HIT, HIT, MISS, HIT, HIT]


def test_an_offer_larger_than_the_reuse_tracker_still_makes_progress() -> None:
    manager = FilterReusedOffloadingManager(CPUOffloadingManager(100), store_threshold=2, max_tracker_size=10)
    keys = make_keys(*range(30))
    first = manager.prepare_store_nowait(keys, ReqContext("first"))
    assert not first.keys_to_store
    second = manager.prepare_store_nowait(keys, ReqContext("second"))
    assert second.keys_to_store == keys[:10]
    assert manager.tracked_count == 10


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_waiter_never_loses_its_block_between_the_commit_and_its_waking_up(backend: str) -> None:
    async def main() -> None:
        manager = CPUOffloadingManager(1)
        writing = manager.prepare_store_nowait(make_keys(1))
        found: list[LookupResult] = []

        async def wait() -> None:
            async with manager.loading(make_keys(1)) as ticket:
                found.append(ticket.result)
                assert ticket.slots == writing.slots

        async with anyio.create_task_group() as group:
            group.start_soon(wait)
            await some_turns()
            manager.complete_store_nowait(writing)
            assert not found
            # Before the waiter runs, somebody else wants all the room there is.
            assert manager.prepare_store_nowait(make_keys(2)).is_refused
            assert manager.lookup_nowait(make_keys(1)) == [HIT]
        assert found == [HIT]
        assert manager.prepare_store_nowait(make_keys(2)).evicted_keys == make_keys(1)

    anyio.run(main, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_fifty_loads_of_a_prefix_that_is_being_stored_look_up_once(backend: str) -> None:
    class Counting(CPUOffloadingManager):
        lookups = 0

        def prepare_load_nowait(self, *args: object, **kwargs: object) -> object:  # type: ignore[override]
            self.lookups += 1
            return super().prepare_load_nowait(*args, **kwargs)  # type: ignore[arg-type]

    async def main() -> None:
        manager = Counting(8)
        writings = [manager.prepare_store_nowait(make_keys(1, 2)), manager.prepare_store_nowait(make_keys(3))]
        results: list[LookupResult] = []

        async def load() -> None:
            async with manager.loading(make_keys(1, 2, 3), take="leading") as ticket:
                results.append(ticket.result)
                assert ticket.token_count == 3

        async with anyio.create_task_group() as group:
            for _ in range(50):
                group.start_soon(load)
            await some_turns()
            assert manager.statistics().waiting_loads == 50
            manager.complete_store_nowait(writings[1])
            await some_turns()
            assert not results
            manager.complete_store_nowait(writings[0])
            assert manager.statistics().pinned == 3
        assert results == [HIT] * 50
        assert manager.lookups == 50
        assert_at_rest(manager)

    anyio.run(main, backend=backend)
