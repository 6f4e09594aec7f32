"""Jobs of a worker process: tried again once, never raised, waited for, and told of exactly once."""

from __future__ import annotations

import pytest
from transfers_rig import LANDING_SECONDS, WorkerRig

from aiokvoffload.devices.base import Direction
from aiokvoffload.errors import BlocksInFlightError
from aiokvoffload.integrations.stepping.jobs import Job, JobMover, JobResult
from aiokvoffload.specs import CPULoadStoreSpec, GPULoadStoreSpec
from aiokvoffload.testing.clock import ManualClock
from aiokvoffload.testing.device import ManualDevice


class JobRig(WorkerRig):
    """A mover over a worker on a device whose copies land when the test says so."""

    def __init__(self, *, in_flight_blocks: int = 1000) -> None:
        clock = ManualClock()
        super().__init__(in_flight_blocks=in_flight_blocks, device=ManualDevice(clock=clock), clock=clock)
        self.mover = JobMover(self.worker, clock, current_stream=lambda: None, landing_seconds=LANDING_SECONDS)

    def start(self, job_id: int, direction: Direction, block: int, slot: int | None, *, urgent: bool = False) -> None:
        """Start a job of one block, whose ticket is the job's number and 100."""
        slots = None if slot is None else CPULoadStoreSpec([slot])
        self.mover.start(Job(job_id, job_id + 100, direction, GPULoadStoreSpec([block], [1], [0]), slots, urgent))

    def results(self) -> list[JobResult]:
        """Let land what can, and return what has ended."""
        self.device.land_all()
        return self.mover.take_results()


def test_jobs_end_once_with_their_numbers() -> None:
    rig = JobRig()
    rig.start(1, Direction.STORE, 3, 5)
    assert rig.mover.take_results() == []
    (result,) = rig.results()
    assert (result.job.job_id, result.job.ticket, result.error, result.byte_count) == (1, 101, None, 8)
    assert rig.slots()[5] == 4
    assert rig.results() == []


def test_job_that_fails_once_is_tried_again() -> None:
    rig = JobRig()
    rig.device.refuse_next("not now")
    rig.start(1, Direction.STORE, 3, 5)
    assert rig.mover.take_results() == []
    (result,) = rig.results()
    assert result.error is None
    assert rig.slots()[5] == 4


def test_copy_that_fails_once_is_tried_again() -> None:
    rig = JobRig()
    rig.device.fail_next_copy(Direction.LOAD, "lost")
    rig.start(1, Direction.LOAD, 3, 5)
    assert rig.results() == []
    (result,) = rig.results()
    assert result.error is None
    assert rig.blocks()[3] == 106


def test_job_that_fails_twice_has_failed() -> None:
    rig = JobRig()
    rig.device.refuse_next("not now")
    rig.device.refuse_next("never")
    rig.start(1, Direction.LOAD, 3, 5)
    (result,) = rig.results() or rig.results()
    assert result.error is not None
    assert "never" in result.error
    assert rig.results() == []


def test_job_that_makes_no_sense_has_failed() -> None:
    rig = JobRig()
    rig.start(1, Direction.LOAD, 3, 99)
    (result,) = rig.results()
    assert result.error is not None
    assert "out of range" in result.error


def test_load_of_nothing_has_failed() -> None:
    rig = JobRig()
    rig.start(1, Direction.LOAD, 3, None)
    (result,) = rig.results()
    assert result.error is not None


def test_waiting_lets_jobs_end_and_leaves_their_results() -> None:
    rig = JobRig()
    rig.start(1, Direction.STORE, 3, 5)
    rig.start(2, Direction.STORE, 4, 6)
    rig.mover.wait({2, 77})
    assert rig.slots()[6] == 5
    assert 2 in [result.job.job_id for result in rig.mover.take_results()]


def test_waiting_covers_the_second_try() -> None:
    rig = JobRig()
    rig.device.fail_next_copy(Direction.STORE, "lost")
    rig.start(1, Direction.STORE, 3, 5)
    rig.mover.wait({1})
    assert rig.slots()[5] == 4
    (result,) = rig.mover.take_results()
    assert result.error is None


def test_waiting_for_a_copy_that_never_lands_names_its_blocks() -> None:
    rig = JobRig()
    rig.start(1, Direction.STORE, 3, 5)
    rig.device.hang_direction(Direction.STORE)
    with pytest.raises(BlocksInFlightError) as caught:
        rig.mover.wait({1})
    assert caught.value.gpu_blocks == frozenset({3})
    rig.device.release()
    assert len(rig.results()) == 1


def test_void_jobs_count_as_failed_whether_they_have_landed_or_not() -> None:
    rig = JobRig()
    for job_id in (1, 2, 3):
        rig.start(job_id, Direction.LOAD, job_id, job_id)
    rig.device.land_next()
    rig.mover.poll()
    rig.mover.void({101, 102, 999})
    results = {result.job.job_id: result.error for result in rig.results()}
    assert results[3] is None
    assert results[1] is not None
    assert results[2] is not None


def test_urgent_job_goes_ahead_of_the_byte_budget() -> None:
    rig = JobRig(in_flight_blocks=1)
    rig.start(1, Direction.STORE, 3, 5)
    rig.start(2, Direction.LOAD, 4, 6, urgent=True)
    assert rig.worker.queued_count == 0
    assert len(rig.results()) == 2


def test_closing_waits_for_what_is_under_way() -> None:
    rig = JobRig()
    rig.start(1, Direction.STORE, 3, 5)
    assert rig.mover.close(1.0)
    assert rig.slots()[5] == 4


def test_closing_says_so_if_something_stays_under_way() -> None:
    rig = JobRig()
    rig.start(1, Direction.STORE, 3, 5)
    rig.device.hang_direction(Direction.STORE)
    assert not rig.mover.close(0.0)
    rig.device.release()
    rig.results()
