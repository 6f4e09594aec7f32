"""An NVIDIA GPU as a device, through the driver's own API (see `cuda_driver`).

A load may be read ahead of its stream, a store must not be: its source is what the engine's kernels are still
writing. A load of what a store under way still writes is read in order, too.

There is no doorbell. A host function in the stream would hold up the copies behind it until the host has run it, and
one in Python needs the interpreter lock, which a thread may hold that waits for this very stream.
"""

from __future__ import annotations

import logging
import math
import mmap
import threading
import time
from collections.abc import Collection, Mapping
from functools import partial
from typing import Self

import numpy as np
from numpy.typing import NDArray

from aiokvoffload.devices.base import CopyPlan, Device, Direction, Event, Proceed, Stream, ignore_bytes
from aiokvoffload.devices.bookkeeping import PinnedRanges
from aiokvoffload.devices.cuda_calibration import SCRATCH_BYTES, SIZES, Calibration
from aiokvoffload.devices.cuda_copy import MOST_DESCRIPTORS, BatchCopier, Copier, LoopCopier, SourceOrder
from aiokvoffload.devices.cuda_driver import CudaDriver, CurrentContext
from aiokvoffload.devices.cuda_errors import CudaError
from aiokvoffload.devices.cuda_streams import Batch, CudaEvent, CudaStream, EventPool, handle_of
from aiokvoffload.devices.ranges import host_side, some_of
from aiokvoffload.errors import ClosedError, DeviceError, InvalidRequestError, PartialCopyError, StateError

_logger = logging.getLogger(__name__)

_PER_THREAD_STREAM = 2
_SHORTEST_SLEEP_SECONDS, _LONGEST_SLEEP_SECONDS = 20e-6, 1e-3
_LATE_SLEEP_SECONDS = 0.1
_KERNEL_WORD_BYTES = 8


