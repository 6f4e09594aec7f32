"""One thread of one process owns an object; everybody else is refused with a sentence."""

from __future__ import annotations

import os
import threading

from aiokvoffload.errors import ClosedError, WrongThreadError


class Owner:
    """Remembers the thread and process that first used an object.

    Args:
        name: What is owned, for messages.
    """

    __slots__ = ("_name", "_process", "_thread", "is_closed")

    def __init__(self, name: str) -> None:
        self._name = name
        self._thread: int | None = None
        self._process = os.getpid()
        self.is_closed = False

    @property
    def is_caller(self) -> bool:
        """The caller is the owner.

        Raises:
            WrongThreadError: The call comes from a process forked after creation.
        """
        self._check_process()
        return threading.get_ident() == self._thread

    def check_thread(self) -> None:
        """Refuse a caller that is not the owner; the first caller becomes it.

        Raises:
            WrongThreadError: The call comes from another thread, or from a process forked after creation.
        """
        thread = threading.get_ident()
        if thread != self._thread:
            if self._thread is not None:
                raise WrongThreadError(
                    f"this {self._name} belongs to another thread; call it from there, "
                    "for instance through anyio.from_thread.run"
                )
            self._thread = thread
        self._check_process()

    def check(self) -> None:
        """Refuse a caller that is not the owner, and everyone once the object is closed.

        Raises:
            WrongThreadError: See `check_thread`.
            ClosedError: The object has been closed.
        """
        self.check_thread()
        if self.is_closed:
            raise ClosedError(f"this {self._name} is closed; open a new one")

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            raise WrongThreadError(f"this {self._name} belongs to the parent process; open a new one after the fork")
