from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aiokvoffload.key_index import SINGLE_DICT_KEYS, KeyIndex, ShardedKeyIndex, make_index
from aiokvoffload.testing.policy_contract import count_instructions
from aiokvoffload.testing.strategies import make_keys

indexes = pytest.mark.parametrize("make", [KeyIndex, lambda: ShardedKeyIndex(1_000_000)], ids=["one", "sharded"])


@indexes
@settings(max_examples=50)
@given(data=st.data())
def test_it_is_a_dict(make: type[KeyIndex], data: st.DataObject) -> None:
    index, model = make(), dict[bytes, int]()
    keys = make_keys(*range(20))
    for step in range(data.draw(st.integers(1, 12))):
        chosen = data.draw(st.lists(st.sampled_from(keys), unique=True))
        call = data.draw(st.sampled_from(["put", "put", "drop", "clear"]))
        if call == "put":
            new = [key for key in chosen if key not in model]
            numbers = [100 * step + place for place in range(len(new))]
            index.put(new, numbers)
            model.update(zip(new, numbers, strict=True))
        elif call == "drop":
            known = [key for key in chosen if key in model]
            index.drop(known)
            for key in known:
                del model[key]
        else:
            index.clear()
            model.clear()
        assert index.find(keys) == [model.get(key) for key in keys]
        assert [index.get(key) for key in keys] == [model.get(key) for key in keys]


def test_a_large_index_is_many_dicts_with_about_as_many_keys_each() -> None:
    assert type(make_index(SINGLE_DICT_KEYS)) is KeyIndex
    index = make_index(1_000_000)
    assert isinstance(index, ShardedKeyIndex)
    keys = make_keys(*range(20_000))
    index.put(keys, range(20_000))
    sizes = [len(shard) for shard in index._shards]
    assert len(sizes) >= 16
    assert max(sizes) < 1.3 * sum(sizes) / len(sizes)


def test_keys_of_a_shard_differ_in_the_bits_that_a_dict_looks_at() -> None:
    index = ShardedKeyIndex(1_000_000)
    index.put(make_keys(*range(20_000)), range(20_000))
    low_bits = Counter(hash(key) % 64 for key in index._shards[0])
    assert len(low_bits) == 64


@indexes
def test_clearing_costs_the_same_at_any_size_and_old_entries_go_bit_by_bit(make: type[KeyIndex]) -> None:
    def cleared(key_count: int) -> tuple[KeyIndex, int]:
        index = make()
        index.put(make_keys(*range(key_count)), range(key_count))
        return index, count_instructions(index.clear)

    (_, few), (index, many) = cleared(10), cleared(5_000)
    assert many == few

    def left() -> int:
        return sum(map(len, index._given_up))

    assert left() == 5_000
    sizes = []
    for number in range(10):
        index.put(make_keys(number), [number])
        sizes.append(left())
    assert sizes[0] >= 3_000
    assert sizes[-1] == 0
    assert index.find(make_keys(3, 4_000)) == [3, None]


def test_a_thousand_resets_leave_nothing_behind() -> None:
    index = ShardedKeyIndex(1_000_000)
    keys = make_keys(*range(64))
    for _ in range(1_000):
        index.put(keys, range(64))
        index.clear()
    index.put(keys, range(64))
    assert len(index._given_up) <= 3 * len(index._shards)
