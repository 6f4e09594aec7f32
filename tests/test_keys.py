from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import aiokvoffload
from aiokvoffload.errors import InvalidRequestError
from aiokvoffload.keys import (
    GROUP_INDEX_BYTES,
    HASH_BYTES,
    CacheIdentity,
    block_hashes,
    encode_value,
    make_offload_key,
    offload_block_hash,
    offload_group_index,
    offload_keys,
    root_hash,
)

IDENTITY = CacheIdentity(
    model="llama",
    revision="main",
    epoch=2,
    dtype="bfloat16",
    layout="NHD",
    page_bytes=((4096, 4096), (1024,)),
    block_tokens=(16, 32),
    parallel_shape=(("tensor", 2),),
    rank=1,
)
ROOT = root_hash(IDENTITY, adapter="sql", salt="t")

atoms = st.none() | st.booleans() | st.integers() | st.text() | st.binary()
values = st.recursive(atoms, lambda inner: st.lists(inner, max_size=4).map(tuple), max_leaves=12)
token_lists = st.lists(st.integers(0, 200_000), max_size=40)


# ---- values that tiers on disk hold: a change here loses every stored block of every user


def test_fingerprint_is_fixed() -> None:
    assert CacheIdentity().fingerprint.hex() == "107cd51c6243356aae15751f81a0761c2f69db7ca756a22fb3dee4974c207f9d"
    assert IDENTITY.fingerprint.hex() == "9d2cf299be7eb991f85339c5890b5b20a8de324b92a25842ef24b8e750932e50"


def test_root_is_fixed() -> None:
    empty = root_hash(CacheIdentity()).hex()
    assert empty == "38f651ef427361d3edd1bf2a451dbb31cca905d1d47bce2b680497f89cd921b5"
    assert ROOT.hex() == "20ea307e205da3e5ac8e6e21c529e8963d847505c5070040d252591e49aa8b0e"


def test_block_hashes_are_fixed() -> None:
    assert [block_hash.hex() for block_hash in block_hashes(ROOT, [0, 1, 2, -3, 9], 2)] == [
        "8219e942da85d4174292085f1041b7b1cf9be8c88249c0a6850f3b3255262dd9",
        "0667dbd154d9e9a93103f5d4cba05fc3222a535d63c021c492369ec9ef35667c",
    ]


def test_encoding_is_fixed() -> None:
    assert encode_value((None, True, -129, "é", b"\0", ())).hex() == (
        "74000000000000003c"
        "6e0000000000000000"
        "3f000000000000000101"
        "690000000000000002ff7f"
        "730000000000000002c3a9"
        "62000000000000000100"
        "740000000000000000"
    )


@pytest.mark.parametrize("hash_seed", ["0", "1", "4242"])
def test_hashes_agree_between_processes(hash_seed: str) -> None:
    program = (
        "from aiokvoffload.keys import CacheIdentity, block_hashes, root_hash\n"
        "identity = CacheIdentity(model='m', parallel_shape=(('tensor', 2),))\n"
        "root = root_hash(identity, salt='s', adapter='a', more=(1,))\n"
        "print(block_hashes(root, range(64), 16)[-1].hex())\n"
    )
    package_home = str(Path(aiokvoffload.__file__).parents[1])
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": package_home}
    ran = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    identity = CacheIdentity(model="m", parallel_shape=(("tensor", 2),))
    root = root_hash(identity, more=(1,), adapter="a", salt="s")
    assert ran.stdout.strip() == block_hashes(root, range(64), 16)[-1].hex()


# ---- nothing collides


@given(values, values)
def test_different_values_have_different_encodings(first: object, second: object) -> None:
    # repr tells True from 1, which == does not.
    assert (encode_value(first) == encode_value(second)) == (repr(first) == repr(second))


@given(st.lists(values, min_size=2, max_size=2, unique_by=repr), values)
def test_no_encoding_begins_another(pair: list[object], tail: object) -> None:
    first, second = map(encode_value, pair)
    assert not (first + encode_value(tail)).startswith(second)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (("ab", "c"), ("a", "bc")),
        (("a",), "a"),
        ((), ("",)),
        ((("a",), "b"), ("a", ("b",))),
        ("1", 1),
        (1, True),
        (0, None),
        ("", b""),
        ("a", b"a"),
        (255, -1),
        (-128, 128),
        ("\ud800\udc00", "\U00010000"),
        ("e\u0301", "\u00e9"),
    ],
)
def test_look_alikes_have_different_encodings(first: object, second: object) -> None:
    assert encode_value(first) != encode_value(second)


def test_integers_of_any_size_can_be_encoded() -> None:
    assert encode_value(10**5000) != encode_value(10**5000 + 1)


@pytest.mark.parametrize("value", [1.5, [1], {"a": 1}, (1, [2]), bytearray(b"a"), np.int64(1), frozenset({1})])
def test_values_without_one_encoding_are_refused(value: object) -> None:
    with pytest.raises(InvalidRequestError, match="cannot hash a"):
        encode_value(value)


