"""What a load gets: the blocks it pins, at once or after the writes that it waits for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from aiokvoffload.key_index import NOT_FOUND
from aiokvoffload.keys import OffloadKey
from aiokvoffload.managers.blocks import BlockTable, Found
from aiokvoffload.managers.prefix import PrefixMatcher
from aiokvoffload.managers.tally import SettledTickets, Tally
from aiokvoffload.managers.waits import LoadRequest, WriteWaits
from aiokvoffload.policies.slots import SlotArray
from aiokvoffload.specs import PrepareLoadOutput, PrepareStoreOutput

Usable = Literal["known", "ready", "none"]
"""Which blocks a load can have: those stored or being written, only those stored, or none."""


class Loads:
    """Pins blocks for loads and settles those that wait.

    Args:
        blocks: Which blocks there are.
        prefix: Where prefixes can end.
        settled: Takes the tickets whose wait has ended.
        tally: Counts what they did not get.
    """

    def __init__(self, blocks: BlockTable, prefix: PrefixMatcher, settled: SettledTickets, tally: Tally) -> None:
        self._blocks = blocks
        self._prefix = prefix
        self._settled = settled
        self._tally = tally
        self._waits = WriteWaits()

    @property
    def waiting_tickets(self) -> list[PrepareLoadOutput]:
        """The loads that wait, in the order in which they came."""
        return self._waits.tickets

    def start(self, ticket: PrepareLoadOutput, request: LoadRequest, usable: Usable) -> None:
        """Pin what a load can have, and let it wait for what of that is being written."""
        self._pin(ticket, request, usable)
        self._waits.add(ticket, request, self._blocks.writes(ticket.slots))

    def start_all(self, ticket: PrepareLoadOutput, keys: Sequence[OffloadKey], found: Found) -> None:
        """Pin all blocks of one KV group, each once, or none if one has no slot; like `start`."""
        count = 0 if np.count_nonzero(found == NOT_FOUND) else len(keys)
        ticket.token_count = count * self._prefix.block_tokens[0]
        ticket.keys = keys[:count]
        ticket.group_sizes, ticket.first_indices = (count,), (0,)
        ticket.slots = found[:count].tolist()
        self._blocks.hold(found[:count], are_distinct=True)
        if writes := self._blocks.writes(ticket.slots):
            self._waits.add(ticket, LoadRequest([keys], "all"), writes)

    def watch(self, ticket: PrepareLoadOutput, keys: Sequence[OffloadKey]) -> None:
        """Let a ticket that pins nothing wait while any of `keys` is being written."""
        self._waits.add(ticket, LoadRequest([keys], "nothing"), self._blocks.writes(self._slots_of(keys)))

    def give_up(self, ticket: PrepareLoadOutput) -> None:
        """End the wait of a load that wants nothing any more; what it has pinned is released by the caller."""
        self._waits.remove(ticket)
        ticket.keys = ()
        self._settled.add(ticket)

    def end_write(self, write: PrepareStoreOutput, success: bool) -> None:
        """Settle the loads whose wait ends with a write.

        They hold the written blocks already: nobody can evict them in between.
        """
        for ticket in self._waits.end_write(write, success):
            self.settle(ticket)

    def settle(self, ticket: PrepareLoadOutput, *, is_missed: bool = False) -> None:
        """End the wait of a load: keep its pins if all blocks were written, else take what is ready, or nothing."""
        request = self._waits.remove(ticket)
        if is_missed or not self._blocks.all_ready(ticket.slots):
            held = ticket.slots
            self._pin(ticket, request, "none" if is_missed else "ready")
            self._blocks.release(held)
            self._tally.note_misses(len(held) - len(ticket.slots), "failed")
        self._settled.add(ticket)

    def settle_all(self, *, is_missed: bool = False) -> None:
        """End all waits."""
        for ticket in self._waits.tickets:
            self.settle(ticket, is_missed=is_missed)

    def _pin(self, ticket: PrepareLoadOutput, request: LoadRequest, usable: Usable) -> None:
        block_tokens = self._prefix.block_tokens
        if request.take == "all":
            keys = request.parts[0] if len(request.parts) == 1 else [key for part in request.parts for key in part]
            slots = self._slots_of(keys)
            is_complete = len(slots) == len(keys) and (
                usable == "known" or (usable == "ready" and self._blocks.all_ready(slots))
            )
            needed = [range(len(part) if is_complete else 0) for part in request.parts]
            ticket.token_count = min(len(run) * tokens for run, tokens in zip(needed, block_tokens, strict=True))
            ticket.keys, held = (keys, slots) if is_complete else ((), slots[:0])
        else:
            are_usable = {"known": self._blocks.are_known, "ready": self._blocks.are_ready, "none": _are_never_usable}
            end = self._prefix.boundary(request.parts, are_usable[usable], request.resident_tokens)
            needed = [self._prefix.needed(group, end, request.resident_tokens) for group in range(len(request.parts))]
            ticket.token_count = end
            ticket.keys = [
                key for part, run in zip(request.parts, needed, strict=True) for key in part[run.start : run.stop]
            ]
            held = self._slots_of(ticket.keys)
        ticket.group_sizes = tuple(map(len, needed))
        ticket.first_indices = tuple(run.start for run in needed)
        ticket.slots = held.tolist()
        self._blocks.hold(held, are_distinct=len(needed) == 1)

    def _slots_of(self, keys: Sequence[OffloadKey]) -> SlotArray:
        """Return the slots of those of `keys` that are stored or being written."""
        found = self._blocks.find(keys)
        slots: SlotArray = found[found != NOT_FOUND]
        return slots


def _are_never_usable(keys: Sequence[OffloadKey]) -> list[bool]:
    return [False] * len(keys)
