from __future__ import annotations

import gc
import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aiokvoffload.policies.base import Access
from aiokvoffload.policies.lines import LEAF_SLOTS, Leaf
from aiokvoffload.policies.lru import LRUPolicy
from aiokvoffload.policies.ranking import RankedPolicy
from aiokvoffload.policies.ranks import Ranks
from aiokvoffload.policies.slots import slot_array
from aiokvoffload.testing.policy_contract import CONTRACT_SETTINGS, count_instructions
from aiokvoffload.testing.strategies import make_keys

CAPACITY = 12 * LEAF_SLOTS


class Model:
    """A ranked policy that sorts everything whenever it is asked."""

    def __init__(self) -> None:
        self.rank_of: dict[int, tuple[int, int, int]] = {}
        self.evictable: set[int] = set()
        self.ranked_count = 0

    def rank(self, slots: Sequence[int], tick: int, depths: Sequence[int] | None) -> None:
        for slot, depth in zip(slots, depths or [1 << 40] * len(slots), strict=True):
            self.ranked_count += 1
            self.rank_of[slot] = (tick, -depth, self.ranked_count)

    def drop(self, slots: Sequence[int]) -> None:
        for slot in slots:
            del self.rank_of[slot]
        self.evictable.difference_update(slots)

    def in_order(self) -> list[int]:
        return sorted(self.evictable, key=self.rank_of.__getitem__)


class RankedLines(RankedPolicy):
    """Shows what the base class does alone."""

    def touch(self, slots: Sequence[int], access: Access) -> None:
        raise NotImplementedError


def check_leaves(policy: RankedPolicy) -> None:
    counts = policy._lines._counts
    for line in policy._lines:
        numbers = [leaf.number for leaf in line.leaves]
        assert list(line.open_leaves) == [leaf for leaf in line.leaves if counts.evictables[leaf.number]]
        bounds = [leaf.bound for leaf in line.leaves]
        assert bounds == sorted(bounds)
        for leaf in line.leaves:
            live = [slot for slot in leaf.slots if policy._lines._leaf_of[slot] == leaf.number]
            assert len(live) == counts.residents[leaf.number] > 0
            assert len(leaf.slots) == counts.entries[leaf.number]
            assert sum(policy._lines._is_evictable[slot] for slot in live) == counts.evictables[leaf.number]
            assert len(leaf.slots) <= 2 * LEAF_SLOTS
        assert counts.residents[numbers].sum() == line.resident_count
        assert counts.evictables[numbers].sum() == line.evictable_count


@st.composite
def slot_runs(draw: st.DrawFn) -> list[int]:
    low, high = sorted(draw(st.lists(st.integers(0, CAPACITY), min_size=2, max_size=2)))
    run = list(range(low, high, draw(st.sampled_from([1, 1, 2, 3, 7, 100]))))
    if draw(st.booleans()):
        random.Random(low).shuffle(run)
    return run


@settings(CONTRACT_SETTINGS, max_examples=80)
@given(st.data())
def test_it_is_a_sorted_list(data: st.DataObject) -> None:
    policy, model = LRUPolicy(CAPACITY), Model()
    for _ in range(data.draw(st.integers(1, 14), label="steps")):
        call = data.draw(st.sampled_from(["insert", "insert", "unpin", "unpin", "pin", "touch", "touch", "evict",
                                          "remove", "demote", "clear"]), label="call")  # fmt: skip
        run = data.draw(slot_runs(), label="run")
        known = [slot for slot in run if slot in model.rank_of]
        if call in ("insert", "touch"):
            chosen = known if call == "touch" else [slot for slot in run if slot not in model.rank_of]
            depths: Sequence[int] | None = data.draw(
                st.sampled_from([None, range(16, 16 + 16 * len(chosen), 16), [slot % 50 for slot in chosen]])
            )
            access = Access(data.draw(st.integers(1, 9), label="tick"), depths=depths)
            if call == "insert":
                policy.insert(chosen, [b""] * len(chosen), access)  # type: ignore[list-item]  # LRU keeps no keys
                model.rank(chosen, access.tick, depths)
            else:
                policy.touch(chosen, access)
                older = [place for place, slot in enumerate(chosen) if model.rank_of[slot][0] < access.tick]
                moved = [chosen[place] for place in older]
                model.rank(moved, access.tick, None if depths is None else [depths[place] for place in older])
        elif call in ("unpin", "pin"):
            chosen = [slot for slot in known if (slot in model.evictable) == (call == "pin")]
            getattr(policy, call)(chosen)
            model.evictable.symmetric_difference_update(chosen)
        elif call == "evict":
            count = data.draw(st.integers(0, CAPACITY), label="count")
            victims = [slot for slot in model.in_order() if slot not in known][:count]
            assert policy.evict(count, known) == (victims if len(victims) == count else None)
            model.drop(victims if len(victims) == count else [])
        elif call == "demote":
            policy.demote(known)
            model.rank(known, 0, None)
        elif call == "remove":
            policy.remove(known)
            model.drop(known)
        elif data.draw(st.booleans()):
            policy.clear()
            model = Model()
        assert policy.coldest(CAPACITY) == model.in_order()
        assert policy.coldest(7) == model.in_order()[:7]
        assert policy.evictable_count == len(model.evictable)
        check_leaves(policy)


