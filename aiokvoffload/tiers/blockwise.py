"""A tier that works on one block at a time."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Callable, Sequence

from aiokvoffload.keys import OffloadKey
from aiokvoffload.tiers.base import Tier
from aiokvoffload.tiers.calls import Operation, TierCall, Use
from aiokvoffload.tiers.outcomes import DELETED, BlockResult, Reason

_logger = logging.getLogger(__name__)


class BlockwiseTier(Tier):
    """Hands out the blocks of a call one by one; whoever derives from it says in which thread."""

    # These may block; OSError becomes a failure.

    @abstractmethod
    def find_block(self, key: OffloadKey) -> BlockResult:
        """Return whether a block is there."""

    @abstractmethod
    def put_block(self, key: OffloadKey, payload: memoryview, use: Use, index: int) -> BlockResult:
        """Store a block, which is the one at `index` of its call."""

    @abstractmethod
    def get_block(self, key: OffloadKey, buffer: memoryview) -> BlockResult:
        """Read a block into a buffer, and check it."""

    @abstractmethod
    def delete_block(self, key: OffloadKey) -> BlockResult:
        """Remove a block."""

    @abstractmethod
    def touch_block(self, key: OffloadKey, use: Use, index: int) -> BlockResult:
        """Note a use of a block."""

    def count_uses(self, keys: Sequence[OffloadKey], use: Use, indices: Sequence[int]) -> None:
        """Note the uses of some blocks of a call in the books, all at once; each block is touched afterwards."""

    @abstractmethod
    def close_storage(self) -> None:
        """Give back what the tier holds."""

    def work_on(self, call: TierCall, indices: Sequence[int]) -> None:
        """Do the work on some blocks of a call, and report them."""
        self._land(call, indices, self.do_blocks(call, indices))

    def do_blocks(self, call: TierCall, indices: Sequence[int]) -> list[BlockResult]:
        """Do the work on some blocks of a call, and return what became of them."""
        do_block, began, now = self._work_of(call), call.began, self.clock.now
        if call.operation is Operation.TOUCH:
            try:
                self.count_uses(call.keys, call.use, indices)
            except Exception as exc:  # noqa: BLE001 - as below
                return [self.failed(call, exc)] * len(indices)
        results = []
        for index in indices:
            began[index] = now()
            try:
                results.append(do_block(index))
            except Exception as exc:  # noqa: BLE001 - a call must be answered; `failed` logs what nobody expects
                results.append(self.failed(call, exc))
        return results

    def failed(self, call: TierCall, exc: Exception) -> BlockResult:
        """Return the result of a block whose work has raised."""
        if isinstance(exc, OSError):
            return call.failure(Reason.FAILED, str(exc))
        _logger.error("%s: %s failed", self.url, call.operation.value, exc_info=exc)
        return call.failure(Reason.FAILED, f"{type(exc).__name__}: {exc}")

    def _work_of(self, call: TierCall) -> Callable[[int], BlockResult]:
        """Return what does the work on one block of a call."""
        keys, buffers = call.keys, call.buffers
        match call.operation:
            case Operation.GET_INTO:
                return lambda index: self.get_block(keys[index], buffers[index])
            case Operation.PUT:
                return lambda index: self.put_block(keys[index], buffers[index], call.use, index)
            case Operation.CONTAINS:
                return lambda index: self.find_block(keys[index])
            case Operation.DELETE:
                return lambda index: self.delete_block(keys[index])
            case Operation.TOUCH:
                return lambda index: self.touch_block(keys[index], call.use, index)
            case Operation.CLOSE:
                return self._close

    def _close(self, _index: int) -> BlockResult:
        self.close_storage()
        return DELETED
