from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from aiokvoffload.key_index import NOT_FOUND
from aiokvoffload.keys import OffloadKey
from aiokvoffload.policies.ghosts import GhostLists
from aiokvoffload.testing.policy_contract import count_instructions
from aiokvoffload.testing.strategies import make_keys

LIMIT = 6


@settings(max_examples=100)
@given(st.data())
def test_they_are_ordered_dicts(data: st.DataObject) -> None:
    ghosts = GhostLists(LIMIT, list_count=2)
    models: list[dict[OffloadKey, int]] = [{}, {}]
    keys = make_keys(*range(16))
    for tick in range(1, data.draw(st.integers(2, 15))):
        call = data.draw(st.sampled_from(["add", "add", "remove", "renew", "clear"]))
        chosen = data.draw(st.lists(st.sampled_from(keys), unique=True, min_size=1, max_size=LIMIT))
        known = {key: index for index, model in enumerate(models) for key in model if key in chosen}
        if call == "add" and (new := [key for key in chosen if key not in known]):
            index = data.draw(st.integers(0, 1))
            ghosts.add(index, new)
            models[index].update(dict.fromkeys(new, -1))
            while len(models[index]) > LIMIT:
                del models[index][next(iter(models[index]))]
        elif call == "remove":
            rows = ghosts.rows(chosen)
            ghosts.remove(rows[rows != NOT_FOUND])
            for key, index in known.items():
                del models[index][key]
        elif call == "renew":
            seen_at = tick - data.draw(st.integers(0, 1))
            for key, row in zip(chosen, ghosts.rows(chosen).tolist(), strict=True):
                assert (row != NOT_FOUND) == (key in known)
                if row == NOT_FOUND:
                    continue
                model = models[known[key]]
                assert ghosts.list_of(row) == known[key]
                assert ghosts.renew(row, seen_at) == (model[key] < seen_at)
                if model[key] < seen_at:
                    del model[key]
                    model[key] = seen_at
        elif call == "clear":
            ghosts.clear()
            models = [{}, {}]
        assert [list(ghosts.keys_in(index)) for index in (0, 1)] == [list(model) for model in models]
        assert ghosts.counts == [len(model) for model in models]
        assert (ghosts.rows(keys) != NOT_FOUND).tolist() == [any(key in model for model in models) for key in keys]


def test_forgetting_and_clearing_cost_the_same_however_much_is_kept() -> None:
    def costs(limit: int) -> tuple[int, int]:
        ghosts = GhostLists(limit, list_count=2)
        ghosts.add(0, make_keys(*range(limit)))
        new = make_keys(*range(limit, limit + 100))
        return count_instructions(lambda: ghosts.add(0, new)), count_instructions(ghosts.clear)

    assert costs(5_000) == costs(500)
