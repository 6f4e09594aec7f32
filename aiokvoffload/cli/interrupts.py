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
_CLEAR_LINE_AND_SHOW_CURSOR = "\r\x1b[K\x1b[?25h"


def leave_when_interrupted() -> None:
    """Let an interrupt end this process on the spot from now on, but for what `interrupts_raised` surrounds.

    That is for all that holds nothing to give back: imports, where an exception comes out as any other or not at all;
    and what only computes, which an event loop would let go on until it suspends. Where interrupts are ignored, as of a
    command in the background, they stay so.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)


def ignore_interrupts() -> None:
    """Let an interrupt change nothing any more: all is said and given back."""
    if signal.getsignal(signal.SIGINT) is _leave:
        signal.signal(signal.SIGINT, signal.SIG_IGN)


@contextmanager
def interrupts_raised() -> Iterator[None]:
    """Let an interrupt raise `KeyboardInterrupt` inside, or cancel an event loop; so what is held is given back."""
    if signal.getsignal(signal.SIGINT) is not _leave:
        yield
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
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


def _leave(_signal: int, _frame: FrameType | None) -> None:
    tidy = _CLEAR_LINE_AND_SHOW_CURSOR if os.isatty(2) else ""  # a progress bar has hidden it
    os.write(2, f"{tidy}{_WORD}\n".encode())
    os._exit(INTERRUPTED)
