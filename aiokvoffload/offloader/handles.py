"""A transfer, as its caller sees it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING

from aiokvoffload.devices.base import Direction, Event
from aiokvoffload.errors import BlocksInFlightError
from aiokvoffload.offloader.waiting import Watchers
from aiokvoffload.specs import CPULoadStoreSpec, GPULoadStoreSpec, Lease, StoreOutcome, TransferResult
from aiokvoffload.transfers.base import Transfer, TransferState

if TYPE_CHECKING:
    from aiokvoffload.offloader.machine import OffloaderMachine

_logger = logging.getLogger(__name__)


class TransferHandle:
    """One store or load; awaitable by any number of tasks, and cancelling one of them changes nothing.

    Its GPU blocks are in use until it is idle. A handle may be dropped: the transfer goes on.

    Attributes:
        gpu_blocks: GPU blocks that the copies touch.
        outcomes: For a store, what became of each offered block; accepted ones whose copy fails become refused.
    """

    def __init__(
        self,
        machine: OffloaderMachine,
        gpu_blocks: Sequence[int] = (),
        outcomes: tuple[StoreOutcome, ...] = (),
        token_count: int = 0,
    ) -> None:
        self.gpu_blocks = frozenset(gpu_blocks)
        self.outcomes = outcomes
        self._machine = machine
        self._token_count = token_count
        self._transfer: Transfer | None = None
        self._lease: Lease | None = None
        self._close: Callable[[bool], bool] = bool
        self._result: TransferResult | None = None
        self._watchers = Watchers()
        self._idle_callbacks: list[Callable[[TransferHandle], None]] = []

    @property
    def is_sent(self) -> bool:
        """The device has the copies; they can be fenced."""
        return self._transfer is None or self._transfer.state in (TransferState.SENT, TransferState.OVER)

    @property
    def is_idle(self) -> bool:
        """No copy touches the GPU blocks any more."""
        return self._result is not None

    @property
    def result(self) -> TransferResult | None:
        """How it ended; None until it is idle."""
        return self._result

    @property
    def is_settled(self) -> bool:
        """Idle, or overdue: waiting for it ends."""
        return self.is_idle or (self._transfer is not None and self._transfer.is_overdue)

    def __await__(self) -> Generator[object, None, TransferResult]:
        """Wait until the GPU blocks are idle.

        Raises:
            BlocksInFlightError: The copy has missed its deadline; it may still land.
            WrongThreadError: The caller is in another thread or event loop, where it would never be woken.
        """
        return self._settled().__await__()

    async def sent(self) -> None:
        """Wait until the device has the copies, or they are over."""
        self._machine.check_waiter()
        await self._watchers.wait_until(lambda: self.is_sent)

    def fence(self) -> None:
        """Let what is launched on the compute stream from now on run after the copies; the host does not wait.

        A step that ran behind a fence counts only if the result is good: until then, nothing that it has computed
        may be published or stored, and the GPU blocks may not be overwritten.

        Raises:
            StateError: The copies are not sent yet, or no compute stream was named.
        """
        if self._transfer is not None and not self.is_idle:
            self._machine.fence(self._transfer)

    def on_idle(self, callback: Callable[[TransferHandle], None]) -> None:
        """Call `callback(handle)` once the GPU blocks are idle, or now; from the owning thread.

        Raises:
            WrongThreadError: Another thread has called.
        """
        self._machine.check_waiter()
        if self.is_idle:
            callback(self)
        else:
            self._idle_callbacks.append(callback)

    def cancel(self) -> bool:
        """Take back copies that are not sent; return whether that was so.

        The handle is idle then, unless copies that it has joined are under way in its GPU blocks.
        """
        return self._transfer is not None and self._machine.withdraw(self._transfer)

    def wait(self, *, timeout_seconds: float) -> TransferResult:
        """Block the calling thread until the GPU blocks are idle; for hosts without an event loop.

        Raises:
            BlocksInFlightError: The copies have not landed within `timeout_seconds`, or missed their deadline.
            StateError: The ranks of an engine do not know of them yet, see `take_jobs`.
        """
        if not self.is_sent:
            self._machine.check_sends_by_itself()
        self._machine.block_until(lambda: self.is_settled, timeout_seconds)
        return self._checked_result(timeout_seconds)

    def check_idle(self) -> None:
        """Refuse to go on while a copy may touch the GPU blocks.

        Raises:
            BlocksInFlightError: One may.
        """
        self._checked_result(self._machine.deadlines.landing_seconds)

    async def wait_out(self) -> None:
        """Wait until the blocks are idle or overdue, whatever cancels the caller meanwhile."""
        await self._watchers.wait_out(lambda: self.is_settled, self._machine.clock)

    def launch(
        self,
        direction: Direction,
        gpu_spec: GPULoadStoreSpec,
        cpu_spec: CPULoadStoreSpec,
        after: Event | None,
        lease: Lease,
        close: Callable[[bool], bool],
    ) -> Transfer:
        """Make the transfer behind this handle; for the machine.

        Args:
            direction: Which way.
            gpu_spec: GPU blocks.
            cpu_spec: Slots.
            after: What the copies wait for.
            lease: On the slots; given back when the copies are over.
            close: Closes the ticket, well or not, and returns whether the transfer still counts; must not raise.
        """
        self._lease = lease
        self._close = close
        self._transfer = Transfer(
            direction,
            gpu_spec,
            cpu_spec,
            after=after,
            on_sent=self._watchers.notify,
            on_over=self._end,
            on_overdue=self._expire,
        )
        return self._transfer

    def finish_empty(self, transfer_type: tuple[str, str] = ("GPU", "CPU")) -> TransferHandle:
        """End a handle that has nothing to copy; for the machine."""
        self._result = TransferResult(0, success=True, transfer_type=transfer_type, token_count=self._token_count)
        return self

    async def _settled(self) -> TransferResult:
        self._machine.check_waiter()
        await self._watchers.wait_until(lambda: self.is_settled)
        return self._checked_result(self._machine.deadlines.landing_seconds)

    def _checked_result(self, seconds: float) -> TransferResult:
        if self._result is None:
            raise BlocksInFlightError(self.gpu_blocks, seconds, self._transfer.awaited if self._transfer else "")
        return self._result

    def _end(self) -> None:
        """The copies are over: commit or drop, give the slots back, tell everyone; all in one step."""
        transfer = self._transfer
        if transfer is None:
            return
        success = transfer.success and not transfer.is_overdue
        if self._lease is not None:
            # Before the ticket is closed: whether anybody else uses the blocks is looked at there.
            self._machine.guarded(self._lease.release)
        error = transfer.error or ("withdrawn before it was sent" if transfer.is_withdrawn else None)
        if transfer.is_overdue:
            error = error or "it landed after its deadline"
        elif not self._close(success) and success:
            success, error = False, "its blocks no longer count: a reset came between"
        self._result = TransferResult(
            transfer.job_id,
            success=success,
            transfer_type=transfer.transfer_type,
            byte_count=transfer.byte_count if success else 0,
            seconds=transfer.seconds,
            token_count=self._token_count if success else 0,
            error=error,
        )
        if not success:
            refused = (StoreOutcome.REFUSED if kind is StoreOutcome.ACCEPTED else kind for kind in self.outcomes)
            self.outcomes = tuple(refused)
        self._machine.note_end(self)
        self._watchers.notify()
        self._call_idle_callbacks()

    def _expire(self) -> None:
        """The copies are overdue: nothing of them will count; the slots stay leased until they land."""
        self._close(False)
        self._watchers.notify()

    def _call_idle_callbacks(self) -> None:
        callbacks, self._idle_callbacks = self._idle_callbacks, []
        for callback in callbacks:
            try:
                callback(self)
            except Exception:
                _logger.exception("an on_idle callback raised")
