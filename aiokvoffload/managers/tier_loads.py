"""A load whose blocks are in tiers: looked for, read into CPU memory, then pinned there."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from operator import not_

from aiokvoffload.keys import OffloadKey
from aiokvoffload.managers.cpu import CPUOffloadingManager
from aiokvoffload.managers.promotions import Promotions
from aiokvoffload.managers.tier_lookups import TierLookups, TierSearch
from aiokvoffload.managers.tier_plan import PlannedTier
from aiokvoffload.managers.waits import Take
from aiokvoffload.specs import PrepareLoadOutput, ReqContext

Keys = Sequence[OffloadKey]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadArguments:
    """What a load has asked for; see `OffloadingManager.prepare_load_nowait`.

    `is_current` says whether its request is of the epoch in which it asked.
    """

    keys: Keys
    ctx: ReqContext | None
    is_current: bool
    take: Take
    group_sizes: Sequence[int] | None
    resident_tokens: int

    def pin(self, backing: CPUOffloadingManager) -> PrepareLoadOutput:
        """Pin what CPU memory has of it."""
        return backing.prepare_load_nowait(
            self.keys,
            self.ctx,
            take=self.take,
            group_sizes=self.group_sizes,
            resident_tokens=self.resident_tokens,
        )


class TierLoad:
    """One load on its way: it holds what CPU memory has of it, and no GPU block.

    Args:
        ticket: The caller's ticket, which is settled in the end.
        arguments: What was asked for.
        held: The pins in CPU memory so far.
        backing: The manager of CPU memory.
        promotions: Reads blocks.
        on_over: Called in the step that ends the wait.
    """

    def __init__(
        self,
        ticket: PrepareLoadOutput,
        arguments: LoadArguments,
        held: PrepareLoadOutput,
        backing: CPUOffloadingManager,
        promotions: Promotions,
        on_over: Callable[[TierLoad], None],
    ) -> None:
        self.ticket = ticket
        self.held = held
        self.arguments = arguments
        self._backing = backing
        self._promotions = promotions
        self._on_over = on_over
        self._is_over = False
        self._found: Mapping[OffloadKey, PlannedTier] = {}

    def look_for(self, missing: Keys, lookups: TierLookups, tiers: Sequence[PlannedTier]) -> None:
        """Find out which tiers have blocks, then read what the prefix needs."""
        search = TierSearch(lookups, missing, tiers, self._promote)
        self._found = search.sources
        search.advance()

    def read_from(self, found: Mapping[OffloadKey, PlannedTier]) -> None:
        """Read what the prefix needs from where it was found before."""
        self._found = found
        self._promote()

    def wait_for_held(self) -> None:
        """Wait for no more than the blocks that are held."""
        self.held.on_settled(self._settle)

    def settle_now(self) -> None:
        """End the wait with what is there."""
        if self.held.is_waiting:
            self._backing.settle_nowait(self.held)
        self._settle()

    def give_up(self) -> None:
        """Want nothing any more, not even what is held; what is being read is read for others."""
        self._is_over = True

    def miss(self) -> None:
        """End the wait with nothing."""
        self._backing.complete_load_nowait(self.held)
        self.held = PrepareLoadOutput(self._backing, self.held.epoch, self.held.generation)
        self.held.group_sizes = (0,) * len(self.ticket.group_sizes)
        self.held.first_indices = (0,) * len(self.ticket.group_sizes)
        self._settle()

    def _promote(self) -> None:
        """Read what is needed when its turn has come; a load that needs nothing waits for nobody's turn."""
        if self._is_over:
            return
        if self._sources()[0]:
            self._promotions.enqueue(self._start_promotion)
        else:
            self._hold_what_is_there()

    def _start_promotion(self) -> bool:
        """Read what is in tiers and needed; False while the budgets do not allow it."""
        if self._is_over:
            return True
        sources, depth_of = self._sources()
        if not self._promotions.has_room(sources):
            return False
        self._promotions.start(sources, depth_of, self.arguments.ctx)
        self._hold_what_is_there()
        return True

    def _hold_what_is_there(self) -> None:
        """Pin what CPU memory has by now, or will have, and wait for no more than that."""
        before, self.held = self.held, self.arguments.pin(self._backing)
        self._backing.complete_load_nowait(before)
        self.wait_for_held()

    def _sources(self) -> tuple[dict[OffloadKey, PlannedTier], dict[OffloadKey, int]]:
        """Return which tier has each block that is needed and missing, and the token position of each one's end."""
        needed, depth_of = self._needed()
        missing = compress(needed, map(not_, self._backing.are_known(needed)))
        return {key: self._found[key] for key in missing}, depth_of

    def _needed(self) -> tuple[list[OffloadKey], dict[OffloadKey, int]]:
        """Return which blocks the load can use, by what is known now, and the token position of each one's end."""
        prefix, arguments = self._backing.prefix, self.arguments
        parts = prefix.split(arguments.keys, arguments.group_sizes)

        def are_usable(keys: Sequence[OffloadKey]) -> list[bool]:
            return self._backing.are_known(keys, self._found)

        depth_of = {
            key: (index + 1) * tokens
            for part, tokens in zip(parts, prefix.block_tokens, strict=True)
            for index, key in enumerate(part)
        }
        if arguments.take == "all":
            needed = [key for part in parts for key in part]
            return (needed if all(are_usable(needed)) else []), depth_of
        end = prefix.boundary(parts, are_usable, arguments.resident_tokens)
        runs = [prefix.needed(group, end, arguments.resident_tokens) for group in range(len(parts))]
        return [key for part, run in zip(parts, runs, strict=True) for key in part[run.start : run.stop]], depth_of

    def _settle(self) -> None:
        if self._is_over:
            return
        self._is_over = True
        adopt(self.ticket, self.held)
        self._on_over(self)


def adopt(ticket: PrepareLoadOutput, held: PrepareLoadOutput) -> None:
    """Show in a ticket what another one has pinned."""
    ticket.keys = held.keys
    ticket.slots = held.slots
    ticket.group_sizes = held.group_sizes
    ticket.first_indices = held.first_indices
    ticket.token_count = held.token_count
