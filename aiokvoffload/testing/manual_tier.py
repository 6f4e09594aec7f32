"""A tier in which nothing happens until the test says so."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from aiokvoffload.keys import OffloadKey
from aiokvoffload.tiers.calls import Operation, TierCall, Use
from aiokvoffload.tiers.memory import MemoryTier
from aiokvoffload.tiers.outcomes import BlockResult, Reason, refusal


class ManualTier(MemoryTier):
    """A memory tier whose work on blocks begins and ends one step at a time; arguments as those of `MemoryTier`.

    Attributes:
        is_ready: Whether it stores what it is given.
        abandoned: Calls that were past their deadline and not over.
        has_stopped: The tier was closed.
    """

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]  # whatever a memory tier takes
        self._waiting: deque[tuple[TierCall, int]] = deque()
        self._begun: deque[tuple[TierCall, int]] = deque()
        self.abandoned: list[TierCall] = []
        self.has_stopped = False
        self._is_ready = True

    @property
    def is_ready(self) -> bool:
        """Whether it stores what it is given; otherwise puts are refused."""
        return self._is_ready

    @is_ready.setter
    def is_ready(self, value: bool) -> None:
        self._is_ready = value
        self._ring()

    @property
    def waiting_count(self) -> int:
        """Blocks on which work has not begun."""
        return len(self._waiting)

    @property
    def begun_count(self) -> int:
        """Blocks in work."""
        return len(self._begun)

    def begin(self, call: TierCall) -> None:
        """Put the blocks of a call in line; closing happens at once."""
        if call.operation is Operation.CLOSE:
            super().begin(call)
        else:
            self._waiting.extend((call, index) for index in call.unanswered())

    def put_block(self, key: OffloadKey, payload: memoryview, use: Use, index: int) -> BlockResult:
        """Copy a block into the dict, if it is time."""
        return super().put_block(key, payload, use, index) if self.is_ready else refusal(Reason.NOT_READY)

    def take_back(self, call: TierCall) -> Sequence[int]:
        """Take the blocks of a call out of the line."""
        taken = [index for waiting, index in self._waiting if waiting is call]
        self._waiting = deque(entry for entry in self._waiting if entry[0] is not call)
        return taken

    def abandon(self, call: TierCall) -> None:
        """Remember the call."""
        self.abandoned.append(call)

    def begin_work(self, count: int | None = None) -> None:
        """Let work begin on the first `count` blocks in line, by default on all."""
        for _ in range(len(self._waiting) if count is None else count):
            call, index = self._waiting.popleft()
            call.began[index] = self.clock.now()
            self._begun.append((call, index))

    def land(self, count: int | None = None, *, result: BlockResult | None = None) -> None:
        """End the work on the first `count` blocks that are or can be begun, by default on all; then poll.

        Args:
            count: How many.
            result: What becomes of them; by default, what a memory tier says.
        """
        left = self.waiting_count + self.begun_count if count is None else count
        self.begin_work(max(0, left - self.begun_count))
        for _ in range(left):
            call, index = self._begun.popleft()
            if result is None:
                self.work_on(call, [index])
            else:
                self._land(call, [index], [result])
        self.poll()

    def _stop(self) -> None:
        self.has_stopped = True
