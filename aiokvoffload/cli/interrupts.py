"""Ctrl-C: answered by one word and exit status 130, whatever goes on."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

INTERRUPTED = 130
_WORD = "interrupted"


def leave_when_interrupted() -> None:
    """Let an interrupt end this process on the spot from now on, but for what `interrupts_raised` surrounds.

    That is for all that holds nothing to give back, imports above all: an exception in the middle of one comes out as
    any other, or not at all. Where interrupts are ignored, as of a command in the background, they stay so.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)


def ignore_interrupts() -> None:
    """Let an interrupt change nothing any more: all is said and given back."""
    if signal.getsignal(signal.SIGINT) is _leave:
        signal.signal(signal.SIGINT, signal.SIG_IGN)


@contextmanager
def interrupts_raised(*, amid_coroutines: bool = False) -> Iterator[None]:
    """Let an interrupt raise `KeyboardInterrupt` inside, so that what is held there is given back.

    Args:
        amid_coroutines: Also in a coroutine that computes for seconds, where an event loop would wait for it to
            suspend and cancel it then; for loops with a single task.
    """
    if signal.getsignal(signal.SIGINT) is not _leave:
        yield
        return
    # A loop takes the place of the usual handler only.
    signal.signal(signal.SIGINT, _raise if amid_coroutines else signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, _leave)


def is_interrupt(error: BaseException) -> bool:
    """Return whether an error is an interrupt, maybe in a group, as task groups raise it."""
    if isinstance(error, BaseExceptionGroup):
        return error.subgroup(KeyboardInterrupt) is not None
    return isinstance(error, KeyboardInterrupt)


def answer_interrupt() -> int:
    """Say the word, and return the exit status."""
    ignore_interrupts()  # once is enough
    print(_WORD, file=sys.stderr)
    return INTERRUPTED


def _raise(_signal: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _leave(_signal: int, _frame: FrameType | None) -> None:
    os.write(2, f"{_WORD}\n".encode())
    os._exit(INTERRUPTED)
