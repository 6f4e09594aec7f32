"""A thread that helps another one."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable, Iterator

import pytest

from aiokvoffload.devices.helper_thread import HelperThread, _SharedWork

PATIENCE_SECONDS = 30.0
NAME = "helper of a test"


def helpers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == NAME]


@pytest.fixture
def helper() -> Iterator[HelperThread]:
    helper = HelperThread(NAME)
    yield helper
    helper.close()
    for thread in helpers():
        thread.join(PATIENCE_SECONDS)


def meeting_of(count: int) -> Callable[[], object]:
    """Return a piece that ends once so many threads are in it."""
    barrier = threading.Barrier(count)
    return lambda: barrier.wait(PATIENCE_SECONDS)


class Notes:
    """Pieces that note which thread has done them."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def pieces(self, count: int) -> list[Callable[[], object]]:
        return [lambda: self.names.append(threading.current_thread().name)] * count


def test_two_threads_work_at_a_time(helper: HelperThread) -> None:
    notes = Notes()
    helper.share([*[meeting_of(2)] * 2, *notes.pieces(10)])
    helper.share([meeting_of(2)] * 4)
    assert len(notes.names) == 10


def test_a_single_piece_starts_no_thread(helper: HelperThread) -> None:
    notes = Notes()
    helper.share([])
    helper.share(notes.pieces(1))
    assert notes.names == [threading.current_thread().name]
    assert helpers() == []


def test_where_there_is_one_processor_nobody_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    helper = HelperThread(NAME)
    notes = Notes()
    helper.share(notes.pieces(5))
    assert notes.names == [threading.current_thread().name] * 5
    assert helpers() == []


def test_with_two_callers_each_works_alone(helper: HelperThread) -> None:
    notes = Notes()
    is_in, gate = threading.Event(), threading.Event()

    def hold() -> None:
        is_in.set()
        gate.wait(PATIENCE_SECONDS)

    other = threading.Thread(target=helper.share, args=([hold],))
    other.start()
    assert is_in.wait(PATIENCE_SECONDS)
    helper.share(notes.pieces(5))
    gate.set()
    other.join(PATIENCE_SECONDS)
    assert notes.names == [threading.current_thread().name] * 5
    assert helpers() == []


def test_a_helper_leaves_once_a_second_caller_comes(helper: HelperThread) -> None:
    notes = Notes()
    met, first_may_go, helper_may_go = threading.Barrier(3), threading.Event(), threading.Event()

    def meet() -> None:
        met.wait(PATIENCE_SECONDS)
        mine = helper_may_go if threading.current_thread().name == NAME else first_may_go
        mine.wait(PATIENCE_SECONDS)

    first = threading.Thread(target=helper.share, args=([meet, meet, *notes.pieces(20)],), name="first")
    first.start()
    met.wait(PATIENCE_SECONDS)  # the first caller and the helper are in a piece each

    def let_them_go_on() -> None:
        helper_may_go.set()
        has_left = threading.Event()
        helper._inbox.put(_SharedWork([has_left.set], [None]))
        assert has_left.wait(PATIENCE_SECONDS)
        first_may_go.set()
        first.join(PATIENCE_SECONDS)

    helper.share([let_them_go_on])
    assert notes.names == ["first"] * 20


def test_after_an_error_the_helper_is_waited_for(helper: HelperThread) -> None:
    meet, is_failing, helper_is_over = meeting_of(2), threading.Event(), threading.Event()

    def fail_in_caller() -> None:
        meet()
        if threading.current_thread().name != NAME:
            is_failing.set()
            raise OSError("a page is gone")
        is_failing.wait(PATIENCE_SECONDS)
        helper_is_over.set()

    with pytest.raises(OSError, match="a page is gone"):
        helper.share([fail_in_caller] * 2)
    assert helper_is_over.is_set()
    notes = Notes()
    helper.share(notes.pieces(2))  # it goes on afterwards
    assert len(notes.names) == 2


def test_what_has_not_begun_when_a_piece_fails_is_left_out() -> None:
    helper, notes = HelperThread(NAME), Notes()
    helper.close()

    def fail() -> None:
        raise OSError("a page is gone")

    with pytest.raises(OSError, match="a page is gone"):
        helper.share([*notes.pieces(3), fail, *notes.pieces(20)])
    assert len(notes.names) == 3


def test_what_the_helper_raises_reaches_the_caller(helper: HelperThread) -> None:
    meet = meeting_of(2)

    def fail_in_helper() -> None:
        meet()
        if threading.current_thread().name == NAME:
            raise OSError("a page is gone")

    with pytest.raises(OSError, match="a page is gone"):
        helper.share([fail_in_helper, fail_in_helper])


def test_after_closing_a_caller_works_alone(helper: HelperThread) -> None:
    notes = Notes()
    helper.share([meeting_of(2)] * 2)
    (thread,) = helpers()
    helper.close()
    thread.join(PATIENCE_SECONDS)
    assert not thread.is_alive()
    helper.share(notes.pieces(5))
    assert notes.names == [threading.current_thread().name] * 5


def test_the_thread_ends_with_a_helper_that_is_given_up() -> None:
    helper = HelperThread(NAME)
    helper.share([meeting_of(2)] * 2)
    (thread,) = helpers()
    del helper
    gc.collect()
    thread.join(PATIENCE_SECONDS)
    assert not thread.is_alive()
