"""The CPU as a device."""

from __future__ import annotations

import gc
import logging
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable

import numpy as np
import pytest

from aiokvoffload.devices.base import Direction
from aiokvoffload.devices.host import HostDevice
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


def test_no_doorbell_rings_for_a_mark() -> None:
    device = HostDevice()
    stream = device.create_stream("marked")
    done: list[bool] = []
    gate = threading.Event()
    device.launch(stream, waiting_for(gate))
    mark, end = device.mark(stream), device.record(stream)
    device.add_doorbell(lambda: done.append(device.is_done(end)))
    gate.set()
    assert device.synchronize(device.record(stream), PATIENCE_SECONDS)
    device.close()
    assert mark.over.is_set()
    assert done == [True, True]


@pytest.mark.parametrize(
    ("page_bytes", "total_bytes", "is_shared"),
    [(32 << 20, 32 << 20, True), (31 << 20, 31 << 20, False), (1 << 16, 31 << 20, False), (1 << 15, 8 << 20, True)],
)
def test_a_thread_helps_with_small_pages_and_large_plans_and_ends_with_the_device(
    page_bytes: int, total_bytes: int, is_shared: bool
) -> None:
    others = set(threading.enumerate())
    device = HostDevice()
    stream = device.create_stream("large")
    source = np.ones(total_bytes, np.uint8)
    target = np.zeros_like(source)
    starts = range(0, total_bytes, page_bytes)
    copies = [(source.ctypes.data + start, target.ctypes.data + start, page_bytes) for start in starts]
    device.copy_batch(plan_of(Direction.LOAD, copies), stream)
    assert device.synchronize(device.record(stream), PATIENCE_SECONDS)
    helpers = [each for each in set(threading.enumerate()) - others if each.name == "aiokvoffload-copies"]
    assert len(helpers) == (is_shared and len(os.sched_getaffinity(0)) > 1)
    device.close()
    for helper in helpers:
        helper.join(PATIENCE_SECONDS)
        assert not helper.is_alive()
    assert np.array_equal(source, target)


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
