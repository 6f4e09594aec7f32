"""Reads a block that never comes, and goes on, and ends.

`python hang_child.py DIRECTORY BACKEND`. Its file system opens a pipe and waits for its writer, as one that has lost
its server waits: in the kernel, where nothing ends it.
"""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

import anyio
from fs_rig import PATIENCE_SECONDS, Directory

from aiokvoffload.testing.clock import ManualClock
from aiokvoffload.testing.faulty_files import FaultyFiles
from aiokvoffload.testing.strategies import make_keys
from aiokvoffload.testing.tier_contract import BLOCK_BYTES, payload
from aiokvoffload.tiers.breaker import BreakerState
from aiokvoffload.tiers.outcomes import BlockResult, Reason


class WaitingFiles(FaultyFiles):
    def __init__(self) -> None:
        super().__init__()
        self.path = ""
        self.is_waiting = threading.Event()

    def open(self, path: str, flags: int) -> int:
        if path == self.path:
            self.is_waiting.set()
        return os.open(path, flags, 0o600)


async def main(path: Path) -> None:
    clock, files, directory = ManualClock(), WaitingFiles(), Directory(path)
    directory.files = files
    tier = directory.open(io="buffered", thread_count=1, clock=clock)
    await tier.put(make_keys(1, 2), [payload(1), payload(2)])
    block = directory.file(1)
    block.unlink()
    os.mkfifo(block)
    files.path = str(block)

    results: list[BlockResult] = []
    released: list[int] = []

    async def read() -> None:
        results.extend(await tier.get_into(make_keys(1), [bytearray(BLOCK_BYTES)], on_release=released.append))

    async with anyio.create_task_group() as group:
        group.start_soon(read)
        await anyio.wait_all_tasks_blocked()
        assert files.is_waiting.wait(PATIENCE_SECONDS)
        clock.advance(tier.timeout_seconds)
    assert results[0].reason is Reason.DEADLINE, results
    assert released == []
    found = tier.statistics()
    assert (found.breaker, found.stuck_threads, found.calls_in_flight) == (BreakerState.OPEN, 1, 1), found
    assert (await tier.contains(make_keys(2)))[0].reason is Reason.BREAKER_OPEN

    # One thread and one deadline is all that it has cost: the next probe is served, by another thread.
    clock.advance(5.0)
    assert (await tier.get_into(make_keys(2), [bytearray(BLOCK_BYTES)]))[0].is_good
    assert tier.statistics().breaker is BreakerState.CLOSED

    async with anyio.create_task_group() as group:
        group.start_soon(tier.aclose)
        await anyio.wait_all_tasks_blocked()
        clock.advance(5.0)
    assert released == []
    assert os.listdir(f"{path}/writers") == []
    print("closed", flush=True)


if __name__ == "__main__":
    anyio.run(main, Path(sys.argv[1]), backend=sys.argv[2])
