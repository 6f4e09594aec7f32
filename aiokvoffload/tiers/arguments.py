"""The arguments of one call, checked before anything is begun."""

from __future__ import annotations

from collections.abc import Sequence

from aiokvoffload.errors import InvalidRequestError
from aiokvoffload.keys import OffloadKey
from aiokvoffload.tiers.calls import Use

MAX_KEY_BYTES = 1024

Buffer = bytes | bytearray | memoryview
"""Anything else with the buffer protocol goes through `memoryview` first."""
Keys = Sequence[OffloadKey]


def check_keys(keys: Keys) -> None:
    """Refuse what cannot be a key.

    Raises:
        InvalidRequestError: A key is not `bytes`, empty, or too long for a header.
    """
    for key in keys:
        if not isinstance(key, bytes) or not 0 < len(key) <= MAX_KEY_BYTES:
            raise InvalidRequestError(f"a key is 1 to {MAX_KEY_BYTES} bytes, not {key!r:.80}")


def use_of(keys: Keys, request_id: str | None, depths: Sequence[int] | None) -> Use:
    """Return the use that a call stands for; without a request it is one of its own."""
    if depths is not None and len(depths) != len(keys):
        raise InvalidRequestError(f"there are {len(depths)} depths for {len(keys)} keys; give one for each")
    return Use(object() if request_id is None else request_id, depths)


def views_of(keys: Keys, buffers: Sequence[Buffer], *, is_written: bool) -> list[memoryview]:
    """Return the buffers as flat bytes."""
    if len(buffers) != len(keys):
        raise InvalidRequestError(f"there are {len(buffers)} buffers for {len(keys)} keys; give one for each")
    views = []
    for buffer in buffers:
        try:
            view = memoryview(buffer).cast("B")
        except TypeError as exc:
            raise InvalidRequestError(f"a buffer must be contiguous memory: {exc}") from exc
        if not view.nbytes or (is_written and view.readonly):
            raise InvalidRequestError(
                "a buffer to read into must be writable and not empty" if is_written else "a block must not be empty"
            )
        views.append(view)
    return views
