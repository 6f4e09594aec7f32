"""Moves the jobs of one worker process, in the engine's own thread: started, asked for, waited for."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

from aiokvoffload.clock import Clock
from aiokvoffload.devices.base import Direction
from aiokvoffload.errors import BlocksInFlightError, DeviceError, OffloadError
from aiokvoffload.specs import CPULoadStoreSpec, GPULoadStoreSpec
from aiokvoffload.transfers.base import Transfer
from aiokvoffload.transfers.worker import OffloadingWorker

_logger = logging.getLogger(__name__)
_OUT_OF_DATE = "the weights have changed"
_TRIES = 2
"""A copy that fails once may have met a moment's trouble; engines pay for a failure with a recomputation, or worse."""


@dataclass(frozen=True, slots=True)
class Job:
    """One transfer that the engine has asked for.

    Attributes:
        job_id: The engine's number.
        ticket: The manager's number.
        direction: Load or store.
        gpu_spec: GPU blocks.
        cpu_spec: Slots; None if there is nothing to copy from, so that the job has failed.
        is_urgent: It goes ahead of what is queued.
    """

    job_id: int
    ticket: int
    direction: Direction
    gpu_spec: GPULoadStoreSpec
    cpu_spec: CPULoadStoreSpec | None
    is_urgent: bool = False


@dataclass(frozen=True, slots=True)
class JobResult:
    """How a job ended.

    Attributes:
        job: Which.
        error: Why it failed, if it did.
        byte_count: Bytes moved.
        seconds: Time the device took.
    """

    job: Job
    error: str | None = None
    byte_count: int = 0
    seconds: float = 0.0


class JobMover:
    """Moves jobs and tells how they ended; a failed copy is tried once more, and is never an exception.

    Args:
        worker: Moves the bytes.
        clock: Where deadlines are read.
        current_stream: Returns the engine's compute stream of this moment; None where its work is done when it calls.
        landing_seconds: How long `wait` waits.
    """

    def __init__(
        self,
        worker: OffloadingWorker,
        clock: Clock,
        *,
        current_stream: Callable[[], object | None],
        landing_seconds: float,
    ) -> None:
        self._worker = worker
        self._clock = clock
        self._current_stream = current_stream
        self._landing_seconds = landing_seconds
        self._jobs: dict[int, Job] = {}
        self._transfers: dict[int, Transfer] = {}
        self._to_retry: list[tuple[Job, CPULoadStoreSpec]] = []
        self._results: list[JobResult] = []
        self._void: set[int] = set()
        self._has_fault = False

    def start(self, job: Job) -> None:
        """Start a job; its copies wait for what is on the compute stream now."""
        if job.cpu_spec is None:
            self._results.append(JobResult(job, "its blocks have left CPU memory"))
            return
        self._jobs[job.job_id] = job
        self._submit(job, job.cpu_spec, tries_left=_TRIES)

    def void(self, tickets: Collection[int]) -> None:
        """Let the jobs of some tickets count as failed, if they have not been told of: they are out of date."""
        self._void |= {job.ticket for job in self._jobs.values()}.intersection(tickets)
        self._results = [
            replace(result, error=result.error or _OUT_OF_DATE) if result.job.ticket in tickets else result
            for result in self._results
        ]

    def poll(self) -> None:
        """Note what is over, send what is queued, and try again what has failed."""
        try:
            self._worker.poll()
        except Exception:
            if not self._has_fault:  # it may come again with every poll
                self._has_fault = True
                _logger.exception("a fault inside the worker; what it concerns fails by its deadline")
        retries, self._to_retry = self._to_retry, []
        for job, slots in retries:
            self._submit(job, slots, tries_left=1)

    def take_results(self) -> list[JobResult]:
        """Return the jobs that have ended since the last call."""
        self.poll()
        results, self._results = self._results, []
        return results

    def wait(self, job_ids: Collection[int]) -> None:
        """Block the thread until jobs are over, whatever their end; sent ahead of others.

        Raises:
            BlocksInFlightError: They are not by the deadline, so their GPU blocks and slots cannot be given to others.
        """
        deadline = self._clock.now() + self._landing_seconds
        self.poll()
        while pending := [self._transfers[job_id] for job_id in job_ids if job_id in self._transfers]:
            left = deadline - self._clock.now()
            if left <= 0:
                blocks = frozenset(block for transfer in pending for block in transfer.gpu_spec.block_ids.tolist())
                raise BlocksInFlightError(blocks, self._landing_seconds)
            for transfer in pending:
                self._worker.send_at_once(transfer)
                with suppress(DeviceError):  # the poll ends what the device has failed
                    self._worker.wait_for(transfer, left)
            self.poll()

    def close(self, drain_seconds: float) -> bool:
        """Take back what is not sent, wait for the rest, and return whether nothing is under way any more."""
        self._worker.withdraw_all()
        deadline = self._clock.now() + drain_seconds
        self._poll_quietly()
        for transfer in self._worker.under_way():
            with suppress(DeviceError):
                self._worker.wait_for(transfer, max(0.0, deadline - self._clock.now()))
        self._poll_quietly()
        return not self._worker.sent_count

    def _submit(self, job: Job, slots: CPULoadStoreSpec, tries_left: int) -> None:
        try:
            after = self._worker.event_after(self._current_stream())
            transfer = Transfer(job.direction, job.gpu_spec, slots, after=after)
            transfer.on_over = partial(self._note_over, job, transfer, tries_left - 1)
            self._transfers[job.job_id] = transfer
            self._worker.submit(transfer)
            if job.is_urgent:
                self._worker.send_at_once(transfer)
        except OffloadError as exc:
            self._end(JobResult(job, str(exc)))

    def _note_over(self, job: Job, transfer: Transfer, tries_left: int) -> None:
        if transfer.error is not None and tries_left:
            _logger.warning("job %d is tried again: %s", job.job_id, transfer.error)
            self._to_retry.append((job, transfer.cpu_spec))
            return
        error = transfer.error or ("it was taken back" if transfer.is_withdrawn else None)
        self._end(JobResult(job, error, transfer.byte_count, transfer.seconds))

    def _end(self, result: JobResult) -> None:
        job = result.job
        del self._jobs[job.job_id]
        del self._transfers[job.job_id]
        if job.ticket in self._void:
            self._void.discard(job.ticket)
            result = replace(result, error=result.error or _OUT_OF_DATE)
        self._results.append(result)

    def _poll_quietly(self) -> None:
        with suppress(Exception):
            self._worker.poll()
