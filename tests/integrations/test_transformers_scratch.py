"""Blocks between a model's cache and the offloader."""

from __future__ import annotations

import pytest
import torch
from transformers_rig import tiny_model, transformers

from aiokvoffload.integrations.transformers.layout import CacheLayout, CutLayer, probe_layout
from aiokvoffload.integrations.transformers.scratch import ScratchBlocks, new_block_tensors, runs

pytestmark = pytest.mark.usefixtures("one_thread")

BLOCK_TOKENS = 4
TOKENS = 20


@pytest.mark.parametrize("blocks", [[0, 1, 2, 3, 4], [5, 6, 0, 1, 4], [6, 5, 4, 3, 2], [2]])
@pytest.mark.parametrize("cut", [(0, 0), (1, 0), (3, 2), (0, 3), (1, 1)])
def test_what_was_filled_is_emptied_into_its_columns(blocks: list[int], cut: tuple[int, int]) -> None:
    layout = probe_layout(tiny_model())
    scratch = ScratchBlocks(layout, new_block_tensors(layout, BLOCK_TOKENS, 7), BLOCK_TOKENS, 7)
    cache = transformers.DynamicCache()
    tensors = {}
    for layer in layout.layers:
        shapes = ((2, heads, TOKENS, elements) for heads, elements in (layer.key_shape, layer.value_shape))
        tensors[layer.index] = tuple(torch.randn(shape) for shape in shapes)
        cache.update(*tensors[layer.index], layer.index)
    scratch.fill(0, blocks, cache, 1, 0)
    source = range(cut[0], len(blocks) * BLOCK_TOKENS - cut[1])
    (part,) = scratch.parts(0)
    assert len(part.layers) > 1  # what is copied at once
    rows = [torch.stack([tensors[layer.index][which][1] for layer in part.layers]) for which in (0, 1)]
    new = [torch.zeros_like(row) for row in rows]
    scratch.empty(part, blocks, new[0], new[1], source, 0)
    for made, row in zip(new, rows, strict=True):
        assert torch.equal(made[:, :, : len(source)], row[:, :, source.start : source.stop])
        assert not made[:, :, len(source) :].any()


def test_layers_of_several_dtypes_share_a_block_without_overlap() -> None:
    layers = tuple(
        CutLayer(index=index, window_tokens=None, key_shape=(1, 3), value_shape=(1, 5), dtype=dtype)
        for index, dtype in enumerate((torch.bfloat16, torch.float32, torch.float32, torch.float16))
    )
    tensors = new_block_tensors(CacheLayout(layers, 4, torch.device("cpu")), 1, 2)
    (parts,) = tensors.parts
    assert [len(part.layers) for part in parts] == [1, 2, 1]
    views = [
        blocks_of[:, place]
        for part in parts
        for place in range(len(part.layers))
        for blocks_of in (part.keys, part.values)
    ]
    for number, view in enumerate(views):
        view[:] = number
    assert [set(view.flatten().tolist()) for view in views] == [{float(number)} for number in range(8)]
    (blocks,) = tensors.groups
    assert blocks.is_contiguous()
    assert all(view.untyped_storage().data_ptr() == blocks.untyped_storage().data_ptr() for view in views)


def test_the_memory_of_no_more_than_eight_layers_is_one_piece() -> None:
    layers = tuple(
        CutLayer(index=index, window_tokens=None, key_shape=(1, 3), value_shape=(1, 3), dtype=torch.float32)
        for index in range(19)
    )
    (parts,) = new_block_tensors(CacheLayout(layers, 19, torch.device("cpu")), 1, 2).parts
    assert [[layer.index for layer in part.layers] for part in parts] == [
        [*range(8)],
        [*range(8, 16)],
        [*range(16, 19)],
    ]


def test_numbers_are_split_into_runs_of_neighbours_in_their_order() -> None:
    assert list(runs([5, 6, 0, 1, 2, 4], 6)) == [range(5, 7), range(3), range(4, 5)]
    assert list(runs([5, 6, 7, 8, 9], 2)) == [range(5, 7), range(7, 9), range(9, 10)]
    assert list(runs([], 2)) == []
