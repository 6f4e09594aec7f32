"""What an offer of blocks gets: slots, at once or after a wait in line, or a refusal."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from aiokvoffload.clock import Clock
from aiokvoffload.events import EventKind
from aiokvoffload.key_index import NOT_FOUND
from aiokvoffload.keys import OffloadKey
from aiokvoffload.managers.announcer import Announcer
from aiokvoffload.managers.blocks import BlockTable, Found
from aiokvoffload.managers.placement import SlotPlacement
from aiokvoffload.managers.tally import SettledTickets, Tally
from aiokvoffload.policies.base import Access, CachePolicy
from aiokvoffload.specs import LookupResult, PrepareStoreOutput, ReqContext, RequestBinding

Keys = Sequence[OffloadKey]


@dataclass(slots=True)
class Offer:
    """Blocks that someone wants to store.

    Attributes:
        ticket: The answer.
        keys: Each once.
        access: Of the request, to all of `keys`.
        binding: The request.
        ctx: The same, as it was given.
        is_filtered: Whether the policy may leave blocks out.
    """

    ticket: PrepareStoreOutput
    keys: list[OffloadKey]
    access: Access
    binding: RequestBinding
    ctx: ReqContext | None
    is_filtered: bool


class Offers:
    """Gives offers their slots; those that wait for room stand in one line.

    Args:
        blocks: Where slots are reserved.
        policy: May leave blocks out.
        placement: Keeps slots from being evicted.
        announcer: Is told of evictions.
        tally: Counts.
        settled: Takes the tickets whose wait has ended.
        clock: By which slots are kept.
    """

    def __init__(
        self,
        blocks: BlockTable,
        policy: CachePolicy,
        placement: SlotPlacement,
        announcer: Announcer,
        tally: Tally,
        settled: SettledTickets,
        clock: Clock,
    ) -> None:
        self._blocks = blocks
        self._policy = policy
        self._placement = placement
        self._announcer = announcer
        self._tally = tally
        self._settled = settled
        self._clock = clock
        self._line: deque[Offer] = deque()

    def __len__(self) -> int:
        return len(self._line)

    def make(self, offer: Offer, found: Found, *, is_leading_enough: bool, may_wait: bool = False) -> None:
        """Give a new offer its slots, put it in line, or refuse it.

        What others wait for already is not taken from before them.

        Args:
            offer: The offer.
            found: The slots of its keys.
            is_leading_enough: Whether, of what does not fit, the leading part is taken.
            may_wait: Whether it stands in line if it does not fit; one that never will is refused.
        """
        is_behind_others = bool(self._line) and NOT_FOUND in found
        if not is_behind_others and self._grant(offer, found, is_leading_enough=is_leading_enough):
            return
        # What is stored of the offer is not evicted for it, so all of it must fit at once.
        if may_wait and len(offer.keys) <= self._blocks.slot_count:
            offer.ticket.is_waiting = True
            self._line.append(offer)
        else:
            self._refuse(offer, found)

    def withdraw(self, ticket: PrepareStoreOutput) -> None:
        """Take an offer out of the line, refused."""
        offer = next(offer for offer in self._line if offer.ticket is ticket)
        self._line.remove(offer)
        self._refuse(offer, self._blocks.find(offer.keys))
        self._settled.add(ticket)

    def withdraw_all(self) -> None:
        """Refuse all offers in line."""
        while self._line:
            self.withdraw(self._line[0].ticket)

    def serve(self, epoch: int, generation: int) -> None:
        """Give room to the offers in line, first come first served; a large one is not overtaken."""
        while self._line:
            offer = self._line[0]
            found = self._blocks.find(offer.keys)
            if offer.binding.epoch != epoch:
                self._refuse(offer, found)
            elif not self._grant(offer, found, is_leading_enough=False):
                return
            self._line.popleft()
            offer.ticket.epoch, offer.ticket.generation = epoch, generation
            self._settled.add(offer.ticket)

    def _grant(self, offer: Offer, found: Found, *, is_leading_enough: bool) -> bool:
        """Give an offer its slots; False if there are not enough, and then nothing has changed."""
        ticket = offer.ticket
        if self._placement.kept_count:
            self._placement.expire(self._clock.now(), len(offer.keys))
        missing, protected = self._note_present(offer, found)
        admitted = self._policy.admit(missing, offer.access) if offer.is_filtered else missing
        room = self._blocks.room_beside(protected)
        if len(admitted) > room and not is_leading_enough:
            return False
        taken = admitted[:room]
        reserved = self._blocks.reserve(taken, ticket, _access_to(taken, offer), protected)
        if reserved is None:
            return False
        ticket.slots, ticket.evicted_keys = reserved
        self._announcer.note(EventKind.REMOVED, ticket.evicted_keys)
        self._placement.sessions.start(ticket.slots, offer.ctx)
        ticket.keys_to_store = taken
        ticket.refused_keys = admitted[room:]
        if len(admitted) < len(missing):
            kept = set(admitted)
            ticket.filtered_keys = [key for key in missing if key not in kept]
        self._tally.evicted += len(ticket.evicted_keys)
        self._tally.refused += len(ticket.refused_keys)
        return True

    def _refuse(self, offer: Offer, found: Found) -> None:
        offer.ticket.refused_keys, _ = self._note_present(offer, found)
        self._tally.refused += len(offer.ticket.refused_keys)

    def _note_present(self, offer: Offer, found: Found) -> tuple[Keys, list[int]]:
        """Note which keys of an offer are stored, or being stored; return the others, and the slots of stored ones."""
        ticket, keys = offer.ticket, offer.keys
        ticket.resident_keys = ticket.pending_keys = ()
        if not np.count_nonzero(found != NOT_FOUND):
            return keys, []
        results = self._blocks.results(found)
        ticket.resident_keys = _selected(keys, results, LookupResult.HIT)
        ticket.pending_keys = _selected(keys, results, LookupResult.PENDING)
        return _selected(keys, results, LookupResult.MISS), found[self._blocks.stored_among(found)].tolist()


def _selected(keys: Keys, results: Sequence[LookupResult], wanted: LookupResult) -> list[OffloadKey]:
    return [key for key, result in zip(keys, results, strict=True) if result is wanted]


def _access_to(keys: Keys, offer: Offer) -> Access:
    """Return the access to some keys of an offer."""
    if len(keys) == len(offer.keys) or offer.access.depths is None:
        return offer.access
    chosen = set(keys)
    return offer.access.select([position for position, key in enumerate(offer.keys) if key in chosen])
