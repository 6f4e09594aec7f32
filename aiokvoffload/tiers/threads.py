"""Threads that a tier blocks in: its own, daemons, and replaced when stuck.

A worker of an event loop's pool that never comes back keeps the process from leaving. These do not: nothing ever
joins them.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence

_logger = logging.getLogger(__name__)

Part = Sequence[int]
"""Positions in the group that are worked on together."""


class Job:
    """Work in parts, which the threads that are free take one by one.

    Args:
        group: What it belongs to, such as a call.
        work: Does a part.
        parts: What there is to do.
        on_pause: Called in a thread whenever no part is left to take and none is in work; at least once after the last.
    """

    __slots__ = ("_begun", "_ended", "_on_pause", "_parts", "_work", "group")

    def __init__(
        self, group: object, work: Callable[[Part], None], parts: Iterable[Part], on_pause: Callable[[], None]
    ) -> None:
        self.group = group
        self._work = work
        self._parts = deque(parts)
        self._on_pause = on_pause
        # Counted by their lengths: appending needs no lock.
        self._begun: list[None] = []
        self._ended: list[None] = []

    @property
    def waiting_count(self) -> int:
        """Parts that no thread has begun."""
        return len(self._parts)

    def run(self) -> None:
        """Do one part after the other until none is left."""
        while self._parts:
            try:
                part = self._parts.popleft()
            except IndexError:  # another thread was faster
                break
            self._begun.append(None)
            try:
                self._work(part)
            except Exception:
                _logger.exception("work in the thread of a tier raised")
            self._ended.append(None)
        if len(self._ended) >= len(self._begun):
            self._on_pause()

    def withdraw(self) -> list[Part]:
        """Take back the parts that no thread has begun, and return them."""
        taken = []
        while self._parts:
            try:
                taken.append(self._parts.popleft())
            except IndexError:  # a thread was faster
                break
        return taken


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

    def submit(self, job: Job) -> None:
        """Queue a job, for as many threads as can have a part of it."""
        thread_count = min(self._count, job.waiting_count)
        with self._condition:
            self._queue.extend([job] * thread_count)
            self._staff()
            self._condition.notify(thread_count)

    def withdraw(self, group: object) -> list[Part]:
        """Take back the parts of a group's jobs that no thread has begun, and return them."""
        with self._condition:
            queued = [job for job in self._queue if job.group is group]
            if queued:
                self._queue = deque(job for job in self._queue if job.group is not group)
            running = [worker.job for worker in self._workers | self._stuck]
        jobs = dict.fromkeys([*queued, *(job for job in running if job is not None and job.group is group)])
        return [part for job in jobs for part in job.withdraw()]

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
            worker.job.run()
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
