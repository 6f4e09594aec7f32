"""The page of a shared region on which its processes say how far they are.

Every process writes one byte of its own and reads those of the others, so no lock is needed.
"""

from __future__ import annotations

import mmap
import struct
from enum import IntEnum

from aiokvoffload.errors import ConfigurationError
from aiokvoffload.memory.region_shape import RegionShape

_HEADER = struct.Struct("<16sQQIII")
_FORMAT = b"aiokvoffload  1\n"  # changes with the layout of the region
HEADER_BYTES = _HEADER.size
_NAME_IS_GONE = HEADER_BYTES
_FIRST_STATE = _NAME_IS_GONE + 1


class ProcessState(IntEnum):
    """How far a process is.

    Attributes:
        ABSENT: It has not joined.
        MAPPED: It has joined.
        PAGEABLE: It is ready, and could not pin the memory.
        PINNED: It is ready.
        FAILED: It will never be ready.
        GAVE_UP: Nor will it, because another has failed.
    """

    ABSENT = 0
    MAPPED = 1
    PAGEABLE = 2
    PINNED = 3
    FAILED = 4
    GAVE_UP = 5

    @property
    def is_ready(self) -> bool:
        """Whether the process has prepared its share."""
        return self in (ProcessState.PAGEABLE, ProcessState.PINNED)


def header_of(shape: RegionShape) -> bytes:
    """Return what a board begins with."""
    return _HEADER.pack(
        _FORMAT,
        shape.block_count,
        shape.slice_bytes,
        shape.world_size,
        shape.is_replicated,
        shape.has_scheduler,
    )


def check_header(header: bytes, shape: RegionShape) -> None:
    """Refuse a region of another shape.

    Raises:
        ConfigurationError: It has another shape, or is no region of this version.
    """
    if header == header_of(shape):
        return
    if len(header) != HEADER_BYTES or not header.startswith(_FORMAT):
        raise ConfigurationError(
            "the file is no region of this version of the library; use the same version in all processes"
        )
    _, block_count, slice_bytes, world_size, is_replicated, has_scheduler = _HEADER.unpack(header)
    found = RegionShape(
        block_count=block_count,
        slice_bytes=slice_bytes,
        world_size=world_size,
        is_replicated=bool(is_replicated),
        has_scheduler=bool(has_scheduler),
    )
    raise ConfigurationError(f"the processes disagree: this one wants {shape}, but the region was made as {found}")


class RegionBoard:
    """The board, as one process sees it.

    Args:
        page: The bytes of the board.
        process_count: Processes that share it.
        number: This process's.
    """

    def __init__(self, page: mmap.mmap, process_count: int, number: int) -> None:
        self._page = page
        self._states = range(_FIRST_STATE, _FIRST_STATE + process_count)
        self._number = number

    @property
    def name_is_gone(self) -> bool:
        """Whether nobody can find the region any more, so that it may be filled."""
        return bool(self._page[_NAME_IS_GONE])

    def say_name_is_gone(self) -> None:
        """Let the others go on."""
        self._page[_NAME_IS_GONE] = 1

    @property
    def states(self) -> list[ProcessState]:
        """How far each process is."""
        return [ProcessState(self._page[place]) for place in self._states]

    @property
    def own_state(self) -> ProcessState:
        """How far this process is."""
        return self.states[self._number]

    def say(self, state: ProcessState) -> None:
        """Say how far this process is."""
        self._page[self._states[self._number]] = state
