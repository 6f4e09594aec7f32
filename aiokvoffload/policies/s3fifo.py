"""Three queues: new blocks in a small one, blocks used again in a main one, keys that left the small one as ghosts.

After J. Yang et al., "FIFO Queues are All You Need for Cache Eviction", SOSP 2023, with its sizes: the small queue
has a tenth of the slots, uses are counted up to 3, more than one use in the small queue leads to the main queue, and
there are as many ghosts as the main queue has slots. Added here: blocks of one request enter a queue deepest first,
and no call passes over more than some hundred blocks, however many were used.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import chain

import numpy as np

from aiokvoffload.keys import OffloadKey
from aiokvoffload.policies.base import Access
from aiokvoffload.policies.history import History
from aiokvoffload.policies.ranking import RankedPolicy, split_by_line
from aiokvoffload.policies.slots import slot_array

_SMALL, _MAIN, _DEMOTED = 0, 1, 2
_SMALL_SHARE = 0.1
_MAX_USES = 3
_USES_TO_STAY = 2
_PASSES_PER_VICTIM = 8
_MAX_PASSES = 512
"""How many used blocks may be passed over at once; each victim adds to what may be, up to this. Without any left, the
next in line leaves although it was used."""


class S3FIFOPolicy(RankedPolicy):
    """Evicts from the small queue while that is above its share, else from the main queue.

    Args:
        capacity: Number of slots.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity, line_count=3, first_line=_DEMOTED, are_ranked_by_tick=True)
        self._small_target = max(1, int(_SMALL_SHARE * capacity))
        self._ghosts = History(capacity - int(_SMALL_SHARE * capacity))
        self._key_of = np.empty(capacity, dtype=object)  # a list would be walked through by the garbage collector
        self._last_tick = array("q", bytes(8 * capacity))
        self._uses = bytearray(capacity)
        self._latest_tick = 1
        self._passes = _MAX_PASSES

    @property
    def history_bytes(self) -> int:
        """Memory taken by what is remembered of blocks that left."""
        return self._ghosts.used_bytes

    def insert(self, slots: Sequence[int], keys: Sequence[OffloadKey], access: Access) -> None:
        """Make `slots` resident and pinned, in the small queue or, where their keys are ghosts, in the main one."""
        self._latest_tick = max(self._latest_tick, access.tick)
        was_ghost = []
        for slot, key in zip(slots, keys, strict=True):
            self._key_of[slot] = key
            self._last_tick[slot] = access.tick
            self._uses[slot] = 0
            was_ghost.append(self._ghosts.pop(key) is not None)
        for line, part, its_access in split_by_line(slot_array(slots), np.array(was_ghost, dtype=np.bool_), access):
            self._insert(part, its_access, line)

    def touch(self, slots: Sequence[int], access: Access) -> None:
        """Count a use; nothing moves, but what was demoted is new again."""
        self._latest_tick = max(self._latest_tick, access.tick)
        demoted = np.flatnonzero(self._lines.indices_of(slot_array(slots)) == _DEMOTED).tolist()
        if demoted:
            self._rerank([slots[position] for position in demoted], access.select(demoted), _SMALL)
        for slot in slots:
            if self._last_tick[slot] < access.tick:
                self._last_tick[slot] = access.tick
                self._uses[slot] = min(_MAX_USES, self._uses[slot] + 1)

    def coldest(self, count: int) -> list[int]:
        """Return up to `count` slots, first to leave first."""
        return [slot for slot, _ in _Hand(self, min(count, self.evictable_count)).victims()]

    def _drop_coldest(self, count: int) -> list[int]:
        """Drop the `count` slots that leave first; those of the small queue become ghosts."""
        hand = _Hand(self, count)
        victims = hand.victims()
        self._passes = hand.passes
        gone = [slot for slot, _ in victims]
        self.remove(gone)
        for slot, line in victims:
            if line == _SMALL:
                self._ghosts.put(self._key_of[slot], 0)
        moved = np.fromiter(hand.passed_over, np.int64, len(hand.passed_over))
        np.frombuffer(self._uses, dtype=np.uint8)[moved] = np.fromiter(hand.passed_over.values(), np.uint8, len(moved))
        self._rerank(moved, Access(self._latest_tick, depths=[0] * len(moved)), _MAIN)  # behind all of that tick
        return gone

    def clear(self) -> None:
        """Drop all slots and ghosts."""
        super().clear()
        self._ghosts.clear()


class _Hand:
    """Goes along the queues of a policy and finds victims, but moves nothing.

    Attributes:
        passed_over: The blocks that go to the end of the main queue and the uses left to each, in that order.
        passes: How many more may be passed over.
    """

    def __init__(self, policy: S3FIFOPolicy, count: int) -> None:
        self.passed_over: dict[int, int] = {}
        self._count = count
        self.passes = policy._passes
        self._uses = policy._uses
        # Victims are asked for in batches: what replaces them goes to the small queue and counts already.
        others_count = policy._lines[_MAIN].resident_count + policy._lines[_DEMOTED].resident_count
        self._small_excess = policy.capacity - others_count - policy._small_target
        self._demoted, self._small = policy._lines.evictable_in(_DEMOTED), policy._lines.evictable_in(_SMALL)
        self._requeued: deque[int] = deque()
        self._main = chain(policy._lines.evictable_in(_MAIN), _drain(self._requeued))

    def victims(self) -> list[tuple[int, int]]:
        """Return the slots that leave, each with the queue that it leaves from."""
        victims: list[tuple[int, int]] = []
        small, main, requeued = self._small, self._main, self._requeued
        uses_of, passed_over, passes = self._uses, self.passed_over, self.passes
        small_excess = self._small_excess
        for _ in range(self._count):
            victim = next(self._demoted, None)
            if victim is not None:
                victims.append((victim, _DEMOTED))
                continue
            passes = min(_MAX_PASSES, passes + _PASSES_PER_VICTIM)
            while True:
                queue, line = (small, _SMALL) if small_excess >= 0 else (main, _MAIN)
                slot = next(queue, None)
                if slot is None:  # that one is dry
                    queue, line = (main, _MAIN) if line == _SMALL else (small, _SMALL)
                    slot = next(queue, None)
                if slot is None:
                    raise RuntimeError("the queues hold fewer blocks than were counted")
                if line == _SMALL:
                    if uses_of[slot] < _USES_TO_STAY or not passes:
                        break
                    small_excess -= 1
                    passed_over[slot] = 0
                else:
                    uses = passed_over.pop(slot, uses_of[slot])
                    if not (uses and passes):
                        small_excess += 1
                        break
                    passed_over[slot] = uses - 1
                passes -= 1
                requeued.append(slot)
            victims.append((slot, line))
        self.passes = passes
        return victims


def _drain(queue: deque[int]) -> Iterator[int]:
    """Yield what is in a queue, also what is added meanwhile."""
    while queue:
        yield queue.popleft()
