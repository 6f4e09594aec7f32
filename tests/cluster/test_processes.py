"""Real processes that are killed: what they held comes back, and what they leave behind is nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from child_rig import Child
from cluster_rig import ENGINE, PATIENCE_SECONDS, Cluster, Rank, Step, poll_until

from aiokvoffload.clock import SystemClock
from aiokvoffload.cluster.places import EngineLock
from aiokvoffload.errors import ClosedError, ConfigurationError, RankLostError, StateError
from aiokvoffload.memory.shared import SHARED_MEMORY
from aiokvoffload.offloader import SyncOffloader
from aiokvoffload.specs import LookupResult, StoreOutcome

SCHEDULER = """
with open_engine(1) as offloader:
    handle = offloader.store_soon(offloader.keys(range(4)), [0])
    say(offloader.take_jobs().hex())
    hear()
"""


def nothing_is_left(directory: Path) -> bool:
    return not list(directory.iterdir()) and not list(SHARED_MEMORY.glob(f"*{ENGINE}*"))


@contextmanager
def engine(directory: Path, **options: Any) -> Iterator[tuple[Cluster, SyncOffloader, Child]]:
    """Open an engine whose rank 0 is in this process, and whose rank 1 is one of its own."""
    cluster = Cluster(directory, **options)
    cluster.ranks.pop()
    with Child(directory) as child:
        cluster.join_soon()
        with cluster.context() as offloader:
            assert child.hear() == "joined"
            cluster.ranks[0].wait_joined()
            yield cluster, offloader, child
        cluster.leave()
    assert nothing_is_left(directory)


def step(cluster: Cluster, offloader: SyncOffloader, child: Child) -> None:
    child.do(f"submit {cluster.step(offloader).hex()}")


def test_a_rank_killed_in_mid_copy_fails_the_transfer_and_its_slots_come_back_with_the_last_report(
    tmp_path: Path,
) -> None:
    with engine(tmp_path) as (cluster, offloader, child):
        keys = offloader.keys(range(8))
        handle = offloader.store_soon(keys, [0, 1])
        step(cluster, offloader, child)
        child.kill()
        poll_until(offloader, lambda: offloader.statistics().fault is not None)
        assert f"rank 1 (process {child.pid}) has died" in str(offloader.statistics().fault)
        assert not handle.is_idle  # rank 0 may still be copying
        assert offloader.statistics().manager.writing == 2
        assert offloader.store_soon(keys, [2, 3]).outcomes == (StoreOutcome.REFUSED,) * 2
        cluster.land(0)
        result = handle.wait(timeout_seconds=PATIENCE_SECONDS)
        assert not result.success
        assert "rank 1" in str(result.error)
        assert "has died" in str(result.error)
        manager = offloader.statistics().manager
        assert (manager.free, manager.total) == (8, 8)
        assert offloader.prepare_load(keys).result is LookupResult.MISS


def test_a_killed_rank_closes_the_offloader_where_that_was_asked_for(tmp_path: Path) -> None:
    with engine(tmp_path, on_lost_rank="close") as (cluster, offloader, child):
        keys = offloader.keys(range(4))
        handle = offloader.store_soon(keys, [0])
        step(cluster, offloader, child)
        cluster.land(0)
        child.kill()
        poll_until(offloader, lambda: handle.is_idle)
        with pytest.raises(RankLostError, match=rf"rank 1 \(process {child.pid}\) has died; close this offloader"):
            offloader.prepare_load(keys)


def test_a_killed_rank_is_seen_even_if_a_process_forked_from_it_holds_its_connection(tmp_path: Path) -> None:
    with engine(tmp_path) as (_, offloader, child):
        child.tell("fork")
        assert "this worker port belongs to the parent process" in child.hear()
        child.kill()
        poll_until(offloader, lambda: offloader.statistics().fault is not None)
        assert "has died" in str(offloader.statistics().fault)


def test_a_rank_in_a_process_of_its_own_stores_and_loads(tmp_path: Path) -> None:
    with engine(tmp_path) as (cluster, offloader, child):
        cluster.write([0, 1])
        keys = offloader.keys(range(8))
        for handle in (offloader.store_soon(keys, [0, 1]), None):
            moving = handle or offloader.prepare_load(keys).start([5, 6])
            step(cluster, offloader, child)
            cluster.land(0)
            child.do("land")
            assert moving.wait(timeout_seconds=PATIENCE_SECONDS).success
        assert cluster.holds([5, 6]) == [True]
        offloader.close()
        child.tell("")


def test_a_rank_that_is_killed_while_the_engine_starts_is_named(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    with Child(tmp_path) as child:
        kill: Step = (lambda joined: joined == 1, child.kill)
        with (
            pytest.raises(StateError, match=rf"rank 1 \(process {child.pid}\) has died while the engine started"),
            cluster.context_doing(kill),
        ):
            raise AssertionError("it opened")
    assert nothing_is_left(tmp_path)


def wait_until_ended(rank: Rank) -> str:
    clock = SystemClock()
    deadline = clock.now() + PATIENCE_SECONDS
    while rank.port.end_reason is None:
        assert clock.now() < deadline
        clock.pause(0.001)
    return rank.port.end_reason


def test_a_killed_scheduler_ends_its_ranks_and_a_restart_with_the_same_id_works(tmp_path: Path) -> None:
    rank = Rank(0, directory=tmp_path)
    with Child(tmp_path, SCHEDULER) as scheduler:
        rank.join_soon()
        rank.wait_joined()
        rank.port.submit(bytes.fromhex(scheduler.hear()))
        scheduler.kill()
        assert f"its scheduler (process {scheduler.pid}) has" in wait_until_ended(rank)
        with pytest.raises(ClosedError, match="leave this port and start the engine again"):
            rank.port.submit(b"")
        assert rank.device.pending_copies  # what was under way still lands, while the rank leaves
        rank.leave()
        assert not rank.device.pending_copies
    assert not list(SHARED_MEMORY.glob(f"*{ENGINE}*"))
    with Cluster(tmp_path, 1).open() as offloader:
        assert offloader.statistics().fault is None
    assert nothing_is_left(tmp_path)


def test_an_engine_of_another_process_keeps_its_name(tmp_path: Path) -> None:
    rank = Rank(0, directory=tmp_path)
    with Child(tmp_path, SCHEDULER) as scheduler:
        rank.join_soon()
        scheduler.hear()
        message = f"an engine 'engine' is open already, by process {scheduler.pid}; close it"
        with pytest.raises(ConfigurationError, match=message):
            EngineLock(tmp_path, ENGINE)
        with pytest.raises(ConfigurationError, match=message), Cluster(tmp_path, 1).context():
            raise AssertionError("it opened")
    rank.wait_joined().leave()


def test_what_is_forked_from_a_killed_scheduler_keeps_neither_its_name_nor_its_ranks(tmp_path: Path) -> None:
    rank = Rank(0, directory=tmp_path)
    forking = """
    with open_engine(1) as offloader:
        if os.fork() == 0:
            say("forked")
            hear()
            os._exit(0)
        threading.Event().wait()
    """
    with Child(tmp_path, forking) as scheduler:
        rank.join_soon()
        assert scheduler.hear() == "forked"
        scheduler.kill()
        assert "has died" in wait_until_ended(rank.wait_joined())
        rank.leave()
        with Cluster(tmp_path, 1).open() as offloader:
            assert offloader.statistics().fault is None
    assert nothing_is_left(tmp_path)


def test_a_scheduler_killed_before_all_have_joined_lets_its_ranks_go_and_can_be_restarted(tmp_path: Path) -> None:
    rank = Rank(0, directory=tmp_path)
    waiting = """
    def report(progress):
        if progress.done_bytes == 1:
            say("one has joined")
            hear()
    with open_offloader(None, cpu_bytes=1 << 12, engine_id=ENGINE, world_size=2, directory=directory,
                        on_progress=report):
        pass
    """
    with Child(tmp_path, waiting) as scheduler:
        rank.join_soon()
        assert scheduler.hear() == "one has joined"
        scheduler.kill()
    assert "has gone; start the engine again" in str(rank.wait_joined().error)
    with Cluster(tmp_path).open() as offloader:
        assert offloader.statistics().fault is None
    assert nothing_is_left(tmp_path)
