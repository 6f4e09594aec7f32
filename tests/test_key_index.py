from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aiokvoffload.key_index import DICT_KEYS, NOT_FOUND, KeyIndex, LargeKeyIndex, SmallKeyIndex, make_index
from aiokvoffload.keys import OffloadKey
from aiokvoffload.policies.slots import slot_array
from aiokvoffload.testing.policy_contract import count_instructions
from aiokvoffload.testing.strategies import make_keys

NUMBER_COUNT = 64

indexes = pytest.mark.parametrize("make", [SmallKeyIndex, LargeKeyIndex])


class KeyWithHash(bytes):
    """A key whose place in a table is chosen by the test."""

    hashed = 0

    def __hash__(self) -> int:
        return self.hashed


def key_with_hash(number: int, hashed: int) -> OffloadKey:
    key = KeyWithHash(number.to_bytes(4, "big"))
    key.hashed = hashed
    return OffloadKey(key)


def colliding_keys(count: int) -> list[OffloadKey]:
    """Return keys of two sets, some of them with the tags of others: sets that are full, and tags that mislead."""
    set_count = LargeKeyIndex(NUMBER_COUNT)._set_count
    return [key_with_hash(number, ((number % 7 - 3) * set_count << 32) + number % 2) for number in range(count)]


@indexes
@pytest.mark.parametrize("keys", [make_keys(*range(200)), colliding_keys(200)], ids=["usual", "colliding"])
@settings(max_examples=60)
@given(data=st.data())
def test_it_is_a_dict(make: type[KeyIndex], keys: list[OffloadKey], data: st.DataObject) -> None:
    index, model = make(NUMBER_COUNT), dict[OffloadKey, int]()
    unused = list(range(NUMBER_COUNT))
    for _ in range(data.draw(st.integers(1, 12))):
        first = data.draw(st.integers(0, len(keys)))
        chosen = keys[first : first + data.draw(st.sampled_from([1, 3, 8, NUMBER_COUNT, len(keys)]))]
        call = data.draw(st.sampled_from(["put", "put", "put", "drop", "clear"]))
        if call == "put":
            new = [key for key in chosen if key not in model][: len(unused)]
            numbers = [unused.pop() for _ in new]
            index.put(new, slot_array(numbers))
            model.update(zip(new, numbers, strict=True))
        elif call == "drop":
            numbers = [model.pop(key) for key in chosen if key in model]
            index.drop(slot_array(numbers))
            unused = [*numbers, *unused]
        else:
            index.clear()
            model, unused = {}, list(range(NUMBER_COUNT))
        for asked in (keys, tuple(chosen), *([key] for key in chosen[:2])):
            assert index.find(asked).tolist() == [model.get(key, NOT_FOUND) for key in asked]
        assert [index.get(key) for key in keys[:20]] == [model.get(key, NOT_FOUND) for key in keys[:20]]
        assert [index.number_of(key) for key in keys[:20]] == [model.get(key) for key in keys[:20]]
        assert index.keys_of(slot_array(model.values())) == list(model)


def test_the_colliding_keys_do_collide() -> None:
    index = LargeKeyIndex(NUMBER_COUNT)
    index.put(colliding_keys(NUMBER_COUNT), slot_array(range(NUMBER_COUNT)))
    assert len(index._excess) == NUMBER_COUNT // 2


def test_few_keys_find_their_set_full() -> None:
    index = LargeKeyIndex(20_000)
    index.put(make_keys(*range(20_000)), slot_array(range(20_000)))
    assert len(index._excess) < 20_000 // 200


def test_many_keys_are_not_in_a_dict_that_would_be_rebuilt() -> None:
    assert type(make_index(DICT_KEYS)) is SmallKeyIndex
    assert type(make_index(DICT_KEYS + 1)) is LargeKeyIndex


def test_no_step_grows_with_what_is_held() -> None:
    chance = random.Random(2)
    keys = [key_with_hash(number, chance.getrandbits(60)) for number in range(50_020)]  # the same in every process

    def costs(held_count: int) -> list[int]:
        index = LargeKeyIndex(100_000)
        index.put(keys[:held_count], slot_array(range(held_count)))
        new, numbers = keys[50_000:], slot_array(range(50_000, 50_020))
        steps = (lambda: index.find(new), lambda: index.put(new, numbers), lambda: index.drop(numbers), index.clear)
        return [count_instructions(step) for step in steps]

    few, many = costs(100), costs(50_000)
    assert few[:1] + few[2:] == many[:1] + many[2:]
    assert many[1] < 2 * few[1]  # the first cell tried is taken more often


@indexes
def test_keys_are_compared_not_only_their_hashes(make: type[KeyIndex]) -> None:
    one, other, third = (key_with_hash(number, 12) for number in range(3))
    index = make(NUMBER_COUNT)
    index.put([one, other], slot_array([5, 6]))
    assert index.find([other, third, one, other, one, third]).tolist() == [6, NOT_FOUND, 5, 6, 5, NOT_FOUND]


def test_nothing_from_before_a_reset_comes_back() -> None:
    keys, numbers = make_keys(*range(50_000)), slot_array(range(50_000))
    index = LargeKeyIndex(100_000)
    index.put(keys, numbers)
    for _ in range(3):  # the first of them finds a table that nothing was put into
        index.clear()
        assert index.find(keys).max() == NOT_FOUND
        index.put(keys[:10], numbers[:10])
        assert index.find(keys[:11]).tolist() == [*range(10), NOT_FOUND]
