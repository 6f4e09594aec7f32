"""Threads that a tier blocks in: its own, daemons, and replaced when stuck.

A worker of an event loop's pool that never comes back keeps the process from leaving. These do not: nothing ever
joins them.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """Something to do in a thread.

    Attributes:
        group: What it belongs to, such as a call.
        work: What to do.
        indices: Which part of the group it does.
    """

    group: object
    work: Callable[[], None]
    indices: Sequence[int] = ()


class _Worker:
    """One thread, and what it is doing."""

    __slots__ = ("is_replaced", "job")

    def __init__(self) -> None:
        self.job: Job | None = None
        self.is_replaced = False


class TierThreads:
    """A bounded number of daemon threads over one queue; started when there is work for them.

    Args:
        name: Of the threads.
        count: Threads that take work.
        stuck_limit: Threads that may be stuck besides; with so many stuck, no more are replaced.
    """

    def __init__(self, name: str, count: int, *, stuck_limit: int | None = None) -> None:
        self._name = name
        self._count = count
        self._stuck_limit = 2 * count if stuck_limit is None else stuck_limit
        self._condition = threading.Condition()
        self._queue: deque[Job] = deque()
        self._workers: set[_Worker] = set()
        self._stuck: set[_Worker] = set()
        self._idle_count = 0
        self._started_count = 0
        self._is_closed = False

    @property
    def stuck_count(self) -> int:
        """Threads that were replaced and have not come back."""
        return len(self._stuck)

    def submit(self, jobs: Iterable[Job]) -> None:
        """Queue jobs."""
        with self._condition:
            self._queue.extend(jobs)
            self._staff()
            self._condition.notify(len(self._queue))

    def withdraw(self, group: object) -> list[Job]:
        """Take back the jobs of a group that no thread has begun, and return them."""
        with self._condition:
            taken = [job for job in self._queue if job.group is group]
            if taken:
                self._queue = deque(job for job in self._queue if job.group is not group)
        return taken

    def replace(self, group: object) -> int:
        """Give up the threads that are in jobs of a group, start others in their place, and return how many."""
        with self._condition:
            late = [worker for worker in self._workers if worker.job is not None and worker.job.group is group]
            replaced = late[: max(0, self._stuck_limit - len(self._stuck))]
            for worker in replaced:
                worker.is_replaced = True
                self._workers.discard(worker)
                self._stuck.add(worker)
            self._staff()
        return len(replaced)

    def close(self) -> None:
        """Let the threads end once nothing is queued any more. Waits for nothing."""
        with self._condition:
            self._is_closed = True
            self._condition.notify_all()

    def _staff(self) -> None:
        while len(self._queue) > self._idle_count and len(self._workers) < self._count:
            worker = _Worker()
            self._started_count += 1
            self._workers.add(worker)
            # It takes its first job at once: two starts in a row must not count on the same idle thread.
            worker.job = self._queue.popleft()
            name = f"aiokvoffload-{self._name}-{self._started_count}"
            threading.Thread(target=self._run, args=(worker,), name=name, daemon=True).start()

    def _run(self, worker: _Worker) -> None:
        while worker.job is not None:
            try:
                worker.job.work()
            except Exception:
                _logger.exception("a job of tier thread %r raised", self._name)
            worker.job = None
            with self._condition:
                if worker.is_replaced:
                    self._stuck.discard(worker)
                    return
                worker.job = self._next_job()
                if worker.job is None:
                    self._workers.discard(worker)

    def _next_job(self) -> Job | None:
        self._idle_count += 1
        try:
            while not self._queue and not self._is_closed:
                self._condition.wait()
        finally:
            self._idle_count -= 1
        return self._queue.popleft() if self._queue else None


def call_bounded(work: Callable[[], None], timeout_seconds: float) -> None:
    """Do something in a thread of its own and wait for it, but not for ever; what it raises is raised here.

    Raises:
        TimeoutError: It has not come back; its thread is left behind.
    """
    is_over = threading.Event()
    errors: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as exc:  # noqa: BLE001 - raised again by whoever waits
            errors.append(exc)
        is_over.set()

    threading.Thread(target=run, name="aiokvoffload-bounded", daemon=True).start()
    if not is_over.wait(timeout_seconds):
        raise TimeoutError(f"it has not come back within {timeout_seconds:g} s")
    for error in errors:
        raise error
