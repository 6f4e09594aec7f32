from __future__ import annotations

import itertools
import math
import os
import pickle
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import aiokvoffload
from aiokvoffload.errors import ConfigurationError, InvalidRequestError, LayoutError
from aiokvoffload.kv_caches import CacheShape, CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor, KVGroup

DTYPES = [
    torch.int8,
    torch.uint8,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
]


def filled(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """A contiguous tensor of random bytes."""
    return torch.randint(0, 256, (math.prod(shape) * dtype.itemsize,), dtype=torch.uint8).view(dtype).view(shape)


def bytes_of(tensor: torch.Tensor) -> bytes:
    """Bytes of the elements in the order of the axes."""
    return bytes(tensor.contiguous().flatten().view(torch.uint8).tolist())


def block_bytes(caches: CanonicalKVCaches, block: int, group: int = 0) -> list[bytes]:
    """Bytes that a transfer would copy for one block, one page per reference."""
    return [
        bytes_of(caches.tensors[ref.tensor_index].tensor[block, : ref.page_bytes]) for ref in caches.group_refs[group]
    ]


def sizes(caches: CanonicalKVCaches) -> list[tuple[int, int]]:
    return [(canonical.tensor.shape[0], canonical.tensor.shape[1]) for canonical in caches.tensors]


def indices(caches: CanonicalKVCaches) -> list[list[int]]:
    return [[ref.tensor_index for ref in refs] for refs in caches.group_refs]


# ---- groups


def make_group(block_tokens: Any = 16, layers: Any = (0,), kind: Any = "full", window_tokens: Any = None) -> KVGroup:
    return KVGroup(block_tokens, layers, kind, window_tokens)


def test_a_group_is_full_unless_said_otherwise() -> None:
    group = KVGroup(block_tokens=16, layers=range(3))
    assert (group.kind, group.window_tokens, group.layers) == ("full", None, (0, 1, 2))
    assert group == KVGroup(16, [0, 1, 2])
    assert hash(group) == hash(KVGroup(16, (0, 1, 2)))
    assert pickle.loads(pickle.dumps(group)) == group  # noqa: S301


@pytest.mark.parametrize("window_tokens", [1, 2, 15, 16, 17, 18, 32, 33, 100])
@pytest.mark.parametrize("offloaded_block_tokens", [1, 16, 48])
def test_a_window_needs_every_block_it_can_reach(window_tokens: int, offloaded_block_tokens: int) -> None:
    group = KVGroup(16, [0], "window", window_tokens)
    needed = group.blocks_needed(offloaded_block_tokens)
    assert needed is not None
    # From any position inside the first block after the prefix, the window reaches back this far at most.
    positions = range(offloaded_block_tokens * needed, offloaded_block_tokens * (needed + 1))
    assert min(positions) - (window_tokens - 1) >= 0
    assert needed == -(-(window_tokens - 1 + offloaded_block_tokens) // offloaded_block_tokens)


def test_a_state_needs_its_last_block_and_full_attention_all() -> None:
    assert KVGroup(16, [0], "state").blocks_needed(32) == 1
    assert KVGroup(16, [0]).blocks_needed(32) is None


@pytest.mark.parametrize("kind", ["full", "window", "state"])
def test_offloaded_blocks_have_tokens(kind: Any) -> None:
    group = KVGroup(16, [0], kind, 8 if kind == "window" else None)
    with pytest.raises(InvalidRequestError, match="offloaded_block_tokens is 0"):
        group.blocks_needed(0)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"block_tokens": 0}, "block_tokens is 0"),
        ({"block_tokens": -16}, "block_tokens is -16"),
        ({"block_tokens": 1.5}, "block_tokens is 1.5"),
        ({"layers": [-1]}, "positions from 0"),
        ({"layers": [1, 1]}, "distinct"),
        ({"layers": [0.5]}, "range"),
        ({"layers": 3}, "range"),
        ({"layers": ["a"]}, "range"),
        ({"kind": "windows", "window_tokens": 4}, "did you mean 'window'"),
        ({"kind": "ssm"}, "Known: full, window, state"),
        ({"kind": None}, "Known: full, window, state"),
        ({"kind": "window"}, "window_tokens"),
        ({"kind": "state", "window_tokens": 4}, "window_tokens"),
        ({"window_tokens": 4}, "window_tokens"),
        ({"kind": "window", "window_tokens": 0}, "window_tokens is 0"),
        ({"kind": "window", "window_tokens": 2.0}, "window_tokens is 2.0"),
    ],
)
def test_groups_that_cannot_be_are_refused(arguments: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigurationError, match=reason):
        make_group(**arguments)


