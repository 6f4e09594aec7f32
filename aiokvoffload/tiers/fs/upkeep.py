"""What a directory needs from time to time: someone who evicts, an index, and a broom."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator

from aiokvoffload.tiers.fs.eviction import EvictingLedger, FoundBlock
from aiokvoffload.tiers.fs.files import Files
from aiokvoffload.tiers.fs.layout import Layout, Report
from aiokvoffload.tiers.fs.ledger import ClosedLedger, Ledger
from aiokvoffload.tiers.fs.locks import FileLock
from aiokvoffload.tiers.fs.writers import is_alive, sweep_dead_writers

_logger = logging.getLogger(__name__)

_STEPS_BETWEEN_SWEEPS = 100


class Upkeep:
    """Becomes the process that evicts when it can, and then counts what the others report.

    Args:
        files: The file system.
        layout: The directory.
        writer: Name of this writer.
        reporting: The books that writers use while another process evicts.
        make_ledger: Returns new books of the process that evicts.
        use_ledger: Called with the books that writers use from now on.
    """

    def __init__(
        self,
        files: Files,
        layout: Layout,
        writer: str,
        reporting: Ledger,
        make_ledger: Callable[[], EvictingLedger],
        use_ledger: Callable[[Ledger], None],
    ) -> None:
        self._files = files
        self._layout = layout
        self._writer = writer
        self._reporting = reporting
        self._make_ledger = make_ledger
        self._use_ledger = use_ledger
        self._lock = FileLock(files, layout.lock)
        self._lock.forget_in_children()
        self._ledger: EvictingLedger | None = None
        self._step_guard = threading.Lock()
        self._is_stopping = threading.Event()
        self._steps_to_sweep = 0
        self._last_trouble = ""
        self.has_looked = threading.Event()
        """Set once it is known who evicts, and, if it is this process, what there is."""

    @property
    def is_evicting(self) -> bool:
        """Whether this process evicts."""
        return self._ledger is not None

    def start(self, interval_seconds: float) -> None:
        """Take a step now and after each interval, in a thread of its own."""
        threading.Thread(target=self._run, args=(interval_seconds,), name="aiokvoffload-upkeep", daemon=True).start()

    def step(self) -> None:
        """Do once what there is to do; blocks."""
        with self._step_guard:
            if self._ledger is None:
                self._try_to_evict()
            if self._ledger is not None:
                if not self._steps_to_sweep:
                    sweep_dead_writers(self._files, self._layout, own=self._writer)
                    self._steps_to_sweep = _STEPS_BETWEEN_SWEEPS
                self._steps_to_sweep -= 1
                self._count_reports(self._ledger)
        self.has_looked.set()

    def stop(self, timeout_seconds: float) -> bool:
        """Take no more steps, and let another process evict; return False if a step does not end in time."""
        self._is_stopping.set()
        if not self._step_guard.acquire(timeout=timeout_seconds):
            return False
        try:
            self._use_ledger(ClosedLedger())
            self._ledger = None
            self._lock.release()
        finally:
            self._step_guard.release()
        return True

    def _run(self, interval_seconds: float) -> None:
        while not self._is_stopping.is_set():
            try:
                self.step()
                self._last_trouble = ""
            except OSError as exc:
                if str(exc) != self._last_trouble:
                    self._last_trouble = str(exc)
                    _logger.warning("the upkeep of %s has failed and goes on: %s", self._layout.root, exc)
            self._is_stopping.wait(interval_seconds)

    def _try_to_evict(self) -> None:
        if self._is_stopping.is_set():
            return
        if not self._lock.take():
            self._use_ledger(self._reporting)
            return
        # From here on nobody else evicts, so nothing may be written uncounted until everything is counted.
        self._use_ledger(ClosedLedger())
        try:
            ledger = self._make_ledger()
            ledger.load(self._found_blocks())
        except BaseException:
            self._lock.release()
            raise
        self._ledger = ledger
        self._steps_to_sweep = 0
        self._use_ledger(ledger)

    def _found_blocks(self) -> Iterator[FoundBlock]:
        for identity in self._layout.identities(self._files):
            for block, found in self._layout.stored_blocks(self._files, identity):
                yield FoundBlock(found.st_mtime_ns, found.st_size, block)

    def _count_reports(self, ledger: EvictingLedger) -> None:
        for name in self._files.list(self._layout.reports):
            report = Report.parse(name)
            if report is None:
                continue
            if not report.is_finished and self._is_alive(report.writer):
                continue  # it is being written
            try:
                found = self._files.stat(self._layout.path(report.block))
                if not ledger.discover(FoundBlock(found.st_mtime_ns, found.st_size, report.block)):
                    self._files.unlink(self._layout.path(report.block))
            except FileNotFoundError:
                pass  # it was never finished, or somebody has removed it since
            self._files.unlink(f"{self._layout.reports}/{name}")

    def _is_alive(self, writer: str) -> bool:
        return writer == self._writer or is_alive(self._files, self._layout, writer)
