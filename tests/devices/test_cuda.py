"""The CUDA device on the stand-in driver: what the contract does not ask of every device."""

from __future__ import annotations

import ctypes
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from cuda_rig import Count, StandIn, hold
from numpy.typing import NDArray

from aiokvoffload import CanonicalKVCaches, KVGroup, open_offloader
from aiokvoffload.devices.base import CopyPlan, Direction, device_for_tensors
from aiokvoffload.devices.cuda import CudaDevice
from aiokvoffload.devices.cuda_copy import BatchCopier, SourceOrder
from aiokvoffload.devices.cuda_driver import CudaDriver
from aiokvoffload.devices.cuda_streams import CudaStream
from aiokvoffload.devices.host import HostDevice
from aiokvoffload.errors import (
    ClosedError,
    ConfigurationError,
    DeviceError,
    InvalidRequestError,
    PartialCopyError,
    StateError,
)
from aiokvoffload.kv_caches import CanonicalKVCacheRef, CanonicalKVCacheTensor
from aiokvoffload.testing.device_contract import PATIENCE_SECONDS
from aiokvoffload.testing.device_memory import pattern, plan_of

PAGE = 4096


def pages(count: int) -> NDArray[np.uint8]:
    """Return zeroed memory that begins where a page does."""
    memory = np.zeros((count + 1) * PAGE, np.uint8)
    first = -memory.ctypes.data % PAGE
    return memory[first : first + count * PAGE]


def finish(device: CudaDevice, stream: CudaStream) -> None:
    event = device.record(stream)
    assert device.synchronize(event, PATIENCE_SECONDS)
    assert device.is_done(event)


@pytest.fixture
def device(stand_in: StandIn) -> Iterator[CudaDevice]:
    device = stand_in.device()
    yield device
    device.close()


@pytest.fixture
def hold_stream(stand_in: StandIn) -> Callable[[CudaDevice, CudaStream], Callable[[], None]]:
    return lambda device, stream: hold(stand_in.library, device, stream)


Hold = Callable[[CudaDevice, CudaStream], Callable[[], None]]


# In which order sources are read


def test_a_store_reads_what_is_there_when_its_stream_gets_there(device: CudaDevice, hold_stream: Hold) -> None:
    gpu, host = np.zeros(64, np.uint8), np.zeros(64, np.uint8)
    stream = device.create_stream("store")
    release = hold_stream(device, stream)
    device.copy_batch(plan_of(Direction.STORE, [(gpu.ctypes.data, host.ctypes.data, 64)], gpu, host), stream)
    gpu[:] = pattern(64)
    release()
    finish(device, stream)
    assert np.array_equal(host, pattern(64))


def test_a_load_may_be_read_early(stand_in: StandIn, device: CudaDevice) -> None:
    gpu, host = np.zeros(64, np.uint8), pattern(64)
    stream = device.create_stream("load")
    device.copy_batch(plan_of(Direction.LOAD, [(host.ctypes.data, gpu.ctypes.data, 64)], gpu, host), stream)
    assert stand_in.count(Count.EARLY_READS) == 1
    finish(device, stream)
    assert np.array_equal(gpu, pattern(64))


@pytest.mark.parametrize("offset", [-64, -63, 0, 63, 64])
def test_a_load_of_what_a_store_still_writes_is_read_in_order(
    stand_in: StandIn, device: CudaDevice, hold_stream: Hold, offset: int
) -> None:
    gpu, host, loaded = pattern(64), np.zeros(192, np.uint8), np.zeros(64, np.uint8)
    store, load = device.create_stream("store"), device.create_stream("load")
    release = hold_stream(device, store)
    slot = host.ctypes.data + 64
    device.copy_batch(plan_of(Direction.STORE, [(gpu.ctypes.data, slot, 64)], gpu, host), store)
    device.wait_event(load, device.record(store))
    device.copy_batch(plan_of(Direction.LOAD, [(slot + offset, loaded.ctypes.data, 64)], host, loaded), load)
    assert stand_in.count(Count.EARLY_READS) == (abs(offset) == 64)
    release()
    finish(device, load)
    assert np.array_equal(loaded, host[64 + offset : 128 + offset])
    device.copy_batch(plan_of(Direction.LOAD, [(slot, loaded.ctypes.data, 64)], host, loaded), load)
    assert stand_in.count(Count.EARLY_READS) == (abs(offset) == 64) + 1  # the store is over
    finish(device, load)


