"""Costs as counts of instructions, which do not depend on how busy the machine is."""

from __future__ import annotations

import statistics

import pytest

from aiokvoffload.keys import OffloadKey
from aiokvoffload.managers.cpu import CPUOffloadingManager
from aiokvoffload.specs import ReqContext
from aiokvoffload.testing.policy_contract import count_instructions
from aiokvoffload.testing.strategies import make_keys

policies = pytest.mark.parametrize("policy", ["lru", "arc"])

BLOCKS_PER_REQUEST = 100


def filled(policy: str, block_count: int, *, again: int = 0) -> CPUOffloadingManager:
    """A full manager; the last `again` blocks were used again."""
    manager = CPUOffloadingManager(block_count, policy=policy)
    keys = make_keys(*range(block_count))
    depths = list(range(16, 16 * BLOCKS_PER_REQUEST + 1, 16))
    for start in range(0, block_count, BLOCKS_PER_REQUEST):
        batch = keys[start : start + BLOCKS_PER_REQUEST]
        manager.complete_store_nowait(manager.prepare_store_nowait(batch, depths=depths[: len(batch)]))
    if again:
        manager.touch(keys[-again:])
    return manager


def fresh_keys(count: int) -> list[OffloadKey]:
    return make_keys(*range(1_000_000, 1_000_000 + count))


@policies
def test_pinned_blocks_cost_nothing(policy: str) -> None:
    block_count, pinned_count = 51_000, 50_000
    managers = [filled(policy, block_count) for _ in range(2)]
    oldest = make_keys(*range(pinned_count))
    load = managers[1].prepare_load_nowait(oldest)
    assert managers[1].statistics().pinned == pinned_count
    offers = iter(fresh_keys(10_000))

    def store_one(manager: CPUOffloadingManager) -> None:
        ticket = manager.prepare_store_nowait([next(offers)])
        assert len(ticket.evicted_keys) == 1
        manager.complete_store_nowait(ticket)

    works = [lambda manager=manager: store_one(manager) for manager in managers]
    free, pinned = (statistics.median(count_instructions(work) for _ in range(21)) for work in works)
    assert pinned <= 2 * free
    managers[1].complete_load_nowait(load)


@policies
def test_protected_blocks_cost_what_they_are(policy: str) -> None:
    """An offer that repeats many stored blocks costs its own size, however much else is held."""
    works = []
    for block_count in (2_000, 40_000):
        manager = filled(policy, block_count)
        keys = [*make_keys(*range(1_000)), *fresh_keys(1)]
        works.append(lambda manager=manager, keys=keys: manager.prepare_store_nowait(keys))
    few, many = map(count_instructions, works)
    assert many <= 1.5 * few


@policies
@pytest.mark.parametrize("again", [0, 5_000])
def test_many_victims_cost_no_more_each(policy: str, again: int) -> None:
    def cost_per_key(count: int) -> float:
        manager = filled(policy, 10_000, again=again)
        keys = fresh_keys(count)
        tickets = []
        cost = count_instructions(lambda: tickets.append(manager.prepare_store_nowait(keys)))
        assert len(tickets[0].evicted_keys) == count
        return cost / count

    assert cost_per_key(5_000) <= 3 * cost_per_key(500)


@policies
def test_every_operation_costs_its_batch_whatever_is_held(policy: str) -> None:
    def cost(block_count: int) -> int:
        manager = filled(policy, block_count, again=block_count // 2)
        ctx = ReqContext("request")
        old, new = make_keys(*range(50, 150)), fresh_keys(100)

        def request() -> None:
            manager.lookup_nowait(old)
            manager.lookup_prefix_nowait(old, ctx)
            manager.touch([*old, *new], ctx)
            load = manager.prepare_load_nowait(old, ctx)
            ticket = manager.prepare_store_nowait(new, ctx)
            lease = ticket.lease()
            manager.complete_store_nowait(ticket)
            lease.release()
            manager.complete_load_nowait(load)
            manager.statistics()

        return count_instructions(request)

    assert cost(40_000) <= 1.5 * cost(2_000)
    # From some size on there are many dicts, and looking is a loop.
    assert cost(200_000) <= 1.1 * cost(70_000)


@policies
def test_many_loads_that_wait_for_one_block_cost_no_more_each(policy: str) -> None:

    def cost_per_load(count: int) -> float:
        manager = filled(policy, 1_000)
        writing = manager.prepare_store_nowait(fresh_keys(1))
        for _ in range(count):
            manager.prepare_load_nowait(fresh_keys(1))
        return count_instructions(lambda: manager.complete_store_nowait(writing)) / count

    assert cost_per_load(1_000) <= 2 * cost_per_load(50)
