"""The engine's KV cache as rows of bytes: one row, a page, per block of each tensor.

Attention backends lay their tensors out in many ways. Transfers need to know only where the bytes of block `b`
lie, so every tensor is viewed as int8 `(block_count, page_bytes)`, without a copy, and each KV group refers to
the views that its layers are made of.

torch is imported only by what touches tensors: managers use `KVGroup` and run without it.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Self, get_args

from aiokvoffload.errors import ConfigurationError, InvalidRequestError, LayoutError
from aiokvoffload.registry import nearest_name

if TYPE_CHECKING:
    import torch

KVGroupKind = Literal["full", "window", "state"]


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers whose blocks are stored and loaded together.

    Attributes:
        block_tokens: Tokens of one GPU block of this group.
        layers: Positions of the layers among the tensors of the cache.
        kind: Which blocks of a prefix the layers need: all of them ("full"), those that the attention window
            reaches ("window"), or only the last one ("state").
        window_tokens: Tokens of the attention window, for "window" only.

    Raises:
        ConfigurationError: The kind is unknown, a number is not positive, or kind and window do not fit.
    """

    block_tokens: int
    layers: Sequence[int]
    kind: KVGroupKind = "full"
    window_tokens: int | None = None

    def __post_init__(self) -> None:
        try:
            layers = tuple(operator.index(layer) for layer in self.layers)
        except TypeError as exc:
            raise ConfigurationError(f"layers of a KV group are positions, such as range(32): {exc}") from exc
        if any(layer < 0 for layer in layers) or len(set(layers)) != len(layers):
            raise ConfigurationError(f"layers of a KV group are distinct positions from 0, not {layers}")
        object.__setattr__(self, "layers", layers)
        object.__setattr__(self, "block_tokens", _positive("block_tokens", self.block_tokens))
        kinds = get_args(KVGroupKind)
        if self.kind not in kinds:
            near = nearest_name(str(self.kind), kinds)
            raise ConfigurationError(f"unknown kind of KV group {self.kind!r}{near or '.'} Known: {', '.join(kinds)}")
        if (self.kind == "window") != (self.window_tokens is not None):
            raise ConfigurationError(
                f"a KV group of kind {self.kind!r} has window_tokens={self.window_tokens}; "
                "give window_tokens for kind 'window' and for no other"
            )
        if self.window_tokens is not None:
            object.__setattr__(self, "window_tokens", _positive("window_tokens", self.window_tokens))

    def blocks_needed(self, offloaded_block_tokens: int) -> int | None:
        """Return how many of the last offloaded blocks of a prefix the group needs; None if all of them.

        Args:
            offloaded_block_tokens: Tokens of one offloaded block of this group.

        Raises:
            InvalidRequestError: An offloaded block would have no tokens.
        """
        if offloaded_block_tokens < 1:
            raise InvalidRequestError(f"offloaded_block_tokens is {offloaded_block_tokens}, it must be at least 1")
        if self.kind == "full":
            return None
        # The token after the prefix sees window - 1 tokens before itself, which may begin anywhere in a block.
        reach_tokens = 0 if self.window_tokens is None else self.window_tokens - 1
        return math.ceil((reach_tokens + offloaded_block_tokens) / offloaded_block_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheShape:
    """What is to be known of a KV cache without holding its tensors.

    Attributes:
        groups: The KV groups.
        block_count: GPU blocks.
        group_page_bytes: Bytes used of each page of each group, see `CacheIdentity.page_bytes`.
        block_size_factor: GPU blocks per offloaded block.

    Raises:
        ConfigurationError: A number is not positive, or groups and pages do not fit each other.
    """

    groups: tuple[KVGroup, ...]
    block_count: int
    group_page_bytes: tuple[tuple[int, ...], ...]
    block_size_factor: int = 1

    def __post_init__(self) -> None:
        _positive("block_size_factor", self.block_size_factor)
        _positive("block_count", self.block_count)
        pages = self.group_page_bytes
        if not pages or len(pages) != len(self.groups) or any(min(group, default=0) < 1 for group in pages):
            raise ConfigurationError(f"{len(self.groups)} KV groups cannot have pages of {pages} bytes")

    @property
    def group_slot_bytes(self) -> tuple[int, ...]:
        """Bytes of one offloaded block of each group."""
        return tuple(sum(page_bytes) * self.block_size_factor for page_bytes in self.group_page_bytes)

    @property
    def slot_bytes(self) -> int:
        """Bytes that hold an offloaded block of any group."""
        return max(self.group_slot_bytes)

    @property
    def offloaded_block_tokens(self) -> tuple[int, ...]:
        """Tokens of an offloaded block of each group."""
        return tuple(group.block_tokens * self.block_size_factor for group in self.groups)


@dataclass(frozen=True, slots=True, eq=False)
class CanonicalKVCacheTensor:
    """The pages of one tensor.

    Attributes:
        tensor: int8 `(block_count, page_bytes)`, a view of the engine's memory; rows may lie apart.
        page_bytes: Bytes of one block in this tensor, padding included.

    Raises:
        LayoutError: The tensor is not such a view.
    """

    tensor: torch.Tensor
    page_bytes: int

    def __post_init__(self) -> None:
        import torch

        tensor = self.tensor
        if not isinstance(tensor, torch.Tensor) or tensor.dtype != torch.int8 or tensor.ndim != 2:
            raise LayoutError(f"a canonical tensor is int8 (block_count, page_bytes), not {_describe(tensor)}")
        block_count, page_bytes = tensor.shape
        if block_count < 1 or page_bytes < 1 or page_bytes != self.page_bytes:
            raise LayoutError(f"a canonical tensor of {self.page_bytes} byte pages is {_describe(tensor)}")
        if page_bytes > 1 and tensor.stride(1) != 1:
            raise LayoutError(f"the bytes of a page are not next to each other: {_describe(tensor)}")
        if block_count > 1 and tensor.stride(0) < page_bytes:
            raise LayoutError(f"pages overlap: {_describe(tensor)}")


@dataclass(frozen=True, slots=True)
class CanonicalKVCacheRef:
    """What a group uses of one tensor.

    Attributes:
        tensor_index: Position in `CanonicalKVCaches.tensors`.
        page_bytes: Bytes used at the start of each page; what follows is padding.
    """

    tensor_index: int
    page_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class CanonicalKVCaches:
    """All tensors of one GPU's KV cache, and which of them each KV group is made of.

    Attributes:
        tensors: Each piece of memory once, however many layers and groups share it.
        group_refs: For each group the tensors that make up its blocks, each tensor once.
        groups: The KV groups.

    Raises:
        LayoutError: Tensors, references and groups do not fit each other.
    """

    tensors: tuple[CanonicalKVCacheTensor, ...]
    group_refs: tuple[tuple[CanonicalKVCacheRef, ...], ...]
    groups: tuple[KVGroup, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "tensors", tuple(self.tensors))
        object.__setattr__(self, "group_refs", tuple(map(tuple, self.group_refs)))
        object.__setattr__(self, "groups", tuple(self.groups))
        if not self.tensors or not self.groups or len(self.group_refs) != len(self.groups):
            raise LayoutError(
                f"{len(self.tensors)} tensors, {len(self.groups)} groups and references of {len(self.group_refs)} "
                "groups; give at least one tensor and one group, and references for each group"
            )
        block_counts = sorted({len(canonical.tensor) for canonical in self.tensors})
        if len(block_counts) > 1:
            raise LayoutError(f"tensors have different block counts: {block_counts}")
        devices = sorted({str(canonical.tensor.device) for canonical in self.tensors})
        if len(devices) > 1:
            raise LayoutError(f"tensors lie on different devices: {', '.join(devices)}; open one offloader per device")
        for group, refs in enumerate(self.group_refs):
            if not refs:
                raise LayoutError(f"group {group} refers to no tensor")
            for ref in refs:
                if not 0 <= ref.tensor_index < len(self.tensors):
                    raise LayoutError(
                        f"group {group} refers to tensor {ref.tensor_index}, there are {len(self.tensors)}"
                    )
                page_bytes = self.tensors[ref.tensor_index].page_bytes
                if not 0 < ref.page_bytes <= page_bytes:
                    raise LayoutError(
                        f"group {group} uses {ref.page_bytes} bytes of tensor {ref.tensor_index}, "
                        f"whose pages have {page_bytes}"
                    )

    @classmethod
    def from_layers(
        cls,
        tensors: torch.Tensor | Sequence[torch.Tensor] | Mapping[Any, torch.Tensor],
        *,
        block_axis: int = 0,
        groups: Sequence[KVGroup] = (),
        page_bytes: int | Sequence[int] | None = None,
        block_tokens: int = 16,
    ) -> Self:
        """View the engine's tensors as pages, without a copy.

        A layer is `(blocks, ...)` or, with `block_axis=1`, `(2, blocks, ...)` and the like: what lies further apart
        than neighbouring blocks becomes a tensor of its own. Within a block the elements may be in any order, with
        no gap between them. Between blocks there may be gaps, as in a slice of a tensor that packs all layers.

        Args:
            tensors: One tensor per layer, by name or in order, or one of all layers: `(layers, blocks, ...)` with
                `block_axis=1`, `(2, layers, blocks, ...)` with `block_axis=2`. With `block_axis=0` one tensor is
                one layer. Any dtype; layers may share memory.
            block_axis: Which axis counts the blocks. Bring tensors that differ to one axis with `movedim`.
            groups: The KV groups; by default one full group of all layers.
            page_bytes: Bytes of a page that hold data, for all layers or for each; by default all of them.
            block_tokens: Tokens of a block where no groups are given.

        Raises:
            LayoutError: A layer cannot be viewed that way, or is not in exactly one group.
            ConfigurationError: `block_tokens` is not positive.
        """
        layers, block_axis = _split_layers(tensors, block_axis)
        names = list(layers)
        groups = tuple(groups) or (KVGroup(block_tokens=block_tokens, layers=range(len(layers))),)
        _check_groups(groups, names)
        views = [_page_views(name, layer, block_axis) for name, layer in layers.items()]
        block_counts = {name: len(view) for name, (view, *_) in zip(names, views, strict=True)}
        if len(set(block_counts.values())) > 1:
            named = ", ".join(f"{name}: {count}" for name, count in block_counts.items())
            raise LayoutError(f"layers have different block counts ({named}); check block_axis")

        distinct: dict[tuple[int, int], torch.Tensor] = {}
        for view in itertools.chain.from_iterable(views):
            known = distinct.setdefault(_place(view), view)
            if view.shape[1] > known.shape[1]:
                distinct[_place(view)] = view
        indices = {place: index for index, place in enumerate(distinct)}

        used_bytes = _used_bytes(page_bytes, len(layers))
        group_refs = []
        for group in groups:
            used_of_tensor: dict[int, int] = {}
            for layer in group.layers:
                for view in views[layer]:
                    used = view.shape[1] if (given := used_bytes[layer]) is None else given
                    if not 0 < used <= view.shape[1]:
                        raise LayoutError(f"{names[layer]}: page_bytes is {used}, a page has {view.shape[1]} bytes")
                    index = indices[_place(view)]
                    used_of_tensor[index] = max(used, used_of_tensor.get(index, 0))
            group_refs.append(tuple(CanonicalKVCacheRef(index, used) for index, used in used_of_tensor.items()))
        return cls(
            tuple(CanonicalKVCacheTensor(view, view.shape[1]) for view in distinct.values()), tuple(group_refs), groups
        )

    @property
    def block_count(self) -> int:
        """GPU blocks."""
        return len(self.tensors[0].tensor)

    @property
    def device(self) -> torch.device:
        """Where all tensors lie."""
        return self.tensors[0].tensor.device

    @property
    def group_page_bytes(self) -> tuple[tuple[int, ...], ...]:
        """Bytes used of each page of each group, see `CacheIdentity.page_bytes`."""
        return tuple(tuple(ref.page_bytes for ref in refs) for refs in self.group_refs)

    def shape(self, block_size_factor: int = 1) -> CacheShape:
        """Return what is to be known of the caches where that many GPU blocks are offloaded as one."""
        return CacheShape(
            groups=self.groups,
            block_count=self.block_count,
            group_page_bytes=self.group_page_bytes,
            block_size_factor=block_size_factor,
        )

    def group_block_bytes(self, group: int) -> int:
        """Return the bytes of one GPU block of a group."""
        return sum(ref.page_bytes for ref in self.group_refs[group])


def _split_layers(tensors: object, block_axis: int) -> tuple[dict[str, torch.Tensor], int]:
    """Return the tensor of each layer by its name for messages, and the block axis of these tensors."""
    import torch

    if isinstance(tensors, torch.Tensor):
        _check_tensor("the tensor of all layers", tensors, block_axis)
        if block_axis == 0:
            return {"layer 0": tensors}, 0
        return {f"layer {layer}": part for layer, part in enumerate(tensors.unbind(block_axis - 1))}, block_axis - 1
    named: dict[str, Any]
    if isinstance(tensors, Mapping):
        named = {f"layer {name!r}": tensor for name, tensor in tensors.items()}
    elif isinstance(tensors, Sequence):
        named = {f"layer {layer}": tensor for layer, tensor in enumerate(tensors)}
    else:
        raise LayoutError(f"give one tensor per layer, or one of all layers, not a {type(tensors).__name__}")
    if not named:
        raise LayoutError("there are no layers; give at least one tensor")
    for name, tensor in named.items():
        _check_tensor(name, tensor, block_axis)
    return named, block_axis


def _page_views(name: str, tensor: torch.Tensor, block_axis: int) -> list[torch.Tensor]:
    """View a layer as int8 `(block_count, page_bytes)`, once for all axes within a block and each step of the others.

    An axis lies within a block if its stride is less than the block's. The views follow the order of the axes.
    """
    import torch

    shape = tensor.shape
    block_count, block_stride = shape[block_axis], tensor.stride(block_axis)
    # Axes of size 1 have strides that mean nothing.
    strides = {axis: tensor.stride(axis) for axis, size in enumerate(shape) if size > 1 and axis != block_axis}
    if block_count == 1 and all(stride >= block_stride for stride in strides.values()):
        block_stride = 1 + max(strides.values(), default=0)
    page_elements = 1
    outer = []
    for axis in sorted(strides, key=strides.__getitem__):
        if strides[axis] >= block_stride:
            outer.append(axis)
        elif strides[axis] == page_elements:
            page_elements *= shape[axis]
        else:
            raise LayoutError(
                f"{name}: a block is not a contiguous page: block axis {block_axis} of {_describe(tensor)}"
            )
    extent = page_elements
    for stride, size in ((block_stride, block_count), *((strides[axis], shape[axis]) for axis in outer)):
        if size > 1 and stride < extent:
            raise LayoutError(f"{name}: blocks overlap: block axis {block_axis} of {_describe(tensor)}")
        extent += stride * (size - 1)
    if page_elements == 1 and len(outer) > 1:
        raise LayoutError(f"{name}: a block is scattered: block axis {block_axis} of {_describe(tensor)}")

    item_bytes = tensor.element_size()
    row_stride = block_stride if block_count > 1 else page_elements
    views = []
    for position in itertools.product(*(range(shape[axis]) for axis in sorted(outer))):
        start = int(tensor.storage_offset()) + sum(map(operator.mul, map(strides.__getitem__, sorted(outer)), position))
        views.append(
            torch.empty(0, dtype=torch.int8, device=tensor.device).set_(
                tensor.untyped_storage(),
                start * item_bytes,
                (block_count, page_elements * item_bytes),
                (row_stride * item_bytes, 1),
            )
        )
    return views


def _place(view: torch.Tensor) -> tuple[int, int]:
    """Equal for views whose pages begin at the same bytes, however long they are."""
    return view.data_ptr(), view.stride(0) if len(view) > 1 else 0


def _check_tensor(name: str, tensor: object, block_axis: int) -> None:
    import torch

    if not isinstance(tensor, torch.Tensor):
        raise LayoutError(f"{name}: a {type(tensor).__name__} is not a tensor; give each tensor as a layer of its own")
    if tensor.layout is not torch.strided or tensor.is_nested:
        raise LayoutError(f"{name}: only dense tensors have pages, not {tensor.layout}")
    if tensor.is_meta:
        raise LayoutError(f"{name}: a meta tensor has no memory")
    if not 0 <= block_axis < tensor.ndim:
        raise LayoutError(
            f"{name}: block_axis {block_axis} is not one of the {tensor.ndim} axes of {_describe(tensor)}"
        )
    if not tensor.numel():
        raise LayoutError(f"{name}: there are no blocks, or no bytes in them: {_describe(tensor)}")


def _check_groups(groups: Sequence[KVGroup], names: Sequence[str]) -> None:
    group_of: dict[int, int] = {}
    for group, declared in enumerate(groups):
        if not declared.layers:
            raise LayoutError(f"group {group} has no layers")
        for layer in declared.layers:
            if layer >= len(names):
                raise LayoutError(f"group {group} names layer {layer}, but there are {len(names)} layers, from 0")
            if layer in group_of:
                raise LayoutError(f"{names[layer]} is in group {group_of[layer]} and in group {group}")
            group_of[layer] = group
    missing = [name for layer, name in enumerate(names) if layer not in group_of]
    if missing:
        raise LayoutError(f"in no group: {', '.join(missing)}")


def _used_bytes(page_bytes: int | Sequence[int] | None, layer_count: int) -> list[int | None]:
    if page_bytes is None:
        return [None] * layer_count
    if isinstance(page_bytes, Sequence):
        if len(page_bytes) != layer_count:
            raise LayoutError(f"page_bytes has {len(page_bytes)} values for {layer_count} layers")
        return [operator.index(used) for used in page_bytes]
    return [operator.index(page_bytes)] * layer_count


def _positive(name: str, value: int) -> int:
    try:
        number = operator.index(value)
    except TypeError as exc:
        raise ConfigurationError(f"{name} is {value!r}, it must be a whole number") from exc
    if number < 1:
        raise ConfigurationError(f"{name} is {number}, it must be at least 1")
    return number


def _describe(tensor: object) -> str:
    import torch

    if not isinstance(tensor, torch.Tensor):
        return f"a {type(tensor).__name__}"
    return f"{tensor.dtype} of shape {tuple(tensor.shape)}, strides {tuple(tensor.stride())}"
