"""A tier that works on one block at a time."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Sequence

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

    @abstractmethod
    def close_storage(self) -> None:
        """Give back what the tier holds."""

    def work_on(self, call: TierCall, indices: Sequence[int]) -> None:
        """Do the work on some blocks of a call, and report them."""
        results = []
        for index in indices:
            call.began[index] = self.clock.now()
            try:
                results.append(self._do_block(call, index))
            except Exception as exc:  # noqa: BLE001 - a call must be answered; `failed` logs what nobody expects
                results.append(self.failed(call, exc))
        self._land(call, indices, results)

    def failed(self, call: TierCall, exc: Exception) -> BlockResult:
        """Return the result of a block whose work has raised."""
        if isinstance(exc, OSError):
            return call.failure(Reason.FAILED, str(exc))
        _logger.error("%s: %s failed", self.url, call.operation.value, exc_info=exc)
        return call.failure(Reason.FAILED, f"{type(exc).__name__}: {exc}")

    def _do_block(self, call: TierCall, index: int) -> BlockResult:
        if call.operation is Operation.CLOSE:
            self.close_storage()
            return DELETED
        key = call.keys[index]
        match call.operation:
            case Operation.CONTAINS:
                return self.find_block(key)
            case Operation.PUT:
                return self.put_block(key, call.buffers[index], call.use, index)
            case Operation.GET_INTO:
                return self.get_block(key, call.buffers[index])
            case Operation.DELETE:
                return self.delete_block(key)
            case Operation.TOUCH:
                return self.touch_block(key, call.use, index)
