"""A tier over a store of values: each block is one value, its envelope first."""

from __future__ import annotations

import errno
import logging
import threading
from abc import abstractmethod
from collections import Counter
from collections.abc import Sequence
from typing import ClassVar, Self

from aiokvoffload.clock import Clock
from aiokvoffload.keys import CacheIdentity, OffloadKey
from aiokvoffload.tiers.administration import TierAdministration
from aiokvoffload.tiers.arguments import MAX_KEY_BYTES
from aiokvoffload.tiers.base import DEFAULT_TIMEOUT_SECONDS, TierSettings, common_options
from aiokvoffload.tiers.breaker import BreakerLimits
from aiokvoffload.tiers.calls import Operation, TierCall, Use
from aiokvoffload.tiers.envelope import FIXED_BYTES, Envelope
from aiokvoffload.tiers.names import IDENTITY, block_id, block_name, describe_identity, identity_name
from aiokvoffload.tiers.outcomes import DELETED, HIT, PRESENT, STORED, BlockResult, Reason, miss, refusal
from aiokvoffload.tiers.threaded import DEFAULT_THREAD_COUNT, ThreadedTier
from aiokvoffload.tiers.threads import call_bounded
from aiokvoffload.tiers.url import OptionReader, TierUrl
from aiokvoffload.tiers.value_administration import ValueAdministration
from aiokvoffload.tiers.value_store import ValueStore

_logger = logging.getLogger(__name__)

_OPENING_SECONDS = 5.0
_DESCRIBED_FOR_SECONDS = 600.0
"""A store may forget; so what the identity is in words is written again from time to time."""
_REFUSALS = {errno.ENOSPC: Reason.FULL, errno.EROFS: Reason.READ_ONLY}


