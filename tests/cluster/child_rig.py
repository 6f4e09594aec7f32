"""Ranks and schedulers that are processes of their own, told what to do line by line."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Self

_PREAMBLE = """
import os, sys, threading
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from aiokvoffload.errors import OffloadError
from aiokvoffload.offloader import Deadlines, open_offloader
from cluster_rig import ENGINE, PATIENCE_SECONDS, Rank

directory = Path(sys.argv[1])

def say(text):
    print(text, flush=True)

def hear():
    return sys.stdin.readline().strip()

def open_engine(world_size):
    deadlines = Deadlines(join_seconds=PATIENCE_SECONDS)
    return open_offloader(
        None, cpu_bytes=1 << 12, engine_id=ENGINE, world_size=world_size, directory=directory, deadlines=deadlines
    )

def join(number):
    rank = Rank(number, directory=directory)
    rank.join_soon()
    return rank.wait_joined()
"""

RANK = """
rank = join(1)
say(rank.error or "joined")
while words := hear().split():
    if words[0] == "submit":
        rank.port.submit(bytes.fromhex(words[1]))
    elif words[0] == "fork":
        if os.fork() == 0:
            try:
                rank.port.submit(b"")
            except OffloadError as exc:
                say(exc)
            hear()  # holds the connection until nobody can tell it anything any more
            os._exit(0)
        continue
    else:
        rank.land()
    say("done")
rank.leave()
"""


class Child:
    """A Python process of an engine.

    Args:
        directory: Where sockets are.
        program: What it runs; `join`, `open_engine`, `say` and `hear` are there.
    """

    def __init__(self, directory: Path, program: str = RANK) -> None:
        here = Path(__file__).parent
        self._process = subprocess.Popen(
            [sys.executable, "-c", _PREAMBLE + textwrap.dedent(program), str(directory), str(here)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(here.parents[1])},
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def hear(self) -> str:
        """Return the next line that it says; empty once it is gone."""
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def tell(self, line: str) -> None:
        """Let it hear a line."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()

    def do(self, line: str) -> None:
        """Let it do something, and wait until that is done."""
        self.tell(line)
        assert self.hear() == "done"

    def kill(self) -> None:
        """Kill it without warning, and wait until it is gone."""
        self._process.kill()
        self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