def test_the_stand_in_catches_a_store_that_is_read_early(stand_in: StandIn, hold_stream: Hold) -> None:
    class Careless(BatchCopier):
        def submit(self, plan: CopyPlan, order: SourceOrder, stream: int) -> None:
            super().submit(plan, SourceOrder.ANY, stream)

    device = stand_in.device(kernel_up_to_bytes=PAGE, kernel=Careless(stand_in.driver()))
    gpu, host = np.zeros(64, np.uint8), pages(1)
    device.pin(host.ctypes.data, PAGE)
    stream = device.create_stream("store")
    release = hold_stream(device, stream)
    device.copy_batch(plan_of(Direction.STORE, [(gpu.ctypes.data, host.ctypes.data, 64)], gpu, host), stream)
    gpu[:] = pattern(64)
    release()
    finish(device, stream)
    assert not host.any()
    device.close()


# Batches


def many_copies(count: int) -> tuple[CopyPlan, NDArray[np.uint8], NDArray[np.uint8]]:
    gpu, host = pattern(8 * count), np.zeros(8 * count, np.uint8)
    offsets = np.arange(count, dtype=np.int64) * 8
    sources, destinations = gpu.ctypes.data + offsets, host.ctypes.data + offsets
    return CopyPlan(sources, destinations, np.full(count, 8, np.int64), Direction.STORE, (gpu, host)), gpu, host


class Owner:
    """Something that a plan keeps alive."""


def owned(plan: CopyPlan) -> tuple[CopyPlan, weakref.ref[Owner]]:
    owner = Owner()
    return replace(plan, keep_alive=(*plan.keep_alive, owner)), weakref.ref(owner)


def test_batches_are_bounded(stand_in: StandIn, device: CudaDevice) -> None:
    plan, gpu, host = many_copies(10_000)
    stream = device.create_stream("many")
    device.copy_batch(plan, stream)
    finish(device, stream)
    assert np.array_equal(gpu, host)
    assert stand_in.count(Count.LARGEST_BATCH) == 4096
    assert stand_in.count(Count.BATCH_CALLS) == 3


def test_the_stand_in_breaks_on_a_batch_that_real_drivers_have_crashed_on(stand_in: StandIn) -> None:
    device = stand_in.device(most_descriptors=1 << 20)
    stream = device.create_stream("many")
    with pytest.raises(PartialCopyError, match="restart the process"):
        device.copy_batch(many_copies(50_000)[0], stream)
    with pytest.raises(DeviceError, match="restart the process"):
        device.record(stream)
    device.close()


def test_address_arrays_with_gaps_are_packed(device: CudaDevice) -> None:
    source, target = pattern(64), np.zeros(64, np.uint8)
    columns = np.array([[source.ctypes.data, target.ctypes.data, 32], [0, 0, 32]], np.int64)
    columns[1, :2] = columns[0, :2] + 32
    stream = device.create_stream("gaps")
    device.copy_batch(CopyPlan(columns[:, 0], columns[:, 1], columns[:, 2], Direction.LOAD), stream)
    finish(device, stream)
    assert np.array_equal(source, target)


@pytest.mark.parametrize("reason", ["old driver", "other addresses"])
def test_without_the_batched_call_copies_go_one_by_one(stand_in: StandIn, reason: str) -> None:
    if reason == "old driver":
        stand_in.set_driver_version(12070)
    else:
        stand_in.set_can_use_host_pointer(False)
    device = stand_in.device()
    plan, gpu, host = many_copies(100)
    stream = device.create_stream("one by one")
    device.copy_batch(plan, stream)
    finish(device, stream)
    assert np.array_equal(gpu, host)
    assert (stand_in.count(Count.BATCH_CALLS), stand_in.count(Count.SINGLE_CALLS)) == (0, 100)
    device.close()


def test_an_old_driver_has_no_batches(stand_in: StandIn) -> None:
    stand_in.set_driver_version(12070)
    with pytest.raises(ConfigurationError, match=r"need a driver of CUDA 12\.8, this one is of 12070"):
        BatchCopier(stand_in.driver())


def test_copies_are_cut_where_registered_memory_ends(stand_in: StandIn, device: CudaDevice) -> None:
    host, gpu = pages(4), np.zeros(4 * PAGE, np.uint8)
    host[:] = pattern(4 * PAGE)
    device.pin(host.ctypes.data, PAGE)
    device.pin(host.ctypes.data + PAGE, 2 * PAGE)
    stream = device.create_stream("load")
    device.copy_batch(plan_of(Direction.LOAD, [(host.ctypes.data, gpu.ctypes.data, 4 * PAGE)], host, gpu), stream)
    finish(device, stream)
    assert np.array_equal(gpu, host)
    assert stand_in.count(Count.LARGEST_BATCH) == 3
    for start in (0, PAGE):
        device.unpin(host.ctypes.data + start)


