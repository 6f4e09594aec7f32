"""Offloaders, and a whole replay, over the CUDA device on the stand-in driver."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import anyio
import numpy as np
import pytest
import torch
from cuda_rig import Count, StandIn, StandInGpu, hold
from gpu_suite import PATIENCE_SECONDS, Gpu, GpuSuite, bandwidths

from aiokvoffload import open_offloader
from aiokvoffload.cli.options import ReplayOptions
from aiokvoffload.cli.replay import Replay
from aiokvoffload.cli.requests import requests_of
from aiokvoffload.devices.base import Event, Stream
from aiokvoffload.testing.asserts import assert_idle
from aiokvoffload.testing.order import OrderChecker


class SimulatedGpu(Gpu):
    """The stand-in as a GPU, whose kernels wait for a gate."""

    tensor_device = "cpu"

    def __init__(self, device: StandInGpu) -> None:
        self.device: StandInGpu = device
        self.compute_stream: Stream = device.create_stream("compute")

    def launch_late(self, work: Callable[[], object]) -> Callable[[], None]:
        gate = threading.Event()

        def wait_and_work() -> None:
            assert gate.wait(PATIENCE_SECONDS)
            work()

        self.device.launch(self.compute_stream, wait_and_work)
        return gate.set

    def synchronize(self) -> None:
        assert self.device.synchronize(self.device.record(self.compute_stream), PATIENCE_SECONDS)


class TestOnTheStandIn(GpuSuite):
    @pytest.fixture
    def gpu(self, stand_in: StandIn) -> Iterator[SimulatedGpu]:
        device = StandInGpu(stand_in)
        yield SimulatedGpu(device)
        device.close()
        assert device.failures == []
        assert stand_in.count(Count.REGISTRATIONS) == 0


def test_blocks_of_a_batch_refused_in_the_middle_are_in_use_until_its_part_has_landed(stand_in: StandIn) -> None:
    device = stand_in.device(most_descriptors=1)
    compute_stream = device.create_stream("compute")
    layers = [torch.zeros((4, 64)) for _ in range(2)]
    context = open_offloader(layers, cpu_bytes=1 << 16, device=device, compute_stream=compute_stream)
    with context as offloader:
        release = hold(stand_in.library, device, compute_stream)
        stand_in.fail_call("cuMemcpyBatchAsync", 1, after=1)
        handle = offloader.store_soon(offloader.keys(range(16)), [2])
        offloader.poll()
        assert not handle.is_idle
        assert offloader.gpu_blocks_in_flight() == {2}
        release()
        result = handle.wait(timeout_seconds=PATIENCE_SECONDS)
        assert not result.success
        assert "not have been taken whole" in str(result)
        assert_idle(offloader)
    device.close()


class WaitsForNothing(StandInGpu):
    """A device that forgets the waits between its streams."""

    def wait_event(self, stream: Stream, event: Event) -> None:
        """Do not wait."""


class LateGpu(SimulatedGpu):
    """A GPU whose kernels begin once all copies are over, which they are if nothing waits."""

    def launch_late(self, work: Callable[[], object]) -> Callable[[], None]:
        end = super().launch_late(work)

        def wait_for_copies() -> None:
            assert self.device._drain(PATIENCE_SECONDS)
            end()

        return wait_for_copies


@pytest.mark.parametrize("test", ["store_takes", "load_overwrites"])
def test_a_forgotten_wait_is_found(stand_in: StandIn, test: str) -> None:
    device = WaitsForNothing(stand_in)
    gpu = LateGpu(device)
    layer = torch.zeros((32, 16 * 1024), dtype=torch.uint8)
    suite = TestOnTheStandIn()
    found = {
        "store_takes": suite.test_a_store_takes_what_the_compute_stream_will_have_written,
        "load_overwrites": suite.test_a_load_overwrites_what_the_compute_stream_has_written_before,
    }[test]
    context = open_offloader(
        [layer], cpu_bytes=4 << 20, block_tokens=4, device=device, compute_stream=gpu.compute_stream
    )
    with context as offloader, pytest.raises(AssertionError):
        found(gpu, layer, offloader)
    device.close()


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
@pytest.mark.parametrize("driver_version", [13000, 12040])
def test_a_replay_reads_right_bytes_in_the_right_order(stand_in: StandIn, backend: str, driver_version: int) -> None:
    stand_in.set_driver_version(driver_version)
    options = ReplayOptions(limit=60, cpu_blocks=60, page_bytes=512, layers=3, block_size_factor=2)
    device = StandInGpu(stand_in)
    replay = Replay(options, requests_of(options), OrderChecker(device))
    report = anyio.run(replay.run, backend=backend)
    assert (report.mismatches, report.order_violations) == (0, 0)
    assert report.blocks_verified == report.blocks_hit > 50
    assert report.evictions > 0
    assert (report.left_pinned, report.left_leased) == (0, 0)
    assert device.failures == []
    assert stand_in.count(Count.REGISTRATIONS) == 0
    calls = (stand_in.count(Count.BATCH_CALLS), stand_in.count(Count.SINGLE_CALLS))
    assert [count > 0 for count in calls] == [driver_version == 13000, driver_version == 12040]


def test_bandwidths_are_measured(stand_in: StandIn) -> None:
    device = StandInGpu(stand_in)
    gpu_memory = np.zeros(2 << 20, np.uint8)
    table = bandwidths(device, gpu_memory.ctypes.data, 1 << 20, [4096, 65536])
    assert [(row.direction.name, row.copy_bytes) for row in table] == [
        (direction, size) for direction in ("STORE", "LOAD") for size in (4096, 65536)
    ]
    assert all(row.gigabytes_per_second > 0 for row in table)
    device.close()
