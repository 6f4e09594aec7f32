"""Lets the threads of a tier wake the host that waits for it."""

from __future__ import annotations

from collections.abc import Callable

Ring = Callable[[], None]


class Doorbell:
    """Rings whoever wants to hear it, once until it is answered; `ring` may be called from any thread."""

    def __init__(self) -> None:
        self._listeners: tuple[Ring, ...] = ()
        self._is_rung = False

    def add(self, listener: Ring) -> Callable[[], None]:
        """Call `listener`, from any thread, at each ring; return what takes it away again.

        It is called at once if the bell has rung and nobody has answered: there may have been nobody to hear it.
        """
        self._listeners = (*self._listeners, listener)
        if self._is_rung:
            listener()

        def remove() -> None:
            self._listeners = tuple(kept for kept in self._listeners if kept is not listener)

        return remove

    def ring(self) -> None:
        """Say that there is something to collect."""
        if not self._is_rung:
            self._is_rung = True
            for listener in self._listeners:
                listener()

    def answer(self) -> None:
        """Let the next ring be heard; to be called before looking at what there is to collect."""
        self._is_rung = False
