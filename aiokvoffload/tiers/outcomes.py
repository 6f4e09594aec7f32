"""What became of one block in one call of a tier, and why."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class BlockOutcome(Enum):
    """What became of one block."""

    HIT = "hit"
    """It is there; after `get_into`, its checked bytes are in the buffer; after `touch`, its use is noted."""
    STORED = "stored"
    PRESENT = "present"
    """It was stored already, so nothing was written."""
    DELETED = "deleted"
    MISS = "miss"
    """It cannot be had; after `get_into`, the contents of its buffer are undefined."""
    REFUSED = "refused"
    """It was not stored."""

    # Each block is counted under it; the hash of an Enum is slow, and of its name.
    __hash__ = object.__hash__


class Reason(Enum):
    """Why a block is a miss or was refused."""

    ABSENT = "absent"
    WRONG_MAGIC = "wrong-magic"
    WRONG_VERSION = "wrong-version"
    WRONG_IDENTITY = "wrong-identity"
    WRONG_KEY = "wrong-key"
    WRONG_LENGTH = "wrong-length"
    WRONG_PADDING = "wrong-padding"
    WRONG_CHECKSUM = "wrong-checksum"
    NOT_A_FILE = "not-a-file"
    """Something else stands in the block's place: a link, a directory, a pipe."""
    NOT_ADMITTED = "not-admitted"
    """The eviction policy does not think it worth the room, yet."""
    FULL = "full"
    READ_ONLY = "read-only"
    BUSY = "busy"
    """Someone is writing it, or the tier has as much under way as it may have."""
    NOT_READY = "not-ready"
    """The tier is still finding out what it holds."""
    FAILED = "failed"
    """The storage answered with an error."""
    DEADLINE = "deadline"
    CANCELLED = "cancelled"
    BREAKER_OPEN = "breaker-open"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class BlockResult:
    """What became of one block.

    Attributes:
        outcome: What.
        reason: Why it is a miss or was refused; None where it went well.
        detail: In words, where the storage had something to say.
    """

    outcome: BlockOutcome
    reason: Reason | None = None
    detail: str = ""

    @property
    def is_good(self) -> bool:
        """It is there, it is stored, or it is gone as asked."""
        return self.reason is None


HIT = BlockResult(BlockOutcome.HIT)
STORED = BlockResult(BlockOutcome.STORED)
PRESENT = BlockResult(BlockOutcome.PRESENT)
DELETED = BlockResult(BlockOutcome.DELETED)


def miss(reason: Reason, detail: str = "") -> BlockResult:
    """Return a miss."""
    return BlockResult(BlockOutcome.MISS, reason, detail)


def refusal(reason: Reason, detail: str = "") -> BlockResult:
    """Return a refusal to store."""
    return BlockResult(BlockOutcome.REFUSED, reason, detail)
