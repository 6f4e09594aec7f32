"""How long anything may take."""

from __future__ import annotations

from dataclasses import dataclass, fields

from aiokvoffload.errors import ConfigurationError
from aiokvoffload.transfers.worker import LANDING_SECONDS


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Bounds in seconds; everything that waits has one.

    Attributes:
        landing_seconds: From sending a copy until its waiters are told that it is stuck.
        pending_seconds: How long a load waits for blocks that are still being written, or are in tiers.
        drain_seconds: How long closing waits for copies under way, and for writes to tiers.
        join_seconds: How long opening waits for the ranks of an engine of several processes.
        prepare_seconds: How long it waits then until all have prepared their part of the memory.
    """

    landing_seconds: float = LANDING_SECONDS
    pending_seconds: float = 10.0
    drain_seconds: float = 5.0
    join_seconds: float = 30.0
    prepare_seconds: float = 600.0

    def __post_init__(self) -> None:
        for bound in fields(self):
            seconds = getattr(self, bound.name)
            if not seconds > 0:
                raise ConfigurationError(f"{bound.name} is {seconds}; it must be above 0")
