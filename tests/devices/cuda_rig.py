"""A driver library that stands in for NVIDIA's, built from C by the tests, and what they do to streams."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Callable
from enum import IntEnum
from pathlib import Path

import pytest

from aiokvoffload.devices.base import CopyPlan, SimulatedDevice, Stream
from aiokvoffload.devices.cuda import CudaDevice
from aiokvoffload.devices.cuda_copy import Copier, LoopCopier, SourceOrder
from aiokvoffload.devices.cuda_driver import CudaDriver
from aiokvoffload.devices.cuda_streams import CudaStream

SOURCE = Path(__file__).parent / "standin" / "standin_cuda.c"
NVIDIA_HEADERS = Path(os.environ.get("CUDA_INCLUDE", "/usr/local/cuda/include"))
"""Where NVIDIA's `cuda.h` is, of a toolkit or of the package `nvidia-cuda-runtime`."""
SEMAPHORE_BYTES = 64

Fate = Callable[[CopyPlan], CopyPlan]
"""What becomes of a batch of copies."""

_HostFunction = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_KEPT: list[object] = []
"""Host functions. A thread of the driver may be about to return from one when nobody else knows it any more."""


def build_stand_in(directory: Path, *options: str) -> Path:
    """Compile the stand-in, and skip the test where there is no compiler."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler (cc) to build the stand-in driver with")
    library = directory / "libstandin_cuda.so"
    flags = ["-std=gnu11", "-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-fvisibility=hidden", "-pthread"]
    command = [compiler, *flags, *options, str(SOURCE), "-o", str(library)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return library


class Count(IntEnum):
    """What the stand-in counts."""

    BATCH_CALLS = 0
    SINGLE_CALLS = 1
    LARGEST_BATCH = 2
    EARLY_READS = 3
    STREAMS = 4
    EVENTS = 5
    REGISTRATIONS = 6
    RETAINED_CONTEXTS = 7


class StandIn:
    """Controls the stand-in driver library, of which a process has one."""

    def __init__(self, library: Path) -> None:
        self.library = ctypes.CDLL(str(library))
        self.library.standin_count.restype = ctypes.c_long
        self.library.standin_break.argtypes = (ctypes.c_void_p, ctypes.c_int)
        self.library.standin_set_capturing.argtypes = (ctypes.c_void_p, ctypes.c_int)
        self._path = library

    def reset(self) -> None:
        """Forget faults, counts and settings."""
        self.library.standin_reset()

    def driver(self) -> CudaDriver:
        """Load it as a driver."""
        return CudaDriver(self._path)

    def device(
        self,
        *,
        most_descriptors: int = 4096,
        kernel: Copier | None = None,
        kernel_up_to_bytes: int | None = 0,
        close_timeout_seconds: float = 5.0,
    ) -> CudaDevice:
        """Return a GPU whose memory is the host's."""
        return CudaDevice(
            driver=self.driver(),
            tensor_kind="cpu",
            most_descriptors=most_descriptors,
            kernel=kernel,
            kernel_up_to_bytes=kernel_up_to_bytes,
            close_timeout_seconds=close_timeout_seconds,
        )

    def set_driver_version(self, version: int) -> None:
        """Be the driver of a CUDA version, 1000 * major + 10 * minor."""
        self.library.standin_set_driver_version(version)

    def set_can_use_host_pointer(self, value: bool) -> None:
        """Know host memory by the CPU's addresses, or not."""
        self.library.standin_set_can_use_host_pointer(int(value))

    def fail_call(self, name: str, code: int, *, after: int = 0) -> None:
        """Let one call of a function return an error."""
        self.library.standin_fail_call(name.encode(), after, code)

    def break_context(self, stream: Stream, code: int) -> None:
        """Break the context for good once the stream gets there."""
        assert isinstance(stream, CudaStream)
        self.library.standin_break(stream.handle, code)

    def capture(self, stream: Stream) -> None:
        """Let the stream be captured into a graph."""
        assert isinstance(stream, CudaStream)
        self.library.standin_set_capturing(stream.handle, 1)

    def count(self, which: Count) -> int:
        """Return a count."""
        found: int = self.library.standin_count(which)
        return found


def hold(library: ctypes.CDLL, device: CudaDevice, stream: Stream) -> Callable[[], None]:
    """Let a stream of a GPU, or of the stand-in, wait for a semaphore; return what posts it.

    The host function is the C library's own, so that no Python runs in the driver's thread.
    """
    assert isinstance(stream, CudaStream)
    c_library = ctypes.CDLL(None)
    semaphore = ctypes.create_string_buffer(SEMAPHORE_BYTES)
    c_library.sem_init(semaphore, 0, 0)
    wait = ctypes.cast(c_library.sem_wait, ctypes.c_void_p)
    library.cuLaunchHostFunc.argtypes = (ctypes.c_void_p,) * 3
    with device.current_context():
        assert library.cuLaunchHostFunc(stream.handle, wait, ctypes.addressof(semaphore)) == 0

    def release() -> None:
        c_library.sem_post(semaphore)

    return release


class FakeKernel(LoopCopier):
    """Copies as the driver does, notes what, and does as it is told.

    Args:
        driver: Copies.
        fate: Changes what it copies, or raises.
    """

    def __init__(self, driver: CudaDriver, fate: Fate = lambda plan: plan) -> None:
        super().__init__(driver)
        self.plans: list[CopyPlan] = []
        self._fate = fate

    def submit(self, plan: CopyPlan, order: SourceOrder, stream: int) -> None:
        self.plans.append(plan)
        super().submit(self._fate(plan), order, stream)


class StandInGpu(CudaDevice, SimulatedDevice):
    """The CUDA device on the stand-in driver, with kernels that are Python code."""

    def __init__(self, stand_in: StandIn) -> None:
        super().__init__(driver=stand_in.driver(), tensor_kind="cpu", kernel_up_to_bytes=0)
        self.failures: list[BaseException] = []
        self._library = stand_in.library
        self._library.cuLaunchHostFunc.argtypes = (ctypes.c_void_p,) * 3

    def launch(self, stream: Stream, work: Callable[[], None]) -> None:
        """Put work into a stream; what it raises is kept."""
        owned = self.adopt_stream(stream)

        def run(_argument: object) -> None:
            try:
                work()
            except BaseException as exc:  # noqa: BLE001  the driver's thread cannot raise
                self.failures.append(exc)

        function = _HostFunction(run)
        _KEPT.append(function)
        with self.current_context():
            assert self._library.cuLaunchHostFunc(owned.handle, ctypes.cast(function, ctypes.c_void_p), None) == 0
