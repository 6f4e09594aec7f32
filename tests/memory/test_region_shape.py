"""Rows, slices, views and shares: the arithmetic of a shared region."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from region_rig import Group, ranks_of, shape_of

from aiokvoffload.errors import ConfigurationError, InvalidRequestError
from aiokvoffload.memory.page_calls import PAGE_BYTES
from aiokvoffload.memory.region_shape import RegionShape
from aiokvoffload.testing.memory_contract import slot_of

shapes = st.builds(
    RegionShape,
    block_count=st.integers(1, 40),
    slice_bytes=st.one_of(st.integers(1, 3 * PAGE_BYTES), st.integers(1, 3).map(lambda pages: pages * PAGE_BYTES)),
    world_size=st.integers(1, 5),
    is_replicated=st.booleans(),
    has_scheduler=st.booleans(),
)


@given(shapes)
def test_shares_are_all_pages_each_once(shape: RegionShape) -> None:
    populated = np.zeros(shape.board_offset // PAGE_BYTES, np.int64)
    for rank in ranks_of(shape):
        for part in shape.share(rank):
            assert part
            assert part.start % PAGE_BYTES == part.stop % PAGE_BYTES == 0
            populated[part.start // PAGE_BYTES : part.stop // PAGE_BYTES] += 1
    assert np.all(populated == 1)
    assert shape.byte_count <= shape.board_offset < shape.byte_count + PAGE_BYTES


def test_slices_of_whole_pages_are_populated_by_their_own_worker() -> None:
    shape = shape_of(block_count=2, slice_bytes=2 * PAGE_BYTES)
    assert list(shape.share(1)) == [
        range(2 * PAGE_BYTES, 4 * PAGE_BYTES),
        range(6 * PAGE_BYTES, 8 * PAGE_BYTES),
    ]


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(shape=shapes, data=st.data())
def test_views_are_the_layers_of_a_slice_in_turn(directory: Path, shape: RegionShape, data: st.DataObject) -> None:
    group = Group(directory, shape)
    expected = np.zeros((shape.block_count, shape.row_bytes), np.uint8)
    for region in group.regions:
        if region.rank is None or (shape.is_replicated and region.rank > 0):
            continue
        first = start = region.rank * shape.slice_bytes
        while region.unviewed_bytes:
            page_bytes = data.draw(st.integers(1, region.unviewed_bytes))
            view = region.create_next_view(page_bytes)
            assert view.shape == (shape.block_count, page_bytes)
            view[:] = value = data.draw(st.integers(1, 255))
            expected[:, start : start + page_bytes] = value
            start += page_bytes
        assert start == first + shape.slice_bytes
        for slot in range(region.slot_count):
            assert np.array_equal(slot_of(region, slot), expected[slot, first:start])
    for region in group.regions:
        assert np.array_equal(region.rows, expected)
    group.close()


def test_a_view_that_does_not_fit_changes_nothing(directory: Path) -> None:
    group = Group(directory, shape_of(slice_bytes=100))
    region = group.regions[1]
    region.create_next_view(60)
    for page_bytes in (41, 0, -1):
        with pytest.raises(InvalidRequestError, match=f"a view of {page_bytes} bytes does not fit: 40 of a slot's 100"):
            region.create_next_view(page_bytes)
    assert region.unviewed_bytes == 40
    view = region.create_next_view(40)
    assert view.ctypes.data == region.address + 60
    assert view.strides == (200, 1)
    assert region.unviewed_bytes == 0
    with pytest.raises(InvalidRequestError, match="0 of a slot's 100 bytes are left"):
        region.create_next_view(1)
    group.close()


def test_what_one_process_writes_the_others_read(directory: Path) -> None:
    group = Group(directory, shape_of(block_count=3, slice_bytes=10, has_scheduler=True))
    worker_0, worker_1, scheduler = group.regions
    slot_of(worker_1, 2)[:] = 7
    slot_of(worker_0, 0)[:] = 5
    assert (scheduler.slot_bytes, scheduler.slot_stride_bytes) == (20, 20)
    assert slot_of(scheduler, 2).tolist() == [0] * 10 + [7] * 10
    assert slot_of(scheduler, 0).tolist() == [5] * 10 + [0] * 10
    group.close()


def test_workers_that_hold_the_same_bytes_share_one_slice(directory: Path) -> None:
    group = Group(directory, shape_of(block_count=3, slice_bytes=10, world_size=3, is_replicated=True))
    assert group.prepare() == [None] * 3
    slot_of(group.regions[0], 1)[:] = 9
    for region in group.regions:
        assert region.slot_stride_bytes == 10
        assert slot_of(region, 1).tolist() == [9] * 10
    group.close()


@pytest.mark.parametrize("sizes", [(0, 1, 1), (1, 0, 1), (1, 1, 0), (1, 1, -2)])
def test_a_region_without_bytes(sizes: tuple[int, int, int]) -> None:
    with pytest.raises(ConfigurationError, match="all three must be at least 1"):
        shape_of(*sizes)


def test_more_workers_than_a_host_has() -> None:
    with pytest.raises(ConfigurationError, match="world_size is 1025; one region serves up to 1024"):
        shape_of(1, 1, 1025)


@pytest.mark.parametrize(
    ("rank", "sentence"), [(2, "there are 2 workers"), (-1, "from 0"), (None, "has_scheduler=False")]
)
def test_a_rank_that_is_not_there(rank: int | None, sentence: str) -> None:
    with pytest.raises(ConfigurationError, match=sentence):
        shape_of().check_rank(rank)
