"""What is remembered of a request of the engine, and of what it has under way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from aiokvoffload.keys import OffloadKey
from aiokvoffload.managers.tier_plan import PlannedTier
from aiokvoffload.specs import PrepareLoadOutput, PrepareStoreOutput, ReqContext


class Answer(Enum):
    """What the engine's scheduler is told about one block."""

    MISS = "miss"
    HIT = "hit"
    PENDING = "pending"
    """It will be there, or its writing fails: it is being written, or a tier has it and it is read."""
    UNKNOWN = "unknown"
    """Tiers are being asked."""


class Below(Enum):
    """What a request knows of one block in the tiers below CPU memory."""

    ASKED = "asked"
    ABSENT = "absent"
    PRESENT = "present"
    READING = "reading"
    LOST = "lost"
    """A tier had it, but it could not be read or found no room: a miss for this request, once and for all."""


@dataclass(frozen=True, slots=True)
class Hold:
    """What pins the blocks that a request has found until it loads them.

    Attributes:
        ticket: Pins them.
        deadline: When it is given up.
    """

    ticket: PrepareLoadOutput
    deadline: float


@dataclass(slots=True, eq=False)
class EngineRequest:
    """One request, from its first lookup to the end of its last copy.

    Attributes:
        ctx: What the manager knows it by; of no other request, whatever the engine calls it.
        may_load: False once a load of it has failed, or the weights have changed: then all is a miss.
        may_store: False once the weights have changed, for its blocks may be older than that.
        has_access: Its access has been counted.
        load: The load under way.
        below: What it knows of the tiers.
        found: Which tier has which block.
        to_ask: Blocks that tiers are asked for at the end of this step.
        wanted: Blocks that it has found in this step, in the order of the lookups.
        has_to_read: Some of them are in tiers only.
        is_looking: It has asked in this step.
        holds: What pins blocks for it.
    """

    ctx: ReqContext
    may_load: bool = True
    may_store: bool = True
    has_access: bool = False
    load: OpenTicket | None = None
    below: dict[OffloadKey, Below] = field(default_factory=dict)
    found: dict[OffloadKey, PlannedTier] = field(default_factory=dict)
    to_ask: list[OffloadKey] = field(default_factory=list)
    wanted: dict[OffloadKey, None] = field(default_factory=dict)
    has_to_read: bool = False
    is_looking: bool = False
    holds: list[Hold] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class OpenTicket:
    """Slots that workers copy to or from.

    Attributes:
        number: What workers call it.
        ticket: Pins the slots.
        request: Whose it is.
        has_failed: A worker has said so.
    """

    number: int
    ticket: PrepareLoadOutput | PrepareStoreOutput
    request: EngineRequest
    has_failed: bool = False


@dataclass(frozen=True, slots=True)
class StoreDecision:
    """What became of an offer.

    Attributes:
        number: Of the ticket; 0 if nothing is to be stored.
        keys: To be stored, in the order of the offer.
        slots: Where each goes.
        evicted_keys: Had to leave for them.
    """

    number: int = 0
    keys: Sequence[OffloadKey] = ()
    slots: Sequence[int] = ()
    evicted_keys: Sequence[OffloadKey] = ()


@dataclass(frozen=True, slots=True)
class LoadDecision:
    """Where the blocks of a load are.

    Attributes:
        number: Of the ticket.
        slots: One per block; None if the blocks have gone, so that the load has failed before it began.
    """

    number: int
    slots: Sequence[int] | None