class ValueTier(ThreadedTier):
    """Blocks as values of a store.

    A store that does not answer when the tier is opened is no error: the breaker is open until it does.

    Args:
        store: Where the values are.
        identity: Whose blocks.
        url: Where it is, without credentials.
        clock: Where deadlines are read.
        timeout_seconds: Longest that a call may take.
        limits: When the breaker opens.
        thread_count: Blocks in work at a time.

    Raises:
        ConfigurationError: The store answers that it will not serve us.
    """

    default_thread_count: ClassVar[int] = DEFAULT_THREAD_COUNT

    def __init__(
        self,
        store: ValueStore,
        identity: CacheIdentity,
        *,
        url: str,
        clock: Clock | None = None,
        timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
        limits: BreakerLimits | None = None,
        thread_count: int = DEFAULT_THREAD_COUNT,
    ) -> None:
        super().__init__(
            url,
            clock=clock,
            timeout_seconds=timeout_seconds,
            limits=limits,
            thread_count=thread_count,
            keys_per_job=store.names_per_call,
        )
        self._store = store
        self._envelope = Envelope(identity.fingerprint, alignment_bytes=1)
        self._identity = identity_name(identity)
        self._description = describe_identity(identity)
        self._describes_at = self.clock.now()
        self._guard = threading.Lock()
        self._removed: Counter[str] = Counter()
        try:
            call_bounded(store.check, _OPENING_SECONDS)
        except (OSError, TimeoutError) as exc:
            _logger.warning("%s does not answer (%s); it is tried again later", url, exc)
            self.breaker.record_stall(f"it did not answer when it was opened: {exc}", is_probe=False)

    @classmethod
    @abstractmethod
    def open_store(
        cls, url: TierUrl, options: OptionReader, *, timeout_seconds: float, bytes_in_work: int
    ) -> ValueStore:
        """Return the store that a URL names; whether it answers is seen later.

        Args:
            url: The URL.
            options: What is left of its options.
            timeout_seconds: Longest that one request should take.
            bytes_in_work: Bytes of the blocks that can be in work at a time.

        Raises:
            ConfigurationError: URL or options cannot work.
        """

    @classmethod
    def from_url(cls, url: TierUrl, settings: TierSettings) -> Self:
        """Open the store and the tier."""
        options = url.read_options()
        timeout_seconds, limits = common_options(options)
        thread_count = options.integer("threads", cls.default_thread_count)
        bytes_in_work = thread_count * (max(settings.block_bytes) + FIXED_BYTES + MAX_KEY_BYTES)
        store = cls.open_store(url, options, timeout_seconds=timeout_seconds, bytes_in_work=bytes_in_work)
        options.finish()
        return cls(
            store,
            settings.identity,
            url=url.redacted,
            clock=settings.clock,
            timeout_seconds=timeout_seconds,
            limits=limits,
            thread_count=thread_count,
        )

    @classmethod
    def administer(cls, url: TierUrl) -> TierAdministration:
        """Return what looks at the blocks of all identities."""
        options = url.read_options()
        timeout_seconds, _ = common_options(options)
        options.integer("threads", cls.default_thread_count)
        store = cls.open_store(url, options, timeout_seconds=timeout_seconds, bytes_in_work=0)
        options.finish()
        return ValueAdministration(store)

    def do_blocks(self, call: TierCall, indices: Sequence[int]) -> list[BlockResult]:
        """Ask for many blocks at a time where no bytes are moved."""
        if call.buffers or call.operation is Operation.CLOSE:
            return super().do_blocks(call, indices)
        began = self.clock.now()
        for index in indices:
            call.began[index] = began
        places = [self._place(call.keys[index]) for index in indices]
        try:
            return self._do_places(call.operation, places)
        except Exception as exc:  # noqa: BLE001 - a call must be answered; `failed` logs what nobody expects
            return [self.failed(call, exc)] * len(indices)

    def find_block(self, key: OffloadKey) -> BlockResult:
        """Ask for the length of a value."""
        return self._do_places(Operation.CONTAINS, [self._place(key)])[0]

    def put_block(self, key: OffloadKey, payload: memoryview, use: Use, index: int) -> BlockResult:
        """Create a value, unless there is one of the right length."""
        place = self._place(key)
        found = self._store.sizes([place], is_use=True)[0]
        if found == self._envelope.stored_bytes(key, payload.nbytes):
            return PRESENT
        if found is Reason.NOT_A_FILE:
            return refusal(found)
        try:
            if isinstance(found, int):
                self._store.remove([place])
            is_created = self._store.create(place, [self._envelope.seal(key, payload), payload])
        except OSError as exc:
            reason = _REFUSALS.get(exc.errno or 0)
            if reason is None:
                raise
            return refusal(reason, str(exc))
        self._describe()
        return STORED if is_created else PRESENT

    def get_block(self, key: OffloadKey, buffer: memoryview) -> BlockResult:
        """Read a value and check it; one that is wrong is removed."""
        place = self._place(key)
        header = bytearray(self._envelope.header_bytes(key))
        fault = self._store.read_into(place, [memoryview(header), buffer])
        if fault is None:
            fault = self._envelope.find_fault(key, bytes(header), buffer, b"")
        if fault is None:
            return HIT
        if fault not in (Reason.ABSENT, Reason.NOT_A_FILE):
            self._remove_bad(place, fault)
        return miss(fault)

    def delete_block(self, key: OffloadKey) -> BlockResult:
        """Remove a value."""
        return self._do_places(Operation.DELETE, [self._place(key)])[0]

    def touch_block(self, key: OffloadKey, use: Use, index: int) -> BlockResult:
        """Let a value stay longer."""
        return self._do_places(Operation.TOUCH, [self._place(key)])[0]

    def close_storage(self) -> None:
        """Leave the store."""
        self._store.close()

    def _do_places(self, operation: Operation, places: Sequence[str]) -> list[BlockResult]:
        if operation is Operation.DELETE:
            return [DELETED if is_gone else miss(Reason.ABSENT) for is_gone in self._store.remove(places)]
        return [_found(size) for size in self._store.sizes(places, is_use=operation is Operation.TOUCH)]

    def _place(self, key: OffloadKey) -> str:
        return block_id(self._identity, block_name(key))

    def _remove_bad(self, place: str, fault: Reason) -> None:
        try:
            self._store.remove([place])
        except OSError as exc:
            _logger.warning("%s: a block with fault %r cannot be removed: %s", self.url, fault.value, exc)
            return
        with self._guard:
            self._removed[fault.value] += 1

    def _describe(self) -> None:
        """Write in words whose blocks these are, unless that was done a short while ago."""
        now = self.clock.now()
        with self._guard:
            if now < self._describes_at:
                return
            self._describes_at = now + _DESCRIBED_FOR_SECONDS
        try:
            self._store.create(f"{self._identity}/{IDENTITY}", [self._description])
        except OSError as exc:
            _logger.warning("%s: the identity cannot be described: %s", self.url, exc)

    def _removed_by_reason(self) -> Counter[str]:
        with self._guard:
            return self._removed.copy()


def _found(size: int | Reason) -> BlockResult:
    if isinstance(size, Reason):
        return miss(size)
    return HIT if size > FIXED_BYTES else miss(Reason.WRONG_LENGTH)
