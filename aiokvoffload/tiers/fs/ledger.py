"""Who may write how much: the process that evicts keeps the books, the others report to it."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace

from aiokvoffload.policies.base import Access
from aiokvoffload.tiers.fs.files import Files
from aiokvoffload.tiers.fs.layout import Layout, Report
from aiokvoffload.tiers.names import BlockId
from aiokvoffload.tiers.outcomes import Reason
from aiokvoffload.tiers.statistics import Holdings


class Ledger(ABC):
    """Lets blocks be written within the capacity of the directory; its methods may be called from any thread."""

    is_open = True
    """Blocks may be written."""

    @abstractmethod
    def reserve(self, block: BlockId, byte_count: int, access: Access, used_ns: int) -> Reason | None:
        """Reserve room for a block that is about to be written; return why not."""

    @abstractmethod
    def commit(self, block: BlockId, byte_count: int) -> None:
        """Note that a reserved block stands in its place."""

    @abstractmethod
    def cancel(self, block: BlockId, byte_count: int) -> None:
        """Give back what was reserved for a block that was not written."""

    def touch(self, blocks: Sequence[BlockId], access: Access, used_ns: Sequence[int]) -> None:
        """Note a use of blocks."""

    def forget(self, block: BlockId) -> None:
        """Note that a block's file is gone."""

    def make_space(self, byte_count: int) -> bool:
        """Remove blocks of at least so many bytes because the file system is full; return whether that was done."""
        return False

    def holdings(self) -> Holdings:
        """Return what the directory holds, where it is known."""
        return Holdings()


class ClosedLedger(Ledger):
    """Lets nothing be written: what the directory holds is still being found out."""

    is_open = False

    def reserve(self, block: BlockId, byte_count: int, access: Access, used_ns: int) -> Reason | None:
        """Refuse."""
        return Reason.NOT_READY

    def commit(self, block: BlockId, byte_count: int) -> None:
        """Nothing was reserved."""

    def cancel(self, block: BlockId, byte_count: int) -> None:
        """Nothing was reserved."""


class ReportingLedger(Ledger):
    """For a process that does not evict: it reports what it writes, and waits while too much is not counted yet.

    A report is made before its block is written and removed by the process that evicts once it has counted the
    block. Reports of all processes together are never about more than the budget: each makes its own before it adds
    them all up, so of two at the same moment at least one sees the other.

    Args:
        files: The file system.
        layout: The directory.
        writer: This process.
        budget_bytes: What may be uncounted.
    """

    def __init__(self, files: Files, layout: Layout, writer: str, budget_bytes: int) -> None:
        self._files = files
        self._layout = layout
        self._writer = writer
        self._budget_bytes = budget_bytes

    def reserve(self, block: BlockId, byte_count: int, access: Access, used_ns: int) -> Reason | None:
        """Report the block, unless too much is reported already."""
        own = Report(block, byte_count, self._writer)
        try:
            self._files.close(self._files.open(self._layout.report(own), os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        except FileExistsError:
            return Reason.BUSY
        reports = (Report.parse(name) for name in self._files.list(self._layout.reports))
        if sum(report.byte_count for report in reports if report is not None) > self._budget_bytes:
            self.cancel(block, byte_count)
            return Reason.BUSY
        return None

    def commit(self, block: BlockId, byte_count: int) -> None:
        """Leave the report, as a finished one, to the process that evicts."""
        report = Report(block, byte_count, self._writer)
        self._files.rename(self._layout.report(report), self._layout.report(replace(report, is_finished=True)))

    def cancel(self, block: BlockId, byte_count: int) -> None:
        """Take the report back."""
        self._files.unlink(self._layout.report(Report(block, byte_count, self._writer)))
