"""What to do about the errors of the CUDA driver."""

from __future__ import annotations

from collections.abc import Mapping

from aiokvoffload.errors import DeviceError

_STICKY = (
    "the GPU's context is broken and every later call fails too: restart the process, and look for what broke it in "
    "the engine's own kernels first (compute-sanitizer, CUDA_LAUNCH_BLOCKING=1)"
)
_CAPTURED = "a CUDA graph is being captured: store and load outside of the capture"

REMEDIES: Mapping[int, str] = {
    1: "an address is not one that the GPU can copy, or a copy crosses the edge of registered memory",
    2: "free GPU memory, or lock less host memory (see `ulimit -l` and the limits of the container)",
    3: "the driver was not initialised: a forked child cannot use it, start workers by spawn",
    4: "the driver has shut down: close the device before the process ends",
    34: "a stub library was loaded: take the build stubs out of LD_LIBRARY_PATH",
    46: "another process uses the GPU exclusively: see nvidia-smi",
    100: "no GPU is visible: see nvidia-smi and CUDA_VISIBLE_DEVICES, or give device='host' for CPU tensors",
    101: "there is no such GPU: see CUDA_VISIBLE_DEVICES",
    201: "no context is current: the driver may have been shut down, or the process has forked",
    400: "a stream or event was destroyed too early, or belongs to another GPU",
    600: "the work is not over yet: ask is_done() first",
    709: "the context is gone: close the device before the engine shuts CUDA down",
    712: "unregister it first; ranges lock whole pages, so two of them cannot share one",
    713: "only a range that was registered can be unregistered, by its first address",
    800: "the system does not allow it: see the limits of the container",
    801: "this driver or GPU cannot do it",
    803: "driver library and kernel module differ: reboot after a driver update",
    804: "the GPU does not support the driver's forward compatibility: install a newer driver",
    999: "see `dmesg` for messages of the driver (Xid)",
}
"""Remedies by `CUresult`."""

STICKY_CODES = frozenset({226, 700, 702, 710, 714, 715, 716, 717, 718, 719, 721, 810, 911})
"""Those of which cuda.h says that the context cannot be used any more."""
_GONE = frozenset({4, 709})
"""The driver, or the context, has been shut down."""


class CudaError(DeviceError):
    """A call of the driver failed.

    Args:
        function: Which one.
        code: Its `CUresult`.
        meaning: What the driver says of the code.
    """

    def __init__(self, function: str, code: int, meaning: str) -> None:
        super().__init__(f"{function} failed with {meaning} ({code}); {remedy_for(code)}")
        self.code = code

    @property
    def has_ended_all_work(self) -> bool:
        """Nothing runs on the GPU for this process any more."""
        return self.code in STICKY_CODES or self.code in _GONE


def remedy_for(code: int) -> str:
    """Return what to do about an error of the driver."""
    if code in STICKY_CODES:
        return _STICKY
    if 900 <= code <= 908:
        return _CAPTURED
    return REMEDIES.get(code, "see the CUDA driver API's list of CUresult codes")
