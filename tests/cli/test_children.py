"""Processes of a command: what becomes of their errors, and of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from aiokvoffload.cli.children import ChildProcess
from aiokvoffload.cli.options import ReplayOptions
from aiokvoffload.cli.rank_process import RankProcess
from aiokvoffload.errors import ConfigurationError, DeviceError, RankLostError
from aiokvoffload.memory.base import PreparationProgress, PreparationStep
from aiokvoffload.memory.shared import SHARED_MEMORY
from aiokvoffload.offloader import open_offloader
from aiokvoffload.testing.memory_contract import StopPreparing

PATIENCE_SECONDS = 60.0
ROOT = Path(__file__).parents[2]
OPTIONS = ReplayOptions(page_bytes=64, layers=2, workers=2)


@contextmanager
def child(work: object, *arguments: object) -> Iterator[ChildProcess]:
    process = ChildProcess("the child", work, *arguments)  # type: ignore[arg-type]
    try:
        yield process
    finally:
        process.end(PATIENCE_SECONDS)


def echo(word: str, pipe: Connection) -> None:
    pipe.send(f"{word} {pipe.recv()}")


def fail(is_mistake: bool, pipe: Connection) -> None:
    raise ConfigurationError("a policy is unknown") if is_mistake else DeviceError("the device has failed")


def die(pipe: Connection) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def obey_nobody(pipe: Connection) -> None:
    pipe.send("here")
    signal.pause()


def test_a_child_answers() -> None:
    with child(echo, "hello") as process:
        process.send("world")
        process.check()
        assert process.receive() == "hello world"


@pytest.mark.parametrize("is_mistake", [False, True])
def test_an_error_is_raised_where_it_can_be_said(capfd: pytest.CaptureFixture[str], is_mistake: bool) -> None:
    expected = (ConfigurationError, "a policy is unknown") if is_mistake else (RankLostError, "the device has failed")
    with child(fail, is_mistake) as process, pytest.raises(expected[0], match=expected[1]):
        process.receive()
    assert capfd.readouterr().err == ""


def test_a_child_that_dies_is_named() -> None:
    with child(die) as process:
        with pytest.raises(RankLostError, match="the child has ended with status -9"):
            process.receive()
        with pytest.raises(RankLostError, match="the child has ended with status -9"):
            process.check()


def test_an_interrupt_is_left_to_the_parent_and_who_does_not_go_is_killed() -> None:
    process = ChildProcess("the child", obey_nobody)
    assert process.receive() == "here"
    pid = process.pid
    os.kill(pid, signal.SIGINT)
    process.check()
    process.end(0.0)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


FIRST_CHILD = """
import signal
from aiokvoffload.cli.children import ChildProcess
def tell(pipe):
    pipe.send(signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, set()))
if __name__ == "__main__":
    child = ChildProcess("the child", tell)
    print("blocked there:", child.receive())
    print("blocked here:", signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, set()))
    child.end(60.0)
"""


def test_the_first_child_of_a_process_too_is_started_with_interrupts_blocked(tmp_path: Path) -> None:
    script = tmp_path / "first.py"
    script.write_text(FIRST_CHILD)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, env=environment, check=True)
    assert done.stdout == "blocked there: True\nblocked here: False\n"


def test_a_rank_that_joins_as_its_scheduler_leaves_ends_with_one_sentence(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    engine_id = f"replay-{os.getpid()}-leaving"

    def leave_once_it_has_joined(progress: PreparationProgress) -> None:
        if progress.step is PreparationStep.WAITING and progress.done_bytes == 1:
            raise StopPreparing

    with child(RankProcess.work, OPTIONS, 16, engine_id, 0) as process:
        with (
            pytest.raises(StopPreparing),
            open_offloader(
                None, cpu_bytes=1 << 20, engine_id=engine_id, world_size=2, on_progress=leave_once_it_has_joined
            ),
        ):
            raise AssertionError("it opened")
        with pytest.raises(RankLostError, match=rf"rank 0 of engine '{engine_id}': the scheduler .* has gone"):
            process.receive()
    assert capfd.readouterr().err == ""
    assert not list(SHARED_MEMORY.glob(f"*{engine_id}*"))


ORPHANED_RANK = """
from aiokvoffload.cli.children import ChildProcess
from aiokvoffload.cli.options import ReplayOptions
from aiokvoffload.cli.rank_process import RankProcess
if __name__ == "__main__":
    rank = ChildProcess("rank 0", RankProcess.work, ReplayOptions(page_bytes=64, workers=2), 16, "of-nobody", 0)
    rank._pipe.poll(None)
    print("ready", flush=True)
    rank.receive()
"""


def test_a_rank_whose_parent_has_died_says_the_sentence_itself(tmp_path: Path) -> None:
    script = tmp_path / "orphaned.py"
    script.write_text(ORPHANED_RANK)
    parent = subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert parent.stdout is not None
    assert parent.stdout.readline() == "ready\n"
    parent.kill()
    _, said = parent.communicate(timeout=PATIENCE_SECONDS)  # until the rank has ended too
    assert said == "aiokvoffload: rank 0: the replay has ended before it has begun\n"
