"""Where every byte of a transfer is read and written, against a model that is a plain loop."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from aiokvoffload.devices.base import CopyPlan, Direction
from aiokvoffload.devices.host_copy import copy_one_by_one
from aiokvoffload.errors import ConfigurationError, InvalidRequestError
from aiokvoffload.kv_caches import CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor, KVGroup
from aiokvoffload.memory.pinned import PinnedMemory
from aiokvoffload.memory.preparation import PreparationOptions
from aiokvoffload.specs import CPULoadStoreSpec, GPULoadStoreSpec
from aiokvoffload.testing.device import ManualDevice
from aiokvoffload.transfers.pointers import SlotLayout, compute_sub_block_ptrs, merge_runs


def ids(*numbers: int) -> NDArray[np.int64]:
    return np.array(numbers, np.int64)


# compute_sub_block_ptrs


@pytest.mark.parametrize(
    ("blocks", "factor", "skip_count", "count", "expected"),
    [
        ((0,), 1, 0, 1, [1000]),
        ((2, 0), 1, 0, 2, [1200, 1000]),
        ((0, 1), 2, 0, 4, [1000, 1010, 1100, 1110]),
        ((0, 1), 2, 1, 3, [1010, 1100, 1110]),
        ((0, 1), 2, 1, 2, [1010, 1100]),
        ((5, 3), 3, 2, 3, [1520, 1300, 1310]),
        ((4,), 4, 3, 1, [1430]),
        ((), 3, 0, 0, []),
    ],
)
def test_golden_addresses(
    blocks: tuple[int, ...], factor: int, skip_count: int, count: int, expected: list[int]
) -> None:
    output = np.zeros(count, np.int64)
    compute_sub_block_ptrs(
        ids(*blocks),
        factor,
        output,
        base_address=1000,
        row_stride_bytes=100,
        sub_block_bytes=10,
        skip_count=skip_count,
    )
    assert output.tolist() == expected


@given(
    blocks=st.lists(st.integers(0, 1 << 20), min_size=1, max_size=8),
    factor=st.integers(1, 4),
    skip_count=st.integers(0, 3),
    left_out=st.integers(0, 3),
    sub_block_bytes=st.integers(1, 1 << 16),
    base_address=st.integers(0, 1 << 46),
    gap=st.integers(0, 1 << 10),
)
def test_addresses_against_a_plain_loop(
    blocks: list[int], factor: int, skip_count: int, left_out: int, sub_block_bytes: int, base_address: int, gap: int
) -> None:
    skip_count %= factor
    count = max(len(blocks) * factor - skip_count - left_out % factor, (len(blocks) - 1) * factor + 1 - skip_count, 1)
    stride = sub_block_bytes * factor + gap
    output = np.zeros(count, np.int64)
    compute_sub_block_ptrs(
        np.array(blocks, np.int64),
        factor,
        output,
        base_address=base_address,
        row_stride_bytes=stride,
        sub_block_bytes=sub_block_bytes,
        skip_count=skip_count,
    )
    every = [
        base_address + block * stride + sub_block * sub_block_bytes for block in blocks for sub_block in range(factor)
    ]
    assert output.tolist() == every[skip_count : skip_count + count]


@pytest.mark.parametrize(
    ("block_count", "factor", "skip_count", "count", "message"),
    [
        (1, 2, 2, 1, "skip_count 2 is not between 0 and 1"),
        (1, 2, -1, 1, "skip_count -1"),
        (1, 2, 0, 3, "1 blocks of 2 do not fit 3"),
        (2, 2, 0, 2, "2 blocks of 2 do not fit 2"),
        (1, 2, 1, 2, "after 1"),
        (0, 2, 0, 1, "0 blocks"),
        (1, 2, 0, 0, "1 blocks"),
    ],
)
def test_addresses_that_do_not_fit(block_count: int, factor: int, skip_count: int, count: int, message: str) -> None:
    output = np.zeros(count, np.int64)
    with pytest.raises(InvalidRequestError, match=message):
        compute_sub_block_ptrs(
            np.arange(block_count, dtype=np.int64),
            factor,
            output,
            base_address=0,
            row_stride_bytes=1,
            sub_block_bytes=1,
            skip_count=skip_count,
        )


# merge_runs


@given(
    st.lists(
        st.tuples(st.integers(0, 12), st.integers(0, 12), st.integers(1, 3)),
        max_size=12,
        unique_by=(lambda copy: copy[0], lambda copy: copy[1]),
    )
)
def test_merged_runs_move_the_same_bytes_and_cannot_be_merged_further(copies: list[tuple[int, int, int]]) -> None:
    sources, destinations, byte_counts = (np.array([copy[side] for copy in copies], np.int64) for side in range(3))
    merged = list(zip(*(column.tolist() for column in merge_runs(sources, destinations, byte_counts)), strict=True))
    assert _bytes_of(merged) == _bytes_of(copies)
    for (source, destination, count), following in itertools.pairwise(merged):
        assert following[:2] != (source + count, destination + count)
    assert all(column.dtype == np.int64 for column in merge_runs(sources, destinations, byte_counts))


def _bytes_of(copies: Sequence[tuple[int, int, int]]) -> list[tuple[int, int]]:
    """Return which byte goes where, in order."""
    return [(source + index, destination + index) for source, destination, count in copies for index in range(count)]


def test_runs_merge_only_where_both_sides_go_on() -> None:
    merged = merge_runs(ids(0, 4, 8, 20, 24), ids(100, 104, 200, 204, 208), ids(4, 4, 4, 4, 4))
    assert [column.tolist() for column in merged] == [[0, 8, 20], [100, 200, 204], [8, 4, 8]]


# SlotLayout


@dataclass
class World:
    """Caches, slots, and a plain copy of both to move bytes in by hand."""

    caches: CanonicalKVCaches
    factor: int

    def __post_init__(self) -> None:
        self.layout = SlotLayout(self.caches, self.factor)
        self.memory = PinnedMemory(8, self.layout.slot_bytes, ManualDevice())
        generator = np.random.default_rng(5)
        for canonical in self.caches.tensors:
            raw = torch.from_numpy(generator.integers(-128, 128, tuple(canonical.tensor.shape), np.int8))
            canonical.tensor.copy_(raw)
        self.memory.buffer[:] = generator.integers(0, 256, len(self.memory.buffer), np.uint8)

    def slots(self) -> NDArray[np.uint8]:
        return self.memory.buffer.reshape(8, -1).copy()

    def pages(self) -> list[NDArray[np.uint8]]:
        return [canonical.tensor.numpy().copy().view(np.uint8) for canonical in self.caches.tensors]

    def moved_by_hand(
        self, gpu_spec: GPULoadStoreSpec, slots: Sequence[int], direction: Direction, keep: Sequence[bool]
    ) -> tuple[list[NDArray[np.uint8]], NDArray[np.uint8]]:
        """Return pages and slots after the transfer, byte range by byte range, in the most literal way."""
        pages, memory = self.pages(), self.slots()
        position = first_slot = 0
        for group, (size, index) in enumerate(zip(gpu_spec.group_sizes, gpu_spec.block_indices, strict=True)):
            skip = index % self.factor
            for number in range(size):
                block = int(gpu_spec.block_ids[position])
                sub_block = (skip + number) % self.factor
                slot = slots[first_slot + (skip + number) // self.factor]
                offset = 0
                for ref in self.caches.group_refs[group]:
                    start = offset + sub_block * ref.page_bytes
                    in_slot = memory[slot, start : start + ref.page_bytes]
                    in_page = pages[ref.tensor_index][block, : ref.page_bytes]
                    if keep[position]:
                        if direction is Direction.STORE:
                            in_slot[:] = in_page
                        else:
                            in_page[:] = in_slot
                    offset += ref.page_bytes * self.factor
                position += 1
            first_slot += -(-(skip + size) // self.factor) if size else 0
        return pages, memory

    def check(
        self, gpu_spec: GPULoadStoreSpec, slots: Sequence[int], direction: Direction, keep: Sequence[bool] | None = None
    ) -> CopyPlan:
        mask = None if keep is None else np.array(keep, np.bool_)
        everything = [True] * len(gpu_spec)
        expected = self.moved_by_hand(gpu_spec, slots, direction, everything if keep is None else keep)
        plan = self.layout.plan(gpu_spec, CPULoadStoreSpec(slots), direction, self.memory, mask)
        plan.validate()
        assert plan.direction is direction
        copy_one_by_one(plan.sources, plan.destinations, plan.byte_counts)
        for found, wanted in zip(self.pages(), expected[0], strict=True):
            assert np.array_equal(found, wanted)
        assert np.array_equal(self.slots(), expected[1])
        return plan


def _make_caches(
    page_bytes: Sequence[Sequence[int]], padding: int = 0, gap: int = 0, block_count: int = 12
) -> CanonicalKVCaches:
    """Return caches of one group per sequence, with one tensor of its own for each of its references."""
    tensors: list[CanonicalKVCacheTensor] = []
    group_refs: list[tuple[CanonicalKVCacheRef, ...]] = []
    for pages in page_bytes:
        refs = []
        for size in pages:
            whole = torch.zeros((block_count, size + padding + gap), dtype=torch.int8)
            refs.append(CanonicalKVCacheRef(len(tensors), size))
            tensors.append(CanonicalKVCacheTensor(whole[:, : size + padding], size + padding))
        group_refs.append(tuple(refs))
    groups = [KVGroup(block_tokens=4, layers=[number]) for number in range(len(page_bytes))]
    return CanonicalKVCaches(tuple(tensors), tuple(group_refs), tuple(groups))


@given(data=st.data())
def test_a_plan_against_moving_bytes_by_hand(data: st.DataObject) -> None:
    page_bytes = data.draw(
        st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=3), min_size=1, max_size=3), label="page_bytes"
    )
    factor = data.draw(st.integers(1, 4), label="factor")
    world = World(
        _make_caches(page_bytes, data.draw(st.integers(0, 3), label="padding"), data.draw(st.integers(0, 3))), factor
    )
    sizes = [data.draw(st.integers(0, 6), label="size") for _ in page_bytes]
    indices = [data.draw(st.integers(0, 9), label="index") for _ in page_bytes]
    blocks = [
        block
        for size in sizes
        for block in data.draw(st.lists(st.integers(0, 11), min_size=size, max_size=size, unique=True))
    ]
    slot_count = sum(-(-(index % factor + size) // factor) for size, index in zip(sizes, indices, strict=True) if size)
    if slot_count > 8:
        return
    slots = data.draw(st.permutations(range(8)))[:slot_count]
    direction = data.draw(st.sampled_from(Direction))
    keep = data.draw(st.none() | st.lists(st.booleans(), min_size=len(blocks), max_size=len(blocks)))
    world.check(GPULoadStoreSpec(blocks, sizes, indices), slots, direction, keep)


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize("factor", [1, 2, 3, 4])
def test_the_first_block_may_lie_inside_its_slot(factor: int, direction: Direction) -> None:
    for index, size in itertools.product(range(2 * factor), range(1, 2 * factor + 1)):
        world = World(_make_caches([[5, 3]]), factor)
        slot_count = -(-(index % factor + size) // factor)
        world.check(GPULoadStoreSpec(range(size), [size], [index]), [7, 2, 5][:slot_count], direction)


def test_empty_groups_take_no_slots() -> None:
    world = World(_make_caches([[4], [6, 2], [3]]), 2)
    plan = world.check(GPULoadStoreSpec([1, 5, 2], [0, 0, 3], [1, 3, 1]), [4, 0], Direction.STORE)
    assert plan.total_bytes == 9
    nothing = world.check(GPULoadStoreSpec([], [0, 0, 0], [0, 0, 0]), [], Direction.LOAD)
    assert nothing.total_bytes == 0
    assert nothing.sources.size == 0


def test_every_group_begins_at_the_start_of_a_slot_and_the_largest_one_sizes_it() -> None:
    layout = SlotLayout(_make_caches([[4], [6, 2], [3]]), 3)
    assert layout.group_slot_bytes == (12, 24, 9)
    assert layout.slot_bytes == 24


def test_neighbours_are_one_copy() -> None:
    world = World(_make_caches([[8]]), 4)
    plan = world.check(GPULoadStoreSpec([3, 4, 5, 6], [4], [0]), [2], Direction.STORE)
    assert plan.byte_counts.tolist() == [32]
    # Pages with padding between them are not neighbours.
    padded = World(_make_caches([[8]], padding=2), 4)
    plan = padded.check(GPULoadStoreSpec([3, 4, 5, 6], [4], [0]), [2], Direction.LOAD)
    assert plan.byte_counts.tolist() == [8] * 4


@pytest.mark.parametrize("count", [1, 3])
def test_a_later_plan_changes_nothing_in_an_earlier_one(count: int) -> None:
    layout = SlotLayout(CanonicalKVCaches.from_layers([torch.zeros((8, 16), dtype=torch.uint8)]), 1)
    memory = PinnedMemory(8, layout.slot_bytes, ManualDevice())

    def plan(*blocks: int) -> list[list[int]]:
        specs = GPULoadStoreSpec(blocks, [len(blocks)], [0]), CPULoadStoreSpec(blocks)
        plans.append(layout.plan(*specs, Direction.STORE, memory))
        return [column.tolist() for column in (plans[-1].sources, plans[-1].destinations, plans[-1].byte_counts)]

    plans: list[CopyPlan] = []
    before = plan(*range(0, 2 * count, 2))
    plan(*range(1, 2 * count + 1, 2))
    assert [column.tolist() for column in (plans[0].sources, plans[0].destinations, plans[0].byte_counts)] == before
    memory.close()


def test_a_plan_keeps_its_memory_alive() -> None:
    world = World(_make_caches([[8]]), 1)
    plan = world.check(GPULoadStoreSpec([0], [1], [0]), [0], Direction.STORE)
    assert plan.keep_alive[0] is world.memory.buffer
    assert [*plan.keep_alive[1:]] == [canonical.tensor for canonical in world.caches.tensors]


@given(data=st.data())
def test_places_tell_apart_what_a_plan_touches(data: st.DataObject) -> None:
    factor = data.draw(st.integers(1, 4))
    sizes = [data.draw(st.integers(0, 5)) for _ in range(2)]
    indices = [data.draw(st.integers(0, 7)) for _ in range(2)]
    layout = SlotLayout(_make_caches([[1], [2]]), factor)
    counts = [-(-(index % factor + size) // factor) if size else 0 for size, index in zip(sizes, indices, strict=True)]
    slots = data.draw(st.permutations(range(20)))[: sum(counts)]
    blocks = [data.draw(st.integers(0, 7)) for _ in range(sum(sizes))]
    expected: dict[int, set[tuple[int, int, int]]] = {}
    first = position = 0
    for group, (size, index) in enumerate(zip(sizes, indices, strict=True)):
        for number in range(size):
            place = index % factor + number
            where = (slots[first + place // factor], place % factor, group)
            expected.setdefault(blocks[position], set()).add(where)
            position += 1
        first += counts[group]
    found = layout.places(GPULoadStoreSpec(blocks, sizes, indices), CPULoadStoreSpec(slots))
    assert found.keys() == expected.keys()
    number_of: dict[tuple[int, int, int], int] = {}
    for block, places in found.items():
        numbers = [places] if isinstance(places, int) else sorted(places)
        for where, number in zip(sorted(expected[block]), numbers, strict=True):
            assert number_of.setdefault(where, number) == number
        assert {slot for slot, _, _ in expected[block]} == set(layout.slots_of(places))
    assert len(set(number_of.values())) == len(number_of)


@pytest.mark.parametrize(
    ("blocks", "sizes", "indices", "slots", "message"),
    [
        ([12], [1, 0], [0, 0], [0], "GPU block 12 is out of range: there are 12, from 0"),
        ([0], [1, 0], [0, 0], [8], "slot 8 is out of range: there are 8, from 0"),
        ([0], [1], [0], [0], "the KV cache has 2 groups, but the GPU blocks come in 1"),
        ([0, 1], [2, 0], [0, 0], [0, 1], "need 1 slots, not 2"),
        ([0, 1], [2, 0], [1, 0], [0], "need 2 slots, not 1"),
        ([0, 1], [1, 1], [0, 0], [0], "need 2 slots, not 1"),
        ([], [0, 0], [0, 0], [0], "need 0 slots, not 1"),
    ],
)
def test_ends_that_do_not_fit(
    blocks: list[int], sizes: list[int], indices: list[int], slots: list[int], message: str
) -> None:
    world = World(_make_caches([[4], [4]]), 2)
    with pytest.raises(InvalidRequestError, match=message):
        world.layout.plan(
            GPULoadStoreSpec(blocks, sizes, indices), CPULoadStoreSpec(slots), Direction.LOAD, world.memory
        )


@pytest.mark.parametrize("factor", [0, -1])
def test_a_factor_that_is_not_positive(factor: int) -> None:
    with pytest.raises(ConfigurationError, match=f"block_size_factor is {factor}"):
        SlotLayout(_make_caches([[4]]), factor)


@pytest.mark.parametrize("direction", list(Direction))
def test_no_copy_goes_from_one_registration_into_the_next(direction: Direction) -> None:
    caches = CanonicalKVCaches.from_layers([torch.zeros((16, 4096), dtype=torch.int8)])
    layout = SlotLayout(caches, 2)
    memory = PinnedMemory(8, layout.slot_bytes, ManualDevice(), options=PreparationOptions(piece_bytes=3 * 8192))
    plan = layout.plan(GPULoadStoreSpec(range(1, 14), [13], [1]), CPULoadStoreSpec(range(1, 8)), direction, memory)
    # The first sub-block of slot 1 is left out; slots 3 and 6 begin pieces.
    assert plan.byte_counts.tolist() == [3 * 4096, 6 * 4096, 4 * 4096]
    memory.close()
