"""The values that managers, transfers and tiers hand to each other."""

from __future__ import annotations

import logging
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, Flag
from typing import Any, Literal, Protocol, get_args

import numpy as np
from numpy.typing import NDArray

from aiokvoffload.errors import ConfigurationError, InvalidRequestError, StateError
from aiokvoffload.keys import OffloadKey

_logger = logging.getLogger(__name__)


class LookupResult(Enum):
    """Whether a block, or a prefix, can be loaded."""

    MISS = "miss"
    HIT = "hit"
    PENDING = "pending"
    """It is being written now, or read from a tier."""


Placement = Literal["inclusive", "exclusive"]
"""Whether CPU memory also holds what the GPU holds, or only what the GPU has given up."""


def check_placement(placement: object, block_size_factor: int) -> None:
    """Refuse a placement that is none, or that the blocks are too large for.

    Raises:
        ConfigurationError: It is.
    """
    if placement not in get_args(Placement):
        raise ConfigurationError(f"placement is {placement!r}, it must be one of {', '.join(get_args(Placement))}")
    if placement == "exclusive" and block_size_factor != 1:
        raise ConfigurationError(
            f"exclusive placement moves single GPU blocks, but block_size_factor is {block_size_factor}; "
            "make it 1, or use inclusive placement"
        )


class StoreOutcome(Enum):
    """What became of one offered block."""

    ACCEPTED = "accepted"
    """It has a slot; its GPU blocks are in use by the copy."""
    RESIDENT = "resident"
    """It is stored already, or being stored by someone else."""
    FILTERED = "filtered"
    """It has not been used often enough to be worth a slot."""
    REFUSED = "refused"
    """There is no room, the offer is of an older epoch, or the copy failed."""


class Completion(Enum):
    """What completing or aborting a ticket did."""

    APPLIED = "applied"
    REPEATED = "repeated"
    """The ticket had been completed or aborted before: nothing changed."""
    STALE = "stale"
    """A reset or a new epoch came between: the slots were given back and nothing else changed."""
    FOREIGN = "foreign"
    """The ticket is another manager's: nothing changed."""


class TierFilter(Flag):
    """Which tiers a request may use."""

    NONE = 0
    CPU = 1
    BELOW = 2
    ALL = CPU | BELOW


@dataclass(slots=True)
class RequestBinding:
    """What one manager remembers of one request.

    Attributes:
        epoch: The manager's epoch at the first call of the request.
        tick: When its only access was counted; 0 before.
    """

    epoch: int
    tick: int = 0


@dataclass(frozen=True, slots=True)
class ReqContext:
    """Who is asking: one request, from its first lookup to its last store.

    All calls of a request pass the same context, or contexts with the same `req_id`. They count as one access,
    and they are bound to the epoch of the first of them: a request that is served again after `bump_epoch` needs a
    new `req_id`.

    Attributes:
        req_id: Unique per request, not per conversation; empty for a request that makes one call only.
        session_id: The conversation.
        turn: Turn of the conversation, from 0.
        priority: Higher stays longer where the policy cares.
        tier_filter: Which tiers may be asked.
        kv_transfer_params: The engine's own, passed through.
    """

    req_id: str
    session_id: str | None = None
    turn: int = 0
    priority: int = 0
    tier_filter: TierFilter = TierFilter.ALL
    kv_transfer_params: Mapping[str, Any] | None = field(default=None, hash=False)
    bindings: dict[object, RequestBinding] = field(default_factory=dict, init=False, repr=False, compare=False)
    """By manager; kept here so that it lives exactly as long as the request."""


class LoadStoreSpec(ABC):
    """One end of a transfer."""

    __slots__ = ()

    @staticmethod
    @abstractmethod
    def medium() -> str:
        """Return the medium this end lies in, such as "GPU"."""


class BlockIDsLoadStoreSpec(LoadStoreSpec):
    """An end that is a list of blocks.

    Attributes:
        block_ids: int64 array of block numbers.
    """

    __slots__ = ("block_ids",)

    def __init__(self, block_ids: Iterable[int] | NDArray[np.integer]) -> None:
        try:
            ids = block_ids if isinstance(block_ids, np.ndarray) else np.array(list(block_ids))
            if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
                raise TypeError(f"they are {ids.dtype} of shape {ids.shape}")
            self.block_ids: NDArray[np.int64] = ids.astype(np.int64)
        except (TypeError, ValueError, OverflowError) as exc:
            raise InvalidRequestError(f"block ids must be a flat sequence of integers: {exc}") from exc
        if self.block_ids.size and int(self.block_ids.min()) < 0:
            raise InvalidRequestError(f"block id {int(self.block_ids.min())} is negative")

    def __len__(self) -> int:
        return len(self.block_ids)

    def __eq__(self, other: object) -> bool:
        if type(self) is not type(other) or not isinstance(other, BlockIDsLoadStoreSpec):
            return NotImplemented
        return np.array_equal(self.block_ids, other.block_ids)

    __hash__ = None  # type: ignore[assignment]  # holds a mutable array

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.block_ids.tolist()})"


