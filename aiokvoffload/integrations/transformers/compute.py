"""Runs a model off the event loop, one call at a time."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from typing import ParamSpec, TypeVar

import anyio
import torch
from anyio.lowlevel import checkpoint_if_cancelled

from aiokvoffload.event_loops import caller_from_threads

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class ComputeThread:
    """A thread that does the blocking work of one model, for any number of tasks of one event loop, first come first.

    Args:
        compute_stream: The CUDA stream that the work is launched on; None on a CPU.
        executor: Has the thread, and goes on after this; None makes one.
    """

    def __init__(self, compute_stream: torch.cuda.Stream | None = None, executor: Executor | None = None) -> None:
        self._stream = compute_stream
        self._is_own = executor is None
        self._executor = executor or ThreadPoolExecutor(max_workers=1, thread_name_prefix="aiokvoffload-model")

    async def run(
        self, function: Callable[Arguments, Result], *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> Result:
        """Call `function` in the thread, without gradients, and return what it returns.

        Cancelled, it takes back a call that has not begun, and otherwise waits for its end: when this ends, however it
        ends, the thread does not touch the arguments any more.

        Raises:
            Exception: Whatever `function` raises.
        """
        await checkpoint_if_cancelled()
        call_in_loop = caller_from_threads()
        finished = anyio.Event()
        future = self._executor.submit(self._call, partial(function, *args, **kwargs))
        future.add_done_callback(lambda _: call_in_loop(finished.set))
        cancellation: BaseException | None = None
        while not finished.is_set():
            try:
                # Shielded from the second time on: anyio cancels again and again, asyncio once per request.
                with anyio.CancelScope(shield=cancellation is not None):
                    await finished.wait()
            except anyio.get_cancelled_exc_class() as exc:
                cancellation = exc
                future.cancel()
        if cancellation is not None:
            raise cancellation
        return future.result()

    def close(self) -> None:
        """End the thread once it is idle, if it was made here."""
        if self._is_own:
            self._executor.shutdown(wait=False)

    def _call(self, function: Callable[[], Result]) -> Result:
        with torch.no_grad(), nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            return function()
