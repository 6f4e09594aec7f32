"""Watched memory: which cells of which rows a range of bytes touches."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from aiokvoffload.errors import InvalidRequestError

Accesses = Iterable[tuple[str, Sequence[int] | NDArray[np.integer]]]
"""Whole rows, as pairs of a region's name and row numbers."""


@dataclass(frozen=True, slots=True)
class Region:
    """Rows of memory, each cut into cells; the last cell of a row may be shorter.

    Attributes:
        name: For messages and declared accesses.
        address: Where the first row begins.
        row_count: Rows.
        row_bytes: Bytes of a row.
        cell_bytes: Bytes of a cell, the unit in which accesses are compared.
        row_stride_bytes: From one row to the next; what lies between is not watched.
        first_cell: Number of the first cell among those of all regions.
    """

    name: str
    address: int
    row_count: int
    row_bytes: int
    cell_bytes: int
    row_stride_bytes: int
    first_cell: int

    @property
    def cells_per_row(self) -> int:
        """Cells of each row."""
        return -(-self.row_bytes // self.cell_bytes)

    @property
    def end_address(self) -> int:
        """Behind the last byte of the last row."""
        return self.address + (self.row_count - 1) * self.row_stride_bytes + self.row_bytes


class _Shelf:
    """Regions side by side, as columns, so that one search finds the region of every range."""

    def __init__(self, regions: list[Region]) -> None:
        self.regions = sorted(regions, key=lambda region: region.address)
        self.addresses = self._column("address")
        self.ends = self._column("end_address")
        self.strides = self._column("row_stride_bytes")
        self.row_bytes = self._column("row_bytes")
        self.cell_bytes = self._column("cell_bytes")
        self.cells_per_row = self._column("cells_per_row")
        self.first_cells = self._column("first_cell")

    def _column(self, name: str) -> NDArray[np.int64]:
        return np.array([getattr(region, name) for region in self.regions], np.int64)

    def has_room_for(self, region: Region) -> bool:
        return all(region.end_address <= other.address or other.end_address <= region.address for other in self.regions)

    def find(
        self, starts: NDArray[np.int64], ends: NDArray[np.int64], covered_bytes: NDArray[np.int64]
    ) -> list[NDArray[np.int64]]:
        """Return arrays of the cells touched; set how many bytes of each range lie in a region, if they touch one."""
        found = []
        which = np.arange(len(starts))
        while len(which):
            index = np.searchsorted(self.ends, starts, side="right")
            inside = index < len(self.ends)
            index, starts, ends, which = index[inside], starts[inside], ends[inside], which[inside]
            base, stride, row_bytes = self.addresses[index], self.strides[index], self.row_bytes[index]
            cell_bytes, per_row = self.cell_bytes[index], self.cells_per_row[index]
            region_ends = self.ends[index]
            low = np.maximum(starts, base) - base
            high = np.minimum(ends, region_ends) - base - 1
            first_row, in_row = np.divmod(low, stride)
            # A range that begins in the gap behind a row touches the next row first.
            first = first_row * per_row + np.where(in_row < row_bytes, in_row // cell_bytes, per_row)
            last_row, in_row = np.divmod(high, stride)
            last = last_row * per_row + np.minimum(in_row // cell_bytes, per_row - 1)
            touched = (low <= high) & (first <= last)
            first_cells = first[touched] + self.first_cells[index[touched]]
            found.append(_expand(first_cells, (last - first + 1)[touched]))
            covered_bytes[which[touched]] += (high - low + 1)[touched]
            goes_on = ends > region_ends
            starts, ends, which = region_ends[goes_on], ends[goes_on], which[goes_on]
        return found


class RegionMap:
    """All watched regions."""

    def __init__(self) -> None:
        self.cell_count = 0
        self._regions: dict[str, Region] = {}
        self._in_order: list[Region] = []
        self._shelves: list[_Shelf] = []
        self._first_cells: NDArray[np.int64] = np.empty(0, np.int64)

    def add(
        self, name: str, address: int, row_count: int, row_bytes: int, cell_bytes: int, row_stride_bytes: int
    ) -> None:
        """Add a region; regions may interleave, as views of one tensor do.

        Raises:
            InvalidRequestError: The name is taken, or the sizes make no rows.
        """
        if name in self._regions:
            raise InvalidRequestError(f"a region named {name!r} is watched already")
        if min(address, row_count) < 1 or not 1 <= cell_bytes <= row_bytes <= row_stride_bytes:
            raise InvalidRequestError(
                f"region {name!r} needs an address, rows, and 1 <= cell_bytes ({cell_bytes}) <= row_bytes "
                f"({row_bytes}) <= row_stride_bytes ({row_stride_bytes})"
            )
        region = Region(name, address, row_count, row_bytes, cell_bytes, row_stride_bytes, self.cell_count)
        self._regions[name] = region
        self._in_order.append(region)
        self.cell_count += row_count * region.cells_per_row
        self._first_cells = np.append(self._first_cells, region.first_cell)
        for index, shelf in enumerate(self._shelves):
            if shelf.has_room_for(region):
                self._shelves[index] = _Shelf([*shelf.regions, region])
                return
        self._shelves.append(_Shelf([region]))

    def cells_of_ranges(
        self, starts: NDArray[np.int64], byte_counts: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Return the cells touched by ranges of bytes, and which ranges lie, in whole or in part, outside."""
        found: list[NDArray[np.int64]] = []
        covered_bytes = np.zeros(len(starts), np.int64)
        for shelf in self._shelves:
            covered_here = np.zeros(len(starts), np.int64)
            found += shelf.find(starts, starts + byte_counts, covered_here)
            np.maximum(covered_bytes, covered_here, out=covered_bytes)
        return _joined(found), covered_bytes < byte_counts

    def cells_of_rows(self, accesses: Accesses) -> NDArray[np.int64]:
        """Return the cells of whole rows.

        Raises:
            InvalidRequestError: There is no such region or row.
        """
        found = []
        for name, rows in accesses:
            region = self._regions.get(name)
            if region is None:
                raise InvalidRequestError(f"no region named {name!r} is watched; there are {sorted(self._regions)}")
            numbers = np.asarray(rows, np.int64)
            if numbers.size and not 0 <= int(numbers.min()) <= int(numbers.max()) < region.row_count:
                raise InvalidRequestError(f"region {name!r} has rows 0 to {region.row_count - 1}, not all of {rows}")
            per_row = region.cells_per_row
            found.append(_expand(region.first_cell + numbers * per_row, np.full(len(numbers), per_row)))
        return _joined(found)

    def locate(self, cell: int) -> tuple[str, int]:
        """Return the region and the row of a cell."""
        index = int(np.searchsorted(self._first_cells, cell, side="right")) - 1
        region = self._in_order[index]
        return region.name, (cell - region.first_cell) // region.cells_per_row


def _joined(found: list[NDArray[np.int64]]) -> NDArray[np.int64]:
    return np.concatenate(found) if found else np.empty(0, np.int64)


def _expand(first: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the numbers first, first + 1, ... of each run, `counts` of each."""
    if not len(counts) or int(counts.max()) == 1:
        return first
    total = int(counts.sum())
    return np.repeat(first - (np.cumsum(counts) - counts), counts) + np.arange(total)
