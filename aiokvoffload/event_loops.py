"""Which event loop runs the caller, and how to call into one from any thread."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable

_logger = logging.getLogger(__name__)


def is_trio() -> bool:
    """Return whether the caller is a trio task."""
    if "trio" not in sys.modules:
        return False
    import trio

    return trio.lowlevel.in_trio_task()


def running_loop() -> object | None:
    """Return what identifies the event loop that runs the caller, if one does."""
    if is_trio():
        import trio

        return trio.lowlevel.current_trio_token()
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def caller_from_threads() -> Callable[[Callable[[], object]], None]:
    """Return what lets any thread have something called in the running event loop, soon; once that has ended, never."""
    if is_trio():
        import trio

        token = trio.lowlevel.current_trio_token()
        return lambda call: _ignoring(trio.RunFinishedError, lambda: token.run_sync_soon(call))
    loop = asyncio.get_running_loop()
    return lambda call: _ignoring(RuntimeError, lambda: loop.call_soon_threadsafe(call))


def _ignoring(error: type[Exception], call: Callable[[], object]) -> None:
    try:
        call()
    except error:
        _logger.debug("a doorbell rang after its event loop had ended")
