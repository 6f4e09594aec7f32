"""How the slots of all workers lie in one shared region.

Row i holds offloaded block i of all workers, a slice for each in the order of their ranks::

    row 0  [ rank 0 | rank 1 ]
    row 1  [ rank 0 | rank 1 ]
    ...
    board  [ who is how far  ]   the last page
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from aiokvoffload.errors import ConfigurationError
from aiokvoffload.memory.page_calls import PAGE_BYTES, whole_pages

MAX_WORLD_SIZE = 1024
"""The board has a byte for each process, and is one page."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionShape:
    """What all processes that share a region have to agree on.

    Attributes:
        block_count: Rows.
        slice_bytes: Bytes of one worker's part of a row.
        world_size: Workers, with ranks from 0.
        is_replicated: All workers hold the same bytes, so that a row has one slice for all.
        has_scheduler: One more process maps the region, without a slice: the one that owns manager and tiers.
    """

    block_count: int
    slice_bytes: int
    world_size: int
    is_replicated: bool = False
    has_scheduler: bool = False

    def __post_init__(self) -> None:
        if min(self.block_count, self.slice_bytes, self.world_size) < 1:
            raise ConfigurationError(
                f"a region of {self.block_count} blocks, {self.slice_bytes} bytes a slice, for {self.world_size} "
                "workers has no bytes; all three must be at least 1"
            )
        if self.world_size > MAX_WORLD_SIZE:
            raise ConfigurationError(f"world_size is {self.world_size}; one region serves up to {MAX_WORLD_SIZE}")

    @property
    def slice_count(self) -> int:
        """Slices of a row."""
        return 1 if self.is_replicated else self.world_size

    @property
    def row_bytes(self) -> int:
        """Bytes of one offloaded block of all workers; from one slot of a worker to its next."""
        return self.slice_bytes * self.slice_count

    @property
    def byte_count(self) -> int:
        """Bytes of all rows."""
        return self.block_count * self.row_bytes

    @property
    def process_count(self) -> int:
        """Processes that map the region."""
        return self.world_size + self.has_scheduler

    @property
    def board_offset(self) -> int:
        """Where the rows have ended and a new page begins."""
        return whole_pages(self.byte_count)

    @property
    def file_bytes(self) -> int:
        """Bytes of rows and board."""
        return self.board_offset + PAGE_BYTES

    def slot_offset(self, rank: int | None) -> int:
        """Return where a worker's slice of row 0 begins; the scheduler's slots are whole rows."""
        return 0 if rank is None or self.is_replicated else rank * self.slice_bytes

    def slot_bytes(self, rank: int | None) -> int:
        """Return the bytes of a slot, as one process sees it."""
        return self.row_bytes if rank is None else self.slice_bytes

    def share(self, rank: int | None) -> Iterator[range]:
        """Return the whole pages that one process populates, as bytes; together they are all pages, each once.

        A worker has the pages that begin in its slices, so that most of a slice lies near its worker. Workers that
        hold the same bytes share the rows; the scheduler has none.
        """
        if rank is None:
            return
        if self.slice_count == 1:
            first, last = (self.block_count * part // self.world_size for part in (rank, rank + 1))
            ranges = iter([range(first * self.row_bytes, last * self.row_bytes)])
        else:
            starts = range(self.slot_offset(rank), self.byte_count, self.row_bytes)
            ranges = (range(start, start + self.slice_bytes) for start in starts)
        for part in ranges:
            pages = range(whole_pages(part.start), whole_pages(part.stop))
            if pages:
                yield pages

    def check_rank(self, rank: int | None) -> None:
        """Refuse a rank that no process of this region has.

        Raises:
            ConfigurationError: There is no such rank, or no scheduler.
        """
        if rank is None and not self.has_scheduler:
            raise ConfigurationError("rank None is the scheduler, but this region's shape has has_scheduler=False")
        if rank is not None and not 0 <= rank < self.world_size:
            raise ConfigurationError(f"rank is {rank}, but there are {self.world_size} workers, from 0")
