"""Every error of the library.

::

    OffloadError
    ├── ConfigurationError      a setting that cannot work        (ValueError)
    ├── LayoutError             a KV cache that cannot be viewed  (ValueError)
    ├── InvalidRequestError     an argument of one call           (ValueError)
    ├── TraceError              a line of a request trace         (ValueError)
    ├── StateError              a call at the wrong moment        (RuntimeError)
    │   ├── WrongThreadError    from a thread or process that does not own the object
    │   └── ClosedError         after the object was closed
    │       └── RankLostError   after a worker process of the engine has gone
    ├── DeviceError             the device refused or failed work (RuntimeError)
    ├── PartialCopyError        the device took only a part of the copies (RuntimeError)
    └── BlocksInFlightError     a copy outlived its deadline; names the GPU blocks (RuntimeError)

Lack of room, a block that is gone and a tier that is down are results, never exceptions.
"""

from __future__ import annotations

from collections.abc import Iterable


class OffloadError(Exception):
    """Base of all errors raised by this library."""


class ConfigurationError(OffloadError, ValueError):
    """A setting that cannot work; the message says which values can."""


class LayoutError(OffloadError, ValueError):
    """A tensor that cannot be viewed as `(block_count, page_bytes)` without a copy."""


class InvalidRequestError(OffloadError, ValueError):
    """An argument of one call is wrong; nothing was changed by the call."""


class TraceError(OffloadError, ValueError):
    """A request trace that cannot be read; the message names file, line and reason."""


class StateError(OffloadError, RuntimeError):
    """A call that is not possible at this moment; the message says what to do first."""


class WrongThreadError(StateError):
    """A call from a thread, event loop or process that does not own the object."""


class ClosedError(StateError):
    """A call on an object that has been closed."""


class RankLostError(ClosedError):
    """A worker process of the engine has gone; the message names it."""


class DeviceError(OffloadError, RuntimeError):
    """The device refused work or reported that work has failed."""


class PartialCopyError(OffloadError, RuntimeError):
    """The device refused a batch of copies after it may have taken a part, which runs.

    No `DeviceError`, after which none of a refused batch runs: the memory stays in use until the stream gets there.
    """


class BlocksInFlightError(OffloadError, RuntimeError):
    """A copy has not landed by its deadline, so its GPU blocks are still in use.

    Retire `gpu_blocks` until the late landing: it is reported by the handle's `on_idle`.
    """

    def __init__(self, gpu_blocks: Iterable[int], seconds: float, awaited: str = "") -> None:
        self.gpu_blocks = frozenset(gpu_blocks)
        named = ", ".join(map(str, sorted(self.gpu_blocks)[:8]))
        more = len(self.gpu_blocks) - 8
        who = f" ({awaited})" if awaited else ""
        super().__init__(
            f"a copy has not landed within {seconds:g} s{who}; do not reuse GPU blocks {named}"
            + (f" and {more} more" if more > 0 else "")
            + " until its handle reports on_idle"
        )