class GPULoadStoreSpec(BlockIDsLoadStoreSpec):
    """GPU blocks, group after group.

    Attributes:
        block_ids: GPU block numbers, int64.
        group_sizes: GPU blocks of each group; they add up to the number of block ids.
        block_indices: For each group, the logical index of its first block within the request. Modulo
            `block_size_factor` it says where inside the first offloaded block the transfer begins.

    Raises:
        InvalidRequestError: Sizes, indices and block ids do not fit each other.
    """

    __slots__ = ("block_indices", "group_sizes")

    def __init__(
        self,
        block_ids: Iterable[int] | NDArray[np.integer],
        group_sizes: Sequence[int],
        block_indices: Sequence[int],
    ) -> None:
        super().__init__(block_ids)
        try:
            self.group_sizes = tuple(map(operator.index, group_sizes))
            self.block_indices = tuple(map(operator.index, block_indices))
        except TypeError as exc:
            raise InvalidRequestError(f"group_sizes and block_indices are sequences of whole numbers: {exc}") from exc
        if min(self.group_sizes, default=0) < 0 or sum(self.group_sizes) != len(self.block_ids):
            raise InvalidRequestError(
                f"group sizes {self.group_sizes} add up to {sum(self.group_sizes)}, "
                f"but there are {len(self.block_ids)} block ids; give one size per group, in order"
            )
        if len(self.block_indices) != len(self.group_sizes) or min(self.block_indices, default=0) < 0:
            raise InvalidRequestError(
                f"block_indices {self.block_indices} must name one index of at least 0 "
                f"for each of the {len(self.group_sizes)} groups"
            )

    @staticmethod
    def medium() -> str:
        """Return "GPU"."""
        return "GPU"

    def __eq__(self, other: object) -> bool:
        same_blocks = super().__eq__(other)
        if same_blocks is not True or not isinstance(other, GPULoadStoreSpec):
            return same_blocks
        return (self.group_sizes, self.block_indices) == (other.group_sizes, other.block_indices)

    __hash__ = None  # holds a mutable array

    def __repr__(self) -> str:
        return f"GPULoadStoreSpec({self.block_ids.tolist()}, {self.group_sizes}, {self.block_indices})"


class CPULoadStoreSpec(BlockIDsLoadStoreSpec):
    """Slots of CPU memory, one per offloaded block."""

    __slots__ = ()

    @staticmethod
    def medium() -> str:
        """Return "CPU"."""
        return "CPU"


@dataclass(frozen=True, slots=True)
class TransferResult:
    """How a transfer ended.

    Attributes:
        job_id: Number of the transfer.
        success: All bytes arrived, and they still count: no reset of the epoch in between.
        transfer_type: Media, from and to.
        byte_count: Bytes moved.
        seconds: Time the device took, where it moved anything.
        token_count: Tokens that are there after a load, resident ones included; 0 for a store and for a failed load.
        error: Why it failed.
    """

    job_id: int
    success: bool
    transfer_type: tuple[str, str]
    byte_count: int = 0
    seconds: float = 0.0
    token_count: int = 0
    error: str | None = None


class SlotHolder(Protocol):
    """Keeps slots from being reused while someone may touch their bytes."""

    def hold(self, slots: Sequence[int]) -> None:
        """Count one more user of each slot."""

    def release(self, slots: Sequence[int]) -> None:
        """Count one user less; a slot without users may be evicted, or is free if it has lost its key."""


class Lease:
    """The fact that someone may still touch the bytes of some slots; given back once, whatever happened."""

    __slots__ = ("_holder", "is_released", "slots")

    def __init__(self, holder: SlotHolder, slots: Sequence[int]) -> None:
        self.slots = tuple(slots)
        holder.hold(self.slots)
        self._holder = holder
        self.is_released = False

    def release(self) -> None:
        """Give the slots back; nobody on this lease touches their bytes any more. Idempotent."""
        if not self.is_released:
            self.is_released = True
            self._holder.release(self.slots)


