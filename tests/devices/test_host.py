"""The CPU as a device."""

from __future__ import annotations

import ctypes
import gc
import logging
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable

import numpy as np
import pytest

from aiokvoffload.devices import host_copy
from aiokvoffload.devices.base import Direction
from aiokvoffload.devices.host import HostDevice
from aiokvoffload.devices.host_copy import HostCopier
from aiokvoffload.errors import DeviceError
from aiokvoffload.testing.device_contract import PATIENCE_SECONDS, DeviceContract
from aiokvoffload.testing.device_memory import pattern, plan_of


class TestHostDevice(DeviceContract):
    def make_device(self) -> HostDevice:
        return HostDevice()


class TestHostDeviceWithoutVectoredCopies(DeviceContract):
    def make_device(self) -> HostDevice:
        device = HostDevice()
        device._copier.is_vectored = False
        return device


def waiting_for(gate: threading.Event | threading.Barrier) -> Callable[[], None]:
    def work() -> None:
        gate.wait(PATIENCE_SECONDS)

    return work


def test_vectored_copies_work_on_this_system() -> None:
    assert HostCopier().is_vectored


def test_a_system_that_forbids_vectored_copies_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_copy, "_find_process_vm_readv", lambda: lambda *_: -1)
    copier = HostCopier()
    assert not copier.is_vectored
    source, target = pattern(100), np.zeros(100, np.uint8)
    copier.copy(plan_of(Direction.LOAD, [(source.ctypes.data, target.ctypes.data, 100)]))
    assert np.array_equal(source, target)


@pytest.mark.parametrize("most_bytes", [1, 7, 64, 1000])
def test_copies_that_stop_early_are_finished(most_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    genuine = host_copy._find_process_vm_readv()
    assert genuine is not None

    def stops_early(process: int, local: int, local_count: int, remote: int, remote_count: int, flags: int) -> int:
        vectors = [np.ctypeslib.as_array((ctypes.c_int64 * 2).from_address(at)) for at in (local, remote)]
        full = int(vectors[0][1])
        for vector in vectors:
            vector[1] = min(full, most_bytes)
        return genuine(process, local, 1, remote, 1, flags)

    monkeypatch.setattr(host_copy, "_find_process_vm_readv", lambda: stops_early)
    copier = HostCopier()
    assert copier.is_vectored
    source, target = pattern(3000), np.zeros(3000, np.uint8)
    copies = [(source.ctypes.data + at, target.ctypes.data + at, size) for at, size in ((0, 64), (64, 936), (1000, 1))]
    copier.copy(plan_of(Direction.LOAD, copies))
    assert np.array_equal(source[:1001], target[:1001])
    assert not target[1001:].any()


def test_an_address_that_is_not_mapped_fails_the_event() -> None:
    device = HostDevice()
    target = np.zeros(16, np.uint8)
    stream = device.create_stream("load")
    device.copy_batch(plan_of(Direction.LOAD, [(64, target.ctypes.data, 16)]), stream)
    event = device.record(stream)
    assert device.synchronize(event, PATIENCE_SECONDS)
    with pytest.raises(DeviceError, match="from 0x40"):
        device.is_done(event)
    device.close()


def test_the_host_runs_while_a_stream_is_busy() -> None:
    device = HostDevice()
    one, two = device.create_stream("one"), device.create_stream("two")
    meeting = threading.Barrier(3)
    for stream in (one, two):
        device.launch(stream, waiting_for(meeting))
    meeting.wait(PATIENCE_SECONDS)
    assert device.synchronize(device.record(one), PATIENCE_SECONDS)
    assert device.synchronize(device.record(two), PATIENCE_SECONDS)
    device.close()


def test_a_raising_doorbell_is_logged_and_rung_no_more(caplog: pytest.LogCaptureFixture) -> None:
    device = HostDevice()
    rung: list[str] = []

    def ring() -> None:
        rung.append(threading.current_thread().name)
        raise RuntimeError("broken bell")

    device.add_doorbell(ring)
    stream = device.create_stream("bells")
    with caplog.at_level(logging.ERROR):
        events = [device.record(stream) for _ in range(3)]
        assert device.synchronize(events[-1], PATIENCE_SECONDS)
        device.close()
    assert rung == ["aiokvoffload-bells"]
    assert "broken bell" in caplog.text


def test_close_lets_queued_work_end() -> None:
    device = HostDevice()
    stream = device.create_stream("last")
    gate = threading.Event()
    done: list[int] = []
    device.launch(stream, waiting_for(gate))
    for number in range(10):
        device.launch(stream, lambda number=number: done.append(number))  # type: ignore[misc]
    gate.set()
    device.close()
    assert done == list(range(10))


def test_close_is_bounded_and_late_work_never_runs(caplog: pytest.LogCaptureFixture) -> None:
    device = HostDevice(close_timeout_seconds=0.01)
    stream = device.create_stream("stuck")
    gate, ended = threading.Event(), threading.Event()
    ran: list[str] = []
    device.launch(stream, waiting_for(gate))
    device.launch(stream, lambda: ran.append("late"))
    event = device.record(stream)
    device.add_doorbell(ended.set)
    device.close()
    assert "'stuck' has not ended" in caplog.text
    gate.set()
    assert ended.wait(PATIENCE_SECONDS)
    assert ran == []
    assert event.error is not None


def test_what_a_copy_kept_alive_is_let_go_once_it_is_over() -> None:
    device = HostDevice()
    stream = device.create_stream("store")
    source, target = pattern(64), np.zeros(64, np.uint8)
    freed = threading.Event()
    weakref.finalize(source, freed.set)
    device.copy_batch(plan_of(Direction.STORE, [(source.ctypes.data, target.ctypes.data, 64)], source), stream)
    del source
    assert freed.wait(PATIENCE_SECONDS)
    assert np.array_equal(target, pattern(64))
    device.close()


def test_a_doorbell_rings_once_its_event_is_done() -> None:
    device = HostDevice()
    stream = device.create_stream("bells")
    gate = threading.Event()
    device.launch(stream, waiting_for(gate))
    event = device.record(stream)
    seen: list[bool] = []
    device.add_doorbell(lambda: seen.append(device.is_done(event)))
    gate.set()
    assert device.synchronize(device.record(stream), PATIENCE_SECONDS)
    assert seen[0] is True
    device.close()


def test_the_thread_of_a_forgotten_stream_ends() -> None:
    device = HostDevice()
    stream = device.create_stream("forgotten")
    found: list[threading.Thread] = []
    keep: Callable[[threading.Thread], None] = found.append
    device.launch(stream, lambda: keep(threading.current_thread()))
    assert device.synchronize(device.record(stream), PATIENCE_SECONDS)
    del stream
    gc.collect()
    found[0].join(PATIENCE_SECONDS)
    assert not found[0].is_alive()
    device.close()


def test_a_process_ends_although_a_stream_hangs() -> None:
    program = """
import threading
from aiokvoffload.devices.host import HostDevice
device = HostDevice()
stuck, waiting = device.create_stream("stuck"), device.create_stream("waiting")
begun = threading.Event()
device.launch(stuck, lambda: (begun.set(), threading.Event().wait()))
device.wait_event(waiting, device.record(stuck))
begun.wait()
print("leaving")
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=True)
    assert done.stdout == "leaving\n"
    assert done.stderr == ""
