"""A thread that helps another one with work that comes in pieces."""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from queue import SimpleQueue

Piece = Callable[[], object]


class HelperThread:
    """Helps whoever works alone; the thread starts with the first who does, and ends with this.

    Args:
        name: Of the thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._inbox: SimpleQueue[_SharedWork | None] = SimpleQueue()
        self._at_work: list[None] = []  # one for each caller: appending and popping need no lock
        self._thread: threading.Thread | None = None
        self._is_useful = len(os.sched_getaffinity(0)) > 1
        # The thread holds the inbox alone, so that this can be given up.
        self._end_thread = weakref.finalize(self, self._inbox.put, None)

    def share(self, pieces: Sequence[Piece]) -> None:
        """Do all pieces, in any order, together with the helper as long as no other thread shares any.

        When this returns or raises, nothing of it goes on.

        Raises:
            BaseException: What the first piece that failed has raised; those that had not begun are left out.
        """
        self._at_work.append(None)
        try:
            work = _SharedWork(pieces, self._at_work)
            if self._is_useful and len(pieces) > 1 and len(self._at_work) == 1:
                self._send(work)
            work.do()
        finally:
            self._at_work.pop()

    def close(self) -> None:
        """Let the thread end; whoever shares work from now on does it alone."""
        self._is_useful = False
        self._end_thread()

    def _send(self, work: _SharedWork) -> None:
        if self._thread is None:
            # A daemon: work that never ends must not keep the process from leaving.
            self._thread = threading.Thread(target=_serve, args=(self._inbox,), name=self._name, daemon=True)
            self._thread.start()
        self._inbox.put(work)


class _SharedWork:
    """Pieces of work that two threads take one by one.

    Args:
        pieces: The work.
        at_work: As long as there are callers.
    """

    def __init__(self, pieces: Sequence[Piece], at_work: Sequence[None]) -> None:
        self._pieces = deque(pieces)
        self._at_work = at_work
        self._is_in_hand = threading.Lock()  # of the helper
        self._error: BaseException | None = None

    def do(self) -> None:
        """Do one piece after the other until none is left, and the helper is over too; raise what failed."""
        while self._take_piece():
            pass
        with self._is_in_hand:
            if self._error is not None:
                raise self._error

    def help(self) -> None:
        """Do one piece after the other until none is left, or another caller has a use for the processor."""
        with self._is_in_hand:
            while len(self._at_work) == 1 and self._take_piece():
                pass

    def _take_piece(self) -> bool:
        """Do the next piece, and return whether there was one."""
        try:
            piece = self._pieces.popleft()
        except IndexError:
            return False
        try:
            piece()
        except BaseException as exc:  # noqa: BLE001 - `do` raises it
            self._error = self._error or exc
            self._pieces.clear()
        return True


def _serve(inbox: SimpleQueue[_SharedWork | None]) -> None:
    while (work := inbox.get()) is not None:
        work.help()
        del work  # what it keeps alive must not live until the next one comes
