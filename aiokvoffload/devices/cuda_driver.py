"""The part of NVIDIA's driver API that a device needs, through ctypes.

Why the driver library, and neither torch nor cuda-python: everything above it then runs against a stand-in library
on any machine; numpy's address arrays go to the batched copy as they are, where cuda-python builds a list of objects
first; and the driver keeps no error pending that an unrelated call would meet later, as the runtime does.

Signatures are those of cuda.h, CUDA driver API 13.0, under the names that the library exports: a function that was
revised keeps its old form under the plain name, and the current one has the suffix that cuda.h adds by a macro.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import TypeVar

from aiokvoffload.devices.cuda_errors import CudaError
from aiokvoffload.errors import ConfigurationError

_Int, _Uint, _Size, _Pointer = ctypes.c_int, ctypes.c_uint, ctypes.c_size_t, ctypes.c_void_p
_DevicePointer, _Uint64 = ctypes.c_uint64, ctypes.c_uint64

PROTOTYPES: Mapping[str, tuple[type, ...]] = {
    "cuInit": (_Uint,),
    "cuDriverGetVersion": (_Pointer,),
    "cuGetErrorName": (_Int, _Pointer),
    "cuGetErrorString": (_Int, _Pointer),
    "cuGetProcAddress_v2": (_Pointer, _Pointer, _Int, _Uint64, _Pointer),
    "cuDeviceGet": (_Pointer, _Int),
    "cuDeviceGetCount": (_Pointer,),
    "cuDeviceGetAttribute": (_Pointer, _Int, _Int),
    "cuDevicePrimaryCtxRetain": (_Pointer, _Int),
    "cuDevicePrimaryCtxRelease_v2": (_Int,),
    "cuCtxGetCurrent": (_Pointer,),
    "cuCtxPushCurrent_v2": (_Pointer,),
    "cuCtxPopCurrent_v2": (_Pointer,),
    "cuThreadExchangeStreamCaptureMode": (_Pointer,),
    "cuStreamCreate": (_Pointer, _Uint),
    "cuStreamDestroy_v2": (_Pointer,),
    "cuStreamIsCapturing": (_Pointer, _Pointer),
    "cuStreamWaitEvent": (_Pointer, _Pointer, _Uint),
    "cuEventCreate": (_Pointer, _Uint),
    "cuEventDestroy_v2": (_Pointer,),
    "cuEventRecord": (_Pointer, _Pointer),
    "cuEventQuery": (_Pointer,),
    "cuEventElapsedTime": (_Pointer, _Pointer, _Pointer),
    "cuMemAlloc_v2": (_Pointer, _Size),
    "cuMemFree_v2": (_DevicePointer,),
    "cuMemHostRegister_v2": (_Pointer, _Size, _Uint),
    "cuMemHostUnregister": (_Pointer,),
    "cuMemcpyAsync": (_DevicePointer, _DevicePointer, _Size, _Pointer),
}
"""Argument types of every function; all return a `CUresult`. cuGetProcAddress_v2 came with CUDA 12.0."""

BATCH_PROTOTYPE = (_Pointer, _Pointer, _Pointer, _Size, _Pointer, _Pointer, _Size, _Pointer, _Pointer)
"""cuMemcpyBatchAsync as of 12.8: destinations, sources, sizes, their number, attributes, index of the first copy of
each, their number, where to put the index of a copy that failed, stream. The form of 13.0 has no such index."""

BATCH_VERSION = 12080
"""CUDA 12.8, which brought the batched copy; asking for this version also gives its form in later drivers."""

_Value = TypeVar("_Value")
_OPTIONAL = frozenset({"cuGetProcAddress_v2"})
_SUCCESS, _NOT_READY = 0, 600
_STREAM_NON_BLOCKING = 1
_HOST_REGISTER_PORTABLE, _HOST_REGISTER_MAPPED = 1, 2
_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEMORY = 91
_CAPTURE_STATUS_NONE = 0
_CAPTURE_MODE_RELAXED = 2


class MemoryLocation(ctypes.Structure):
    """CUmemLocation: a hint where managed or pageable memory lies; ignored for all other memory."""

    _fields_ = (("type", _Int), ("id", _Int))


class CopyAttributes(ctypes.Structure):
    """CUmemcpyAttributes: what holds for the copies of a batch."""

    _fields_ = (
        ("source_access_order", _Int),
        ("source_location_hint", MemoryLocation),
        ("destination_location_hint", MemoryLocation),
        ("flags", _Uint),
    )


class CudaDriver:
    """A loaded driver library; handles, addresses and contexts are plain numbers.

    Args:
        library: The library to load.

    Attributes:
        version: 1000 * major + 10 * minor of the CUDA version that the driver supports.
        batched_copy: The batched copy with `BATCH_PROTOTYPE`, or None where the driver is too old; returns its code.

    Raises:
        ConfigurationError: There is no such library, or it cannot drive any GPU.
    """

    def __init__(self, library: str | os.PathLike[str] = "libcuda.so.1") -> None:
        try:
            loaded = ctypes.CDLL(os.fspath(library))
            self._functions = {name: _declare(loaded, name) for name in PROTOTYPES if _has(loaded, name)}
        except (OSError, AttributeError) as exc:
            raise ConfigurationError(
                f"the NVIDIA driver cannot be used: {exc}; install it, or give device='host' for CPU tensors"
            ) from exc
        try:
            self.call("cuInit", 0)
        except CudaError as exc:
            raise ConfigurationError(str(exc)) from exc
        self.version = self._get("cuDriverGetVersion", _Int())
        self.batched_copy = self._find_batched_copy()

    def call(self, name: str, *arguments: object) -> None:
        """Call a function.

        Raises:
            CudaError: It returned an error.
        """
        code = self._functions[name](*arguments)
        if code:
            raise self.error(name, code)

    def error(self, name: str, code: int) -> CudaError:
        """Return the error for a code that the function `name` returned."""
        texts = (self._text(function, code) for function in ("cuGetErrorName", "cuGetErrorString"))
        return CudaError(name.split("_")[0], code, ": ".join(filter(None, texts)) or "an unknown error")

    # Devices and contexts

    def device(self, ordinal: int) -> int:
        """Return the device with that number, among those that CUDA_VISIBLE_DEVICES shows.

        Raises:
            ConfigurationError: There is no such device.
        """
        count = self._get("cuDeviceGetCount", _Int())
        if not 0 <= ordinal < count:
            raise ConfigurationError(f"there is no GPU {ordinal}: the driver shows {count}; see CUDA_VISIBLE_DEVICES")
        return self._get("cuDeviceGet", _Int(), ordinal)

    def can_use_host_pointer(self, device: int) -> bool:
        """Return whether the GPU knows registered host memory by the addresses that the CPU uses."""
        return bool(self._get("cuDeviceGetAttribute", _Int(), _CAN_USE_HOST_POINTER_FOR_REGISTERED_MEMORY, device))

    def retain_primary_context(self, device: int) -> int:
        """Return the context that torch and the CUDA runtime use too; to be released once."""
        return self._get_handle("cuDevicePrimaryCtxRetain", device)

    def release_primary_context(self, device: int) -> None:
        """Give the context back."""
        self.call("cuDevicePrimaryCtxRelease_v2", device)

    def current_context(self) -> int | None:
        """Return the calling thread's context, if it has one."""
        return self._get("cuCtxGetCurrent", _Pointer())

    # Streams and events

    def create_stream(self) -> int:
        """Return a new stream, which does not wait for the legacy default stream."""
        return self._get_handle("cuStreamCreate", _STREAM_NON_BLOCKING)

    def is_capturing(self, stream: int) -> bool:
        """Return whether what is put into `stream` becomes part of a CUDA graph instead of running."""
        status = _Int()
        self.call("cuStreamIsCapturing", stream, ctypes.byref(status))
        return status.value != _CAPTURE_STATUS_NONE

    def create_event(self) -> int:
        """Return a new event that notes the time."""
        return self._get_handle("cuEventCreate", 0)

    def is_event_done(self, event: int) -> bool:
        """Return whether the work before the last record of `event` is over."""
        code = self._functions["cuEventQuery"](event)
        if code == _NOT_READY:
            return False
        if code != _SUCCESS:
            raise self.error("cuEventQuery", code)
        return True

    def elapsed_seconds(self, start: int, end: int) -> float:
        """Return the time between two events that are done; it counts in half microseconds."""
        return self._get("cuEventElapsedTime", ctypes.c_float(), start, end) / 1000

    # Memory

    def register(self, address: int, byte_count: int) -> None:
        """Lock host memory, for every context, and make it visible to the GPU."""
        self.call("cuMemHostRegister_v2", address, byte_count, _HOST_REGISTER_PORTABLE | _HOST_REGISTER_MAPPED)

    def allocate(self, byte_count: int) -> int:
        """Return the address of new device memory."""
        return self._get("cuMemAlloc_v2", _DevicePointer(), byte_count)

    # Inside

    def _get(self, name: str, result: ctypes._SimpleCData[_Value], *arguments: object) -> _Value:
        """Call a function that writes its result through its first argument."""
        self.call(name, ctypes.byref(result), *arguments)
        return result.value

    def _get_handle(self, name: str, *arguments: object) -> int:
        return self._get(name, _Pointer(), *arguments) or 0

    def _find_batched_copy(self) -> Callable[..., int] | None:
        if self.version < BATCH_VERSION or "cuGetProcAddress_v2" not in self._functions:
            return None
        found, status = _Pointer(), _Int()
        self.call(
            "cuGetProcAddress_v2", b"cuMemcpyBatchAsync", ctypes.byref(found), BATCH_VERSION, 0, ctypes.byref(status)
        )
        return ctypes.CFUNCTYPE(_Int, *BATCH_PROTOTYPE)(found.value) if found.value else None

    def _text(self, name: str, code: int) -> str | None:
        text = ctypes.c_char_p()
        self._functions[name](code, ctypes.byref(text))
        return text.value.decode() if text.value else None


