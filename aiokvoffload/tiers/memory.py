"""Blocks in a dict: the reference for the other tiers, and a tier for tests and demonstrations.

It keeps what the others keep, envelopes included, and checks as they do; calls are answered before they return.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Self

from aiokvoffload.clock import Clock
from aiokvoffload.errors import ConfigurationError
from aiokvoffload.keys import CacheIdentity, OffloadKey
from aiokvoffload.policies.base import POLICIES, Access, CachePolicy
from aiokvoffload.tiers.base import DEFAULT_TIMEOUT_SECONDS, TierSettings, common_options
from aiokvoffload.tiers.blockwise import BlockwiseTier
from aiokvoffload.tiers.breaker import BreakerLimits
from aiokvoffload.tiers.calls import TierCall, Use
from aiokvoffload.tiers.envelope import FIXED_BYTES, Envelope
from aiokvoffload.tiers.outcomes import DELETED, HIT, PRESENT, STORED, BlockResult, Reason, miss, refusal
from aiokvoffload.tiers.requests import RequestTicks
from aiokvoffload.tiers.slots import BlockSlots, check_capacity
from aiokvoffload.tiers.statistics import Holdings
from aiokvoffload.tiers.url import TierUrl

DEFAULT_CAPACITY_BYTES = 1 << 30
ENVELOPE_BYTES = FIXED_BYTES + 36
"""With a key of the library's own hashes."""


class MemoryTier(BlockwiseTier):
    """Blocks in this process's memory.

    Args:
        identity: Whose blocks.
        block_bytes: Bytes of the smallest block that is expected; more blocks than fit of these are never held.
        capacity_bytes: What the blocks may take, envelopes included.
        policy: Class of the eviction policy.
        url: For statistics and messages.
        clock: Where deadlines are read.
        timeout_seconds: Longest that a call may take.
        limits: When the breaker opens.
    """

    def __init__(
        self,
        identity: CacheIdentity,
        *,
        block_bytes: int,
        capacity_bytes: int = DEFAULT_CAPACITY_BYTES,
        policy: type[CachePolicy] | str = "lru",
        url: str = "memory://",
        clock: Clock | None = None,
        timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
        limits: BreakerLimits | None = None,
    ) -> None:
        super().__init__(url, clock=clock, timeout_seconds=timeout_seconds, limits=limits)
        self._envelope = Envelope(identity.fingerprint, alignment_bytes=1)
        check_capacity(url, capacity_bytes, block_bytes)
        self._slots = BlockSlots(capacity_bytes, capacity_bytes // block_bytes, POLICIES.resolve(policy))
        self._ticks = RequestTicks(lambda last_tick: last_tick + 1)
        self._removed: Counter[str] = Counter()
        self.blocks: dict[OffloadKey, bytes] = {}
        """What is stored, headers included; a test may corrupt it."""

    @classmethod
    def from_url(cls, url: TierUrl, settings: TierSettings) -> Self:
        """Open `memory://?capacity=8GiB&policy=lru`."""
        options = url.read_options()
        capacity_bytes = options.size("capacity", DEFAULT_CAPACITY_BYTES)
        policy = options.text("policy", "lru")
        timeout_seconds, limits = common_options(options)
        options.finish()
        if url.host or url.path:
            raise ConfigurationError(f"{url.redacted}: a memory tier has no name; write memory://?capacity=8GiB")
        check_capacity(url.redacted, capacity_bytes, max(settings.block_bytes) + ENVELOPE_BYTES)
        return cls(
            settings.identity,
            block_bytes=min(settings.block_bytes),
            capacity_bytes=capacity_bytes,
            policy=policy,
            url=url.redacted,
            clock=settings.clock,
            timeout_seconds=timeout_seconds,
            limits=limits,
        )

    def begin(self, call: TierCall) -> None:
        """Do all of it at once."""
        self.work_on(call, call.unanswered())

    def take_back(self, call: TierCall) -> Sequence[int]:
        """Nothing is ever waiting."""
        return ()

    def find_block(self, key: OffloadKey) -> BlockResult:
        """Look into the dict."""
        return HIT if key in self.blocks else miss(Reason.ABSENT)

    def put_block(self, key: OffloadKey, payload: memoryview, use: Use, index: int) -> BlockResult:
        """Copy a block into the dict."""
        access = self._access(use, [index])
        byte_count = self._envelope.stored_bytes(key, payload.nbytes)
        if len(self.blocks.get(key, b"")) == byte_count:
            self._slots.touch([key], access)
            return PRESENT
        if byte_count > self._slots.capacity_bytes:
            return refusal(Reason.FULL, f"{byte_count} bytes are more than the capacity")
        if not self._slots.is_worth_room(key, access):
            return refusal(Reason.NOT_ADMITTED)
        self._remove(key)
        while not self._slots.has_room(byte_count):
            victim = self._slots.pick_victim()
            if victim is None:
                return refusal(Reason.FULL)
            self._remove(victim)
        self.blocks[key] = self._envelope.seal(key, payload) + payload
        self._slots.add(key, byte_count, access, is_ready=True)
        return STORED

    def get_block(self, key: OffloadKey, buffer: memoryview) -> BlockResult:
        """Copy a block out of the dict."""
        stored = self.blocks.get(key)
        if stored is None:
            return miss(Reason.ABSENT)
        header_bytes = self._envelope.header_bytes(key)
        fault: Reason | None = Reason.WRONG_LENGTH
        if len(stored) == header_bytes + buffer.nbytes:
            buffer[:] = memoryview(stored)[header_bytes:]
            fault = self._envelope.find_fault(key, stored[:header_bytes], buffer, b"")
        if fault is None:
            return HIT
        self._removed[fault.value] += 1
        self._remove(key)
        return miss(fault)

    def delete_block(self, key: OffloadKey) -> BlockResult:
        """Take a block out of the dict."""
        if key not in self.blocks:
            return miss(Reason.ABSENT)
        self._remove(key)
        return DELETED

    def touch_block(self, key: OffloadKey, use: Use, index: int) -> BlockResult:
        """Look into the dict: `count_uses` has told the policy."""
        return self.find_block(key)

    def count_uses(self, keys: Sequence[OffloadKey], use: Use, indices: Sequence[int]) -> None:
        """Tell the policy."""
        self._slots.touch([keys[index] for index in indices], self._access(use, indices))

    def close_storage(self) -> None:
        """Forget all blocks."""
        self.blocks.clear()

    def _remove(self, key: OffloadKey) -> None:
        self.blocks.pop(key, None)
        self._slots.remove(key)

    def _access(self, use: Use, indices: Sequence[int]) -> Access:
        return Access(self._ticks.tick(use.request), self.clock.now(), depths=use.depths_of(indices))

    def _holdings(self) -> Holdings:
        slots = self._slots
        return Holdings(slots.block_count, slots.used_bytes, slots.capacity_bytes, slots.evicted_blocks)

    def _removed_by_reason(self) -> Counter[str]:
        return self._removed