def test_the_legacy_default_stream_can_be_waited_for_but_never_copies(device: CudaDevice) -> None:
    compute = device.adopt_stream(TorchStream(0))
    copies = device.create_stream("copies")
    device.wait_event(copies, device.record(compute))
    device.wait_event(compute, device.record(copies))
    finish(device, copies)
    plan, _, host = many_copies(1)
    with pytest.raises(DeviceError, match="legacy default stream"):
        device.copy_batch(plan, compute)
    assert not host.any()


# What goes wrong


def test_a_batch_refused_in_the_middle_is_said_so_and_its_first_part_runs(stand_in: StandIn, hold_stream: Hold) -> None:
    device = stand_in.device(most_descriptors=4)
    stream = device.create_stream("refused")
    plan, gpu, host = many_copies(10)
    release = hold_stream(device, stream)
    stand_in.fail_call("cuMemcpyBatchAsync", 1, after=1)
    plan, owner = owned(plan)
    with pytest.raises(PartialCopyError, match=r"not have been taken whole: cuMemcpyBatchAsync .*INVALID_VALUE"):
        device.copy_batch(plan, stream)
    event = device.record(stream)
    del plan
    assert not device.is_done(event)
    assert owner() is not None
    release()
    finish(device, stream)
    assert np.array_equal(host[:32], gpu[:32])
    assert not host[32:].any()
    assert owner() is None
    device.close()


def test_a_batch_whose_end_cannot_be_marked_is_kept_until_it_can(stand_in: StandIn, device: CudaDevice) -> None:
    stream = device.create_stream("marks")
    plan, gpu, host = many_copies(10)
    finish(device, stream)
    stand_in.fail_call("cuEventRecord", 2)
    plan, owner = owned(plan)
    device.copy_batch(plan, stream)
    event = device.record(stream)
    assert device.synchronize(event, PATIENCE_SECONDS)
    assert np.array_equal(gpu, host)
    del plan
    finish(device, stream)
    assert owner() is None


@pytest.mark.parametrize("code", [700, 719])
def test_a_broken_context_fails_every_event_and_says_to_restart(
    stand_in: StandIn, hold_stream: Hold, caplog: pytest.LogCaptureFixture, code: int
) -> None:
    device = stand_in.device()
    stream = device.create_stream("broken")
    before = device.record(stream)
    assert device.synchronize(before, PATIENCE_SECONDS)
    release = hold_stream(device, stream)
    stand_in.break_context(stream, code)
    event = device.record(stream)
    release()
    assert device.synchronize(event, PATIENCE_SECONDS)
    with pytest.raises(DeviceError, match="restart the process"):
        device.is_done(event)
    assert device.is_done(before)  # known to be over before
    with pytest.raises(DeviceError, match="restart the process"):
        device.create_stream("another")
    device.close()
    assert "could be given back" in caplog.text


@pytest.mark.parametrize("code", [201, 900])
def test_an_error_that_says_nothing_of_the_work_ends_nothing(
    stand_in: StandIn, device: CudaDevice, caplog: pytest.LogCaptureFixture, code: int
) -> None:
    stream = device.create_stream("asked")
    event = device.record(stream)
    assert device.synchronize(device.record(stream), PATIENCE_SECONDS)
    stand_in.fail_call("cuEventQuery", code)
    assert not device.is_done(event)
    assert "cannot be told now" in caplog.text
    assert device.is_done(event)


def test_streams_of_a_captured_graph_are_refused(stand_in: StandIn, device: CudaDevice) -> None:
    compute = device.create_stream("compute")
    stand_in.capture(compute)
    other = stand_in.device()
    with pytest.raises(StateError, match="outside of the capture"):
        other.record(other.adopt_stream(TorchStream(compute.handle)))
    other.close()


def test_polls_and_pins_spoil_no_capture(stand_in: StandIn, device: CudaDevice) -> None:
    compute, stream, host = device.create_stream("compute"), device.create_stream("copies"), pages(1)
    stand_in.capture(compute)
    device.copy_batch(many_copies(10)[0], stream)
    finish(device, stream)
    device.pin(host.ctypes.data, PAGE)
    device.unpin(host.ctypes.data)
    mode = ctypes.c_int(1)
    driver = stand_in.driver()
    driver.call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
    assert mode.value == 0  # as it was
    driver.call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))


