"""Regions of several processes: all in this one, or real ones that are told what to do."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from aiokvoffload.memory.region_shape import RegionShape
from aiokvoffload.memory.shared import SharedOffloadRegion
from aiokvoffload.testing.memory_contract import PinCountingDevice

PATIENCE_SECONDS = 30.0
"""Bounds a failing test; a passing one never waits for it."""


def shape_of(block_count: int = 3, slice_bytes: int = 5000, world_size: int = 2, **options: bool) -> RegionShape:
    return RegionShape(block_count=block_count, slice_bytes=slice_bytes, world_size=world_size, **options)


def ranks_of(shape: RegionShape) -> list[int | None]:
    """Return the ranks of all processes of a region."""
    return [*range(shape.world_size), *([None] if shape.has_scheduler else [])]


class Group:
    """All processes of a region as objects of this process, each with a device of its own."""

    def __init__(
        self, directory: Path, shape: RegionShape, *, limits: dict[int, int] | None = None, **options: Any
    ) -> None:
        self.devices = [PinCountingDevice(limit=(limits or {}).get(rank)) for rank in range(shape.world_size)]
        self.regions = [
            SharedOffloadRegion(
                "engine",
                shape,
                rank,
                None if rank is None else self.devices[rank],
                directory=directory,
                join_seconds=PATIENCE_SECONDS,
                prepare_seconds=PATIENCE_SECONDS,
                **options,
            )
            for rank in ranks_of(shape)
        ]

    def prepare(self) -> list[Exception | None]:
        """Prepare all of them at once, each in a thread; return what each has raised."""
        return prepare_all(self.regions)

    def close(self) -> None:
        for region in self.regions:
            region.close()


def prepare_all(regions: Sequence[SharedOffloadRegion]) -> list[Exception | None]:
    """Prepare regions at once, each in a thread; return what each has raised."""
    errors: list[Exception | None] = [None] * len(regions)

    def prepare(number: int) -> None:
        try:
            regions[number].prepare()
        except Exception as exc:  # noqa: BLE001  returned
            errors[number] = exc

    threads = [threading.Thread(target=prepare, args=(number,)) for number in range(len(regions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


_PREAMBLE = textwrap.dedent(
    """
    import os, signal, sys
    from pathlib import Path
    from aiokvoffload.devices.host import HostDevice
    from aiokvoffload.errors import OffloadError
    from aiokvoffload.memory.region_shape import RegionShape
    from aiokvoffload.memory.shared import SharedOffloadRegion

    def make(rank, engine_id="engine", block_count=4, slice_bytes=5000, world_size=2, **options):
        shape = RegionShape(block_count=block_count, slice_bytes=slice_bytes, world_size=world_size)
        directory = Path(sys.argv[1])
        return SharedOffloadRegion(engine_id, shape, rank, HostDevice(), directory=directory, **options)

    def say(text):
        print(text, flush=True)

    def hear():
        return sys.stdin.readline().strip()
    """
)


class Process:
    """A Python process with a region; it says lines, and hears lines.

    Args:
        directory: Where regions are.
        program: What it runs; `make`, `say` and `hear` are there.
    """

    def __init__(self, directory: Path, program: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _PREAMBLE + textwrap.dedent(program), str(directory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        )

    def hear(self) -> str:
        """Return the next line that it says; empty once it is gone."""
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def tell(self, line: str = "go on") -> None:
        """Let it hear a line."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()

    def kill(self) -> None:
        """Kill it without warning, and wait until it is gone."""
        self._process.kill()
        self._process.wait()

    def end(self) -> int:
        """Wait until it has ended by itself."""
        return self._process.wait(PATIENCE_SECONDS)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
