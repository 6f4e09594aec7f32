"""One batch in the hands of a tier."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial

from aiokvoffload.keys import OffloadKey
from aiokvoffload.tiers.outcomes import BlockResult, Reason, miss, refusal

_logger = logging.getLogger(__name__)

Release = Callable[[int], None]


class Operation(Enum):
    """What a call asks for."""

    CONTAINS = "contains"
    PUT = "put"
    GET_INTO = "get_into"
    DELETE = "delete"
    TOUCH = "touch"
    CLOSE = "close"
    """The tier's own last call, without blocks."""

    # Each block is counted under it; the hash of an Enum is slow, and of its name.
    __hash__ = object.__hash__


@dataclass(frozen=True, slots=True)
class Use:
    """Which request uses the blocks of a call.

    Attributes:
        request: Calls with the same one count as one use.
        depths: Token position of each block's end; of one request the deepest leave first.
    """

    request: Hashable
    depths: Sequence[int] | None = None

    def depth(self, index: int) -> int:
        """Return the depth of one block, 0 where unknown."""
        return 0 if self.depths is None else self.depths[index]

    def depths_of(self, indices: Sequence[int]) -> list[int] | None:
        """Return the depths of some blocks, None where unknown."""
        return None if self.depths is None else [self.depths[index] for index in indices]


class TierCall:
    """A batch that was posted to a tier; its state changes only inside `Tier.poll()` and `cancel()`.

    A block is *answered* once: by the tier, at the deadline, or by `cancel()`. It is *over* when no thread and no
    client of the tier touches its buffer any more, which may be later. The tier owns the buffer until then,
    whatever was answered and whoever has stopped waiting.

    Attributes:
        operation: What was asked for.
        keys: The blocks.
        buffers: One per block, for `put` and `get_into`.
        use: Which request uses them.
        deadline: When unanswered blocks become misses, on the tier's clock.
        started: When the call was posted.
        began: When the work on each block began; None before. Written by whoever does the work.
        is_probe: It finds out for the breaker whether the tier is back.
        is_overdue: Its deadline has passed before it was over.
        unanswered_count: Blocks without a result.
    """

    __slots__ = (
        "_is_open",
        "_on_answered",
        "_on_over",
        "_on_release",
        "_open_count",
        "_results",
        "_withdraw",
        "began",
        "buffers",
        "deadline",
        "is_overdue",
        "is_probe",
        "keys",
        "operation",
        "started",
        "unanswered_count",
        "use",
    )

    def __init__(
        self,
        operation: Operation,
        keys: Sequence[OffloadKey],
        buffers: Sequence[memoryview],
        use: Use,
        *,
        started: float,
        deadline: float,
        withdraw: Callable[[TierCall, Reason], None],
        on_release: Release | None = None,
    ) -> None:
        self.operation = operation
        self.keys = tuple(keys)
        self.buffers = tuple(buffers)
        self.use = use
        self.started = started
        self.deadline = deadline
        self.is_probe = False
        self.is_overdue = False
        block_count = self.block_count
        self.began: list[float | None] = [None] * block_count
        self._withdraw = withdraw
        self._on_release = on_release
        self._results: list[BlockResult | None] = [None] * block_count
        self.unanswered_count = block_count
        self._is_open = [True] * block_count
        self._open_count = block_count
        self._on_answered: list[Callable[[], None]] = []
        self._on_over: list[Callable[[], None]] = []

    @property
    def block_count(self) -> int:
        """Blocks of the call; closing counts as one."""
        return 1 if self.operation is Operation.CLOSE else len(self.keys)

    @property
    def is_answered(self) -> bool:
        """Every block has its result."""
        return not self.unanswered_count

    @property
    def is_over(self) -> bool:
        """No buffer of the call is touched any more."""
        return not self._open_count

    @property
    def results(self) -> tuple[BlockResult, ...]:
        """What became of each block, in the order of the keys; complete once the call is answered."""
        return tuple(result for result in self._results if result is not None)

    def on_answered(self, callback: Callable[[], None]) -> None:
        """Call `callback` once the call is answered, or now if it is."""
        if self.is_answered:
            callback()
        else:
            self._on_answered.append(callback)

    def on_over(self, callback: Callable[[], None]) -> None:
        """Call `callback` once no buffer is touched any more, or now if none is."""
        if self.is_over:
            callback()
        else:
            self._on_over.append(callback)

    def cancel(self) -> None:
        """Answer what is unanswered, and take back what the tier has not begun; what it has begun ends by itself."""
        if not self.is_over:
            self._withdraw(self, Reason.CANCELLED)

    # For the tier

    def has_result(self, index: int) -> bool:
        """Return whether a block is answered."""
        return self._results[index] is not None

    def answer(self, index: int, result: BlockResult) -> None:
        """Set the result of a block that has none."""
        self._results[index] = result
        self.unanswered_count -= 1
        if self.is_answered:
            _call_all(self._on_answered)

    def release(self, index: int) -> None:
        """Say that a block's buffer is not touched any more; once per block, after its answer."""
        self._is_open[index] = False
        self._open_count -= 1
        if self._on_release is not None:
            _call_all([partial(self._on_release, index)])
        if not self._open_count:
            self.buffers = ()
            _call_all(self._on_over)

    def unanswered(self) -> list[int]:
        """Return the positions of blocks without a result."""
        return [index for index, result in enumerate(self._results) if result is None]

    def open_since(self) -> float | None:
        """Return when the work began that has lasted longest, of blocks that are not over."""
        times = zip(self.began, self._is_open, strict=True)
        return min((began for began, is_open in times if is_open and began is not None), default=None)

    def failure(self, reason: Reason, detail: str = "") -> BlockResult:
        """Return the result of a block that could not be served: a refusal to store, otherwise a miss."""
        return refusal(reason, detail) if self.operation is Operation.PUT else miss(reason, detail)


def _call_all(callbacks: list[Callable[[], None]]) -> None:
    for callback in callbacks:
        try:
            callback()
        except Exception:
            # A lease that is not given back because another's owner failed would never come back.
            _logger.exception("a callback of a tier call raised")
    callbacks.clear()