class CurrentContext:
    """Makes a context current in the calling thread while it is entered, and leaves the thread as it was.

    Calls inside do not spoil a CUDA graph that is being captured meanwhile, here or in another thread: in the mode in
    which threads are by default, even to query an event would.
    """

    __slots__ = ("_capture_mode", "_context", "_driver", "_is_pushed")

    def __init__(self, driver: CudaDriver, context: int) -> None:
        self._driver = driver
        self._context = context
        self._is_pushed = False
        self._capture_mode = _Int(_CAPTURE_MODE_RELAXED)

    def __enter__(self) -> None:
        """Push the context unless it is current already, as it is in an engine's own thread."""
        if self._driver.current_context() != self._context:
            self._driver.call("cuCtxPushCurrent_v2", self._context)
            self._is_pushed = True
        self._driver.call("cuThreadExchangeStreamCaptureMode", ctypes.byref(self._capture_mode))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Pop it again."""
        self._driver.call("cuThreadExchangeStreamCaptureMode", ctypes.byref(self._capture_mode))
        if self._is_pushed:
            self._driver.call("cuCtxPopCurrent_v2", None)


def _has(library: ctypes.CDLL, name: str) -> bool:
    return name not in _OPTIONAL or hasattr(library, name)


def _declare(library: ctypes.CDLL, name: str) -> Callable[..., int]:
    function = getattr(library, name)
    function.argtypes = PROTOTYPES[name]
    function.restype = _Int
    declared: Callable[..., int] = function
    return declared