class Ticket:
    """The right to decide, once, what becomes of some slots.

    A ticket may have to wait before it is good for something. It is then *settled*, once, in the very step that
    ends the wait, so that nothing can come between.

    Attributes:
        slots: The slots, one per key, in the order of the keys.
        epoch: Epoch of the manager when the ticket was made.
        generation: Resets of the manager before the ticket was made.
        is_open: Neither completed nor aborted yet.
        is_waiting: Not settled yet.
        waits_since: When its wait began, on the manager's clock, as long as it waits.
    """

    __slots__ = ("_on_settled", "epoch", "generation", "holder", "is_open", "is_waiting", "slots", "waits_since")

    def __init__(self, holder: SlotHolder, epoch: int, generation: int) -> None:
        self.holder = holder
        self.slots: list[int] = []
        self.epoch = epoch
        self.generation = generation
        self.is_open = True
        self.is_waiting = False
        self.waits_since: float | None = None
        self._on_settled: list[Callable[[], None]] = []

    def lease(self) -> Lease:
        """Return a lease on the ticket's slots, to be held while their bytes are touched.

        Raises:
            StateError: The ticket is closed, so its slots may be someone else's.
        """
        if not self.is_open:
            raise StateError("this ticket is completed or aborted; take its lease before that")
        return Lease(self.holder, tuple(self.slots))

    def on_settled(self, callback: Callable[[], None]) -> None:
        """Call `callback` in the step that settles the ticket, or now if it does not wait."""
        if self.is_waiting:
            self._on_settled.append(callback)
        else:
            callback()

    def settle(self) -> None:
        """End the wait; for managers, once the state is consistent."""
        self.is_waiting = False
        callbacks, self._on_settled = self._on_settled, []
        for callback in callbacks:
            try:
                callback()
            except Exception:
                # Others wait for the same step: one that fails must not keep them asleep.
                _logger.exception("a callback of a settled ticket raised")


class PrepareStoreOutput(Ticket):
    """The answer to an offer of blocks, and the right to commit or abort those that were accepted.

    While `is_waiting`, the offer stands in line for room and nothing is reserved.

    Attributes:
        keys_to_store: Accepted, in order; `slots` says where each goes.
        evicted_keys: Had to leave for them.
        resident_keys: Stored already.
        pending_keys: Being written under another ticket.
        filtered_keys: Not worth a slot.
        refused_keys: No room, or of an older epoch.
    """

    __slots__ = ("evicted_keys", "filtered_keys", "keys_to_store", "pending_keys", "refused_keys", "resident_keys")

    def __init__(self, holder: SlotHolder, epoch: int, generation: int) -> None:
        super().__init__(holder, epoch, generation)
        self.keys_to_store: Sequence[OffloadKey] = ()
        self.evicted_keys: Sequence[OffloadKey] = ()
        self.resident_keys: Sequence[OffloadKey] = ()
        self.pending_keys: Sequence[OffloadKey] = ()
        self.filtered_keys: Sequence[OffloadKey] = ()
        self.refused_keys: Sequence[OffloadKey] = ()

    @property
    def is_refused(self) -> bool:
        """Blocks that should have been stored found no room."""
        return bool(self.refused_keys)

    @property
    def store_spec(self) -> CPULoadStoreSpec:
        """Where the accepted blocks go, in the order of `keys_to_store`."""
        return CPULoadStoreSpec(self.slots)

    def outcomes(self, keys: Iterable[OffloadKey]) -> tuple[StoreOutcome, ...]:
        """Return what became of each of `keys`, which were in the offer."""
        outcome_of = dict.fromkeys(self.keys_to_store, StoreOutcome.ACCEPTED)
        outcome_of.update(dict.fromkeys(self.filtered_keys, StoreOutcome.FILTERED))
        outcome_of.update(dict.fromkeys(self.refused_keys, StoreOutcome.REFUSED))
        return tuple(outcome_of.get(key, StoreOutcome.RESIDENT) for key in keys)


class PrepareLoadOutput(Ticket):
    """Blocks pinned for one reader until it completes or aborts.

    While `is_waiting`, some of the blocks are still being written. They are pinned already, so none can leave
    between its commit and the reader's waking up; what fails to be written is a miss, and the ticket shrinks. With
    tiers below, it also waits while these are asked and read, and may grow.

    Attributes:
        keys: Pinned blocks, in order; `slots` says where each lies. Empty on a miss.
        group_sizes: How many of `keys` belong to each KV group.
        first_indices: For each group, the index of its first key among the keys asked for.
        token_count: Tokens of the prefix that is covered, what the GPU holds already included.
    """

    __slots__ = ("first_indices", "group_sizes", "keys", "token_count")

    def __init__(self, holder: SlotHolder, epoch: int, generation: int) -> None:
        super().__init__(holder, epoch, generation)
        self.keys: Sequence[OffloadKey] = ()
        self.group_sizes: tuple[int, ...] = ()
        self.first_indices: tuple[int, ...] = ()
        self.token_count = 0

    @property
    def result(self) -> LookupResult:
        """HIT, PENDING while waiting, or MISS."""
        if self.is_waiting:
            return LookupResult.PENDING
        return LookupResult.HIT if self.keys else LookupResult.MISS

    @property
    def load_spec(self) -> CPULoadStoreSpec:
        """Where the blocks lie, in the order of `keys`."""
        return CPULoadStoreSpec(self.slots)
