"""The processes that share a region: they find each other by a file, wait for each other, and agree."""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Callable
from pathlib import Path

from aiokvoffload.clock import Clock
from aiokvoffload.errors import ConfigurationError, StateError
from aiokvoffload.memory.base import PreparationProgress, PreparationStep, Report
from aiokvoffload.memory.page_calls import PAGE_BYTES
from aiokvoffload.memory.region_board import HEADER_BYTES, ProcessState, RegionBoard, check_header, header_of
from aiokvoffload.memory.region_file import RegionFile, sweep_stale_files
from aiokvoffload.memory.region_shape import RegionShape

_FIRST_PAUSE_SECONDS = 0.001
_LONGEST_PAUSE_SECONDS = 0.02


class RegionGroup:
    """The processes of a region, as one of them sees them; making it joins them.

    Left by `leave`, or when it is let go of; whichever process leaves before all are ready ends the waiting of the
    others.

    Args:
        path: The file that they find each other by.
        shape: How slots lie in the region; the same for all.
        rank: This worker's; None for the scheduler.
        join_seconds: How long to wait until all have joined.
        prepare_seconds: How long to wait then until all are ready.
        clock: Where deadlines are read.
        free_bytes: Says how much room a file system has.

    Raises:
        ConfigurationError: There is no room, the processes disagree about the shape, or something else of that name
            is in the way.
        StateError: The rank stays taken, or the file of a dead engine in the way.
    """

    def __init__(
        self,
        path: Path,
        shape: RegionShape,
        rank: int | None,
        *,
        join_seconds: float,
        prepare_seconds: float,
        clock: Clock,
        free_bytes: Callable[[Path], int],
    ) -> None:
        shape.check_rank(rank)
        self._path = path
        self._shape = shape
        self._number = shape.world_size if rank is None else rank
        self._clock = clock
        self._free_bytes = free_bytes
        self._join_seconds = join_seconds
        self._join_deadline = clock.now() + join_seconds
        self._prepare_seconds = prepare_seconds
        self._file, self._board = self._connect()
        # A file that nobody leaves would keep its name, and its memory, until the next engine sweeps it.
        self.leave = weakref.finalize(self, _leave, self._file, self._board, os.getpid())
        """Let go of the file; idempotent."""

    @property
    def descriptor(self) -> int:
        """The open file; until all are ready or one has failed."""
        return self._file.descriptor

    @property
    def is_waiting(self) -> bool:
        """Whether this process has joined, and is neither ready nor gone."""
        return self._board.own_state is ProcessState.MAPPED

    @property
    def speaks_for_refusal(self) -> bool:
        """Whether this process is the first of those that could not pin the memory, so that one of them says so."""
        states = self._board.states
        return ProcessState.PAGEABLE in states and states.index(ProcessState.PAGEABLE) == self._number

    def say_mapped(self) -> None:
        """Say that this process has mapped the file, and no longer needs its name."""
        self._board.say(ProcessState.MAPPED)

    def say_ready(self, *, is_pinned: bool) -> None:
        """Say that this process has prepared its share."""
        self._board.say(ProcessState.PINNED if is_pinned else ProcessState.PAGEABLE)

    def fail(self) -> None:
        """Say that this process will never be ready, and let go of the file."""
        # The error of one that only gave up explains nothing.
        self._board.say(ProcessState.GAVE_UP if self._those(ProcessState.FAILED) else ProcessState.FAILED)
        self.leave()

    def gather(self, report: Report) -> None:
        """Wait until all have mapped the file, and take its name away before anything is put into it.

        Raises:
            StateError: A process has not come in time, has failed or has died.
        """
        within = f"within {self._join_seconds:g} s"
        self._wait_for(
            lambda: self._those(ProcessState.ABSENT), self._join_deadline, f"joined the region {within}", report
        )
        if self._file.is_creator:
            self._file.drop_name()
            self._board.say_name_is_gone()
        self._wait_for(
            lambda: [] if self._board.name_is_gone else ["its creator"],
            self._join_deadline,
            f"taken the name of the region away {within}",
            report,
        )

    def agree(self, report: Report) -> bool:
        """Wait until all are ready, and return whether all could pin the memory.

        Raises:
            StateError: A process is not ready in time, has failed or has died.
        """
        seconds = self._prepare_seconds
        deadline = self._clock.now() + seconds
        self._wait_for(lambda: self._those(ProcessState.MAPPED), deadline, f"become ready within {seconds:g} s", report)
        return not self._those(ProcessState.PAGEABLE)

    def reserve(self, part: range) -> None:
        """Make room for a range in the file.

        Raises:
            OSError: There is none.
        """
        os.posix_fallocate(self._file.descriptor, part.start, len(part))

    def _connect(self) -> tuple[RegionFile, RegionBoard]:
        """Create the file, or join it; what is left of a dead engine is removed first.

        Some processes of an engine that was killed may still wait for the others. They find out soon, and go.
        """
        while True:
            file = RegionFile.find(self._path)
            if file is None:
                sweep_stale_files(self._path.parent)
                self._check_room()
                file = RegionFile.create(self._path, self._shape.file_bytes, header_of(self._shape))
            if file is not None:
                try:
                    if (board := self._join(file)) is not None:
                        return file, board
                except BaseException:
                    file.close()
                    raise
                file.close()
            if self._clock.now() >= self._join_deadline:
                name = self._name_of(self._number)
                raise StateError(
                    f"{self._path.name} had no place for {name} within {self._join_seconds:g} s: "
                    f"it has one, or a dead engine has left it; use another engine_id, or remove {self._path}"
                )
            self._clock.pause(_FIRST_PAUSE_SECONDS)

    def _join(self, file: RegionFile) -> RegionBoard | None:
        """Take this process's place; return None if there is none yet."""
        if not file.is_creator and not file.has_living_creator():
            file.sweep()
            return None
        check_header(file.read_tail(HEADER_BYTES), self._shape)
        if not file.take_place(self._number):
            return None
        page = mmap.mmap(file.descriptor, PAGE_BYTES, offset=self._shape.board_offset)
        board = RegionBoard(page, self._shape.process_count, self._number)
        is_hopeless = _has_failed(board) or _dead_numbers(file, board, self._number)
        return None if is_hopeless or board.own_state is not ProcessState.ABSENT else board

    def _check_room(self) -> None:
        free_bytes = self._free_bytes(self._path.parent)
        if free_bytes < self._shape.file_bytes:
            raise ConfigurationError(
                f"{self._path.parent} has {free_bytes} bytes free, but {self._path.name} needs "
                f"{self._shape.file_bytes}; use less CPU memory, or make it larger (docker run --shm-size=..., "
                f"mount -o remount,size=... {self._path.parent})"
            )

    def _wait_for(self, missing: Callable[[], list[str]], deadline: float, deed: str, report: Report) -> None:
        """Wait, blocking, until nothing is missing that other processes have to do."""
        pause_seconds = _FIRST_PAUSE_SECONDS
        while names := missing():
            ready_count = sum(state.is_ready for state in self._board.states)
            done_bytes = self._shape.byte_count * ready_count // self._shape.process_count
            report(PreparationProgress(PreparationStep.WAITING, done_bytes, self._shape.byte_count))
            self._check_others()
            if self._clock.now() >= deadline:
                raise StateError(f"{self._path.name}: {', '.join(names)} has not {deed}; look for an error there")
            self._clock.pause(pause_seconds)
            pause_seconds = min(2 * pause_seconds, _LONGEST_PAUSE_SECONDS)
        self._check_others()

    def _check_others(self) -> None:
        """Refuse to go on with a process that has failed or died."""
        if dead := _dead_numbers(self._file, self._board, self._number):
            names = ", ".join(map(self._name_of, dead))
            raise StateError(f"{self._path.name}: {names} has died; start the engine again")
        if failed := self._those(ProcessState.FAILED):
            raise StateError(f"{self._path.name}: {', '.join(failed)} has failed; look for an error there")

    def _those(self, state: ProcessState) -> list[str]:
        return [self._name_of(number) for number, found in enumerate(self._board.states) if found is state]

    def _name_of(self, number: int) -> str:
        return "the scheduler" if number == self._shape.world_size else f"rank {number}"


def _has_failed(board: RegionBoard) -> bool:
    return not {ProcessState.FAILED, ProcessState.GAVE_UP}.isdisjoint(board.states)


def _dead_numbers(file: RegionFile, board: RegionBoard, own_number: int) -> list[int]:
    """Return the processes that have died after they joined and before they were ready."""
    joined = [number for number, state in enumerate(board.states) if state is ProcessState.MAPPED]
    gone = [number for number in joined if number != own_number and not file.has_process(number)]
    # One that has become ready, or has failed, lets go of its place too, but says so before.
    return [number for number in gone if board.states[number] is ProcessState.MAPPED]


def _leave(file: RegionFile, board: RegionBoard, process: int) -> None:
    if os.getpid() != process:
        return  # forked: file and place are the parent's
    if board.own_state in (ProcessState.ABSENT, ProcessState.MAPPED):
        board.say(ProcessState.FAILED)
    file.close()