def test_every_identity_field_changes_the_fingerprint() -> None:
    identities = [
        CacheIdentity(),
        CacheIdentity(model="x"),
        CacheIdentity(revision="x"),
        CacheIdentity(dtype="x"),
        CacheIdentity(layout="x"),
        CacheIdentity(epoch=1),
        CacheIdentity(page_bytes=((1,),)),
        CacheIdentity(page_bytes=((1,), ())),
        CacheIdentity(page_bytes=((1, 1),)),
        CacheIdentity(page_bytes=((1,), (1,))),
        CacheIdentity(block_tokens=(1,)),
        CacheIdentity(parallel_shape=(("x", 1),)),
        CacheIdentity(rank=0),
        CacheIdentity(rank=1),
    ]
    assert len({identity.fingerprint for identity in identities}) == len(identities)
    assert len({root_hash(identity) for identity in identities}) == len(identities)


def test_an_epoch_changes_nothing_but_the_epoch() -> None:
    later = IDENTITY.next_epoch()
    assert (later.epoch, later.model, later.rank) == (3, "llama", 1)
    assert later.fingerprint != IDENTITY.fingerprint


def test_additions_of_a_request_cannot_spell_each_other() -> None:
    identity = CacheIdentity()
    additions: list[dict[str, object]] = [
        {},
        {"adapter": "sql"},
        {"salt": "sql"},
        {"adapter": "sql", "salt": ""},
        {"adapter": "", "salt": "sql"},
        {"salt": "adapter=sql"},
        {"adapter": "sql", "salt": "x"},
        {"adapter": "sqlx", "salt": ""},
        {"adapter": "sqlsalt", "salt": "x"},
        {"adapter": "x", "salt": "sql"},
        {"salt": b"sql"},
        {"salt": 1},
        {"salt": "1"},
        {"salt": True},
        {"salt": None},
        {"salt": ("sql",)},
        {"adapter": ("sql", "salt", "x")},
        {"identity": "x"},
    ]
    assert len({root_hash(identity, **added) for added in additions}) == len(additions)


def test_the_order_of_additions_does_not_matter() -> None:
    assert root_hash(IDENTITY, a=1, b=2) == root_hash(IDENTITY, b=2, a=1)


@given(st.text(), st.text(), st.text(), st.text())
def test_adapter_and_salt_are_told_apart(adapter: str, salt: str, other_adapter: str, other_salt: str) -> None:
    same = (adapter, salt) == (other_adapter, other_salt)
    first = root_hash(IDENTITY, adapter=adapter, salt=salt)
    assert (first == root_hash(IDENTITY, adapter=other_adapter, salt=other_salt)) == same


# ---- chaining


@given(token_lists, st.integers(1, 9))
def test_only_full_blocks_have_a_hash(token_ids: list[int], block_tokens: int) -> None:
    hashes = block_hashes(ROOT, token_ids, block_tokens)
    assert len(hashes) == len(token_ids) // block_tokens
    assert all(len(block_hash) == HASH_BYTES for block_hash in hashes)
    assert len(set(hashes)) == len(hashes)


@given(token_lists, token_lists, st.integers(1, 9))
def test_hashes_agree_exactly_as_far_as_the_tokens(first: list[int], second: list[int], block_tokens: int) -> None:
    agreeing = 0
    while agreeing < min(len(first), len(second)) and first[agreeing] == second[agreeing]:
        agreeing += 1
    pairs = zip(block_hashes(ROOT, first, block_tokens), block_hashes(ROOT, second, block_tokens), strict=False)
    for block, (one, other) in enumerate(pairs):
        assert (one == other) == ((block + 1) * block_tokens <= agreeing)


@given(st.lists(st.integers(0, 9), min_size=4, max_size=24), st.integers(0, 23), st.integers(1, 4))
def test_one_other_token_changes_every_later_block(token_ids: list[int], position: int, block_tokens: int) -> None:
    position %= len(token_ids)
    changed = [*token_ids]
    changed[position] += 1
    before = block_hashes(ROOT, token_ids, block_tokens)
    after = block_hashes(ROOT, changed, block_tokens)
    first_changed = position // block_tokens
    assert before[:first_changed] == after[:first_changed]
    assert not set(before[first_changed:]) & set(after)


def test_a_chain_depends_on_its_root_and_its_block_size() -> None:
    other_root = root_hash(IDENTITY, adapter="other", salt="t")
    chains = [block_hashes(ROOT, range(16), tokens) for tokens in (1, 2, 4, 8, 16)]
    chains.append(block_hashes(other_root, range(16), 4))
    hashes = [block_hash for chain in chains for block_hash in chain]
    assert len(set(hashes)) == len(hashes)


# ---- token ids


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "int32", "uint32", "int64", "uint64", ">i4", ">i8"])
def test_all_integer_arrays_hash_alike(dtype: str) -> None:
    token_ids = list(range(100))
    expected = block_hashes(ROOT, token_ids, 16)
    assert block_hashes(ROOT, np.array(token_ids, dtype=dtype), 16) == expected
    assert block_hashes(ROOT, np.repeat(np.array(token_ids, dtype=dtype), 2)[::2], 16) == expected


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_tensors_hash_like_lists(dtype: torch.dtype) -> None:
    tensor: Any = torch.arange(100, dtype=dtype)
    assert block_hashes(ROOT, tensor, 16) == block_hashes(ROOT, list(range(100)), 16)


