"""Processes that are killed while they write, and reads that never end."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
PATIENCE_SECONDS = 100.0


def run_child(script: str, *arguments: object) -> str:
    """Run a script of this directory to its end, which it must reach by itself."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path])}
    command = [sys.executable, str(HERE / script), *map(str, arguments)]
    found = subprocess.run(
        command, env=environment, check=False, capture_output=True, text=True, timeout=PATIENCE_SECONDS
    )
    assert found.returncode == 0, found.stderr
    return found.stdout


@pytest.mark.parametrize("seed", range(0, 120, 30))
def test_whoever_is_killed_leaves_whole_blocks_or_nothing(tmp_path: Path, seed: int) -> None:
    killed = run_child("crash_child.py", tmp_path / "kv", seed, 30)
    assert int(killed.split()[0]) >= 25


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1000, 1100, 25))
def test_whoever_is_killed_at_many_more_points_leaves_whole_blocks_or_nothing(tmp_path: Path, seed: int) -> None:
    run_child("crash_child.py", tmp_path / "kv", seed, 25)


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_read_that_hangs_costs_one_thread_and_the_process_still_ends(tmp_path: Path, backend: str) -> None:
    assert run_child("hang_child.py", tmp_path / "kv", backend) == "closed\n"
