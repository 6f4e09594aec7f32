"""The CUDA device on a GPU: `pytest -m gpu` runs all of this."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator

import anyio
import numpy as np
import pytest
import torch
from cuda_rig import hold
from gpu_suite import Gpu, GpuSuite, bandwidths
from numpy.typing import NDArray

from aiokvoffload import open_offloader
from aiokvoffload.devices.base import Device, Direction, Stream, device_for_tensors
from aiokvoffload.devices.cuda import CudaDevice
from aiokvoffload.devices.cuda_calibration import SIZES
from aiokvoffload.devices.cuda_copy import LoopCopier
from aiokvoffload.devices.cuda_driver import CudaDriver
from aiokvoffload.testing.device_contract import DeviceContract
from aiokvoffload.testing.device_memory import DeviceMemory

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
]

LONG_CYCLES = 200_000_000
"""About a tenth of a second, and far longer than it takes to ask for a transfer."""
TOTAL_BYTES = 256 << 20
LARGE_COPY_BYTES = 256 << 10
LEAST_SHARE = 0.9


class TensorMemory(DeviceMemory):
    """Memory of the GPU, by way of torch."""

    def __init__(self, content: NDArray[np.uint8]) -> None:
        self._tensor = torch.from_numpy(content).cuda()
        torch.cuda.synchronize()

    @property
    def address(self) -> int:
        return self._tensor.data_ptr()

    def read(self) -> NDArray[np.uint8]:
        return self._tensor.cpu().numpy()


class TestContract(DeviceContract):
    def make_device(self) -> CudaDevice:
        return CudaDevice()

    def make_device_memory(self, device: Device, content: NDArray[np.uint8]) -> TensorMemory:
        return TensorMemory(content)

    def make_host_memory(self, content: NDArray[np.uint8]) -> NDArray[np.uint8]:
        pinned: NDArray[np.uint8] = torch.from_numpy(content).pin_memory().numpy()
        return pinned

    def hold(self, device: Device, stream: Stream) -> Callable[[], None]:
        assert isinstance(device, CudaDevice)
        return hold(ctypes.CDLL("libcuda.so.1"), device, stream)


class TestContractOneByOne(TestContract):
    def make_device(self) -> CudaDevice:
        device = CudaDevice()
        device._engine = LoopCopier(CudaDriver())
        return device


class TorchGpu(Gpu):
    """A GPU and a stream of torch's that computes."""

    tensor_device = "cuda:0"

    def __init__(self, device: CudaDevice, compute_stream: torch.cuda.Stream) -> None:
        self.device = device
        self.compute_stream = compute_stream
        self._torch_stream = compute_stream

    def launch_late(self, work: Callable[[], object]) -> Callable[[], None]:
        with torch.cuda.stream(self._torch_stream):
            torch.cuda._sleep(LONG_CYCLES)  # type: ignore[no-untyped-call]
            work()
        return lambda: None

    def synchronize(self) -> None:
        torch.cuda.synchronize()


@pytest.fixture(params=["a stream of its own", "legacy default stream"])
def compute_stream(request: pytest.FixtureRequest) -> torch.cuda.Stream:
    if request.param == "a stream of its own":
        return torch.cuda.Stream()  # type: ignore[no-untyped-call]
    return torch.cuda.default_stream()


class TestOffloading(GpuSuite):
    @pytest.fixture
    def gpu(self, compute_stream: torch.cuda.Stream) -> Iterator[TorchGpu]:
        device = device_for_tensors("cuda", 0)
        assert isinstance(device, CudaDevice)
        yield TorchGpu(device, compute_stream)
        device.close()


def test_calibration_ends_with_a_choice(capsys: pytest.CaptureFixture[str]) -> None:
    device = CudaDevice()
    device.prepare({min(SIZES)})
    with capsys.disabled():
        limits = {direction.value: limit for direction, limit in device.kernel_limits.items()}
        print(f"\nup to so many bytes per copy a kernel is faster: {limits}")
    assert all(limit in (0, *SIZES) for limit in device.kernel_limits.values())
    device.close()


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_an_offloader_opens_and_tries_the_kernel_off_the_event_loop(backend: str) -> None:
    layer = torch.randint(0, 256, (8, min(SIZES)), dtype=torch.uint8, device="cuda")
    kept = layer.clone()
    threads: set[int] = set()

    async def store_and_load() -> None:
        async with open_offloader(
            [layer],
            cpu_bytes=4 << 20,
            compute_stream=torch.cuda.current_stream(),
            on_progress=lambda _: threads.add(threading.get_ident()),
        ) as offloader:
            keys = offloader.keys(range(64))
            await offloader.store(keys, [0, 1, 2, 3])
            assert await offloader.load(keys, [4, 5, 6, 7]) == 64

    anyio.run(store_and_load, backend=backend)
    torch.cuda.synchronize()
    assert torch.equal(layer[4:], kept[:4])
    assert threading.get_ident() not in threads


@pytest.mark.parametrize("kernel_up_to_bytes", [0, max(SIZES)], ids=["copy engines", "kernel"])
def test_bandwidth_by_copy_size(capsys: pytest.CaptureFixture[str], kernel_up_to_bytes: int) -> None:
    """The table of docs/performance.md."""
    device = CudaDevice(kernel_up_to_bytes=kernel_up_to_bytes)
    device.prepare({min(SIZES)})
    memory = torch.zeros(2 * TOTAL_BYTES, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    table = bandwidths(device, memory.data_ptr(), TOTAL_BYTES, [size << 10 for size in (4, 16, 64, 256, 1024, 4096)])
    with capsys.disabled():
        print(f"\n| direction | KiB per copy | GB/s | share of contiguous | kernel up to {kernel_up_to_bytes} |")
        for row in table:
            print(
                f"| {row.direction.value} | {row.copy_bytes >> 10} | {row.gigabytes_per_second:.1f} "
                f"| {row.share_of_contiguous:.0%} | |"
            )
    device.close()
    if not kernel_up_to_bytes:
        large = [row for row in table if row.copy_bytes >= LARGE_COPY_BYTES]
        assert {row.direction for row in large} == set(Direction)
        assert min(row.share_of_contiguous for row in large) >= LEAST_SHARE
