"""The CUDA device keeps the contract, on the stand-in driver."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from cuda_rig import StandIn, hold

from aiokvoffload.devices.base import Device, Stream
from aiokvoffload.devices.cuda import CudaDevice
from aiokvoffload.devices.cuda_copy import LoopCopier
from aiokvoffload.testing.device_contract import DeviceContract


class TestCudaDevice(DeviceContract):
    @pytest.fixture(autouse=True)
    def _load(self, stand_in: StandIn) -> None:
        self.stand_in = stand_in

    def make_device(self) -> CudaDevice:
        return self.stand_in.device()

    def hold(self, device: Device, stream: Stream) -> Callable[[], None]:
        assert isinstance(device, CudaDevice)
        return hold(self.stand_in.library, device, stream)


class TestCudaDeviceWithSmallBatches(TestCudaDevice):
    def make_device(self) -> CudaDevice:
        return self.stand_in.device(most_descriptors=7)


class TestCudaDeviceOnAnOldDriver(TestCudaDevice):
    def make_device(self) -> CudaDevice:
        self.stand_in.set_driver_version(12040)
        return self.stand_in.device()


class TestCudaDeviceWithAKernel(TestCudaDevice):
    def make_device(self) -> CudaDevice:
        return self.stand_in.device(kernel=LoopCopier(self.stand_in.driver()), kernel_up_to_bytes=65536)
