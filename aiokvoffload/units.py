"""Sizes and durations as people write them."""

from __future__ import annotations

import re
from decimal import Decimal

from aiokvoffload.errors import ConfigurationError

_BYTE_UNITS = {
    "": 1,
    "b": 1,
    **{f"{letter}b": 1000**power for power, letter in enumerate("kmgt", start=1)},
    **{f"{letter}ib": 1024**power for power, letter in enumerate("kmgt", start=1)},
}
_SECOND_UNITS = {"ms": 0.001, "": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_NUMBER_AND_UNIT = re.compile(r"\s*([0-9]{1,30}(?:\.[0-9]{1,30})?)\s*([A-Za-z]*)\s*")


def parse_byte_size(text: str) -> int:
    """Return the bytes meant by `1048576`, `64MiB`, `1.5 GiB` or `1GB`; upper and lower case are the same.

    Raises:
        ConfigurationError: The text is no such size, or not a whole number of bytes of at least 1.
    """
    match = _NUMBER_AND_UNIT.fullmatch(text)
    factor = _BYTE_UNITS.get(match[2].lower()) if match else None
    if match is None or factor is None:
        raise ConfigurationError(
            f"{text!r} is no size; give bytes or a number with kB, MB, GB, TB, KiB, MiB, GiB or TiB, such as 64MiB"
        )
    size = int(Decimal(match[1]) * factor)
    if size < 1:
        raise ConfigurationError(f"{text!r} is less than one byte")
    return size


def parse_duration_seconds(text: str) -> float:
    """Return the seconds meant by `10`, `0.5s`, `200ms`, `5m`, `2h` or `1d`.

    Raises:
        ConfigurationError: The text is no such duration, or no time at all.
    """
    match = _NUMBER_AND_UNIT.fullmatch(text)
    factor = _SECOND_UNITS.get(match[2].lower()) if match else None
    if match is None or factor is None or not float(match[1]):
        raise ConfigurationError(
            f"{text!r} is no duration; give seconds or a number with ms, s, m, h or d, such as 10s"
        )
    return float(match[1]) * factor
