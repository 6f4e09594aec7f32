"""Asks tiers which blocks they have, each block of each tier once at a time, whoever wants to know."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from aiokvoffload.keys import OffloadKey
from aiokvoffload.managers.tier_plan import PlannedTier
from aiokvoffload.tiers.base import Tier
from aiokvoffload.tiers.calls import TierCall

Keys = Sequence[OffloadKey]


class TierLookups:
    """Finds out which tier has which blocks.

    Args:
        now: The time, as the tiers see it.
        tier_key: What a block is called in the tiers.
    """

    def __init__(self, now: Callable[[], float], tier_key: Callable[[OffloadKey], OffloadKey]) -> None:
        self._now = now
        self._tier_key = tier_key
        self._open: dict[tuple[Tier, OffloadKey], _Question] = {}

    def ask(self, planned: PlannedTier, keys: Keys) -> list[_Question]:
        """Return the questions, old and new, whose answers say which of `keys` a tier has."""
        questions: dict[_Question, None] = {}
        new: list[OffloadKey] = []
        for key in keys:
            # By its name in the tier: an answer from before a weight update says nothing about what came after it.
            question = self._open.get((planned.tier, self._tier_key(key)))
            if question is None:
                new.append(key)
            else:
                questions[question] = None
        if new:
            tier_keys = [self._tier_key(key) for key in new]
            question = _Question(new)
            self._open.update(((planned.tier, tier_key), question) for tier_key in tier_keys)
            questions[question] = None
            call = planned.tier.start_contains(tier_keys, deadline=self._now() + planned.plan.lookup_seconds)
            call.on_answered(lambda: self._end(planned.tier, question, call))
        return list(questions)

    def _end(self, tier: Tier, question: _Question, call: TierCall) -> None:
        for tier_key in call.keys:
            del self._open[tier, tier_key]
        question.end({key for key, result in zip(question.keys, call.results, strict=True) if result.is_good})


class _Question:
    """One call to one tier."""

    def __init__(self, keys: Keys) -> None:
        self.keys = keys
        self.found: set[OffloadKey] = set()
        self.is_answered = False
        self._listeners: list[Callable[[], None]] = []

    def on_answered(self, listener: Callable[[], None]) -> None:
        self._listeners.append(listener)

    def end(self, found: set[OffloadKey]) -> None:
        self.found = found
        self.is_answered = True
        for listener in self._listeners:
            listener()


class TierSearch:
    """Who has which of some blocks; tiers are asked in order, each for what those before do not have.

    Args:
        lookups: Asks them.
        keys: The blocks.
        tiers: The tiers, in order.
        on_found: Called by `advance` once it is known where each block is.

    Attributes:
        sources: The tier of each block that was found.
        is_over: Every block was found, or is in no tier.
    """

    def __init__(
        self, lookups: TierLookups, keys: Keys, tiers: Sequence[PlannedTier], on_found: Callable[[], None]
    ) -> None:
        self.sources: dict[OffloadKey, PlannedTier] = {}
        self.is_over = False
        self._lookups = lookups
        self._keys = list(keys)
        self._tiers = list(tiers)
        self._on_found = on_found
        self._questions: list[_Question] = []

    def advance(self) -> None:
        """Begin, or go on with what is answered."""
        while not self.is_over and all(question.is_answered for question in self._questions):
            missing = [key for key in self._keys if key not in self.sources]
            if self._questions:
                planned = self._tiers.pop(0)
                found = set().union(*(question.found for question in self._questions))
                self.sources.update((key, planned) for key in missing if key in found)
                missing = [key for key in missing if key not in found]
            if not missing or not self._tiers:
                self.is_over = True
                self._on_found()
                return
            if self._tiers[0].tier.is_closed:
                self._questions = []
                self._tiers.pop(0)
                continue
            self._questions = self._lookups.ask(self._tiers[0], missing)
            for question in self._questions:
                if not question.is_answered:
                    question.on_answered(self.advance)
