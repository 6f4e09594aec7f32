"""Ctrl-C is answered by one word and status 130, whatever a command is doing; nothing stays behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import anyio
import pytest
from cluster_rig import Cluster
from offloader_rig import on_both_loops, settle

from aiokvoffload.cli.interrupts import ignore_interrupts, interrupts_raised, is_interrupt, leave_when_interrupted
from aiokvoffload.cli.rank_process import Step
from aiokvoffload.cli.replay_workers import RankProcesses, Stepper
from aiokvoffload.cluster.places import meeting_directory
from aiokvoffload.memory.shared import SHARED_MEMORY

ROOT = Path(__file__).parents[2]
PATIENCE_SECONDS = 60.0
COMMAND = ("-m", "aiokvoffload")


class Command:
    """A command in a process of its own, and a group of its own as a terminal would make it."""

    def __init__(self, *arguments: str, path: Path = ROOT) -> None:
        self._process = subprocess.Popen(
            [sys.executable, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": f"{path}{os.pathsep}{ROOT}"},
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def hear(self) -> str:
        """Return the next line of its standard output."""
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def interrupt(self) -> tuple[int, str]:
        """Press Ctrl-C, which reaches its children too; return its status, and what it has said on standard error."""
        os.killpg(self.pid, signal.SIGINT)
        _, said = self._process.communicate(timeout=PATIENCE_SECONDS)
        return self._process.returncode, said

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()


@contextmanager
def started(*arguments: str, path: Path = ROOT) -> Iterator[Command]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # what is ignored here would be there
    try:
        command = Command(*arguments, path=path)
    finally:
        signal.signal(signal.SIGINT, before)
    try:
        yield command
    finally:
        command.end()


STUBBORN_TORCH = """
import sys
print("importing", flush=True)
try:
    sys.stdin.readline()
except BaseException as exc:  # some libraries do this while they are imported
    raise ImportError("torch cannot be imported") from exc
"""


@pytest.mark.parametrize("arguments", [["replay"], ["replay", "--workers", "2"], ["bench", "transfer"]])
def test_in_the_middle_of_an_import(tmp_path: Path, arguments: list[str]) -> None:
    (tmp_path / "torch.py").write_text(STUBBORN_TORCH)
    with started(*COMMAND, *arguments, path=tmp_path) as command:
        assert command.hear() == "importing"
        assert command.interrupt() == (130, "interrupted\n")


@pytest.mark.parametrize("arguments", [[], ["--workers", "2"], ["--no-data"], ["--no-data", "--sweep"]])
def test_while_a_trace_is_read(tmp_path: Path, arguments: list[str]) -> None:
    trace = tmp_path / "trace.jsonl"
    os.mkfifo(trace)
    with started(*COMMAND, "replay", "--trace", str(trace), *arguments) as command, trace.open("w"):
        # Opened once the other end is.
        assert command.interrupt() == (130, "interrupted\n")


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_in_the_middle_of_a_replay_with_several_workers(backend: str) -> None:
    script = str(Path(__file__).with_name("interrupted_child.py"))
    options = ["--workers", "2", "--limit", "100000", "--cpu-blocks", "120", "--page-bytes", "64", "--layers", "2"]
    with started(script, "replay", *options, "--backend", backend) as command:
        assert command.hear() == "in full swing"
        assert command.interrupt() == (130, "interrupted\n")
        assert not list(SHARED_MEMORY.glob(f"*replay-{command.pid}-*"))
        assert not list(meeting_directory().glob(f"replay-{command.pid}-*"))


class NotedSteps(RankProcesses):
    """Notes the steps that ranks would get."""

    def __init__(self) -> None:
        self.steps: list[Step | None] = []

    def send(self, step: Step | None) -> None:
        self.steps.append(step)


@on_both_loops
async def test_the_last_step_takes_the_jobs_along_that_closing_waits_for(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    cluster.join_soon()
    async with cluster.context() as offloader:
        for rank in cluster.ranks:
            rank.wait_joined()
        noted = NotedSteps()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(Stepper(offloader, noted).run)
            await settle()
            handle = offloader.store_soon(offloader.keys(range(4)), [0])
            tasks.cancel_scope.cancel()
        (step,) = noted.steps
        assert step is not None
        for rank in cluster.ranks:
            rank.port.submit(step.jobs)
        cluster.land()
        assert (await handle).success
    cluster.leave()


@pytest.fixture
def handler() -> Iterator[None]:
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("handler")
def test_what_is_ignored_stays_ignored() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    leave_when_interrupted()
    with interrupts_raised():
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


@pytest.mark.usefixtures("handler")
def test_interrupts_are_raised_where_there_is_something_to_give_back() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    leave_when_interrupted()
    leaving = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), interrupts_raised():
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is leaving


@pytest.mark.usefixtures("handler")
def test_nothing_is_said_once_all_is_over() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    leave_when_interrupted()
    ignore_interrupts()
    signal.raise_signal(signal.SIGINT)


def test_an_interrupt_is_found_in_a_group() -> None:
    assert is_interrupt(BaseExceptionGroup("of a nursery", [ValueError(), KeyboardInterrupt()]))
    assert not is_interrupt(ExceptionGroup("of a nursery", [ValueError()]))
    assert not is_interrupt(ValueError())