def filled(capacity: int, *, step: int = 1) -> LRUPolicy:
    policy = LRUPolicy(capacity)
    slots = range(0, capacity, step)
    policy.insert(slots, [b""] * len(slots), Access(1))  # type: ignore[list-item]  # LRU keeps no keys
    policy.unpin(slots)
    return policy


@pytest.mark.parametrize("seed", range(3))
def test_one_by_one(seed: int) -> None:
    rng = random.Random(seed)
    policy, model = LRUPolicy(CAPACITY), Model()
    for step in range(1500):
        slot = rng.randrange(step % 97, CAPACITY, 97)
        if slot in model.evictable and rng.random() < (0.3 if step < 1000 else 0.9):
            policy.remove([slot])
            model.drop([slot])
        elif slot not in model.rank_of:
            tick = rng.randrange(1, 50)
            policy.insert([slot], [b""], Access(tick, depths=[slot]))  # type: ignore[list-item]  # LRU keeps no keys
            model.rank([slot], tick, [slot])
            policy.unpin([slot])
            model.evictable.add(slot)
    check_leaves(policy)
    assert policy.coldest(CAPACITY) == model.in_order()


@pytest.mark.parametrize("step", [1, -1])
def test_the_number_of_leaves_follows_the_slots(step: int) -> None:
    policy = filled(64 * LEAF_SLOTS)
    left = range(0, 64 * LEAF_SLOTS, LEAF_SLOTS)
    for start in left[::step]:
        policy.remove(range(start + 1, start + LEAF_SLOTS))
    assert policy.coldest(CAPACITY) == list(left)
    assert len(policy._lines[0].leaves) <= 2
    check_leaves(policy)


def test_slots_that_get_another_base_go_among_those_of_the_other_line() -> None:
    policy = RankedLines(CAPACITY, line_count=2)
    slots = list(range(CAPACITY))
    policy._enter(slots, [slot % 97 + 1 for slot in slots], Access(1), 1)
    policy._rebase(slots[::3], [slot % 89 + 1 for slot in slots[::3]], 0)
    policy._rebase(slots[1::3], [slot % 89 + 1 for slot in slots[1::3]], 0)
    policy.unpin(slots)
    check_leaves(policy)
    in_order = sorted([*slots[::3], *slots[1::3]], key=lambda slot: (slot % 89, slot))
    assert policy._lines.coldest(0, CAPACITY) == in_order
    assert policy._lines.coldest(1, 5) == sorted(slots[2::3], key=lambda slot: (slot % 97, slot))[:5]
    assert set(policy._lines.indices_of(slot_array(in_order)).tolist()) == {0}


def test_touching_for_ever_without_an_eviction_leaves_nothing_behind() -> None:
    policy = filled(LEAF_SLOTS)
    for tick in range(2, 400):
        policy.touch(range(tick % 5, LEAF_SLOTS, 5), Access(tick))
    assert sum(len(leaf.slots) for leaf in policy._lines[0].leaves) <= 3 * LEAF_SLOTS
    assert len(policy._lines._leaves) <= 8