def test_without_a_driver_the_error_says_what_to_do() -> None:
    with pytest.raises(ConfigurationError, match=r"libnothing.so.*install it, or give device='host'"):
        CudaDriver("libnothing.so")
    with pytest.raises(ConfigurationError, match="cuInit"):
        CudaDriver("libc.so.6")


def test_a_gpu_that_is_not_there_is_named(stand_in: StandIn) -> None:
    with pytest.raises(ConfigurationError, match="no GPU 2: the driver shows 2; see CUDA_VISIBLE_DEVICES"):
        CudaDevice(2, driver=stand_in.driver())


# Pinning


def test_what_the_driver_refuses_is_not_pinned(stand_in: StandIn, device: CudaDevice) -> None:
    host = pages(2)
    stand_in.fail_call("cuMemHostRegister", 2)
    with pytest.raises(DeviceError, match=r"OUT_OF_MEMORY.*ulimit -l"):
        device.pin(host.ctypes.data, PAGE)
    assert stand_in.count(Count.REGISTRATIONS) == 0
    device.pin(host.ctypes.data, PAGE)
    device.unpin(host.ctypes.data)


def test_what_the_driver_still_uses_stays_pinned(stand_in: StandIn, device: CudaDevice, hold_stream: Hold) -> None:
    gpu, host = pattern(PAGE), pages(1)
    device.pin(host.ctypes.data, PAGE)
    stream = device.create_stream("store")
    release = hold_stream(device, stream)
    device.copy_batch(plan_of(Direction.STORE, [(gpu.ctypes.data, host.ctypes.data, PAGE)], gpu), stream)
    with pytest.raises(DeviceError, match="cuMemHostUnregister failed"):
        device.unpin(host.ctypes.data)
    release()
    finish(device, stream)
    device.unpin(host.ctypes.data)
    assert stand_in.count(Count.REGISTRATIONS) == 0


def test_two_ranges_cannot_share_a_page(device: CudaDevice) -> None:
    host = pages(1)
    device.pin(host.ctypes.data, 100)
    with pytest.raises(DeviceError, match="cannot share one"):
        device.pin(host.ctypes.data + 100, 100)
    device.unpin(host.ctypes.data)


def test_memory_is_pinned_from_any_thread(stand_in: StandIn, device: CudaDevice) -> None:
    host = pages(8)
    threads = [
        threading.Thread(target=device.pin, args=(host.ctypes.data + number * PAGE, PAGE)) for number in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_SECONDS)
    assert stand_in.count(Count.REGISTRATIONS) == 8
    for number in range(8):
        device.unpin(host.ctypes.data + number * PAGE)


# Streams, events, contexts


class TorchStream:
    """What the device knows of a torch.cuda.Stream."""

    def __init__(self, handle: int, device_index: int = 0) -> None:
        self.cuda_stream = handle
        self.device_index = device_index