def test_ranges_and_tuples_hash_like_lists() -> None:
    expected = block_hashes(ROOT, [0, 1, 2, 3], 2)
    assert block_hashes(ROOT, range(4), 2) == block_hashes(ROOT, (0, 1, 2, 3), 2) == expected


def test_negative_token_ids_are_integers_too() -> None:
    # Engines use them as place holders, for images among others.
    assert block_hashes(ROOT, [-1, -2], 2) != block_hashes(ROOT, [1, 2], 2)


@pytest.mark.parametrize("token_ids", [[], (), np.array([], dtype=np.int32), np.array([])])
def test_no_tokens_have_no_hashes(token_ids: Any) -> None:
    assert block_hashes(ROOT, token_ids, 4) == []


@pytest.mark.parametrize(
    "token_ids",
    [
        [0.0, 1.0],
        [0, 1.5],
        [True, False],
        ["0", "1"],
        [None, 1],
        [0, 1 << 63],
        [0, 1 << 64],
        [-(1 << 63) - 1, 0],
        np.array([0, (1 << 64) - 1], dtype=np.uint64),
        np.array([0.0, 1.0]),
        np.array([[0, 1], [2, 3]]),
        [[0, 1], [2, 3]],
        [[0, 1], [2]],
        np.array(7),
        7,
        "ab",
        torch.tensor([0.0, 1.0]),
        torch.tensor([0.0, 1.0], dtype=torch.bfloat16),
    ],
    ids=repr,
)
def test_what_are_no_token_ids_is_refused(token_ids: Any) -> None:
    with pytest.raises(InvalidRequestError, match="flat sequence of integers of 64 bits"):
        block_hashes(ROOT, token_ids, 2)


@given(st.integers(-(1 << 63), (1 << 63) - 1), st.integers(-(1 << 63), (1 << 63) - 1))
def test_all_token_ids_of_64_bits_differ(first: int, second: int) -> None:
    assert (block_hashes(ROOT, [first], 1) == block_hashes(ROOT, [second], 1)) == (first == second)


@pytest.mark.parametrize("block_tokens", [0, -1])
def test_blocks_have_tokens(block_tokens: int) -> None:
    with pytest.raises(InvalidRequestError, match="block_tokens"):
        block_hashes(ROOT, [1, 2], block_tokens)


@pytest.mark.parametrize("root", [b"", ROOT[:-1], ROOT + (5).to_bytes(8, "little"), "a" * 32])
def test_a_chain_cannot_start_in_the_middle_of_another(root: Any) -> None:
    with pytest.raises(InvalidRequestError, match="root_hash"):
        block_hashes(root, [1, 2], 2)


# ---- keys


@given(st.binary(max_size=64), st.integers(0, (1 << 32) - 1))
def test_a_key_can_be_taken_apart(block_hash: bytes, group_index: int) -> None:
    key = make_offload_key(block_hash, group_index)
    assert len(key) == len(block_hash) + GROUP_INDEX_BYTES
    assert (offload_block_hash(key), offload_group_index(key)) == (block_hash, group_index)


def test_the_group_index_is_big_endian() -> None:
    assert make_offload_key(b"hash", 0x01020304) == b"hash\x01\x02\x03\x04"
    assert make_offload_key(b"hash") == b"hash\0\0\0\0"


@pytest.mark.parametrize("group_index", [-1, 1 << 32])
def test_the_group_index_fits_four_bytes(group_index: int) -> None:
    with pytest.raises(InvalidRequestError, match="group index"):
        make_offload_key(b"hash", group_index)


@pytest.mark.parametrize("block_hash", [7, "a" * 32, bytearray(32), None])
def test_hashes_are_bytes(block_hash: Any) -> None:
    with pytest.raises(InvalidRequestError, match="is bytes"):
        make_offload_key(block_hash)
    with pytest.raises(InvalidRequestError, match="is bytes"):
        offload_keys([block_hash])


@given(st.integers(0, 20), st.integers(1, 6), st.integers(0, 3))
def test_the_last_gpu_block_names_the_offloaded_block(block_count: int, factor: int, group_index: int) -> None:
    hashes = block_hashes(ROOT, range(block_count), 1)
    keys = offload_keys(iter(hashes), block_size_factor=factor, group_index=group_index)
    assert len(keys) == block_count // factor
    for block, key in enumerate(keys):
        assert offload_block_hash(key) == hashes[block * factor + factor - 1]
        assert offload_group_index(key) == group_index


def test_engine_hashes_have_at_least_sixteen_bytes() -> None:
    assert offload_keys([bytes(16)]) == [bytes(20)]
    with pytest.raises(InvalidRequestError, match="hash of 15 bytes"):
        offload_keys([bytes(16), bytes(15)])


@pytest.mark.parametrize("factor", [0, -2])
def test_an_offloaded_block_has_gpu_blocks(factor: int) -> None:
    with pytest.raises(InvalidRequestError, match="block_size_factor"):
        offload_keys([bytes(16)], block_size_factor=factor)
