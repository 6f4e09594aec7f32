from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aiokvoffload.policies.sorted_slots import LEAF_SLOTS, SortedSlots
from aiokvoffload.testing.policy_contract import CONTRACT_SETTINGS, count_instructions

CAPACITY = 12 * LEAF_SLOTS


def ranked(capacity: int, seed: int | None = None) -> tuple[list[int], SortedSlots]:
    """Slots ranked by number, or shuffled."""
    rank_of = list(range(capacity))
    if seed is not None:
        random.Random(seed).shuffle(rank_of)
    return rank_of, SortedSlots(rank_of)


def check_leaves(slots: SortedSlots) -> None:
    assert all(0 < len(leaf) <= 2 * LEAF_SLOTS for leaf in slots._leaves)
    assert sum(map(len, slots._leaves)) == len(slots)


class TestSortedSlots:
    @settings(CONTRACT_SETTINGS, max_examples=60)
    @given(st.data())
    def test_it_is_a_sorted_list(self, data: st.DataObject) -> None:
        rank_of, slots = ranked(CAPACITY, data.draw(st.none() | st.integers(0, 5), label="seed"))
        model: set[int] = set()
        for _ in range(data.draw(st.integers(1, 12), label="steps")):
            call = data.draw(st.sampled_from(["add", "add", "discard", "pop", "peek", "clear"]), label="call")
            low, high = sorted(data.draw(st.lists(st.integers(0, CAPACITY), min_size=2, max_size=2), label="range"))
            chosen = {*range(low, high, data.draw(st.sampled_from([1, 1, 2, 3, 7, 100]), label="step"))}
            if call == "add":
                slots.add(chosen - model)
                model |= chosen
            elif call == "discard":
                slots.discard(chosen & model)
                model -= chosen
            elif call == "clear" and data.draw(st.booleans()):
                slots.clear()
                model.clear()
            in_order = sorted(model, key=rank_of.__getitem__)
            if call == "pop":
                assert slots.pop_coldest(low) == in_order[:low]
                model -= {*in_order[:low]}
                in_order = in_order[low:]
            assert len(slots) == len(model)
            assert slots.coldest(high) == in_order[:high]
            assert slots.coldest(CAPACITY) == in_order
            check_leaves(slots)

    @pytest.mark.parametrize("seed", range(3))
    def test_one_by_one(self, seed: int) -> None:
        rank_of, slots = ranked(CAPACITY, seed)
        model: list[int] = []
        rng = random.Random(seed)
        for step in range(3000):
            if model and rng.random() < (0.3 if step < 2000 else 0.9):
                slot = model.pop(rng.randrange(len(model)))
                slots.discard([slot])
            else:
                slot = rng.choice([slot for slot in range(step % 97, CAPACITY, 97) if slot not in model] or [-1])
                if slot >= 0:
                    slots.add([slot])
                    model.append(slot)
        check_leaves(slots)
        assert slots.coldest(CAPACITY) == sorted(model, key=rank_of.__getitem__)

    @pytest.mark.parametrize("size", [LEAF_SLOTS - 1, LEAF_SLOTS, LEAF_SLOTS + 1, 2 * LEAF_SLOTS, 2 * LEAF_SLOTS + 1])
    def test_leaves_split_and_empty_at_any_size(self, size: int) -> None:
        _, slots = ranked(4 * LEAF_SLOTS)
        slots.add(range(0, 2 * size, 2) if 2 * size <= 4 * LEAF_SLOTS else range(size))
        before = slots.coldest(CAPACITY)
        check_leaves(slots)
        assert before == sorted(before)
        assert len(before) == size
        assert slots.pop_coldest(size - 1) == before[:-1]
        assert slots.pop_coldest(5) == before[-1:]
        assert len(slots) == 0
        assert slots.pop_coldest(1) == []
        slots.add([3])
        assert slots.coldest(1) == [3]

    @pytest.mark.parametrize("step", [1, -1])
    def test_their_number_follows_the_slots(self, step: int) -> None:
        _, slots = ranked(64 * LEAF_SLOTS)
        slots.add(range(64 * LEAF_SLOTS))
        left = range(0, 64 * LEAF_SLOTS, LEAF_SLOTS)
        for start in left[::step]:
            slots.discard(range(start + 1, start + LEAF_SLOTS))
        assert slots.coldest(CAPACITY) == list(left)
        assert len(slots._leaves) <= 2

    def test_a_run_of_neighbours_costs_one_search(self) -> None:
        _, slots = ranked(CAPACITY)
        slots.add(range(100))
        slots.add(range(200, CAPACITY))

        def add_and_discard(count: int) -> int:
            run = range(100, 100 + count)

            def work() -> None:
                slots.add(run)
                slots.discard(run)

            return count_instructions(work)

        assert add_and_discard(100) <= 2 * add_and_discard(1)
