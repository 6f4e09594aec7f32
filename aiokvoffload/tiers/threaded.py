"""A tier whose storage blocks: threads of its own do the work, a block at a time."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial

from aiokvoffload.clock import Clock
from aiokvoffload.tiers.base import DEFAULT_TIMEOUT_SECONDS
from aiokvoffload.tiers.blockwise import BlockwiseTier
from aiokvoffload.tiers.breaker import BreakerLimits
from aiokvoffload.tiers.calls import TierCall
from aiokvoffload.tiers.threads import Job, Part, TierThreads

_logger = logging.getLogger(__name__)

DEFAULT_THREAD_COUNT = 4
DEFAULT_KEYS_PER_JOB = 32


class ThreadedTier(BlockwiseTier):
    """A tier over blocking calls; a thread that does not come back by the deadline is replaced.

    Args:
        url: Where it is, without credentials.
        clock: Where deadlines are read.
        timeout_seconds: Longest that a call may take.
        limits: When the breaker opens.
        thread_count: Blocks in work at a time.
        keys_per_job: Blocks that one thread takes of a call without buffers, where one block is little work.
    """

    def __init__(
        self,
        url: str,
        *,
        clock: Clock | None = None,
        timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
        limits: BreakerLimits | None = None,
        thread_count: int = DEFAULT_THREAD_COUNT,
        keys_per_job: int = DEFAULT_KEYS_PER_JOB,
    ) -> None:
        super().__init__(url, clock=clock, timeout_seconds=timeout_seconds, limits=limits)
        self._keys_per_job = keys_per_job
        self._threads = TierThreads(type(self).__name__, thread_count)

    def begin(self, call: TierCall) -> None:
        """Queue the blocks of a call."""
        indices = call.unanswered()
        size = 1 if call.buffers else self._keys_per_job
        parts = [indices[start : start + size] for start in range(0, len(indices), size)]
        # Whoever waits for the call is woken when all of it has landed, not once for each block.
        self._threads.submit(Job(call, partial(self._work_quietly, call), parts, self._ring))

    def take_back(self, call: TierCall) -> Sequence[int]:
        """Take blocks out of the queue."""
        return [index for part in self._threads.withdraw(call) for index in part]

    def abandon(self, call: TierCall) -> None:
        """Replace the threads that are in a call."""
        replaced_count = self._threads.replace(call)
        if replaced_count:
            _logger.warning(
                "%s: %d threads have not come back from a %s; others take their place",
                self.url,
                replaced_count,
                call.operation.value,
            )

    def _work_quietly(self, call: TierCall, part: Part) -> None:
        self._note(call, part, self.do_blocks(call, part))

    def _stop(self) -> None:
        self._threads.close()

    def _stuck_count(self) -> int:
        return self._threads.stuck_count
