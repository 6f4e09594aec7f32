"""The file tier: blocks in a directory of a local or network file system, shared by processes, kept over restarts."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from aiokvoffload.clock import Clock
from aiokvoffload.errors import ConfigurationError
from aiokvoffload.keys import CacheIdentity, OffloadKey
from aiokvoffload.policies.base import POLICIES, CachePolicy
from aiokvoffload.tiers.administration import TierAdministration
from aiokvoffload.tiers.base import DEFAULT_TIMEOUT_SECONDS, TierSettings, common_options
from aiokvoffload.tiers.breaker import BreakerLimits
from aiokvoffload.tiers.calls import Use
from aiokvoffload.tiers.envelope import FILE_ALIGNMENT_BYTES
from aiokvoffload.tiers.fs.administration import DirectoryAdministration
from aiokvoffload.tiers.fs.direct import BlockIO, can_be_direct
from aiokvoffload.tiers.fs.eviction import EvictingLedger
from aiokvoffload.tiers.fs.files import Files
from aiokvoffload.tiers.fs.layout import Layout
from aiokvoffload.tiers.fs.ledger import ClosedLedger, Ledger, ReportingLedger
from aiokvoffload.tiers.fs.store import BlockStore
from aiokvoffload.tiers.fs.upkeep import Upkeep
from aiokvoffload.tiers.fs.writers import Writer
from aiokvoffload.tiers.outcomes import BlockResult
from aiokvoffload.tiers.slots import check_capacity
from aiokvoffload.tiers.statistics import Holdings
from aiokvoffload.tiers.threaded import ThreadedTier
from aiokvoffload.tiers.threads import call_bounded
from aiokvoffload.tiers.url import TierUrl

_logger = logging.getLogger(__name__)

_MIB = 1 << 20
_OPENING_SECONDS = 10.0
_OPENING_PATIENCE_SECONDS = 0.25
_CLOSING_SECONDS = 1.0
_SMALLEST_FILE_BYTES = 2 * FILE_ALIGNMENT_BYTES
_MANY_SLOTS = 1 << 16
_THREAD_COUNT = 8
"""More than a disk needs to be busy: meanwhile some wait for the interpreter's lock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileTierOptions:
    """What a file tier is told besides its directory.

    Attributes:
        capacity_bytes: What the block files of the directory may take, whoever wrote them.
        block_bytes: The sizes that blocks have.
        policy: Who leaves first: a name or a class.
        keep_free_bytes: What stays free on the file system.
        budget_bytes: What processes that do not evict may have written and the one that does may not have counted;
            by default an eighth of the capacity, at most 256 MiB, at least one block.
        io: "direct" goes past the page cache; "auto" does so where the file system can.
        thread_count: Blocks in work at a time.
        timeout_seconds: Longest that a call may take.
        limits: When the breaker opens.
        upkeep_seconds: How often reports are counted and the lock is tried for; None: only by hand.
    """

    capacity_bytes: int
    block_bytes: tuple[int, ...]
    policy: type[CachePolicy] | str = "lru"
    keep_free_bytes: int = 1 << 30
    budget_bytes: int | None = None
    io: str = "auto"
    thread_count: int = _THREAD_COUNT
    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS
    limits: BreakerLimits | None = None
    upkeep_seconds: float | None = 0.1

    @property
    def largest_file_bytes(self) -> int:
        """Bytes of the file of the largest block."""
        return file_bytes(max(self.block_bytes))

    @property
    def slot_count(self) -> int:
        """Blocks at most: twice those that fit, as other identities may have smaller ones."""
        fitting = self.capacity_bytes // file_bytes(min(self.block_bytes))
        return min(self.capacity_bytes // _SMALLEST_FILE_BYTES, max(_MANY_SLOTS, 2 * fitting))

    @property
    def uncounted_bytes(self) -> int:
        """The budget, also where it is not given."""
        return max(self.largest_file_bytes, self.budget_bytes or min(256 * _MIB, self.capacity_bytes // 8))


class FileTier(ThreadedTier):
    """Blocks in files.

    Args:
        directory: Made if it is missing; must be empty, or hold blocks of this library.
        identity: Whose blocks.
        options: Everything else.
        clock: Where deadlines are read.
        files: The file system.

    Raises:
        ConfigurationError: Directory or options cannot work.
    """

    def __init__(
        self,
        directory: str,
        identity: CacheIdentity,
        options: FileTierOptions,
        *,
        clock: Clock | None = None,
        files: Files | None = None,
    ) -> None:
        super().__init__(
            f"file://{directory}",
            clock=clock,
            timeout_seconds=options.timeout_seconds,
            limits=options.limits,
            thread_count=options.thread_count,
        )
        check_capacity(self.url, options.capacity_bytes, options.largest_file_bytes)
        self.directory = directory
        self._options = options
        self._policy = POLICIES.resolve(options.policy)
        self._files = files or Files()
        self._layout = Layout(directory)
        try:
            # A file system that hangs must not hang whoever opens a tier on it.
            call_bounded(lambda: self._open(identity), _OPENING_SECONDS)
        except (OSError, TimeoutError) as exc:
            raise ConfigurationError(f"{self.url} cannot be opened: {exc}") from exc
        if options.upkeep_seconds is not None:
            self._upkeep.start(options.upkeep_seconds)
            # A small directory is ready when the tier is; the index of a large one must not hold up the start.
            self.wait_until_known(_OPENING_PATIENCE_SECONDS)

    @classmethod
    def from_url(cls, url: TierUrl, settings: TierSettings) -> Self:
        """Open `file:///var/cache/kv?capacity=200GiB`; the options are in docs/tiers.md."""
        reader = url.read_options()
        capacity_bytes = reader.size("capacity", 0)
        usual = FileTierOptions(capacity_bytes=capacity_bytes, block_bytes=settings.block_bytes)
        timeout_seconds, limits = common_options(reader)
        options = FileTierOptions(
            capacity_bytes=capacity_bytes,
            block_bytes=settings.block_bytes,
            policy=reader.text("policy", "lru"),
            keep_free_bytes=reader.size("keep_free", usual.keep_free_bytes),
            budget_bytes=reader.size("budget", 0) or None,
            io=reader.text("io", usual.io, choices=("auto", "direct", "buffered")),
            thread_count=reader.integer("threads", usual.thread_count),
            timeout_seconds=timeout_seconds,
            limits=limits,
        )
        reader.finish()
        if not capacity_bytes:
            raise ConfigurationError(f"{url.redacted} needs to know how much it may take; add ?capacity=200GiB or less")
        return cls(directory_of(url), settings.identity, options, clock=settings.clock)

    @classmethod
    def administer(cls, url: TierUrl) -> TierAdministration:
        """Return what looks at a directory from outside."""
        return DirectoryAdministration(directory_of(url))

    @property
    def is_direct(self) -> bool:
        """Whether blocks go past the page cache."""
        return self._block_io.is_direct

    @property
    def is_evicting(self) -> bool:
        """Whether this process evicts for all who share the directory."""
        return self._upkeep.is_evicting

    @property
    def is_ready(self) -> bool:
        """Whether it is known what the directory holds; until then nothing is stored, and what is there can be read."""
        return self._store.ledger.is_open

    def wait_until_known(self, timeout_seconds: float) -> bool:
        """Block until it is known who evicts and, if it is this process, what there is."""
        return self._upkeep.has_looked.wait(timeout_seconds)

    def upkeep_step(self) -> None:
        """Do at once what is otherwise done after each interval: try to become the one who evicts, count, sweep."""
        self._upkeep.step()

    def find_block(self, key: OffloadKey) -> BlockResult:
        """Ask the file system."""
        return self._store.find(key)

    def put_block(self, key: OffloadKey, payload: memoryview, use: Use, index: int) -> BlockResult:
        """Write a file."""
        return self._store.put(key, payload, use, index)

    def get_block(self, key: OffloadKey, buffer: memoryview) -> BlockResult:
        """Read a file."""
        return self._store.get(key, buffer)

    def delete_block(self, key: OffloadKey) -> BlockResult:
        """Remove a file."""
        return self._store.delete(key)

    def count_uses(self, keys: Sequence[OffloadKey], use: Use, indices: Sequence[int]) -> None:
        """Note the uses in the books."""
        self._store.count_uses(keys, use, indices)

    def touch_block(self, key: OffloadKey, use: Use, index: int) -> BlockResult:
        """Set the times of a file."""
        return self._store.touch(key, use, index)

    def close_storage(self) -> None:
        """Let another process evict, and leave nothing behind but blocks."""
        if not self._upkeep.stop(_CLOSING_SECONDS):
            _logger.warning("%s: the upkeep does not end; its lock ends with this process", self.url)
        self._writer.close()

    def _open(self, identity: CacheIdentity) -> None:
        files, layout, options = self._files, self._layout, self._options
        layout.create(files)
        layout.describe(files, identity)
        self._writer = Writer(files, layout)
        try:
            self._block_io = BlockIO(files, is_direct=self._choose_direct())
        except BaseException:
            self._writer.close()
            raise
        self._store = BlockStore(files, layout, identity, self._writer, self._block_io, ClosedLedger(), self.clock)
        self._upkeep = Upkeep(
            files,
            layout,
            self._writer.name,
            ReportingLedger(files, layout, self._writer.name, options.uncounted_bytes),
            self._make_evicting_ledger,
            self._use_ledger,
        )

    def _choose_direct(self) -> bool:
        if self._options.io == "buffered":
            return False
        is_possible = can_be_direct(self._files, self._writer.new_path())
        if self._options.io == "direct" and not is_possible:
            raise ConfigurationError(f"{self.url}: its file system takes no direct I/O; use io=auto or io=buffered")
        return is_possible

    def _make_evicting_ledger(self) -> EvictingLedger:
        return EvictingLedger(
            self._files,
            self._layout,
            capacity_bytes=self._options.capacity_bytes,
            slot_count=self._options.slot_count,
            policy=self._policy,
            keep_free_bytes=self._options.keep_free_bytes,
        )

    def _use_ledger(self, ledger: Ledger) -> None:
        self._store.ledger = ledger
        self._ring()

    def _holdings(self) -> Holdings:
        return self._store.ledger.holdings()

    def _removed_by_reason(self) -> Counter[str]:
        return self._store.removed


def directory_of(url: TierUrl) -> str:
    """Return the directory that a URL names.

    Raises:
        ConfigurationError: It names none.
    """
    if url.host not in ("", "localhost") or not url.path.strip("/"):
        raise ConfigurationError(
            f"{url.redacted} names no directory of this machine; write file:///var/cache/kv, with three slashes"
        )
    return url.path.rstrip("/")


def file_bytes(block_bytes: int) -> int:
    """Return the bytes of the file of a block with a usual key."""
    return FILE_ALIGNMENT_BYTES - (-block_bytes // FILE_ALIGNMENT_BYTES) * FILE_ALIGNMENT_BYTES
