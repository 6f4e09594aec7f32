"""A replay with real worker processes: every byte of every rank, and every order."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
from typing import Any

import anyio
import pytest

from aiokvoffload.cli.main import run
from aiokvoffload.cli.options import ReplayOptions
from aiokvoffload.cli.rank_process import RankProcess, Step
from aiokvoffload.cli.replay_workers import WorkersReplay
from aiokvoffload.cli.report import ReplayReport
from aiokvoffload.cli.requests import requests_of
from aiokvoffload.cluster import WorkerPort
from aiokvoffload.cluster.places import meeting_directory
from aiokvoffload.devices.base import Event, SimulatedDevice, Stream
from aiokvoffload.errors import RankLostError
from aiokvoffload.memory.shared import SHARED_MEMORY
from aiokvoffload.testing.order import OrderChecker

OPTIONS = ReplayOptions(limit=60, cpu_blocks=120, page_bytes=64, layers=2, workers=2)


def replay_with(rank_class: type[RankProcess], options: ReplayOptions = OPTIONS) -> ReplayReport:
    replay = WorkersReplay(options, requests_of(options), rank_class)
    return anyio.run(replay.run)


def nothing_is_left() -> bool:
    return (
        not multiprocessing.active_children()
        and not list(SHARED_MEMORY.glob(f"*replay-{os.getpid()}-*"))
        and not list(meeting_directory().glob(f"replay-{os.getpid()}-*"))
    )


def report_of(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 0) -> dict[str, Any]:
    common = ["replay", "--limit", "60", "--cpu-blocks", "120", "--page-bytes", "64", "--layers", "2", "--json"]
    assert run([*common, *arguments]) == status
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert nothing_is_left()
    return found


def test_every_rank_verifies_every_loaded_block_and_nothing_stays_behind(capsys: pytest.CaptureFixture[str]) -> None:
    report = report_of(capsys, "--workers", "2")
    assert report["mismatches"] == report["order_violations"] == 0
    assert report["blocks_verified"] == report["blocks_hit"] > 30
    assert report["evictions"] > 100
    assert report["left_pinned"] == report["left_leased"] == 0
    assert report["bytes_loaded"] == report["blocks_hit"] * 64 * 2 * 2


def test_flipped_bytes_are_found_on_trio_too_with_several_gpu_blocks_per_block(
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ["--workers", "2", "--backend", "trio", "--block-size-factor", "2", "--corrupt", "3"]
    report = report_of(capsys, *arguments, status=1)
    assert report["mismatches"] > 0
    assert report["order_violations"] == 0


class EarlyJobs(RankProcess):
    """Gets the jobs of each step before the kernels of the step before are launched, as over a channel of their own."""

    held: Step | None = None

    def take(self, port: WorkerPort, step: Step) -> None:
        port.submit(step.jobs)
        if self.held is not None:
            self.launch(self.held)
        self.held = step


class Forgetful(OrderChecker):
    """Does not let streams wait for the compute stream."""

    compute: Stream | None = None

    def create_stream(self, name: str) -> Stream:
        stream = super().create_stream(name)
        if name == "compute":
            self.compute = stream
        return stream

    def mark(self, stream: Stream) -> Event:
        event = super().mark(stream)
        if stream is self.compute:
            self.forgotten = event
        return event

    def wait_event(self, stream: Stream, event: Event) -> None:
        if event is not getattr(self, "forgotten", None):
            super().wait_event(stream, event)


class ForgetfulRank(RankProcess):
    def make_device(self) -> SimulatedDevice:
        checker = super().make_device()
        assert isinstance(checker, OrderChecker)
        return Forgetful(checker.wrapped)


@pytest.mark.parametrize("rank_class", [EarlyJobs, ForgetfulRank])
def test_a_mistake_in_the_order_is_found(rank_class: type[RankProcess]) -> None:
    report = replay_with(rank_class)
    assert report.order_violations is not None
    assert report.order_violations > 0
    assert not report.is_faultless
    assert nothing_is_left()


class KilledRank(RankProcess):
    """Is killed in the middle, with copies under way."""

    step_count = 0

    def take(self, port: WorkerPort, step: Step) -> None:
        super().take(port, step)
        self.step_count += 1
        if self.rank == 1 and self.step_count == 10:
            os.kill(os.getpid(), signal.SIGKILL)


def test_a_rank_that_is_killed_ends_the_replay_with_one_clear_error() -> None:
    with pytest.raises(RankLostError, match="rank 1 has ended with status -9"):
        replay_with(KilledRank)
    assert nothing_is_left()


def test_workers_need_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run(["replay", "--workers", "2", "--no-data"])
    assert "--workers moves bytes" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--placement", "exclusive", "--gpu-blocks", "9"], "workers replay with inclusive placement only"),
        (["--engines", "2", "--tier", "memory:"], "workers belong to one engine"),
        (["--restart-after", "5"], "workers replay from start to end"),
    ],
)
def test_what_workers_cannot_replay_is_refused_with_a_sentence_each(
    capsys: pytest.CaptureFixture[str], arguments: list[str], sentence: str
) -> None:
    with pytest.raises(SystemExit, match="2"):
        run(["replay", "--workers", "2", *arguments])
    assert sentence in capsys.readouterr().err


def test_cpu_memory_is_of_all_workers_together() -> None:
    assert ReplayOptions(workers=3).cpu_bytes == 3 * ReplayOptions().cpu_bytes
