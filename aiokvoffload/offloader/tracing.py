"""Where somebody may watch single calls; by default nobody does."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol, Self

from aiokvoffload.specs import ReqContext


class CallSpan(Protocol):
    """One call that is watched."""

    def note(self, **counts: int) -> None:
        """Add what came of the call."""


class Tracing(Protocol):
    """Watches calls: lookup, load, store, demotion, and within a load the promotion that it waits for."""

    def span(self, name: str, block_count: int, ctx: ReqContext | None) -> AbstractContextManager[CallSpan]:
        """Return what is entered when a call begins and left when it ends, in the task of the caller."""


class _NoSpan:
    def note(self, **counts: int) -> None:
        """Nobody watches."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return


class NoTracing:
    """Watches nothing."""

    def __init__(self) -> None:
        self._span = _NoSpan()

    def span(self, name: str, block_count: int, ctx: ReqContext | None) -> _NoSpan:
        """Return what does nothing."""
        return self._span
