"""Where every byte of a transfer is read and written.

A slot holds `block_size_factor` GPU blocks of one KV group. For every reference of the group (a layer's keys, its
values, ...) it holds that many pages in a row, and the references follow one another from the start of the slot.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from aiokvoffload.devices.base import CopyPlan, Direction
from aiokvoffload.errors import InvalidRequestError
from aiokvoffload.kv_caches import CanonicalKVCaches
from aiokvoffload.memory.base import HostMemory
from aiokvoffload.specs import CPULoadStoreSpec, GPULoadStoreSpec

Addresses = NDArray[np.int64]
Places = int | frozenset[int]
"""`(slot * factor + sub-block) * groups + group`; several of them for a GPU block that is named more than once.

A number for most, because a container per block is work for the garbage collector, which stops the world.
"""


def compute_sub_block_ptrs(
    block_ids: Addresses,
    block_size_factor: int,
    output: Addresses,
    *,
    base_address: int,
    row_stride_bytes: int,
    sub_block_bytes: int,
    skip_count: int = 0,
) -> None:
    """Write the address of every sub-block of some blocks to `output`.

    Sub-block j of block b lies at `base_address + b * row_stride_bytes + j * sub_block_bytes`. The first
    `skip_count` sub-blocks of the first block are left out, and what follows `output`'s length of the last one.

    Args:
        block_ids: int64 block numbers.
        block_size_factor: Sub-blocks of each block.
        output: int64, one address per sub-block.
        base_address: Where sub-block 0 of block 0 lies.
        row_stride_bytes: From one block to the next.
        sub_block_bytes: From one sub-block to the next.
        skip_count: Sub-blocks of the first block to leave out, fewer than `block_size_factor`.

    Raises:
        InvalidRequestError: The blocks do not hold exactly that many sub-blocks, counted in whole blocks.
    """
    if not 0 <= skip_count < block_size_factor:
        raise InvalidRequestError(f"skip_count {skip_count} is not between 0 and {block_size_factor - 1}")
    if len(block_ids) != -(-(skip_count + len(output)) // block_size_factor) * bool(len(output)):
        raise InvalidRequestError(
            f"{len(block_ids)} blocks of {block_size_factor} do not fit {len(output)} sub-blocks after {skip_count}"
        )
    rows = base_address + block_ids * row_stride_bytes
    if block_size_factor == 1:
        output[:] = rows
        return
    offsets = np.arange(block_size_factor, dtype=np.int64) * sub_block_bytes
    output[:] = np.add.outer(rows, offsets).reshape(-1)[skip_count : skip_count + len(output)]


def merge_runs(
    sources: Addresses, destinations: Addresses, byte_counts: Addresses, *, pieces: Addresses | None = None
) -> tuple[Addresses, Addresses, Addresses]:
    """Join neighbouring copies that go on where the one before ends, on both sides, and in the same piece.

    Returns:
        Arrays of their own.
    """
    if len(sources) < 2:
        return sources.copy(), destinations.copy(), byte_counts.copy()
    goes_on = (sources[1:] == sources[:-1] + byte_counts[:-1]) & (
        destinations[1:] == destinations[:-1] + byte_counts[:-1]
    )
    if pieces is not None:
        goes_on &= pieces[1:] == pieces[:-1]
    starts = np.concatenate(([0], np.flatnonzero(~goes_on) + 1))
    return sources[starts], destinations[starts], np.add.reduceat(byte_counts, starts)


@dataclass(frozen=True, slots=True)
class _Page:
    """One reference of a group: where its pages lie in GPU memory and within a slot."""

    gpu_address: int
    gpu_stride_bytes: int
    page_bytes: int
    slot_offset_bytes: int


@dataclass(frozen=True, slots=True)
class _Part:
    """The blocks of one group in a transfer."""

    group: int
    skip_count: int
    gpu_blocks: Addresses
    slots: Addresses


class SlotLayout:
    """How GPU blocks lie in slots; makes the copies of a transfer.

    Args:
        kv_caches: The GPU side.
        block_size_factor: GPU blocks per slot.

    Raises:
        ConfigurationError: The factor is not positive.
    """

    def __init__(self, kv_caches: CanonicalKVCaches, block_size_factor: int) -> None:
        self.kv_caches = kv_caches
        self.block_size_factor = block_size_factor
        self.shape = kv_caches.shape(block_size_factor)
        self.group_slot_bytes = self.shape.group_slot_bytes
        self.slot_bytes = self.shape.slot_bytes
        self._pages = [self._group_pages(group) for group in range(len(kv_caches.group_refs))]
        self._columns: Addresses = np.empty((3, 0), dtype=np.int64)
        self._places_per_slot = block_size_factor * len(self._pages)

    def places(self, gpu_spec: GPULoadStoreSpec, cpu_spec: CPULoadStoreSpec) -> dict[int, Places]:
        """Return where the bytes of every GPU block are in CPU memory; see `Places` and `slots_of`."""
        blocks: list[int] = []
        numbers: list[int] = []
        for part in self._parts(gpu_spec, cpu_spec):
            output = np.empty(len(part.gpu_blocks), dtype=np.int64)
            compute_sub_block_ptrs(
                part.slots,
                self.block_size_factor,
                output,
                base_address=part.group,
                row_stride_bytes=self._places_per_slot,
                sub_block_bytes=len(self._pages),
                skip_count=part.skip_count,
            )
            blocks += part.gpu_blocks.tolist()
            numbers += output.tolist()
        found: dict[int, Places] = dict(zip(blocks, numbers, strict=True))
        if len(found) < len(blocks):
            for block, number in zip(blocks, numbers, strict=True):
                if found[block] != number:
                    found[block] = _numbers(found[block]) | {number}
        return found

    def slots_of(self, places: Places) -> Iterable[int]:
        """Return the slots that some places lie in."""
        if isinstance(places, int):
            return (places // self._places_per_slot,)
        return {number // self._places_per_slot for number in places}

    def plan(
        self,
        gpu_spec: GPULoadStoreSpec,
        cpu_spec: CPULoadStoreSpec,
        direction: Direction,
        memory: HostMemory,
        keep: NDArray[np.bool_] | None = None,
    ) -> CopyPlan:
        """Return the copies between GPU blocks and slots, neighbours merged.

        Args:
            gpu_spec: GPU blocks, group after group.
            cpu_spec: Slots, group after group; the first GPU block of a group may lie inside its first slot.
            direction: Which way.
            memory: Where the slots are.
            keep: Which GPU blocks to copy; all of them by default.

        Raises:
            InvalidRequestError: A block or slot is out of range, or the two ends do not fit each other.
        """
        self._check_range("GPU block", gpu_spec.block_ids, self.kv_caches.block_count)
        self._check_range("slot", cpu_spec.block_ids, memory.slot_count)
        parts = self._parts(gpu_spec, cpu_spec)
        columns = self._empty_columns(sum(len(part.gpu_blocks) * len(self._pages[part.group]) for part in parts))
        kept: list[NDArray[np.bool_]] = []
        first = at = 0
        for part in parts:
            count = len(part.gpu_blocks)
            if keep is not None:
                kept += [keep[first : first + count]] * len(self._pages[part.group])
            first += count
            for page in self._pages[part.group]:
                gpu_side, slot_side, byte_counts = columns[:, at : at + count]
                at += count
                byte_counts[:] = page.page_bytes
                compute_sub_block_ptrs(
                    part.gpu_blocks,
                    1,
                    gpu_side,
                    base_address=page.gpu_address,
                    row_stride_bytes=page.gpu_stride_bytes,
                    sub_block_bytes=page.page_bytes,
                )
                compute_sub_block_ptrs(
                    part.slots,
                    self.block_size_factor,
                    slot_side,
                    base_address=memory.address + page.slot_offset_bytes,
                    row_stride_bytes=memory.slot_stride_bytes,
                    sub_block_bytes=page.page_bytes,
                    skip_count=part.skip_count,
                )
        if kept:
            columns = columns[:, np.concatenate(kept)]
        gpu_side, slot_side, byte_counts = columns
        owners = (memory.buffer, *(tensor.tensor for tensor in self.kv_caches.tensors))
        pieces = None
        if memory.slots_per_piece < memory.slot_count:
            pieces = (slot_side - memory.address) // (memory.slots_per_piece * memory.slot_stride_bytes)
        ends = (gpu_side, slot_side) if direction is Direction.STORE else (slot_side, gpu_side)
        return CopyPlan(*merge_runs(*ends, byte_counts, pieces=pieces), direction, owners)

    def _empty_columns(self, copy_count: int) -> Addresses:
        """Return room for GPU addresses, slot addresses and byte counts before they are merged; the same every time."""
        if self._columns.shape[1] < copy_count:
            self._columns = np.empty((3, copy_count), dtype=np.int64)
        return self._columns[:, :copy_count]

    def _parts(self, gpu_spec: GPULoadStoreSpec, cpu_spec: CPULoadStoreSpec) -> list[_Part]:
        """Cut both ends into groups, leaving out empty ones."""
        if len(gpu_spec.group_sizes) != len(self._pages):
            raise InvalidRequestError(
                f"the KV cache has {len(self._pages)} groups, but the GPU blocks come in {len(gpu_spec.group_sizes)}"
            )
        parts = []
        first_block = first_slot = 0
        for group, (size, index) in enumerate(zip(gpu_spec.group_sizes, gpu_spec.block_indices, strict=True)):
            skip_count = index % self.block_size_factor
            slot_count = -(-(skip_count + size) // self.block_size_factor) if size else 0
            if size:
                block_ids = gpu_spec.block_ids[first_block : first_block + size]
                slot_ids = cpu_spec.block_ids[first_slot : first_slot + slot_count]
                parts.append(_Part(group, skip_count, block_ids, slot_ids))
            first_block += size
            first_slot += slot_count
        if first_slot != len(cpu_spec):
            raise InvalidRequestError(
                f"GPU blocks {gpu_spec.group_sizes} from {gpu_spec.block_indices}, at {self.block_size_factor} "
                f"a slot, need {first_slot} slots, not {len(cpu_spec)}"
            )
        return parts

    def _group_pages(self, group: int) -> list[_Page]:
        pages = []
        offset = 0
        for ref in self.kv_caches.group_refs[group]:
            tensor = self.kv_caches.tensors[ref.tensor_index].tensor
            pages.append(_Page(tensor.data_ptr(), tensor.stride(0), ref.page_bytes, offset))
            offset += ref.page_bytes * self.block_size_factor
        return pages

    def _check_range(self, what: str, ids: Addresses, count: int) -> None:
        if len(ids) and int(ids.max()) >= count:
            raise InvalidRequestError(f"{what} {int(ids.max())} is out of range: there are {count}, from 0")


def _numbers(places: Places) -> frozenset[int]:
    return frozenset((places,)) if isinstance(places, int) else places