class CudaDevice(Device):
    """One GPU; streams made or adopted live as long as the device.

    Args:
        ordinal: Which one, as torch counts them.
        driver: The driver library; by default that of the system.
        tensor_kind: What torch calls the device of the tensors that it copies.
        most_descriptors: Copies per call of the driver.
        kernel: Another way for small copies, beside the copy engines; None lets `prepare` look for Triton.
        kernel_up_to_bytes: Up to how many bytes per copy it is used; None lets `prepare` measure it, 0 turns it off.
        close_timeout_seconds: How long `close` waits for copies under way.

    Attributes:
        kernel_limits: Up to how many bytes per copy the kernel is used, by direction.

    Raises:
        ConfigurationError: No driver, or no such GPU.
    """

    def __init__(
        self,
        ordinal: int = 0,
        *,
        driver: CudaDriver | None = None,
        tensor_kind: str = "cuda",
        most_descriptors: int = MOST_DESCRIPTORS,
        kernel: Copier | None = None,
        kernel_up_to_bytes: int | None = None,
        close_timeout_seconds: float = 5.0,
    ) -> None:
        self.ordinal = ordinal
        self.tensor_kind = tensor_kind
        self._driver = driver or CudaDriver()
        self._close_timeout_seconds = close_timeout_seconds
        self._device = self._driver.device(ordinal)
        self._sees_host_addresses = self._driver.can_use_host_pointer(self._device)
        # Where the GPU has other addresses for host memory, the batched copy is known to fault.
        is_batched = self._driver.batched_copy is not None and self._sees_host_addresses
        self._most_descriptors = most_descriptors
        self._engine: Copier = BatchCopier(self._driver, most_descriptors) if is_batched else LoopCopier(self._driver)
        self._kernel = kernel
        self._kernel_up_to_bytes = kernel_up_to_bytes
        self._is_prepared = False
        self._preparing = threading.Lock()
        self.kernel_limits: Mapping[Direction, int] = dict.fromkeys(Direction, kernel_up_to_bytes or 0)
        self._pinned = PinnedRanges()
        self._streams: dict[int, CudaStream] = {}
        self._events = EventPool(self._driver)
        self._scratch: list[tuple[int, NDArray[np.uint8]]] = []
        self._is_closed = False
        self._context = self._driver.retain_primary_context(self._device)

    @classmethod
    def for_tensors(cls, index: int | None) -> Self:
        """Return a device for tensors on GPU `index`."""
        return cls(index or 0)

    def prepares_at_once(self, page_bytes: Collection[int]) -> bool:
        """Return whether a kernel was looked for before, or is of no use."""
        is_of_use = self._kernel_up_to_bytes != 0 and self._sees_host_addresses
        return self._is_prepared or not is_of_use or not page_bytes or min(page_bytes) > max(SIZES)

    def prepare(self, page_bytes: Collection[int], proceed: Proceed = ignore_bytes) -> None:
        """Find out up to which size a kernel copies faster than the copy engines; once, for about a second.

        A kernel that fails is not used.

        Raises:
            DeviceError: It has broken the GPU's context, or found it broken.
        """
        self._check_open()
        with self._preparing:
            if self.prepares_at_once(page_bytes):
                return
            kernel = self._kernel or _find_kernel(self.ordinal)
            if kernel is not None and self._kernel_up_to_bytes is None:
                try:
                    self.kernel_limits = self._calibrate(kernel, proceed)
                except (DeviceError, PartialCopyError) as exc:
                    self._check_context()
                    _logger.warning("small copies go by the copy engines: %s", exc)
            self._kernel, self._is_prepared = kernel, True

    def current_context(self) -> CurrentContext:
        """Return what makes the context of this GPU current in the calling thread while it is entered."""
        return CurrentContext(self._driver, self._context)

    def create_stream(self, name: str) -> CudaStream:
        """Return a new stream, which does not wait for the legacy default stream."""
        self._check_open()
        with self.current_context():
            handle = self._driver.create_stream()
        self._streams[handle] = stream = CudaStream(self, name, handle)
        return stream

    def adopt_stream(self, stream: object) -> CudaStream:
        """Return a stream of torch, or of anything with `__cuda_stream__`, as a stream of this device.

        Raises:
            InvalidRequestError: It is none, or one of another GPU.
        """
        if isinstance(stream, CudaStream):
            return self._own_stream(stream)
        self._check_open()
        handle = handle_of(stream)
        index = getattr(stream, "device_index", self.ordinal)
        if handle is None or handle == _PER_THREAD_STREAM or index != self.ordinal:
            raise InvalidRequestError(
                f"CudaDevice {self.ordinal} cannot use {stream!r}; give a torch.cuda.Stream of this GPU, such as "
                f"torch.cuda.current_stream({self.ordinal}), or make one with create_stream()"
            )
        return self._streams.setdefault(handle, CudaStream(self, f"adopted {handle:#x}", handle, stream))

    def record(self, stream: Stream) -> CudaEvent:
        """Return an event that is done once all work now in `stream` is done.

        Raises:
            StateError: The stream is being captured into a CUDA graph.
        """
        owned = self._own_stream(stream)
        # An event of a capture would draw the streams that wait for it, and their copies, into the graph.
        if owned.adopted is not None and self._is_captured(owned):
            raise StateError("a CUDA graph is being captured on this stream; store and load outside of the capture")
        return self._record(owned)

    def is_done(self, event: Event) -> bool:
        """Return whether the work before `event` is over."""
        owned = self._own_event(event)
        is_over = self._is_over(owned)
        if is_over and owned.error is not None:
            raise DeviceError(owned.error)
        return is_over

    def elapsed_seconds(self, start: Event, end: Event) -> float:
        """Return the GPU's time between two events."""
        first, last = self._own_event(start), self._own_event(end)
        if not (self._is_over(first) and self._is_over(last)):
            raise StateError("the time between two events is known once both are over; ask is_done() first")
        with self.current_context():
            return self._driver.elapsed_seconds(first.handle, last.handle)

    def wait_event(self, stream: Stream, event: Event) -> None:
        """Let work put into `stream` from now on start only after `event`."""
        owned, awaited = self._own_stream(stream), self._own_event(event)
        if not awaited.is_over:
            with self.current_context():
                self._driver.call("cuStreamWaitEvent", owned.handle, awaited.handle, 0)

    def copy_batch(self, plan: CopyPlan, stream: Stream) -> None:
        """Put the copies of `plan` into `stream`.

        Raises:
            DeviceError: The plan is not valid, or the stream is the legacy default stream.
            PartialCopyError: The driver refused it, maybe after it had taken a part.
        """
        owned = self._own_stream(stream)
        plan.validate()
        if owned.is_legacy_default:
            raise DeviceError(
                "copies cannot go on the legacy default stream, which every other stream waits for; "
                "use one of create_stream()"
            )
        for copier, part in self._parts(self._pinned.ranges.cut(plan)):
            self._put(copier, part, owned)

    def synchronize(self, event: Event, timeout_seconds: float) -> bool:
        """Block until `event` is over; return False at the timeout."""
        owned = self._own_event(event)
        deadline = time.perf_counter() + timeout_seconds
        sleep_seconds = _SHORTEST_SLEEP_SECONDS
        while not self._is_over(owned):
            left = deadline - time.perf_counter()
            if left <= 0:
                return False
            time.sleep(min(left, sleep_seconds))
            sleep_seconds = min(2 * sleep_seconds, _LONGEST_SLEEP_SECONDS)
        return True

    def pin(self, address: int, byte_count: int) -> None:
        """Lock a range of host memory; whole pages are locked, so two ranges cannot share one."""
        self._check_open()
        self._pinned.add(address, byte_count)
        try:
            with self.current_context():
                self._driver.register(address, byte_count)
        except BaseException:
            self._pinned.remove(address)
            raise

    def unpin(self, address: int) -> None:
        """Take back the `pin` of the range that starts at `address`."""
        self._check_open()
        byte_count = self._pinned.remove(address)
        try:
            with self.current_context():
                self._driver.call("cuMemHostUnregister", address)
        except BaseException:
            self._pinned.add(address, byte_count)
            raise

    def close(self) -> None:
        """Wait for copies under way, bounded, and give everything back, what a late one uses once it is over."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._drain(self._close_timeout_seconds):
            self._give_back()
        else:
            _logger.warning("copies are still under way on GPU %d; their memory stays registered", self.ordinal)
            threading.Thread(target=self._give_back_late, name="aiokvoffload-late-copies", daemon=True).start()

    # Copies

    def _parts(self, plan: CopyPlan) -> list[tuple[Copier, CopyPlan]]:
        """Divide a plan among the ways of copying."""
        limit = self.kernel_limits[plan.direction]
        if self._kernel is None or not limit or not len(plan.sources):
            return [(self._engine, plan)] if len(plan.sources) else []
        is_small = plan.byte_counts <= limit
        is_aligned = (plan.sources | plan.destinations | plan.byte_counts) % _KERNEL_WORD_BYTES == 0
        by_kernel = is_small & is_aligned & self._pinned.ranges.cover(host_side(plan), plan.byte_counts)
        parts = ((self._kernel, some_of(plan, by_kernel)), (self._engine, some_of(plan, ~by_kernel)))
        return [(copier, part) for copier, part in parts if len(part.sources)]

    def _put(self, copier: Copier, plan: CopyPlan, stream: Stream) -> None:
        """Put copies into a stream in one certain way."""
        owned = self._own_stream(stream)
        with self.current_context():
            self._forget_finished()
            batch = Batch(plan)
            try:
                copier.submit(plan, self._source_order(plan), owned.handle)
            except Exception as exc:
                if copier is self._kernel:
                    _logger.warning("from now on small copies go by the copy engines: %s", exc)
                    self._kernel = None
                raise PartialCopyError(f"a batch of copies may not have been taken whole: {exc}") from exc
            finally:
                owned.batches.append(batch)
                self._mark_end(batch, owned)

    def _source_order(self, plan: CopyPlan) -> SourceOrder:
        if plan.direction is Direction.STORE:
            return SourceOrder.STREAM
        batches = (batch for stream in self._streams.values() for batch in stream.batches)
        return SourceOrder.STREAM if any(batch.writes(plan) for batch in batches) else SourceOrder.ANY

    def _mark_end(self, batch: Batch, stream: CudaStream) -> None:
        """Record when a batch is over; where the driver refuses, it is tried again later."""
        try:
            batch.end = self._record(stream)
        except CudaError as exc:
            batch.is_over = exc.has_ended_all_work

    def _forget_finished(self) -> None:
        """Let go of the plans that are over."""
        for stream in self._streams.values():
            while stream.batches:
                batch = stream.batches[0]
                if batch.end is None:
                    self._mark_end(batch, stream)
                if not batch.is_over and (batch.end is None or not self._query(batch.end)):
                    break
                stream.batches.popleft()

    # Preparation

    def _calibrate(self, kernel: Copier, proceed: Proceed) -> Mapping[Direction, int]:
        trials = self._device_for_trials()
        put_by_engine, put_by_kernel = (partial(trials._put, copier) for copier in (trials._engine, kernel))
        try:
            device_address, host = trials._take_scratch(SCRATCH_BYTES)
            return Calibration(trials, put_by_engine, put_by_kernel, device_address, host).kernel_limits(proceed)
        finally:
            trials.close()

    def _device_for_trials(self) -> CudaDevice:
        """Return the same GPU once more: so the streams of this one stay with the thread that owns it."""
        return CudaDevice(
            self.ordinal,
            driver=self._driver,
            most_descriptors=self._most_descriptors,
            kernel_up_to_bytes=0,
            close_timeout_seconds=self._close_timeout_seconds,
        )

    def _take_scratch(self, byte_count: int) -> tuple[int, NDArray[np.uint8]]:
        """Return the address of GPU memory, and pinned host memory; both until the device has been given back."""
        host: NDArray[np.uint8] = np.frombuffer(mmap.mmap(-1, byte_count), np.uint8)
        self.pin(host.ctypes.data, byte_count)
        with self.current_context():
            self._scratch.append((self._driver.allocate(byte_count), host))
        return self._scratch[-1]

    def _check_context(self) -> None:
        """Ask the driver for the least of things, after a kernel has failed.

        Raises:
            DeviceError: Nothing can be done on the GPU any more.
        """
        try:
            with self.current_context():
                self._driver.call("cuEventDestroy_v2", self._driver.create_event())
        except CudaError as exc:
            raise DeviceError(
                f"GPU {self.ordinal} was found broken when a kernel for small copies was tried, which may have done "
                f"it: {exc}; CudaDevice({self.ordinal}, kernel_up_to_bytes=0) tries none"
            ) from exc

    # Events

    def _record(self, stream: CudaStream) -> CudaEvent:
        with self.current_context():
            handle = self._events.take()
            try:
                self._driver.call("cuEventRecord", handle, stream.handle)
            except CudaError:
                self._events.give_back(handle)
                raise
        return CudaEvent(self, handle, self._events.give_back)

    def _is_captured(self, stream: CudaStream) -> bool:
        with self.current_context():
            return self._driver.is_capturing(stream.handle)

    def _is_over(self, event: CudaEvent) -> bool:
        was_over = event.is_over
        if self._query(event) and not was_over:
            self._forget_finished()
        return event.is_over

    def _query(self, event: CudaEvent) -> bool:
        """Ask the driver, until the answer is yes or that nothing runs any more."""
        if not event.is_over:
            try:
                with self.current_context():
                    event.is_over = self._driver.is_event_done(event.handle)
            except CudaError as exc:
                # Another error says nothing of the work, whose memory stays in use until the driver answers.
                event.is_over = exc.has_ended_all_work
                event.error = str(exc) if event.is_over else None
                if not event.is_over:
                    _logger.warning("whether copies are over cannot be told now: %s", exc)
        return event.is_over

    # The end

    def _drain(self, timeout_seconds: float, sleep_seconds: float = _LONGEST_SLEEP_SECONDS) -> bool:
        """Wait until no copy is under way; return False at the timeout."""
        deadline = time.perf_counter() + timeout_seconds
        while True:
            self._forget_finished()
            if not any(stream.batches for stream in self._streams.values()):
                return True
            if time.perf_counter() >= deadline:
                return False
            time.sleep(sleep_seconds)

    def _give_back_late(self) -> None:
        self._drain(math.inf, _LATE_SLEEP_SECONDS)
        self._give_back()

    def _give_back(self) -> None:
        calls = [("cuMemHostUnregister", address) for address in self._pinned.addresses]
        calls += [("cuStreamDestroy_v2", stream.handle) for stream in self._streams.values() if stream.adopted is None]
        calls += [("cuEventDestroy_v2", handle) for handle in self._events.handles]
        calls += [("cuMemFree_v2", address) for address, _ in self._scratch]
        self._pinned.clear()
        self._streams.clear()
        errors = []
        try:
            with self.current_context():
                for name, argument in calls:
                    try:
                        self._driver.call(name, argument)
                    except CudaError as exc:
                        errors.append(exc)
            self._driver.release_primary_context(self._device)
        except CudaError as exc:  # at the end of the process the driver may have gone before
            errors.append(exc)
        self._scratch.clear()
        if errors:
            _logger.warning("not everything on GPU %d could be given back: %s", self.ordinal, errors[0])

    def _check_open(self) -> None:
        if self._is_closed:
            raise ClosedError("this CudaDevice was closed; make a new one")

    def _own_stream(self, stream: object) -> CudaStream:
        self._check_open()
        if not isinstance(stream, CudaStream) or stream.device() is not self:
            raise InvalidRequestError(f"{stream!r} is not a stream of this CudaDevice; make one with create_stream()")
        return stream

    def _own_event(self, event: Event) -> CudaEvent:
        self._check_open()
        if not isinstance(event, CudaEvent) or event.device() is not self:
            raise InvalidRequestError(f"{event!r} is not an event of this CudaDevice; make one with record()")
        return event


def _find_kernel(ordinal: int) -> Copier | None:
    try:
        from aiokvoffload.devices.cuda_kernel import KernelCopier
    except ImportError:
        return None
    return KernelCopier(ordinal)
