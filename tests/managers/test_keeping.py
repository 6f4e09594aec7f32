from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiokvoffload.managers.keeping import KeptSlots
from aiokvoffload.testing.policy_contract import CONTRACT_SETTINGS, count_instructions

SLOTS = 12


@CONTRACT_SETTINGS
@given(st.data())
def test_it_is_a_dict_of_deadlines(data: st.DataObject) -> None:
    kept = KeptSlots(SLOTS)
    model: dict[int, float] = {}
    now = 0.0
    slots = st.lists(st.integers(0, SLOTS - 1), unique=True, max_size=8)
    for _ in range(data.draw(st.integers(0, 30))):
        match data.draw(st.sampled_from(["keep", "keep", "let go", "expire", "clear"])):
            case "keep":
                chosen = data.draw(slots)
                deadline = now + data.draw(st.sampled_from([0.5, 1.0, 2.0, 7.0]))
                added = []
                for slot in chosen:
                    if slot in model or len(model) < SLOTS // 2:
                        added += [slot] * (slot not in model)
                        model[slot] = deadline
                assert kept.keep(chosen, deadline) == added
            case "let go":
                chosen = data.draw(slots)
                assert kept.let_go(chosen) == [slot for slot in chosen if model.pop(slot, None) is not None]
            case "expire":
                now += data.draw(st.sampled_from([0.0, 0.5, 1.0, 3.0]))
                over = sorted(deadline for deadline in model.values() if deadline <= now)
                limit = data.draw(st.integers(1, 4))
                expired = kept.expire(now, limit)
                assert [model.pop(slot) for slot in expired] == over[:limit]
            case _:
                if model:
                    kept.clear()
                    model.clear()
        assert kept.count == len(model)
        assert [slot for slot in range(SLOTS) if slot in kept] == sorted(model)
        if model:
            assert kept.mask.nonzero()[0].tolist() == sorted(model)


def test_keeping_again_and_again_leaves_nothing_behind() -> None:
    kept = KeptSlots(100)
    for number in range(10_000):
        kept.keep(range(50), 1.0 + number)
    assert len(kept._deadlines) < 200
    assert len(kept.expire(1e9, 1000)) == 50
    assert not kept._first_of


@pytest.mark.parametrize("work", ["keep", "let go", "expire"])
def test_costs_do_not_follow_what_is_kept(work: str) -> None:
    def cost(held: int) -> int:
        kept = KeptSlots(100_000)
        for first in range(0, held, 10):
            kept.keep(range(first, first + 10), 5.0 + first)
        calls = {
            "keep": lambda: kept.keep(range(90_000, 90_020), 3.0),
            "let go": lambda: kept.let_go(range(20)),
            "expire": lambda: kept.expire(15.0, 100),
        }
        return count_instructions(calls[work])

    assert cost(20_000) <= 1.5 * cost(100)
