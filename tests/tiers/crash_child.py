"""Kills processes that write blocks, and looks at what they leave behind.

`python crash_child.py DIRECTORY FIRST_SEED COUNT`. One process is forked per point, before there are any threads, and a
second one looks; it exits with an error, which ends the run, if anything is wrong.
"""

from __future__ import annotations

import os
import random
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from fs_rig import FILE_BYTES, Directory, held, load, store

from aiokvoffload.testing.faulty_files import FaultyFiles

CAPACITY_BLOCKS = 8
PUTS = 12


class DeadlyFiles(FaultyFiles):
    """Kills its process at the n-th change of the file system: before it, after it, or in the middle of a write."""

    def __init__(self, chance: random.Random) -> None:
        super().__init__()
        self.chance = chance
        self.left = chance.randrange(1, 60)

    def change(self, work: Callable[[], None]) -> None:
        self.left -= 1
        if self.left:
            work()
            return
        if self.chance.random() < 0.5:
            work()
        os.kill(os.getpid(), signal.SIGKILL)

    def write(self, descriptor: int, views: Sequence[memoryview], offset: int) -> int:
        self.left -= 1
        if not self.left:
            content = b"".join(views)
            os.pwrite(descriptor, content[: self.chance.randrange(len(content) + 1)], offset)
            os.kill(os.getpid(), signal.SIGKILL)
        return super().write(descriptor, views, offset)

    def rename(self, path: str, to_path: str) -> None:
        self.change(lambda: os.rename(path, to_path))

    def unlink(self, path: str) -> None:
        self.change(lambda: os.unlink(path))

    def set_times(self, path: str, nanoseconds: int) -> None:
        self.change(lambda: os.utime(path, ns=(nanoseconds, nanoseconds)))

    def open(self, path: str, flags: int) -> int:
        if flags & os.O_CREAT and self.left == 1:
            self.left = 0
            super().open(path, flags)
            os.kill(os.getpid(), signal.SIGKILL)
        self.left -= bool(flags & os.O_CREAT)
        return super().open(path, flags)


def write_until_killed(path: Path, log: Path, seed: int) -> None:
    chance = random.Random(seed)
    directory = Directory(path, CAPACITY_BLOCKS)
    # Where writes are direct, they end at whole pages; through the page cache at any byte.
    io = chance.choice(["buffered", "buffered", "auto"])
    directory.files = DeadlyFiles(chance)
    tier = directory.open(io=io, thread_count=1)
    descriptor = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    for step in range(PUTS):
        number = seed * PUTS + step
        if store(tier, number)[0].is_good:
            os.write(descriptor, f"{number}\n".encode())


def check(path: Path, log: Path, seed: int) -> None:
    directory = Directory(path, CAPACITY_BLOCKS)
    tier = directory.open()
    assert tier.is_evicting
    numbers = range(max(0, seed - 9) * PUTS, (seed + 1) * PUTS)
    there = held(tier, *numbers)
    # Also compares every byte; what was half written must not stand in a block's place at all.
    assert [number for number in there if not load(tier, number).is_good] == []
    stored = [int(line) for line in log.read_text().split()] if log.exists() else []
    # What was stored has left in the order in which it came, and one block at most for another that never came.
    assert {number for number in stored if number >= min(there, default=0)} <= set(there)
    assert len(there) >= min(len(stored), CAPACITY_BLOCKS - 1)
    assert tier.statistics().holdings.used_bytes == directory.used_bytes() == len(there) * FILE_BYTES
    assert len(there) <= CAPACITY_BLOCKS
    assert directory.leftovers() == []
    assert list(path.glob("blocks/*/??/.*")) == []
    tier.close()


def in_child(work: Callable[[], None]) -> int:
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1]
    try:
        work()
    except BaseException:  # noqa: BLE001 - the parent hears of it by the exit status
        sys.excepthook(*sys.exc_info())
        os._exit(1)
    os._exit(0)


def main(path: Path, first_seed: int, count: int) -> None:
    log = path.with_suffix(".log")
    killed_count = 0
    for seed in range(first_seed, first_seed + count):
        status = in_child(lambda seed=seed: write_until_killed(path, log, seed))  # type: ignore[misc]
        killed_count += os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        if not (os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0):
            sys.exit(f"seed {seed}: the writer failed")
        if in_child(lambda seed=seed: check(path, log, seed)):  # type: ignore[misc]
            sys.exit(f"seed {seed}: what it left behind is wrong")
    print(f"{killed_count} killed")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
