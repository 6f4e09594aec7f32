"""What a user writes into the engine's own configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, Self, get_args

from aiokvoffload.errors import ConfigurationError
from aiokvoffload.integrations.stepping.manager import HOLD_SECONDS
from aiokvoffload.managers.reuse import MAX_TRACKER_SIZE
from aiokvoffload.managers.tier_plan import TierPlan
from aiokvoffload.policies.base import POLICIES
from aiokvoffload.registry import nearest_name
from aiokvoffload.transfers.worker import LANDING_SECONDS

OnReset = Literal["new-weights", "same-weights"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSettings:
    """Checked settings of one engine.

    Attributes:
        cpu_bytes_to_use: CPU memory of all ranks together.
        eviction_policy: Name of the policy, or `module:Class`.
        store_threshold: Uses that make a block worth storing; 0 and 1 store every block.
        max_tracker_size: Blocks whose uses are remembered.
        tiers: Below CPU memory, the fastest first: URLs, each alone or as `{"url": ..., "plan": {...}}`.
        recompute_tokens_per_second: How fast the engine computes what is not loaded; a slower tier is not read.
        revision: Version of the weights, for tiers that outlive the engine.
        on_reset: What the engine's reset of its cache means: `"new-weights"`, all that tiers have is out of reach
            from then on; `"same-weights"`, only CPU memory is emptied.
        hold_seconds: How long what was found stays pinned for a request that waits.
        landing_seconds: How long a copy may take that the engine waits for.
        join_seconds: How long scheduler and workers wait for each other at the start, where they share memory.
        drain_seconds: How long the end waits for what is being written to tiers.

    Raises:
        ConfigurationError: A value cannot work.
    """

    cpu_bytes_to_use: int
    eviction_policy: str = "lru"
    store_threshold: int = 0
    max_tracker_size: int = MAX_TRACKER_SIZE
    tiers: tuple[tuple[str, TierPlan], ...] = ()
    recompute_tokens_per_second: float | None = None
    revision: str = ""
    on_reset: OnReset = "new-weights"
    hold_seconds: float = HOLD_SECONDS
    landing_seconds: float = LANDING_SECONDS
    join_seconds: float = 600.0
    drain_seconds: float = 10.0

    def __post_init__(self) -> None:
        POLICIES.resolve(self.eviction_policy)
        for name, minimum in (("cpu_bytes_to_use", 1), ("store_threshold", 0), ("max_tracker_size", 1)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
                raise ConfigurationError(f"{name} is {value!r}; it must be a whole number of at least {minimum}")
        for name in ("hold_seconds", "landing_seconds", "join_seconds", "drain_seconds"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
                raise ConfigurationError(f"{name} is {value!r}; it must be a number above 0")
        if self.on_reset not in get_args(OnReset):
            raise ConfigurationError(f"on_reset is {self.on_reset!r}; it must be {' or '.join(get_args(OnReset))}")

    @classmethod
    def read(cls, mapping: Mapping[str, Any], foreign_names: frozenset[str]) -> Self:
        """Read what concerns this library, and refuse what concerns nobody.

        Args:
            mapping: The engine's own options among it.
            foreign_names: What these are called.

        Raises:
            ConfigurationError: A name is unknown, a value cannot work, or `cpu_bytes_to_use` is missing.
        """
        known = {field.name for field in fields(cls)}
        for name in mapping:
            if name not in known and name not in foreign_names:
                near = nearest_name(str(name), sorted(known | foreign_names))
                raise ConfigurationError(f"unknown setting {name!r}{near or '.'} Known: {', '.join(sorted(known))}")
        values = {name: value for name, value in mapping.items() if name in known}
        if "cpu_bytes_to_use" not in values:
            raise ConfigurationError("cpu_bytes_to_use is missing; say how much CPU memory all ranks together may use")
        values["cpu_bytes_to_use"] = _whole(values["cpu_bytes_to_use"])
        values["tiers"] = tuple(_read_tier(given) for given in _list(values.get("tiers", ())))
        return cls(**values)


def _read_tier(given: object) -> tuple[str, TierPlan]:
    if isinstance(given, str):
        return given, TierPlan()
    if isinstance(given, Mapping) and isinstance(given.get("url"), str) and given.keys() <= {"url", "plan"}:
        plan = given.get("plan", {})
        known = {field.name for field in fields(TierPlan)}
        if isinstance(plan, Mapping) and plan.keys() <= known:
            return given["url"], TierPlan(**plan)
        raise ConfigurationError(f"the plan of a tier is {plan!r}; it may have {', '.join(sorted(known))}")
    raise ConfigurationError(f'a tier is {given!r}; give its URL, or {{"url": ..., "plan": {{...}}}}')


def _list(given: object) -> list[object]:
    if isinstance(given, list | tuple):
        return list(given)
    raise ConfigurationError(f"tiers is {given!r}; give a list, the fastest first")


def _whole(given: object) -> object:
    """Return the whole number that a value spells, as engines' command lines hand it over; others as they are."""
    if isinstance(given, float) and given.is_integer():
        return int(given)
    return int(given) if isinstance(given, str) and given.isdecimal() else given