class ProtocolStream:
    """A stream of cuda.core."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._handle


def test_streams_of_others_are_adopted_once(device: CudaDevice) -> None:
    made = device.create_stream("made")
    assert device.adopt_stream(made) is made
    adopted = device.adopt_stream(TorchStream(made.handle + 0))
    assert adopted is made
    with_protocol = device.adopt_stream(ProtocolStream(0))
    assert with_protocol is device.adopt_stream(TorchStream(0))


@pytest.mark.parametrize("stranger", [TorchStream(0, device_index=1), TorchStream(2), object(), 7, None])
def test_streams_that_cannot_be_used_are_refused(device: CudaDevice, stranger: object) -> None:
    with pytest.raises(InvalidRequestError, match=r"torch.cuda.current_stream\(0\)"):
        device.adopt_stream(stranger)


def test_events_are_used_again(stand_in: StandIn, device: CudaDevice) -> None:
    stream = device.create_stream("events")
    finish(device, stream)
    count = stand_in.count(Count.EVENTS)
    for _ in range(200):
        finish(device, stream)
    assert stand_in.count(Count.EVENTS) == count


def test_a_wait_outlives_the_event_it_waits_for(device: CudaDevice, hold_stream: Hold) -> None:
    first, second = device.create_stream("first"), device.create_stream("second")
    release = hold_stream(device, first)
    device.wait_event(second, device.record(first))
    gc.collect()
    other = device.create_stream("other")
    for _ in range(3):
        finish(device, other)  # records the same event of the driver again
    waiting = device.record(second)
    assert not device.is_done(waiting)
    release()
    assert device.synchronize(waiting, PATIENCE_SECONDS)


def test_the_callers_context_stays_current(stand_in: StandIn, device: CudaDevice) -> None:
    other = CudaDevice(1, driver=stand_in.driver(), tensor_kind="cpu")
    driver = stand_in.driver()
    assert driver.current_context() is None
    finish(device, device.create_stream("one"))
    assert driver.current_context() is None
    with other.current_context():
        before = driver.current_context()
        finish(device, device.create_stream("one"))
        with pytest.raises(DeviceError, match="legacy"):
            device.copy_batch(many_copies(1)[0], device.adopt_stream(TorchStream(0)))
        assert driver.current_context() == before
    other.close()


# The end


def test_close_gives_everything_back(stand_in: StandIn) -> None:
    kinds = (Count.STREAMS, Count.EVENTS, Count.REGISTRATIONS, Count.RETAINED_CONTEXTS)
    gc.collect()
    before = [stand_in.count(kind) for kind in kinds]
    device = stand_in.device()
    host = pages(1)
    device.pin(host.ctypes.data, PAGE)
    held = [device.record(device.create_stream(str(number))) for number in range(3)]
    device.copy_batch(many_copies(100)[0], device.create_stream("busy"))
    assert [stand_in.count(kind) for kind in kinds] != before
    device.close()
    assert [stand_in.count(kind) for kind in kinds] == before
    with pytest.raises(ClosedError):
        device.is_done(held[0])
    with pytest.raises(ClosedError):
        device.pin(host.ctypes.data, PAGE)


def test_close_is_bounded_and_late_copies_keep_what_they_use(
    stand_in: StandIn, hold_stream: Hold, caplog: pytest.LogCaptureFixture
) -> None:
    registrations = stand_in.count(Count.REGISTRATIONS)
    device = stand_in.device(close_timeout_seconds=0.0)
    gpu, host = pattern(PAGE), pages(1)
    device.pin(host.ctypes.data, PAGE)
    stream = device.create_stream("late")
    release = hold_stream(device, stream)
    device.copy_batch(plan_of(Direction.STORE, [(gpu.ctypes.data, host.ctypes.data, PAGE)], gpu), stream)
    owner = weakref.ref(gpu)
    del gpu
    device.close()
    del device, stream
    gc.collect()
    assert "still under way on GPU 0" in caplog.text
    assert owner() is not None
    assert stand_in.count(Count.REGISTRATIONS) == registrations + 1
    release()
    for thread in threading.enumerate():
        if thread.name == "aiokvoffload-late-copies":
            thread.join(PATIENCE_SECONDS)
    assert np.array_equal(host, pattern(PAGE))
    assert stand_in.count(Count.REGISTRATIONS) == registrations


# Which device copies what


def test_tensors_find_their_device(stand_in_library: object, monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(device_for_tensors("cpu"), HostDevice)
    monkeypatch.setattr("aiokvoffload.devices.cuda.CudaDriver", lambda: StandIn.driver(StandIn(stand_in_library)))  # type: ignore[arg-type]
    device = device_for_tensors("cuda", 1)
    assert isinstance(device, CudaDevice)
    assert (device.ordinal, device.tensor_kind) == (1, "cuda")
    device.close()


def test_on_a_gpu_the_compute_stream_is_required() -> None:
    class AnyTensors(HostDevice):
        tensor_kind = None

    tensor = torch.empty((4, 64), dtype=torch.int8, device="meta")
    caches = CanonicalKVCaches(
        (CanonicalKVCacheTensor(tensor, 64),), ((CanonicalKVCacheRef(0, 64),),), (KVGroup(block_tokens=16, layers=[0]),)
    )
    context = open_offloader(caches, cpu_bytes=4096, device=AnyTensors())
    with (
        pytest.raises(ConfigurationError, match=r"KV caches on meta need compute_stream, such as torch\.cuda"),
        context,
    ):
        pass


def test_tensors_that_a_device_cannot_copy_are_refused(stand_in: StandIn) -> None:
    device = CudaDevice(driver=stand_in.driver())
    with (
        pytest.raises(ConfigurationError, match="CudaDevice copies CUDA memory, but the KV caches lie on cpu"),
        open_offloader([torch.zeros(4, 64)], cpu_bytes=4096, device=device),
    ):
        pass
    device.close()