def test_a_run_costs_much_less_than_its_slots_one_by_one() -> None:
    policy = filled(CAPACITY)

    def pin_and_unpin(runs: Sequence[Sequence[int]]) -> int:
        def work() -> None:
            for run in runs:
                policy.pin(run)
                policy.unpin(run)

        return count_instructions(work)

    run = range(100, 228)
    assert pin_and_unpin([run]) * 2 <= pin_and_unpin([[slot] for slot in run])


def test_whatever_is_pinned_an_eviction_looks_at_one_leaf() -> None:
    def instructions(pinned_count: int) -> int:
        policy = filled(200 * LEAF_SLOTS)
        policy.pin(range(pinned_count))
        return count_instructions(lambda: policy.evict(1))

    assert instructions(150 * LEAF_SLOTS + 100) <= 2 * instructions(100)


class TestRanks:
    @pytest.mark.parametrize("count", [3, 19])
    def test_older_requests_leave_first_then_deeper_blocks_then_the_first_given(self, count: int) -> None:
        ranks = Ranks(100)
        slots = list(range(count))
        array = slot_array(slots)
        assert ranks.assign(array, 2, [16, 32, 32] + [8] * (count - 3)).tolist()[:3] == [1, 2, 0]
        assert ranks.of(1) < ranks.of(0)
        ranks.assign(slot_array([50]), 1, [8])
        assert ranks.of(50) < ranks.of(1)
        assert ranks.assign(array, 3, range(16, 16 + 16 * count, 16)).tolist() == slots[::-1]
        assert ranks.assign(array, 4, None).tolist() == slots

    @pytest.mark.parametrize("count", [3, 19])
    def test_bases_of_any_size_go_before_depths(self, count: int) -> None:
        ranks = Ranks(100)
        slots = list(range(count))
        bases = [1 << 200, 1, (1 << 200) + 1] + [1 << 100] * (count - 3)
        in_order = ranks.assign_each(slot_array(slots), bases, range(16, 16 + 16 * count, 16))
        assert in_order.tolist() == [1, *slots[:2:-1], 0, 2]
        assert ranks.rebase(slot_array([2, 0, 1]), [7, 7, 8]).tolist() == [2, 0, 1]
        ranks.assign(slot_array([50]), 0, None)
        assert [slot for slot in (*slots, 50) if ranks.is_first(slot)] == [50]

    def test_another_base_keeps_the_order_of_equals(self) -> None:
        ranks = Ranks(40)
        ranks.assign_each(slot_array([2, 0, 1]), [5, 6, 7], None)
        ranks.assign(slot_array(range(10, 40)), 3, None)
        assert ranks.rebase(slot_array([10, 0, 1, 2]), [3, 3, 3, 3]).tolist() == [2, 0, 1, 10]

    def test_select_older_keeps_slots_and_depths_together(self) -> None:
        ranks = Ranks(4)
        ranks.assign(slot_array([0, 2]), 5, None)
        ranks.assign(slot_array([1, 3]), 6, None)
        slots, access = ranks.select_older(slot_array([0, 1, 2, 3]), Access(6, depths=[10, 11, 12, 13]))
        assert slots.tolist() == [0, 2]
        assert access.depths == [10, 12]
        slots, access = ranks.select_older(slot_array([0, 2]), Access(6))
        assert (slots.tolist(), access) == ([0, 2], Access(6))
        assert not len(ranks.select_older(slot_array([0, 1]), Access(5))[0])


def test_after_a_reset_leaves_are_let_go_of_without_the_garbage_collector() -> None:
    """It would free all of them in one pause, which grows with the slots."""

    def leaf_count() -> int:
        return sum(type(thing) is Leaf for thing in gc.get_objects())

    policy = RankedLines(CAPACITY)
    gc.collect()
    gc.disable()
    others = leaf_count()
    try:
        for tick in (1, 2):
            policy.clear()
            for first in range(0, CAPACITY, LEAF_SLOTS):
                slots = range(first, first + LEAF_SLOTS)
                policy.insert(slots, make_keys(*slots), Access(tick))
        assert leaf_count() - others == CAPACITY // LEAF_SLOTS
    finally:
        gc.enable()
