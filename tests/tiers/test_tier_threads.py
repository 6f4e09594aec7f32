"""Threads of a tier's own."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from aiokvoffload.tiers.threads import Job, Part, TierThreads, call_bounded

PATIENCE_SECONDS = 60.0


class Gate:
    """Work that says when it has begun, waits, and says when it is over."""

    def __init__(self) -> None:
        self.has_begun = threading.Semaphore(0)
        self.may_end = threading.Event()
        self.is_over = threading.Semaphore(0)

    def work(self, _part: Part = ()) -> None:
        self.has_begun.release()
        self.may_end.wait(PATIENCE_SECONDS)
        self.is_over.release()

    def wait_begun(self) -> None:
        assert self.has_begun.acquire(timeout=PATIENCE_SECONDS)

    def wait_over(self) -> None:
        assert self.is_over.acquire(timeout=PATIENCE_SECONDS)


def nothing() -> None:
    """Nobody wants to hear of a pause."""


def job(group: str, work: Callable[[Part], None], part_count: int = 1, on_pause: Callable[[], None] = nothing) -> Job:
    """Parts of one position each."""
    return Job(group, work, [(number,) for number in range(part_count)], on_pause)


def run_one(threads: TierThreads) -> None:
    is_done = threading.Event()
    threads.submit(job("one", lambda _: is_done.set()))
    assert is_done.wait(PATIENCE_SECONDS)


def test_work_is_done_by_a_bounded_number_of_daemon_threads() -> None:
    threads, gate, seen = TierThreads("t", 2), Gate(), []

    def work(_part: Part) -> None:
        seen.append(threading.current_thread())
        gate.work()

    threads.submit(job("g", work, 5))
    gate.wait_begun()
    gate.wait_begun()
    assert not gate.has_begun.acquire(blocking=False)
    gate.may_end.set()
    for _ in range(5):
        gate.wait_over()
    assert len(set(seen)) == 2
    assert all(thread.daemon for thread in seen)
    threads.close()


def test_work_that_has_not_begun_can_be_withdrawn() -> None:
    threads, gate = TierThreads("t", 1), Gate()
    threads.submit(Job("a", gate.work, [(0,), (1, 2), (3,)], nothing))
    threads.submit(job("b", gate.work))
    gate.wait_begun()
    assert threads.withdraw("a") == [(1, 2), (3,)]
    assert threads.withdraw("a") == []
    gate.may_end.set()
    gate.wait_over()
    gate.wait_over()
    assert not gate.is_over.acquire(blocking=False)
    threads.close()


def test_a_stuck_thread_is_replaced_and_ends_when_it_comes_back() -> None:
    threads, stuck = TierThreads("stuck", 1), Gate()  # a name of its own, as below
    threads.submit(job("stuck", stuck.work))
    stuck.wait_begun()
    before = set(threading.enumerate())
    assert threads.replace("other") == 0
    assert threads.replace("stuck") == 1
    assert threads.replace("stuck") == 0
    assert threads.stuck_count == 1
    run_one(threads)
    stuck_thread = next(thread for thread in before if thread.name == "aiokvoffload-stuck-1")
    stuck.may_end.set()
    stuck_thread.join(PATIENCE_SECONDS)
    assert not stuck_thread.is_alive()
    assert threads.stuck_count == 0
    run_one(threads)
    threads.close()


def test_the_number_of_stuck_threads_is_bounded() -> None:
    threads, stuck = TierThreads("t", 2, stuck_limit=3), Gate()
    for replaced in (2, 1, 0):
        threads.submit(job("stuck", stuck.work, 2))
        stuck.wait_begun()
        if replaced:
            stuck.wait_begun()
        assert threads.replace("stuck") == replaced
    assert threads.stuck_count == 3
    threads.withdraw("stuck")
    stuck.may_end.set()
    for _ in range(5):
        stuck.wait_over()
    run_one(threads)
    threads.close()


def test_work_that_raises_ends_no_thread(caplog: pytest.LogCaptureFixture) -> None:
    threads = TierThreads("t", 1)

    done: list[int] = []

    def fail(part: Part) -> None:
        done.extend(part)
        raise ValueError("on purpose")

    threads.submit(job("g", fail, 3))
    run_one(threads)
    assert caplog.text.count("work in the thread of a tier raised") == 3
    assert done == [0, 1, 2]
    threads.close()


def test_a_pause_comes_when_the_last_part_is_over_whoever_did_it() -> None:
    threads, first, second = TierThreads("t", 2), Gate(), Gate()
    pauses = threading.Semaphore(0)
    threads.submit(job("g", lambda part: (first if part == (0,) else second).work(), 2, pauses.release))
    first.wait_begun()
    second.wait_begun()
    first.may_end.set()
    first.wait_over()
    run_one(threads)  # by the thread that was first, which has had its look at the job by then
    assert not pauses.acquire(blocking=False)
    second.may_end.set()
    assert pauses.acquire(timeout=PATIENCE_SECONDS)
    threads.close()


def test_a_pause_comes_also_when_the_rest_was_withdrawn() -> None:
    threads, gate, pauses = TierThreads("t", 1), Gate(), threading.Semaphore(0)
    threads.submit(job("g", gate.work, 3, pauses.release))
    gate.wait_begun()
    assert threads.withdraw("g") == [(1,), (2,)]
    gate.may_end.set()
    assert pauses.acquire(timeout=PATIENCE_SECONDS)
    threads.close()


def test_a_thread_that_is_stuck_keeps_no_part_from_the_others() -> None:
    threads, stuck, done = TierThreads("t", 2), Gate(), threading.Semaphore(0)
    threads.submit(job("g", lambda part: stuck.work() if part == (0,) else done.release(), 9))
    for _ in range(8):
        assert done.acquire(timeout=PATIENCE_SECONDS)
    stuck.may_end.set()
    stuck.wait_over()
    threads.close()


def test_closing_waits_for_nothing_and_ends_the_threads() -> None:
    threads, gate = TierThreads("closing", 1), Gate()  # a name of its own: threads of other tests may still be ending
    is_done = threading.Event()
    threads.submit(job("g", gate.work))
    threads.submit(job("g", lambda _: is_done.set()))
    gate.wait_begun()
    thread = next(thread for thread in threading.enumerate() if thread.name == "aiokvoffload-closing-1")
    threads.close()
    assert thread.is_alive()
    gate.may_end.set()
    thread.join(PATIENCE_SECONDS)
    assert not thread.is_alive()
    assert is_done.is_set()  # what was queued before is still done


def test_a_bounded_call_raises_what_the_work_raises() -> None:
    def fail() -> None:
        raise ValueError("on purpose")

    with pytest.raises(ValueError, match="on purpose"):
        call_bounded(fail, PATIENCE_SECONDS)
    call_bounded(lambda: None, PATIENCE_SECONDS)


def test_a_bounded_call_leaves_behind_what_does_not_come_back() -> None:
    gate = Gate()
    with pytest.raises(TimeoutError, match=r"within 0\.01 s"):
        call_bounded(gate.work, 0.01)
    gate.may_end.set()
    gate.wait_over()
