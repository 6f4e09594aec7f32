"""A shared region of real processes, some of which are killed; afterwards nothing is left."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from region_rig import Process

from aiokvoffload.memory.page_calls import PAGE_BYTES

pytestmark = pytest.mark.timeout(60)

MEMBER = """
    region = make({rank})
    say("joined")
    if hear() == "prepare":
        try:
            region.prepare()
            region.rows[{rank}, :] = {rank} + 1
            say("ready")
            hear()
            say(region.rows[:2, 0].tolist())
        except OffloadError as exc:
            say(exc)
    region.close()
    say("closed")
"""

FILLING = """
    region = make(1)
    say("joined")
    hear()

    def stop_here(progress):
        if progress.step.value == "registering":
            say("filled")
            hear()

    region.prepare(stop_here)
"""


def test_processes_share_bytes_and_leave_nothing(directory: Path) -> None:
    with Process(directory, MEMBER.format(rank=0)) as first, Process(directory, MEMBER.format(rank=1)) as second:
        for process in (first, second):
            assert process.hear() == "joined"
            process.tell("prepare")
        for process in (first, second):
            assert process.hear() == "ready"
        assert os.listdir(directory) == []
        for process in (first, second):
            process.tell()
            assert process.hear() == "[1, 2]"
            assert process.hear() == "closed"
            assert process.end() == 0


def test_a_creator_that_is_killed_is_named_and_a_restart_with_the_same_id_works(directory: Path) -> None:
    with Process(directory, MEMBER.format(rank=0)) as creator:
        assert creator.hear() == "joined"
        with Process(directory, MEMBER.format(rank=1)) as other:
            assert other.hear() == "joined"
            creator.kill()
            other.tell("prepare")
            assert other.hear() == "aiokvoffload_engine.mmap: rank 0 has died; start the engine again"
            assert other.hear() == "closed"
    (left,) = directory.iterdir()
    assert left.stat().st_blocks * 512 <= PAGE_BYTES  # nothing has been put into it
    test_processes_share_bytes_and_leave_nothing(directory)


def test_a_restart_while_a_process_of_the_killed_engine_still_waits(directory: Path) -> None:
    with Process(directory, MEMBER.format(rank=1)) as straggler, Process(directory, MEMBER.format(rank=0)) as killed:
        assert straggler.hear() == "joined"
        assert killed.hear() == "joined"
        killed.kill()
        with Process(directory, MEMBER.format(rank=0)) as first, Process(directory, MEMBER.format(rank=1)) as second:
            straggler.tell("prepare")
            assert "rank 0 has died" in straggler.hear()
            assert straggler.hear() == "closed"
            for process in (first, second):
                assert process.hear() == "joined"
                process.tell("prepare")
            for process in (first, second):
                assert process.hear() == "ready"


def test_a_process_that_is_killed_while_it_fills_its_share_is_named_and_leaves_nothing(directory: Path) -> None:
    with Process(directory, MEMBER.format(rank=0)) as first, Process(directory, FILLING) as second:
        for process in (first, second):
            assert process.hear() == "joined"
            process.tell("prepare")
        assert second.hear() == "filled"
        assert os.listdir(directory) == []
        second.kill()
        assert first.hear() == "aiokvoffload_engine.mmap: rank 1 has died; start the engine again"
        assert first.hear() == "closed"


def test_processes_that_are_killed_when_all_is_ready_leave_nothing(directory: Path) -> None:
    with Process(directory, MEMBER.format(rank=0)) as first, Process(directory, MEMBER.format(rank=1)) as second:
        for process in (first, second):
            assert process.hear() == "joined"
            process.tell("prepare")
        for process in (first, second):
            assert process.hear() == "ready"
        for process in (first, second):
            process.kill()
        assert os.listdir(directory) == []


RESTARTS = """
    def live(rank, writer, point):
        # Writes a dot once it has joined, and one when it has come to the point where it is killed.
        def stop_here():
            os.write(writer, b".")
            signal.pause()

        region = make(rank)
        os.write(writer, b".")
        if point == "joined" and rank == 0:
            stop_here()
        try:
            region.prepare(lambda progress: stop_here() if progress.step.value == point and rank == 0 else None)
        except OffloadError:
            pass
        else:
            if point == "ready":
                stop_here()
        region.close()

    def start_and_kill(point):
        reader, writer = os.pipe()
        children = []
        for rank in range(2):
            child = os.fork()
            if not child:
                try:
                    live(rank, writer, point)
                finally:
                    os._exit(0)
            children.append(child)
        killed = {"ready": 2, "closed": 0}.get(point, 1)
        for _ in range(2 + killed):
            os.read(reader, 1)
        for child in children[:killed]:
            os.kill(child, signal.SIGKILL)
        for child in children:
            os.waitpid(child, 0)
        os.close(reader)
        os.close(writer)

    for number in range(70):
        start_and_kill(["joined", "populating", "registering", "ready", "closed"][number % 5])
        left = os.listdir(sys.argv[1])
        if number % 5 and left:
            say(f"{left} after restart {number}")
    say("done")
"""


def test_seventy_restarts_in_a_row_leave_nothing(directory: Path) -> None:
    with Process(directory, RESTARTS) as process:
        assert process.hear() == "done"
        assert process.end() == 0
    assert os.listdir(directory) == []


def test_an_interpreter_that_ends_without_closing_leaves_nothing(directory: Path) -> None:
    with Process(directory, "region = make(0)\nsay('joined')\nraise SystemExit(3)") as process:
        assert process.hear() == "joined"
        assert process.end() == 3
    assert os.listdir(directory) == []
