"""Sizes and durations. Sizes are also tested where the command line reads them."""

from __future__ import annotations

import pytest

from aiokvoffload.errors import ConfigurationError
from aiokvoffload.units import parse_byte_size, parse_duration_seconds


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("10", 10.0), ("0.5s", 0.5), ("200ms", 0.2), ("5m", 300.0), ("2h", 7200.0), ("1d", 86400.0), (" 1.5 S ", 1.5)],
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration_seconds(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "s", "-1", "1w", "0", "0ms", "1 s s", "nan", "inf"])
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(ConfigurationError, match="is no duration; give seconds or a number with ms, s, m, h or d"):
        parse_duration_seconds(text)


def test_sizes() -> None:
    assert parse_byte_size("1.5 GiB") == 3 << 29
