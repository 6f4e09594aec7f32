"""A rank's end of an engine: takes jobs in the engine's thread, moves them, and reports from a thread of its own."""

from __future__ import annotations

import logging
import selectors
import threading
from contextlib import suppress
from functools import partial

from aiokvoffload.clock import Clock
from aiokvoffload.cluster.jobs import Job, JobBatch, decode_batch
from aiokvoffload.cluster.messages import (
    Fault,
    FrameError,
    Landing,
    Landings,
    Leaving,
    Refused,
    shortened,
)
from aiokvoffload.cluster.peer import Peer, WakeUp
from aiokvoffload.devices.base import Event
from aiokvoffload.errors import (
    BlocksInFlightError,
    ClosedError,
    DeviceError,
    InvalidRequestError,
    OffloadError,
    StateError,
)
from aiokvoffload.memory.base import HostMemory
from aiokvoffload.ownership import Owner
from aiokvoffload.transfers.base import Transfer, TransferState
from aiokvoffload.transfers.poller import Pace, PollStep
from aiokvoffload.transfers.worker import OffloadingWorker

_logger = logging.getLogger(__name__)

_MAX_LANDINGS = 256
"""So many of them are far from a frame's bound, whatever their errors say."""


class WorkerPort:
    """Moves the bytes of one rank, as its scheduler has decided; needs no event loop. Made by `join_offloader`.

    Args:
        scheduler: The process that decides.
        engine: Name of this opening of the engine; jobs of another are refused.
        rank: This one.
        worker: Moves the bytes.
        memory: This rank's slots.
        clock: Where deadlines are read.
        stores: Whether this rank stores; where all hold the same bytes, one does.
        drain_seconds: How long closing waits for copies under way.
    """

    def __init__(
        self,
        scheduler: Peer,
        engine: str,
        rank: int,
        worker: OffloadingWorker,
        memory: HostMemory,
        clock: Clock,
        *,
        stores: bool = True,
        drain_seconds: float = 5.0,
    ) -> None:
        self.rank = rank
        self.memory = memory
        self._scheduler = scheduler
        self._engine = engine
        self._worker = worker
        self._clock = clock
        self._stores = stores
        self._drain_seconds = drain_seconds
        self._owner = Owner("worker port")
        self._lock = threading.Lock()
        """Held by whoever uses the worker: the engine's thread while it submits, the port's while it polls."""
        self._transfers: dict[int, Transfer] = {}
        self._landings: list[Landing] = []
        self._last_batch_number = 0
        self._end_reason: str | None = None
        self._has_fault = False
        self._is_stopping = False
        self._wake_up = WakeUp()
        self._silence = worker.add_doorbell(self._wake_up.ring)
        # A daemon: a copy that never lands must not keep the process from leaving.
        self._thread = threading.Thread(target=self._run, name="aiokvoffload-port", daemon=True)
        self._thread.start()

    @property
    def end_reason(self) -> str | None:
        """Why nothing can be submitted any more; None while all is well."""
        return self._end_reason

    def submit(self, jobs: bytes) -> None:
        """Start what `take_jobs` has handed out: in step order, before the step's own kernels are launched.

        Stores wait for what is on the compute stream now, so for all steps before this one. Returns at once.

        Args:
            jobs: From `Offloader.take_jobs`, through the engine's own step message; empty ones do nothing.

        Raises:
            InvalidRequestError: They are no jobs, or another engine's.
            StateError: They are not the next ones: some were lost, doubled or reordered. Nothing was started.
            WrongThreadError: The call comes from another thread than the first, or from a forked process.
            ClosedError: The port is closed, or its scheduler is gone.
        """
        self._owner.check()
        if self._end_reason is not None:
            raise ClosedError(f"rank {self.rank}: {self._end_reason}; leave this port and start the engine again")
        if not jobs:
            return
        batch = decode_batch(jobs)
        self._check_turn(batch)
        with self._lock:
            needs_compute = any(job.waits_for_compute for job in batch.jobs)
            # One event for all, before any fence: a store need not wait for loads of its own step.
            after = self._worker.event_after(None) if needs_compute else None
            self._last_batch_number = batch.number
            for job in batch.jobs:
                if job.is_load or self._stores:
                    self._start(job, after if job.waits_for_compute else None)
            for transfer_id in batch.fences:
                if (transfer := self._transfers.get(transfer_id)) is not None:
                    self._worker.send_at_once(transfer)
                    if transfer.state is TransferState.SENT:  # else it has failed, and a step behind it is void
                        self._worker.fence(transfer)
        self._wake_up.ring()

    def close(self) -> None:
        """Leave the engine: wait for copies under way, bounded, and give the memory back; idempotent.

        Raises:
            BlocksInFlightError: Copies are under way even so; their memory stays mapped and registered.
        """
        if self._owner.is_closed:
            return
        self._owner.check_thread()
        self._owner.is_closed = True
        self._is_stopping = True
        self._wake_up.ring()
        self._thread.join()
        if self._silence is not None:
            self._silence()
        self._wake_up.close()
        stuck = self._drain()
        self._report()
        self._scheduler.send(Leaving(self._end_reason or "its port was closed", is_drained=not stuck))
        self._scheduler.close()
        if stuck:
            raise BlocksInFlightError(stuck, self._drain_seconds)
        self.memory.close()

    # Jobs

    def _check_turn(self, batch: JobBatch) -> None:
        if batch.engine != self._engine:
            raise InvalidRequestError(
                f"these jobs are of engine {batch.engine!r}, but this port belongs to {self._engine!r}"
            )
        expected = self._last_batch_number + 1
        if batch.number != expected:
            what = (
                "they were submitted before, or after later ones"
                if batch.number < expected
                else "those in between were lost, or come later"
            )
            raise StateError(
                f"rank {self.rank}: jobs number {batch.number} have come, but number {expected} is due: {what}; submit "
                "the bytes of every take_jobs() once, in the order of the steps"
            )

    def _start(self, job: Job, after: Event | None) -> None:
        """Start a job; one that cannot be has failed, which the scheduler will hear."""
        try:
            transfer = Transfer(job.direction, job.gpu_spec(), job.cpu_spec(), after=after)
            transfer.on_over = partial(self._note_landing, job.transfer_id, transfer)
            self._transfers[job.transfer_id] = transfer
            self._worker.submit(transfer)
            if job.is_urgent:
                self._worker.send_at_once(transfer)
        except OffloadError as exc:
            self._transfers.pop(job.transfer_id, None)
            self._landings.append(Landing(job.transfer_id, 0, 0.0, shortened(str(exc))))

    def _note_landing(self, transfer_id: int, transfer: Transfer) -> None:
        self._transfers.pop(transfer_id, None)
        error = transfer.error or ("its rank has withdrawn it" if transfer.is_withdrawn else None)
        self._landings.append(
            Landing(transfer_id, transfer.byte_count, transfer.seconds, None if error is None else shortened(error))
        )

    # In the port's thread

    def _run(self) -> None:
        try:
            self._poll_until_stopped()
        except Exception:
            _logger.exception("the worker port of rank %d has failed", self.rank)
            self._end_reason = "its port has failed, see the log"
            self._scheduler.hang_up()

    def _poll_until_stopped(self) -> None:
        pace = Pace(has_doorbell=self._silence is not None)
        scheduler = [source for source in (self._scheduler.connection.fileno(), self._scheduler.process) if source >= 0]
        with selectors.DefaultSelector() as selector:
            for source in (self._wake_up.fileno(), *scheduler):
                selector.register(source, selectors.EVENT_READ)
            while not self._is_stopping:
                selector.select(pace.seconds_to_next(self._step()))
                self._wake_up.clear()
                if self._end_reason is None and (reason := self._listen()) is not None:
                    self._end(reason)
                    for source in scheduler:
                        selector.unregister(source)

    def _step(self) -> PollStep:
        """Poll once, report what is over, and say when to poll next."""
        with self._lock:
            self._poll()
            has_news = bool(self._landings)
            step = PollStep(has_news, self._worker.seconds_to_landing(), self._worker.seconds_to_deadline())
        self._report()
        return step

    def _poll(self) -> None:
        try:
            self._worker.poll()
        except Exception as exc:
            if not self._has_fault:  # told once: it may come again with every poll
                self._has_fault = True
                _logger.exception("a fault inside the worker port of rank %d", self.rank)
                self._scheduler.send(Fault(shortened(f"{type(exc).__name__}: {exc}")))

    def _report(self) -> None:
        """Tell the scheduler what is over."""
        with self._lock:
            landings, self._landings = self._landings, []
        for start in range(0, len(landings), _MAX_LANDINGS):
            part = tuple(landings[start : start + _MAX_LANDINGS])
            self._scheduler.send(Landings(part, self._worker.joined_block_count))

    def _listen(self) -> str | None:
        """Return why the engine has ended; None as long as it has not."""
        try:
            messages = self._scheduler.receive()
        except FrameError as exc:
            return f"its scheduler ({self._scheduler}) cannot be understood: {exc}"
        if messages is None:
            return f"its scheduler ({self._scheduler}) has gone without a word"
        for message in messages:
            if isinstance(message, Leaving | Refused):
                return f"its scheduler ({self._scheduler}) has ended the engine: {message.reason}"
        return f"its scheduler ({self._scheduler}) has died" if self._scheduler.is_dead else None

    def _end(self, reason: str) -> None:
        """Take nothing more; what is under way still lands."""
        _logger.info("rank %d: %s", self.rank, reason)
        self._end_reason = reason
        with self._lock:
            self._worker.withdraw_all()

    def _drain(self) -> frozenset[int]:
        """Wait for what is under way, after the thread has ended; return the GPU blocks of what does not land."""
        worker, deadline = self._worker, self._clock.now() + self._drain_seconds
        worker.withdraw_all()
        self._poll()
        count = worker.sent_count + 1
        while 0 < worker.sent_count < count and self._clock.now() < deadline:
            count = worker.sent_count
            for transfer in worker.under_way():
                with suppress(DeviceError):  # the poll ends what the device has failed
                    worker.wait_for(transfer, max(0.0, deadline - self._clock.now()))
            self._poll()
        return frozenset(block for transfer in worker.under_way() for block in transfer.gpu_spec.block_ids.tolist())