def test_groups_need_no_torch() -> None:
    program = (
        "import sys\n"
        "from aiokvoffload.kv_caches import KVGroup\n"
        "assert KVGroup(16, range(2), 'window', 4).blocks_needed(16) == 2\n"
        "assert 'torch' not in sys.modules\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(aiokvoffload.__file__).parents[1])}
    ran = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr


# ---- layouts


def test_blocks_first() -> None:
    layers = [filled(6, 16, 2, 4), filled(6, 16, 2, 4)]
    caches = CanonicalKVCaches.from_layers(layers)
    assert sizes(caches) == [(6, 256), (6, 256)]
    assert indices(caches) == [[0, 1]]
    assert caches.groups == (KVGroup(16, (0, 1)),)
    assert (caches.block_count, caches.device, caches.group_page_bytes) == (6, torch.device("cpu"), ((256, 256),))
    assert caches.group_block_bytes(0) == 512
    for block in range(6):
        assert block_bytes(caches, block) == [bytes_of(layer[block]) for layer in layers]


def test_keys_and_values_apart() -> None:
    layers = [filled(2, 6, 16, 4), filled(2, 6, 16, 8)]
    caches = CanonicalKVCaches.from_layers(layers, block_axis=1, block_tokens=32)
    assert sizes(caches) == [(6, 128), (6, 128), (6, 256), (6, 256)]
    assert indices(caches) == [[0, 1, 2, 3]]
    assert caches.groups[0].block_tokens == 32
    for block in range(6):
        assert block_bytes(caches, block) == [bytes_of(layer[half, block]) for layer in layers for half in (0, 1)]


def test_keys_and_values_together_behind_the_blocks() -> None:
    # One backend hands out (2, blocks, ...) with both halves next to each other in memory.
    layer = filled(6, 2, 16, 4).movedim(1, 0)
    caches = CanonicalKVCaches.from_layers([layer], block_axis=1)
    assert sizes(caches) == [(6, 256)]
    assert block_bytes(caches, 4) == [bytes_of(layer[:, 4])]


def test_one_tensor_of_all_layers() -> None:
    everything = filled(3, 6, 16, 4)
    caches = CanonicalKVCaches.from_layers(everything, block_axis=1)
    assert sizes(caches) == [(6, 128)] * 3
    assert caches.groups[0].layers == (0, 1, 2)
    assert block_bytes(caches, 5) == [bytes_of(everything[layer, 5]) for layer in range(3)]


def test_one_tensor_of_keys_and_values_of_all_layers() -> None:
    everything = filled(2, 3, 6, 16, 4)
    caches = CanonicalKVCaches.from_layers(everything, block_axis=2)
    assert sizes(caches) == [(6, 128)] * 6
    assert caches.groups[0].layers == (0, 1, 2)
    assert block_bytes(caches, 5) == [bytes_of(everything[half, layer, 5]) for layer in range(3) for half in (0, 1)]


def test_one_tensor_with_all_layers_in_a_page() -> None:
    everything = filled(6, 3, 2, 4)
    caches = CanonicalKVCaches.from_layers(everything)
    assert sizes(caches) == [(6, 48)]
    assert caches.groups[0].layers == (0,)


def test_layers_of_one_tensor_can_be_in_several_groups() -> None:
    groups = (KVGroup(16, [0, 2]), KVGroup(16, [1], "window", 64))
    everything = filled(2, 3, 6, 16, 4)
    caches = CanonicalKVCaches.from_layers(everything, block_axis=2, groups=groups)
    assert caches.groups == groups
    assert [len(refs) for refs in caches.group_refs] == [4, 2]
    assert block_bytes(caches, 1, group=1) == [bytes_of(everything[0, 1, 1]), bytes_of(everything[1, 1, 1])]


def test_layers_can_have_names() -> None:
    layers = {"model.layers.0": filled(4, 8), "model.layers.1": filled(4, 16)}
    caches = CanonicalKVCaches.from_layers(layers)
    assert sizes(caches) == [(4, 16), (4, 32)]


def test_a_group_keeps_the_order_of_its_layers() -> None:
    caches = CanonicalKVCaches.from_layers([filled(4, 8), filled(4, 4)], groups=[KVGroup(16, [1, 0])])
    assert caches.group_page_bytes == ((8, 16),)


def test_groups_share_tensors() -> None:
    shared = [filled(4, 32), filled(4, 32)]
    caches = CanonicalKVCaches.from_layers(
        [shared[0], shared[1], shared[0].view(4, 2, 16), shared[1].view(torch.int8)],
        groups=[KVGroup(16, [0, 1]), KVGroup(32, [2, 3], "state")],
    )
    assert sizes(caches) == [(4, 64), (4, 64)]
    assert indices(caches) == [[0, 1], [0, 1]]


def test_layers_of_one_group_that_share_a_tensor_are_copied_once() -> None:
    shared = filled(2, 4, 32)
    caches = CanonicalKVCaches.from_layers([shared, filled(2, 4, 32), shared], block_axis=1)
    assert indices(caches) == [[0, 1, 2, 3]]
    assert caches.group_block_bytes(0) == 4 * 64


def test_a_shared_tensor_has_the_largest_page() -> None:
    raw = filled(4, 64, dtype=torch.int8)
    small, large = raw[:, :48], raw
    for layers in ([small, large], [large, small]):
        caches = CanonicalKVCaches.from_layers(layers, groups=[KVGroup(16, [0]), KVGroup(16, [1], "state")])
        assert sizes(caches) == [(4, 64)]
        assert caches.group_page_bytes == tuple((layer.shape[1],) for layer in layers)
        assert CanonicalKVCaches.from_layers(layers).group_page_bytes == ((64,),)


def test_pages_with_other_distances_are_other_tensors() -> None:
    raw = filled(8, 16, dtype=torch.int8)
    caches = CanonicalKVCaches.from_layers([raw[:4], raw[::2]], groups=[KVGroup(16, [0]), KVGroup(16, [1], "state")])
    assert indices(caches) == [[0], [1]]
    assert block_bytes(caches, 3, group=0) == [bytes_of(raw[3])]
    assert block_bytes(caches, 3, group=1) == [bytes_of(raw[6])]


def test_parts_of_a_page_are_tensors_of_their_own() -> None:
    # A state-space layer: a convolution state and a recurrent state inside one page.
    raw = filled(4, 64, dtype=torch.int8)
    caches = CanonicalKVCaches.from_layers([raw[:, :16].view(torch.float32), raw[:, 16:48]])
    assert sizes(caches) == [(4, 16), (4, 32)]
    assert block_bytes(caches, 3) == [bytes_of(raw[3, :16]), bytes_of(raw[3, 16:48])]


@pytest.mark.parametrize("page_bytes", [96, [96, 100], (96, 128)])
def test_padding_is_not_used(page_bytes: int | Sequence[int]) -> None:
    layers = [filled(4, 128, dtype=torch.uint8), filled(4, 128, dtype=torch.uint8)]
    used = [page_bytes] * 2 if isinstance(page_bytes, int) else list(page_bytes)
    caches = CanonicalKVCaches.from_layers(layers, page_bytes=page_bytes)
    assert sizes(caches) == [(4, 128), (4, 128)]
    assert caches.group_page_bytes == (tuple(used),)
    assert caches.group_block_bytes(0) == sum(used)
    assert block_bytes(caches, 2) == [bytes_of(layer[2, :size]) for layer, size in zip(layers, used, strict=True)]


def test_padding_of_a_split_layer_is_that_of_each_half() -> None:
    caches = CanonicalKVCaches.from_layers([filled(2, 4, 64, dtype=torch.int8)], block_axis=1, page_bytes=[48])
    assert sizes(caches) == [(4, 64), (4, 64)]
    assert caches.group_page_bytes == ((48, 48),)


def test_layers_packed_into_the_blocks_of_one_tensor() -> None:
    packed = filled(6, 3, 16, 4)
    caches = CanonicalKVCaches.from_layers([packed[:, layer] for layer in range(3)])
    assert sizes(caches) == [(6, 128)] * 3
    assert [canonical.tensor.stride() for canonical in caches.tensors] == [(384, 1)] * 3
    assert block_bytes(caches, 2) == [bytes_of(packed[2, layer]) for layer in range(3)]
    same = CanonicalKVCaches.from_layers(packed.movedim(1, 0), block_axis=1)
    assert block_bytes(same, 2) == block_bytes(caches, 2)


def test_heads_before_tokens_and_after() -> None:
    stored = filled(6, 2, 16, 4)  # heads first in memory
    caches = CanonicalKVCaches.from_layers([stored.permute(0, 2, 1, 3)])
    assert sizes(caches) == [(6, 256)]
    assert block_bytes(caches, 1) == [bytes_of(stored[1])]


def test_some_of_the_blocks_of_a_larger_tensor() -> None:
    larger = filled(9, 2, 8)
    assert block_bytes(CanonicalKVCaches.from_layers([larger[3:7]]), 0) == [bytes_of(larger[3])]
    every_second = CanonicalKVCaches.from_layers([larger[1::2]])
    assert every_second.block_count == 4
    assert block_bytes(every_second, 2) == [bytes_of(larger[5])]


def test_one_value_per_block() -> None:
    scales = filled(2, 5, dtype=torch.float32)
    caches = CanonicalKVCaches.from_layers([scales], block_axis=1)
    assert sizes(caches) == [(5, 4), (5, 4)]
    assert block_bytes(caches, 3) == [bytes_of(scales[0, 3]), bytes_of(scales[1, 3])]
    flags = CanonicalKVCaches.from_layers([filled(5, dtype=torch.uint8)])
    assert sizes(flags) == [(5, 1)]


@pytest.mark.parametrize("strides", [(32, 8, 1), (1, 8, 1), (0, 8, 1), (9, 8, 1)])
def test_the_stride_of_the_only_block_means_nothing(strides: tuple[int, ...]) -> None:
    layer = filled(32).as_strided((1, 4, 8), strides)
    caches = CanonicalKVCaches.from_layers([layer])
    assert sizes(caches) == [(1, 64)]
    assert block_bytes(caches, 0) == [bytes_of(layer)]


def test_a_single_block_is_split_like_many() -> None:
    for block_count in (1, 2):
        caches = CanonicalKVCaches.from_layers([filled(2, block_count, 4, 8)], block_axis=1)
        assert sizes(caches) == [(block_count, 64)] * 2
        sliced = CanonicalKVCaches.from_layers([filled(2, 9, 4, 8)[:, 3 : 3 + block_count]], block_axis=1)
        assert sizes(sliced) == [(block_count, 64)] * 2


@pytest.mark.parametrize("strides", [(8, 1, 3, 1), (8, 8, 8, 1), (8, 0, 1, 1), (8, 99, 99, 1)])
def test_the_strides_of_single_heads_mean_nothing(strides: tuple[int, ...]) -> None:
    layer = filled(48).as_strided((6, 1, 1, 8), strides)
    caches = CanonicalKVCaches.from_layers([layer])
    assert sizes(caches) == [(6, 16)]
    assert block_bytes(caches, 5) == [bytes_of(layer[5])]


def test_single_halves_and_single_layers() -> None:
    caches = CanonicalKVCaches.from_layers(filled(1, 1, 6, 8), block_axis=2)
    assert sizes(caches) == [(6, 16)]


def test_tensors_that_require_gradients_are_viewed_too() -> None:
    layer = torch.zeros(4, 8, requires_grad=True)
    view = CanonicalKVCaches.from_layers([layer]).tensors[0].tensor
    view[2] = 1
    assert not view.requires_grad
    assert layer[2].count_nonzero() == 8


# ---- views, not copies


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_both_sides_see_what_the_other_writes(dtype: torch.dtype) -> None:
    layers = [filled(2, 5, 3, 4, dtype=dtype) for _ in range(2)]
    caches = CanonicalKVCaches.from_layers(layers, block_axis=1)
    new = filled(3, 4, dtype=dtype)
    layers[1][0, 3].copy_(new)
    assert block_bytes(caches, 3)[2] == bytes_of(new)

    before = [bytes_of(layer) for layer in layers]
    ref = caches.group_refs[0][3]
    page = filled(ref.page_bytes, dtype=torch.int8)
    caches.tensors[ref.tensor_index].tensor[3] = page
    assert bytes_of(layers[1][1, 3]) == bytes_of(page)
    assert bytes_of(layers[0]) == before[0]
    untouched = [(half, block) for half in (0, 1) for block in range(5) if (half, block) != (1, 3)]
    for half, block in untouched:
        at = (half * 5 + block) * ref.page_bytes
        assert bytes_of(layers[1][half, block]) == before[1][at : at + ref.page_bytes]


def test_the_views_keep_the_memory_alive() -> None:
    layer = filled(4, 8)
    expected = [bytes_of(layer[block]) for block in range(4)]
    caches = CanonicalKVCaches.from_layers([layer])
    del layer
    assert [block_bytes(caches, block)[0] for block in range(4)] == expected


@dataclass
class Layout:
    """A layer with any order of axes, gaps between blocks, and an offset into its memory."""

    layer: torch.Tensor
    block_axis: int
    outer_axes: list[int]  # in order
    inner_axes: list[int]  # as they lie in memory

    def pages(self, block: int) -> list[torch.Tensor]:
        """The block's pages in the order they are referred to, elements as they lie in memory."""
        ordered = self.layer.permute(*self.outer_axes, self.block_axis, *self.inner_axes)
        outer = itertools.product(*(range(self.layer.shape[axis]) for axis in self.outer_axes))
        return [ordered[(*position, block)] for position in outer]


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    outer = draw(st.lists(st.integers(1, 3), max_size=2))
    block_count = draw(st.integers(1, 5))
    inner = [draw(st.integers(2, 4)), *draw(st.lists(st.integers(1, 4), max_size=2))]
    gap, offset = draw(st.integers(0, 5)), draw(st.integers(0, 3))
    dtype = draw(st.sampled_from(DTYPES))
    page_elements = math.prod(inner)
    row = page_elements + gap
    memory = filled(offset + math.prod(outer) * block_count * row, dtype=dtype)
    rows = memory[offset:].view(*outer, block_count, row)[..., :page_elements]
    stored = rows.view(*outer, block_count, *inner)
    order = draw(st.permutations(range(stored.ndim)))
    return Layout(
        layer=stored.permute(*order),
        block_axis=order.index(len(outer)),
        outer_axes=sorted(order.index(axis) for axis in range(len(outer))),
        inner_axes=[order.index(axis) for axis in range(len(outer) + 1, stored.ndim)],
    )


@given(st.lists(layouts(), min_size=1, max_size=3))
@settings(deadline=None)
def test_any_order_of_axes_and_any_gap(drawn: list[Layout]) -> None:
    for layout in drawn:
        caches = CanonicalKVCaches.from_layers([layout.layer], block_axis=layout.block_axis)
        page_bytes = math.prod(layout.layer.shape[axis] for axis in layout.inner_axes) * layout.layer.element_size()
        assert set(sizes(caches)) == {(layout.layer.shape[layout.block_axis], page_bytes)}
        for block in range(caches.block_count):
            assert block_bytes(caches, block) == [bytes_of(page) for page in layout.pages(block)]
            for ref, page in zip(caches.group_refs[0], layout.pages(block), strict=True):
                new = filled(page_bytes, dtype=torch.int8)
                caches.tensors[ref.tensor_index].tensor[block] = new
                assert bytes_of(page) == bytes_of(new)


@given(st.data(), st.integers(1, 4), st.integers(1, 5), st.integers(1, 24))
@settings(deadline=None)
def test_any_padding(data: st.DataObject, layer_count: int, block_count: int, page_bytes: int) -> None:
    used = data.draw(st.lists(st.integers(1, page_bytes), min_size=layer_count, max_size=layer_count))
    layers = [filled(block_count, page_bytes, dtype=torch.int8) for _ in used]
    caches = CanonicalKVCaches.from_layers(layers, page_bytes=used)
    assert caches.group_page_bytes == (tuple(used),)
    for block in range(block_count):
        expected = [bytes_of(layer[block, :size]) for layer, size in zip(layers, used, strict=True)]
        assert block_bytes(caches, block) == expected


@given(st.data(), st.integers(1, 6))
@settings(deadline=None)
def test_any_split_into_groups_covers_every_layer_once(data: st.DataObject, layer_count: int) -> None:
    order = data.draw(st.permutations(range(layer_count)))
    cuts = sorted(data.draw(st.sets(st.integers(1, layer_count), max_size=3)) | {0, layer_count})
    groups = [KVGroup(16, order[start:end]) for start, end in itertools.pairwise(cuts)]
    layers = [filled(3, 2 + layer) for layer in range(layer_count)]
    caches = CanonicalKVCaches.from_layers(layers, groups=groups)
    for group, declared in enumerate(groups):
        assert block_bytes(caches, 1, group) == [bytes_of(layers[layer][1]) for layer in declared.layers]


# ---- refusals


def sparse() -> torch.Tensor:
    return torch.eye(4).to_sparse()


@pytest.mark.parametrize(
    ("tensors", "arguments", "reasons"),
    [
        ([], {}, ["no layers"]),
        ({}, {}, ["no layers"]),
        (None, {}, ["NoneType"]),
        (7, {}, ["int"]),
        ([filled(4, 8), "x"], {}, ["layer 1", "str is not a tensor"]),
        ({"model.0": None}, {}, ["layer 'model.0'", "NoneType"]),
        ([(filled(4, 8), filled(4, 8))], {}, ["layer 0", "tuple", "layer of its own"]),
        ([filled(4, 8)], {"block_axis": 2}, ["layer 0", "block_axis 2", "2 axes", "(4, 8)"]),
        ([filled(4, 8)], {"block_axis": -1}, ["layer 0", "block_axis -1"]),
        ([torch.zeros(())], {}, ["layer 0", "0 axes"]),
        (filled(4, 8), {"block_axis": 2}, ["all layers", "block_axis 2"]),
        ([filled(4, 8), filled(0, 8)], {}, ["layer 1", "no blocks"]),
        ([filled(4, 0)], {}, ["layer 0", "no bytes"]),
        (filled(0, 4, 8), {"block_axis": 1}, ["no blocks"]),
        ([filled(4, 8), filled(5, 8)], {}, ["layer 0: 4", "layer 1: 5", "block_axis"]),
        ([filled(2, 4, 8)[:, :, :6].clone(), filled(4, 2, 8)], {"block_axis": 1}, ["layer 0: 4", "layer 1: 2"]),
        ([sparse()], {}, ["layer 0", "torch.sparse_coo"]),
        ([torch.zeros(4, 8, device="meta")], {}, ["layer 0", "meta"]),
        ([filled(4, 2, 8)[..., :6]], {}, ["layer 0", "contiguous", "shape (4, 2, 6)", "strides (16, 8, 1)"]),
        ([filled(4, 8)[:, ::2]], {}, ["layer 0", "contiguous"]),
        ([filled(4, 8), filled(4, 1).expand(4, 8)], {}, ["layer 1", "contiguous", "strides (1, 0)"]),
        ([filled(4, 2, 1).expand(4, 2, 8)], {}, ["layer 0", "contiguous", "strides (2, 1, 0)"]),
        ([filled(8).expand(4, 8)], {}, ["layer 0", "overlap", "strides (0, 1)"]),
        ([filled(1, 4, 8).expand(2, 4, 8)], {"block_axis": 1}, ["layer 0", "contiguous"]),
        ([filled(20).unfold(0, 8, 4)], {}, ["layer 0", "overlap", "strides (4, 1)"]),
        ([filled(40).as_strided((2, 4, 4), (8, 4, 1))], {"block_axis": 1}, ["layer 0", "overlap"]),
        ([filled(40).as_strided((2, 4, 4), (4, 4, 1))], {"block_axis": 1}, ["layer 0", "overlap"]),
        ([filled(16, 8, 4)], {"block_axis": 2}, ["layer 0", "scattered"]),
        ([filled(4, 8)], {"page_bytes": 17}, ["layer 0", "page_bytes is 17", "16 bytes"]),
        ([filled(4, 8)], {"page_bytes": 0}, ["layer 0", "page_bytes is 0"]),
        ([filled(4, 8)], {"page_bytes": [-1]}, ["layer 0", "page_bytes is -1"]),
        ([filled(4, 8)], {"page_bytes": [8, 8]}, ["2 values for 1 layers"]),
        ([filled(4, 8)] * 2, {"groups": [KVGroup(16, [0])]}, ["in no group: layer 1"]),
        ([filled(4, 8)] * 2, {"groups": [KVGroup(16, [0, 1]), KVGroup(16, [1])]}, ["layer 1", "group 0", "group 1"]),
        ([filled(4, 8)] * 2, {"groups": [KVGroup(16, [0, 1, 2])]}, ["group 0", "layer 2", "2 layers"]),
        ([filled(4, 8)], {"groups": [KVGroup(16, [0]), KVGroup(16, [])]}, ["group 1", "no layers"]),
    ],
)
def test_what_cannot_be_viewed_is_refused(tensors: Any, arguments: dict[str, Any], reasons: list[str]) -> None:
    with pytest.raises(LayoutError) as caught:
        CanonicalKVCaches.from_layers(tensors, **arguments)
    for reason in reasons:
        assert reason in str(caught.value)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_refused() -> None:
    nested = torch.nested.nested_tensor([torch.zeros(2, 8), torch.zeros(3, 8)])
    with pytest.raises(LayoutError, match="layer 0: only dense tensors"):
        CanonicalKVCaches.from_layers([nested])


def test_block_tokens_of_the_default_group_are_checked() -> None:
    with pytest.raises(ConfigurationError, match="block_tokens is 0"):
        CanonicalKVCaches.from_layers([filled(4, 8)], block_tokens=0)


# ---- caches put together by hand


def pages(block_count: int = 4, page_bytes: int = 16) -> CanonicalKVCacheTensor:
    return CanonicalKVCacheTensor(torch.zeros(block_count, page_bytes, dtype=torch.int8), page_bytes)


def test_caches_can_be_put_together_by_hand() -> None:
    caches = CanonicalKVCaches(
        tensors=[pages(), pages(page_bytes=8)],  # type: ignore[arg-type]
        group_refs=[[CanonicalKVCacheRef(0, 12), CanonicalKVCacheRef(1, 8)]],  # type: ignore[arg-type]
        groups=[KVGroup(16, [0])],  # type: ignore[arg-type]
    )
    assert isinstance(caches.tensors, tuple)
    assert caches.group_refs == ((CanonicalKVCacheRef(0, 12), CanonicalKVCacheRef(1, 8)),)
    assert (caches.group_page_bytes, caches.group_block_bytes(0)) == (((12, 8),), 20)


@pytest.mark.parametrize(
    ("tensor", "page_bytes", "reason"),
    [
        (torch.zeros(4, 16), 16, "int8"),
        (torch.zeros(4, 16, dtype=torch.uint8), 16, "int8"),
        (torch.zeros(64, dtype=torch.int8), 16, "int8"),
        (torch.zeros(4, 4, 4, dtype=torch.int8), 16, "int8"),
        (None, 16, "NoneType"),
        (torch.zeros(4, 16, dtype=torch.int8), 8, "8 byte pages"),
        (torch.zeros(0, 16, dtype=torch.int8), 16, "16 byte pages"),
        (torch.zeros(4, 0, dtype=torch.int8), 0, "0 byte pages"),
        (torch.zeros(4, 32, dtype=torch.int8)[:, ::2], 16, "next to each other"),
        (torch.zeros(16, 4, dtype=torch.int8).T, 16, "next to each other"),
        (torch.zeros(64, dtype=torch.int8).unfold(0, 16, 8), 16, "overlap"),
        (torch.zeros(16, dtype=torch.int8).expand(4, 16), 16, "overlap"),
    ],
)
def test_what_is_no_canonical_tensor_is_refused(tensor: Any, page_bytes: int, reason: str) -> None:
    with pytest.raises(LayoutError, match=reason):
        CanonicalKVCacheTensor(tensor, page_bytes)


@pytest.mark.parametrize(
    ("tensors", "group_refs", "groups", "reason"),
    [
        ((), ((),), (KVGroup(16, [0]),), "0 tensors"),
        ((pages(),), (), (), "0 groups"),
        ((pages(),), ((CanonicalKVCacheRef(0, 16),),) * 2, (KVGroup(16, [0]),), "references of 2 groups"),
        ((pages(), pages(5)), ((CanonicalKVCacheRef(0, 16),),), (KVGroup(16, [0]),), "different block counts"),
        ((pages(),), ((),), (KVGroup(16, [0]),), "group 0 refers to no tensor"),
        ((pages(),), ((CanonicalKVCacheRef(1, 16),),), (KVGroup(16, [0]),), "refers to tensor 1, there are 1"),
        ((pages(),), ((CanonicalKVCacheRef(-1, 16),),), (KVGroup(16, [0]),), "refers to tensor -1"),
        ((pages(),), ((CanonicalKVCacheRef(0, 17),),), (KVGroup(16, [0]),), "uses 17 bytes"),
        ((pages(),), ((CanonicalKVCacheRef(0, 0),),), (KVGroup(16, [0]),), "uses 0 bytes"),
        (
            (pages(), CanonicalKVCacheTensor(torch.zeros(4, 16, dtype=torch.int8, device="meta"), 16)),
            ((CanonicalKVCacheRef(0, 16),),),
            (KVGroup(16, [0]),),
            "different devices: cpu, meta",
        ),
    ],
)
def test_parts_that_do_not_fit_are_refused(
    tensors: tuple[CanonicalKVCacheTensor, ...],
    group_refs: tuple[tuple[CanonicalKVCacheRef, ...], ...],
    groups: tuple[KVGroup, ...],
    reason: str,
) -> None:
    with pytest.raises(LayoutError, match=reason):
        CanonicalKVCaches(tensors, group_refs, groups)


def test_a_shape_says_what_is_known_without_tensors() -> None:
    caches = CanonicalKVCaches.from_layers([torch.zeros(6, 4), torch.zeros(6, 8)], block_tokens=16)
    shape = caches.shape(3)
    assert (shape.block_count, shape.group_page_bytes, shape.block_size_factor) == (6, ((16, 32),), 3)
    assert (shape.group_slot_bytes, shape.slot_bytes, shape.offloaded_block_tokens) == ((144,), 144, (48,))


@pytest.mark.parametrize(
    "changes",
    [{"block_count": 0}, {"block_size_factor": 0}, {"group_page_bytes": ()}, {"group_page_bytes": ((8, 0),)}],
)
def test_a_shape_that_no_cache_has(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError):
        CacheShape(**{"groups": (KVGroup(16, [0]),), "block_count": 1, "group_page_bytes": ((8,),), **changes})
