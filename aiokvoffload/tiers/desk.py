"""The calls a tier has in hand: posted, answered, overdue, over."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Protocol

from aiokvoffload.clock import Clock
from aiokvoffload.tiers.breaker import Breaker, BreakerState
from aiokvoffload.tiers.calls import Operation, TierCall
from aiokvoffload.tiers.doorbell import Doorbell
from aiokvoffload.tiers.outcomes import BlockResult, Reason
from aiokvoffload.tiers.statistics import TierCounts

_SAY_NOTHING = frozenset(
    {Reason.NOT_ADMITTED, Reason.FULL, Reason.READ_ONLY, Reason.BUSY, Reason.NOT_READY, Reason.CLOSED}
)
"""Results that a tier may give without having asked its storage."""


class Worker(Protocol):
    """Does the work of calls."""

    def begin(self, call: TierCall) -> None:
        """Set to work on the unanswered blocks of a call."""

    def take_back(self, call: TierCall) -> Sequence[int]:
        """Give back the blocks of a call on which work has not begun."""

    def abandon(self, call: TierCall) -> None:
        """Note that a call is past its deadline and not over."""


class CallDesk:
    """Posts calls, collects what has landed, and ends what is past its deadline.

    Everything but `note` is for the thread that owns the tier.

    Args:
        worker: Does the work.
        breaker: Keeps calls away from a tier that fails.
        clock: Where deadlines are read.
        timeout_seconds: Work on one block that lasts so long is a stall.
    """

    def __init__(self, worker: Worker, breaker: Breaker, clock: Clock, timeout_seconds: float) -> None:
        self._worker = worker
        self._breaker = breaker
        self._clock = clock
        self._timeout_seconds = timeout_seconds
        self._landings: deque[tuple[TierCall, Sequence[int], Sequence[BlockResult]]] = deque()
        self._calls: dict[TierCall, None] = {}
        self._is_polling = False
        self.doorbell = Doorbell()
        self.counts = TierCounts()

    @property
    def calls(self) -> list[TierCall]:
        """Calls that are not over."""
        return list(self._calls)

    @property
    def next_deadline(self) -> float | None:
        """When `poll` has something to end, if nothing lands before."""
        return min((call.deadline for call in self._calls if not call.is_overdue), default=None)

    def post(self, call: TierCall) -> None:
        """Let the work on a call begin, or answer it at once."""
        if not call.block_count:
            return
        self._calls[call] = None
        if call.operation is Operation.CLOSE:
            self._worker.begin(call)
        elif call.deadline <= self._clock.now():
            self._give_back(call, call.unanswered(), Reason.DEADLINE)
        elif not self._breaker.admit():
            self._give_back(call, call.unanswered(), Reason.BREAKER_OPEN)
        else:
            call.is_probe = self._breaker.state is BreakerState.HALF_OPEN
            if call.is_probe:
                # One block finds out as much as a thousand, and costs one thread.
                self._give_back(call, call.unanswered()[1:], Reason.BREAKER_OPEN)
            self._worker.begin(call)
        self.poll()

    def note(self, call: TierCall, indices: Sequence[int], results: Sequence[BlockResult]) -> None:
        """Report blocks that nobody touches any more, and what became of them; from any thread.

        The next `poll` collects them; it is for the doorbell to bring that about soon.
        """
        self._landings.append((call, indices, results))

    def poll(self) -> None:
        """Collect what has landed and end what is past its deadline."""
        if self._is_polling:
            return  # called back from below; what it would find is found there
        self._is_polling = True
        try:
            self.doorbell.answer()
            while self._landings:
                self._collect(*self._landings.popleft())
            now = self._clock.now()
            for call in [call for call in self._calls if call.deadline <= now and not call.is_overdue]:
                self._expire(call)
        finally:
            self._is_polling = False

    def withdraw(self, call: TierCall, reason: Reason) -> None:
        """Answer a call that nobody waits for any more; work that has begun goes on."""
        self.take_back(call, reason)
        for index in call.unanswered():
            self._answer(call, index, call.failure(reason))

    def take_back(self, call: TierCall, reason: Reason) -> None:
        """Answer and release those blocks of a call on which work has not begun."""
        self._give_back(call, self._worker.take_back(call), reason)

    def _give_back(self, call: TierCall, indices: Sequence[int], reason: Reason) -> None:
        for index in indices:
            self._answer(call, index, call.failure(reason))
            call.release(index)
        self._forget_if_over(call)

    def _collect(self, call: TierCall, indices: Sequence[int], results: Sequence[BlockResult]) -> None:
        now = self._clock.now()
        for index, result in zip(indices, results, strict=True):
            if result.reason is Reason.FAILED:
                self._breaker.record_failure(result.detail, is_probe=call.is_probe)
            elif result.reason not in _SAY_NOTHING and not call.is_overdue:
                began = call.began[index]
                seconds = now - (call.started if began is None else began)
                self._breaker.record_success(seconds, is_probe=call.is_probe)
            if not self._answer(call, index, result):
                self.counts.late_blocks += 1
            call.release(index)
        self._forget_if_over(call)

    def _answer(self, call: TierCall, index: int, result: BlockResult) -> bool:
        if call.has_result(index):
            return False
        # Counted before anyone is called back, so that they see the statistics of this moment.
        self.counts.add(call, index, result)
        if call.unanswered_count == 1:
            self.counts.add_latency(call.operation, self._clock.now() - call.started)
        call.answer(index, result)
        return True

    def _expire(self, call: TierCall) -> None:
        call.is_overdue = True
        # Before anything is given back: a probe that is over without a verdict is followed by another at once.
        self._judge_overdue(call)
        self.take_back(call, Reason.DEADLINE)
        if not call.is_over:
            self._worker.abandon(call)
        for index in call.unanswered():
            self._answer(call, index, call.failure(Reason.DEADLINE))

    def _judge_overdue(self, call: TierCall) -> None:
        """Tell the breaker of a call past its deadline; having waited in line is no failure, unless of a probe."""
        if call.operation is Operation.CLOSE:
            return
        what, began = call.operation.value, call.open_since()
        if began is not None and self._clock.now() - began >= self._timeout_seconds:
            why = f"a {what} has not come back within {self._timeout_seconds:g} s"
            self._breaker.record_stall(why, is_probe=call.is_probe)
        elif began is not None or call.is_probe:
            self._breaker.record_failure(f"a {what} has missed its deadline", is_probe=call.is_probe)

    def _forget_if_over(self, call: TierCall) -> None:
        if call.is_over and call in self._calls:
            del self._calls[call]
            if call.is_probe:
                self._breaker.end_probe()
