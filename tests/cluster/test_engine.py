"""A whole engine in one process: a scheduler and its ranks, with real sockets and memory, every byte looked at."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import anyio
import pytest
from cluster_rig import BLOCK_BYTES, PATIENCE_SECONDS, Cluster, poll_until
from offloader_rig import Interrupted, on_both_loops, settle

from aiokvoffload.clock import SystemClock
from aiokvoffload.devices.base import Direction, Event
from aiokvoffload.errors import (
    BlocksInFlightError,
    ClosedError,
    InvalidRequestError,
    RankLostError,
    StateError,
    WrongThreadError,
)
from aiokvoffload.memory.shared import SHARED_MEMORY
from aiokvoffload.offloader import ALREADY_DONE
from aiokvoffload.offloader.machine import OffloaderMachine
from aiokvoffload.specs import LookupResult, StoreOutcome
from aiokvoffload.testing.asserts import assert_idle


def states(offloader: OffloaderMachine, keys: list[Any]) -> list[LookupResult]:
    return list(offloader.manager.lookup_nowait(keys))


def assert_nothing_is_held(offloader: OffloaderMachine) -> None:
    manager = offloader.statistics().manager
    assert (manager.pinned, manager.writing, manager.leased_without_key) == (0, 0, 0)


def store(cluster: Cluster, offloader: Any, blocks: list[int]) -> list[Any]:
    """Store blocks on all ranks, and wait; return their keys."""
    keys: list[Any] = offloader.keys(range(4 * len(blocks)))
    handle = offloader.store_soon(keys, blocks)
    cluster.step(offloader)
    cluster.land()
    assert handle.wait(timeout_seconds=PATIENCE_SECONDS).success
    return keys


def test_every_rank_stores_and_loads_its_own_bytes(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    with cluster.open() as offloader:
        cluster.write([0, 1, 2])
        keys = store(cluster, offloader, [0, 1, 2])
        assert states(offloader, keys) == [LookupResult.HIT] * 3
        cluster.write([0, 1, 2], seed=9)
        handle = offloader.prepare_load(keys).start([7, 5, 6])
        cluster.step(offloader)
        cluster.land()
        result = handle.wait(timeout_seconds=PATIENCE_SECONDS)
        assert (result.token_count, result.byte_count) == (12, 3 * BLOCK_BYTES * 2)
        assert cluster.holds([7, 5, 6]) == [True, True]
        statistics = offloader.statistics()
        assert statistics.stored_bytes == statistics.loaded_bytes == 3 * BLOCK_BYTES * 2
        assert statistics.fault is None
        assert_idle(offloader)
    assert not list(tmp_path.iterdir())
    assert not list(SHARED_MEMORY.glob("*engine*"))


def test_a_transfer_is_over_when_every_rank_is_done(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    with cluster.open() as offloader:
        keys = offloader.keys(range(8))
        handle = offloader.store_soon(keys, [0, 1])
        assert (handle.is_sent, offloader.statistics().queued_transfers) == (False, 1)
        cluster.step(offloader)
        assert (handle.is_sent, offloader.statistics().in_flight_bytes) == (True, 2 * BLOCK_BYTES * 2)
        cluster.land(1)
        poll_until(offloader, lambda: offloader.statistics().stored_bytes == 2 * BLOCK_BYTES)
        assert not handle.is_idle
        assert states(offloader, keys) == [LookupResult.PENDING] * 2
        cluster.land(0)
        assert handle.wait(timeout_seconds=PATIENCE_SECONDS).success
        assert_idle(offloader)


def test_a_transfer_has_failed_when_one_rank_has(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    with cluster.open() as offloader:
        keys = offloader.keys(range(8))
        handle = offloader.store_soon(keys, [0, 1])
        cluster.step(offloader)
        cluster.ranks[1].device.fail_next_copy(Direction.STORE, "the link is down")
        cluster.land()
        result = handle.wait(timeout_seconds=PATIENCE_SECONDS)
        assert not result.success
        assert result.error is not None
        assert "rank 1: " in result.error
        assert "the link is down" in result.error
        assert handle.outcomes == (StoreOutcome.REFUSED,) * 2
        assert states(offloader, keys) == [LookupResult.MISS] * 2
        assert_idle(offloader)


def test_what_was_not_handed_out_can_be_taken_back(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    with cluster.open() as offloader:
        keys = offloader.keys(range(8))
        first = offloader.store_soon(keys[:1], [0])
        second = offloader.store_soon(keys[1:], [1])
        assert second.cancel()
        assert second.is_idle
        cluster.step(offloader)
        assert not first.cancel()
        assert [len(rank.device.copies) for rank in cluster.ranks] == [1, 1]
        assert offloader.take_jobs() == b""
        cluster.land()
        assert first.wait(timeout_seconds=PATIENCE_SECONDS).success
        assert_idle(offloader)


def test_a_store_waits_for_the_steps_before_its_own(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    with cluster.open() as offloader:
        keys = offloader.keys(range(4))
        for rank in cluster.ranks:
            rank.device.launch(rank.compute, lambda rank=rank: rank.write([0], 1))  # type: ignore[misc]  # bound now
            rank.device.hang(rank.compute)
        handle = offloader.store_soon(keys, [0])
        cluster.step(offloader)
        cluster.land()
        assert cluster.ranks[0].device.landed_copies == []
        for rank in cluster.ranks:
            rank.device.launch(rank.compute, lambda rank=rank: None)  # type: ignore[misc]  # bound now
            with rank.port._lock:
                rank.device.release(rank.compute)
        cluster.land()
        assert handle.wait(timeout_seconds=PATIENCE_SECONDS).success
        cluster.write([0], seed=2)
        load = offloader.prepare_load(keys).start([3])
        cluster.step(offloader)
        cluster.land()
        load.wait(timeout_seconds=PATIENCE_SECONDS)
        assert cluster.holds([3]) == [True, True]


def test_already_done_does_not_wait_for_the_compute_stream_and_nothing_else_is_taken(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    with cluster.open() as offloader:
        keys = offloader.keys(range(4))
        for rank in cluster.ranks:
            rank.device.launch(rank.compute, lambda: None)
            rank.device.hang(rank.compute)
        with pytest.raises(InvalidRequestError, match="ranks have streams of their own"):
            offloader.store_soon(keys, [0], after=cluster.ranks[0].compute)
        handle = offloader.store_soon(keys, [0], after=ALREADY_DONE)
        cluster.step(offloader)
        cluster.land()
        assert handle.wait(timeout_seconds=PATIENCE_SECONDS).success


def test_a_step_behind_a_fence_runs_after_the_copy_even_over_the_budget(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, rank_options=lambda rank: {"in_flight_bytes": 1})
    with cluster.open() as offloader:
        cluster.write([0, 1])
        keys = store(cluster, offloader, [0, 1])
        for rank in cluster.ranks:
            rank.device.hang_direction(Direction.LOAD)
        first = offloader.prepare_load(keys[:1]).start([4])
        fenced = offloader.prepare_load(keys).start([6, 7])
        fenced.fence()
        cluster.step(offloader)
        assert [len(rank.device.copies) for rank in cluster.ranks] == [3, 3]
        seen: list[bool] = []
        for rank in cluster.ranks:
            rank.device.launch(rank.compute, lambda rank=rank: seen.append(rank.holds([6, 7], 1)))  # type: ignore[misc]
        cluster.land()
        assert seen == []
        for rank in cluster.ranks:
            with rank.port._lock:
                rank.device.release()
        cluster.land()
        assert seen == [True, True]
        assert fenced.wait(timeout_seconds=PATIENCE_SECONDS).success
        assert first.wait(timeout_seconds=PATIENCE_SECONDS).success


def test_a_fence_on_what_is_under_way_travels_alone(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    with cluster.open() as offloader:
        handle = offloader.store_soon(offloader.keys(range(4)), [0])
        cluster.step(offloader)
        handle.fence()
        assert cluster.step(offloader) != b""
        seen: list[int] = []
        for rank in cluster.ranks:
            rank.device.hang_direction(Direction.STORE)
            rank.device.launch(rank.compute, lambda rank=rank: seen.append(rank.number))  # type: ignore[misc]
            rank.land()
        assert seen == []
        for rank in cluster.ranks:
            with rank.port._lock:
                rank.device.release()
        cluster.land()
        assert seen == [0, 1]
        handle.wait(timeout_seconds=PATIENCE_SECONDS)
        handle.fence()
        assert offloader.take_jobs() == b""


def test_a_later_fence_sends_what_a_rank_still_holds_back(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, rank_options=lambda rank: {"in_flight_bytes": 1})
    with cluster.open() as offloader:
        handles = [offloader.store_soon([key], [block]) for block, key in enumerate(offloader.keys(range(8)))]
        cluster.step(offloader)
        assert [len(rank.device.copies) for rank in cluster.ranks] == [1, 1]
        handles[1].fence()
        cluster.step(offloader)
        assert [len(rank.device.copies) for rank in cluster.ranks] == [2, 2]
        cluster.land()
        assert all(handle.wait(timeout_seconds=PATIENCE_SECONDS).success for handle in handles)


def test_a_rank_whose_device_has_no_doorbell_looks_for_landings_itself(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    for rank in cluster.ranks:
        rank.device.add_doorbell = lambda ring: None  # type: ignore[method-assign, assignment, return-value]
    with cluster.open() as offloader:
        handle = offloader.store_soon(offloader.keys(range(4)), [0])
        cluster.step(offloader)
        cluster.land()
        assert handle.wait(timeout_seconds=PATIENCE_SECONDS).success


def test_a_demotion_is_sent_at_once_and_takes_with_it_what_must_go_before(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, rank_options=lambda rank: {"in_flight_bytes": 1}, placement="exclusive")
    with cluster.open() as offloader:
        cluster.write([0])
        keys = store(cluster, offloader, [0])
        for rank in cluster.ranks:
            rank.device.hang_direction(Direction.LOAD)
        loads = [offloader.prepare_load(keys).start([block], take_along=False) for block in (4, 5)]
        more = offloader.keys(range(4), salt="more")
        demoted = offloader.demote_soon(more, [5])  # what the second load, which is over the budget, will fill
        demoted.fence()
        cluster.step(offloader)
        assert [len(rank.device.copies) for rank in cluster.ranks] == [4, 4]
        for rank in cluster.ranks:
            with rank.port._lock:
                rank.device.release()
        cluster.land()
        for handle in (*loads, demoted):
            assert handle.wait(timeout_seconds=PATIENCE_SECONDS).success
        load = offloader.prepare_load(more).start([9])
        cluster.step(offloader)
        cluster.land()
        load.wait(timeout_seconds=PATIENCE_SECONDS)
        assert cluster.holds([9]) == [True, True]


def test_replicated_blocks_are_stored_by_rank_0_and_loaded_by_all(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, replicated=True)
    with cluster.open() as offloader:
        assert offloader.block_count == 8
        assert offloader.memory.slot_bytes == BLOCK_BYTES
        for rank in cluster.ranks:
            cluster.ranks[0].write([0, 1], 1)
            rank.layers = cluster.ranks[0].layers if rank.number == 0 else rank.layers
        keys = store(cluster, offloader, [0, 1])
        assert [len(rank.device.copies) for rank in cluster.ranks] == [1, 0]
        handle = offloader.prepare_load(keys).start([5, 6])
        cluster.step(offloader)
        cluster.land()
        assert handle.wait(timeout_seconds=PATIENCE_SECONDS).byte_count == 2 * BLOCK_BYTES * 2
        first, second = cluster.ranks
        assert all(a[[5, 6]].equal(b[[5, 6]]) for a, b in zip(first.layers, second.layers, strict=True))
        assert first.holds([5, 6], 1)
        assert offloader.statistics().stored_bytes == 2 * BLOCK_BYTES


def test_a_tier_holds_the_blocks_of_all_ranks(tmp_path: Path) -> None:
    tier = f"file://{tmp_path}/tier?capacity=1MiB"
    cluster = Cluster(tmp_path / "meeting", clock=SystemClock(), tiers=[tier])
    with cluster.open() as offloader:
        cluster.write([0, 1])
        keys = store(cluster, offloader, [0, 1])
        poll_until(offloader, lambda: offloader.manager.is_at_rest)
        offloader.reset()
        assert offloader.statistics().manager.ready == 0
        ticket = offloader.prepare_load(keys)
        poll_until(offloader, lambda: ticket.result is not LookupResult.PENDING)
        assert ticket.token_count == 8
        handle = ticket.start([5, 6])
        cluster.step(offloader)
        cluster.land()
        assert handle.wait(timeout_seconds=PATIENCE_SECONDS).success
        assert cluster.holds([5, 6]) == [True, True]


def test_a_blocking_call_that_nobody_could_serve_is_refused(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    with cluster.open() as offloader:
        keys = offloader.keys(range(4))
        for call in (
            lambda: offloader.store(keys, [0]),
            lambda: offloader.load(keys, [0]),
            lambda: offloader.demote(keys, [0]),
            lambda: offloader.store_soon(keys, [0]).wait(timeout_seconds=1),
        ):
            with pytest.raises(StateError, match=r"the ranks get their work from take_jobs\(\)"):
                call()
        cluster.step(offloader)
        cluster.land()
        poll_until(offloader, lambda: states(offloader, keys) == [LookupResult.HIT])


def test_what_is_never_handed_out_fails(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    with cluster.open() as offloader:
        handle = offloader.store_soon(offloader.keys(range(4)), [0])
        cluster.clock.advance(31)
        assert offloader.poll() == [handle]
        assert handle.result is not None
        assert "take_jobs() was not called within 30 s" in str(handle.result.error)
        assert_idle(offloader)


def test_a_silent_rank_is_named_and_its_late_report_frees_the_slots_and_changes_nothing_else(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    with cluster.open() as offloader:
        keys = offloader.keys(range(8))
        handle = offloader.store_soon(keys, [0, 1])
        cluster.step(offloader)
        cluster.land(0)
        poll_until(offloader, lambda: offloader.statistics().stored_bytes == 2 * BLOCK_BYTES)
        cluster.clock.advance(31)
        with pytest.raises(BlocksInFlightError, match="rank 1 did not report it") as caught:
            handle.wait(timeout_seconds=PATIENCE_SECONDS)
        assert caught.value.gpu_blocks == {0, 1}
        statistics = offloader.statistics().manager
        assert (statistics.leased_without_key, statistics.ready) == (2, 0)
        assert states(offloader, keys) == [LookupResult.MISS] * 2
        again = store(cluster, offloader, [2, 3])  # the engine goes on, with other blocks; rank 1 lands both
        assert again == keys
        poll_until(offloader, lambda: handle.is_idle)
        assert handle.result is not None
        assert not handle.result.success
        assert states(offloader, keys) == [LookupResult.HIT] * 2
        assert_idle(offloader)


def test_blocks_that_no_rank_reports_stay_leased_after_closing(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    with cluster.open() as offloader:
        offloader.store_soon(offloader.keys(range(4)), [0])
        cluster.step(offloader)
        for rank in cluster.ranks:
            rank.device.hang_direction(Direction.STORE)
        with pytest.raises(BlocksInFlightError, match="GPU blocks 0"):
            offloader.close(drain_seconds=0.01)
        for rank in cluster.ranks:
            with rank.port._lock:
                rank.device.release()


def test_a_rank_that_leaves_in_order_means_misses_and_refusals(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    with cluster.open() as offloader:
        keys = store(cluster, offloader, [0, 1])
        queued = offloader.store_soon(offloader.keys(range(4), salt="queued"), [2])
        cluster.ranks[1].leave()
        poll_until(offloader, lambda: offloader.statistics().fault is not None)
        assert "rank 1" in str(offloader.statistics().fault)
        assert "has left: its port was closed" in str(offloader.statistics().fault)
        assert queued.is_idle
        assert offloader.prepare_load(keys).result is LookupResult.MISS
        assert offloader.store_soon(keys, [0, 1]).outcomes == (StoreOutcome.REFUSED,) * 2
        assert offloader.take_jobs() == b""
        assert_nothing_is_held(offloader)


def test_a_rank_that_leaves_ends_the_offloader_where_that_was_asked_for(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, on_lost_rank="close")
    with cluster.open() as offloader:
        keys = offloader.keys(range(4))
        handle = offloader.store_soon(keys, [0])
        cluster.step(offloader)
        cluster.ranks[0].leave()  # its copy lands while it leaves
        poll_until(offloader, lambda: offloader.statistics().fault is not None)
        message = r"rank 0 .* has left: .*; close this offloader and start the engine again"
        calls = [lambda: offloader.prepare_load(keys), lambda: offloader.store_soon(keys, [0]), offloader.take_jobs]
        for call in calls:
            with pytest.raises(RankLostError, match=message):
                call()
        cluster.land(1)
        poll_until(offloader, lambda: handle.is_idle)


def test_a_port_whose_scheduler_has_closed_refuses_with_one_clear_error(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    with cluster.open() as offloader:
        offloader.store_soon(offloader.keys(range(4)), [0])
        jobs = offloader.take_jobs()
        cluster.ranks[0].port.submit(jobs)
        cluster.ranks[1].port.submit(jobs)
        cluster.land()
        offloader.close()
        for rank in cluster.ranks:
            while rank.port.end_reason is None:
                SystemClock().pause(0.001)
            with pytest.raises(ClosedError, match=r"has ended the engine: the offloader was closed; leave this port"):
                rank.port.submit(jobs)


def test_a_port_belongs_to_the_thread_that_submits_and_ends_with_its_context(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    with cluster.open() as offloader:
        cluster.step(offloader)
        cluster.ranks[0].port.submit(b"")
        errors: list[Exception] = []

        def submit() -> None:
            try:
                cluster.ranks[0].port.submit(b"")
            except WrongThreadError as exc:
                errors.append(exc)

        thread = threading.Thread(target=submit)
        thread.start()
        thread.join()
        assert len(errors) == 1
        port = cluster.ranks[0].port
        cluster.ranks[0].leave()
        with pytest.raises(ClosedError, match="this worker port is closed"):
            port.submit(b"")


def test_jobs_that_a_rank_cannot_do_fail_there_and_are_reported(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    with cluster.open() as offloader:
        handle = offloader.store_soon(offloader.keys(range(4)), [0])
        cluster.ranks[1].device.refuse_next("no descriptors left")
        cluster.step(offloader)
        cluster.land()
        result = handle.wait(timeout_seconds=PATIENCE_SECONDS)
        assert not result.success
        assert "rank 1: no descriptors left" in str(result.error)


def test_a_fault_inside_a_rank_is_told_by_the_scheduler_and_the_rest_goes_on(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    with cluster.open() as offloader:
        keys = offloader.keys(range(4))
        handle = offloader.store_soon(keys, [0])
        cluster.step(offloader)
        device = cluster.ranks[1].device
        is_done = device.is_done

        def fail(event: Event) -> bool:
            raise RuntimeError("the driver is confused")

        device.is_done = fail  # type: ignore[method-assign]
        cluster.land()
        poll_until(offloader, lambda: offloader.statistics().fault is not None)
        message = "DeviceError: a fault inside rank 1: RuntimeError: the driver is confused"
        assert offloader.statistics().fault == message
        device.is_done = is_done  # type: ignore[method-assign]
        cluster.ranks[1].port._wake_up.ring()
        poll_until(offloader, lambda: handle.is_idle)
        assert offloader.prepare_load(keys).result is LookupResult.MISS
        assert_nothing_is_held(offloader)


def test_a_rank_that_only_falls_silent_may_still_copy_so_its_slots_stay_leased(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    with cluster.open() as offloader:
        handle = offloader.store_soon(offloader.keys(range(4)), [0])
        cluster.step(offloader)
        cluster.land(0)
        cluster.ranks[1].port._scheduler.hang_up()
        poll_until(offloader, lambda: offloader.statistics().fault is not None)
        assert "has closed its connection without a word" in str(offloader.statistics().fault)
        assert not handle.is_idle
        assert offloader.statistics().manager.writing == 1
        with pytest.raises(BlocksInFlightError, match="GPU blocks 0"):
            offloader.close(drain_seconds=0.01)


def test_a_fence_needs_a_compute_stream_on_every_rank(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, rank_options=lambda rank: {"compute_stream": None} if rank else {})
    with cluster.open() as offloader:
        handle = offloader.store_soon(offloader.keys(range(4)), [0])
        with pytest.raises(StateError, match="a rank has joined without a compute stream"):
            handle.fence()
        cluster.step(offloader)
        cluster.land()
        assert handle.wait(timeout_seconds=PATIENCE_SECONDS).success


def test_a_fence_on_what_a_rank_cannot_send_holds_nothing_back(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    with cluster.open() as offloader:
        handle = offloader.store_soon(offloader.keys(range(4)), [0])
        handle.fence()
        cluster.ranks[1].device.refuse_next("no descriptors left")
        cluster.step(offloader)
        cluster.land()
        assert not handle.wait(timeout_seconds=PATIENCE_SECONDS).success


def test_take_jobs_is_for_engines_of_several_processes() -> None:
    import torch

    from aiokvoffload.offloader import open_offloader

    with (
        open_offloader([torch.zeros(4, 8)], cpu_bytes=1 << 12) as offloader,
        pytest.raises(StateError, match="moves the bytes itself"),
    ):
        offloader.take_jobs()


@on_both_loops
async def test_a_cancelled_store_takes_back_what_no_rank_knows_and_waits_for_the_rest(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    cluster.join_soon()
    async with cluster.context() as offloader:
        for rank in cluster.ranks:
            rank.wait_joined()
        keys = offloader.keys(range(4))
        with anyio.CancelScope() as scope:
            await Interrupted(offloader.store(keys, [0]), scope.cancel, 1)
        assert scope.cancelled_caught
        assert offloader.statistics().manager.failed_blocks == 1  # it had begun
        assert offloader.take_jobs() == b""
        assert_nothing_is_held(offloader)
        ended: list[str] = []

        async def store() -> None:
            try:
                await offloader.store(keys, [0])
            finally:
                ended.append("ended")

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(store)
            await settle()
            jobs = offloader.take_jobs()
            for rank in cluster.ranks:
                rank.port.submit(jobs)
            tasks.cancel_scope.cancel()
            await settle()
            assert ended == []
            cluster.land()
        assert ended == ["ended"]
        assert states(offloader, keys) == [LookupResult.HIT]
        assert_idle(offloader)
    cluster.leave()
