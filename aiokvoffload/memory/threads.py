"""Prepares memory off the event loop."""

from __future__ import annotations

import threading
from typing import Protocol

import anyio
from anyio.lowlevel import checkpoint_if_cancelled

from aiokvoffload.event_loops import caller_from_threads
from aiokvoffload.memory.base import PreparationProgress, Report, ignore_progress


class _StoppedError(Exception):
    """Whoever waited for the preparation was cancelled."""


class Preparable(Protocol):
    """What is prepared; see `HostMemory`."""

    @property
    def prepares_at_once(self) -> bool:
        """See `HostMemory.prepares_at_once`."""

    def prepare(self, report: Report) -> None:
        """See `HostMemory.prepare`."""


async def prepare_in_thread(memory: Preparable, report: Report = ignore_progress) -> None:
    """Prepare memory in a thread of its own, on asyncio or trio; so little that it takes no time, at once.

    Cancelled, it stops the preparation at its next report, and ends once the thread has let go of the memory; the
    memory can only be closed then.

    Args:
        memory: What to prepare.
        report: Called in the thread.

    Raises:
        Exception: Whatever `memory.prepare` raises.
    """
    await checkpoint_if_cancelled()
    if memory.prepares_at_once:
        memory.prepare(report)
        return
    is_stopped = False
    errors: list[BaseException] = []
    finished = anyio.Event()
    call_in_loop = caller_from_threads()

    def report_unless_stopped(progress: PreparationProgress) -> None:
        if is_stopped:
            raise _StoppedError
        report(progress)

    def prepare() -> None:
        try:
            memory.prepare(report_unless_stopped)
        except BaseException as exc:  # noqa: BLE001  raised by the one who waits
            errors.append(exc)
        call_in_loop(finished.set)

    threading.Thread(target=prepare, name="aiokvoffload-prepare", daemon=True).start()
    cancellation: BaseException | None = None
    try:
        while not finished.is_set():
            try:
                # Shielded from the second time on: anyio cancels again and again, asyncio once per request.
                with anyio.CancelScope(shield=is_stopped):
                    await finished.wait()
            except anyio.get_cancelled_exc_class() as exc:
                cancellation = exc
                is_stopped = True
    finally:
        is_stopped = True
    if cancellation is not None:
        raise cancellation
    if errors:
        raise errors.pop()
