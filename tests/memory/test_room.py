"""How much memory there is to have."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from aiokvoffload.memory.room import available_bytes, free_bytes_of

MEMINFO = "MemTotal:       100 kB\nMemFree:         10 kB\nMemAvailable:    50 kB\n"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, None),
        ({"meminfo": MEMINFO}, 51_200),
        ({"meminfo": MEMINFO, "memory.max": "max\n", "memory.current": "1\n"}, 51_200),
        ({"meminfo": MEMINFO, "memory.max": "40000\n", "memory.current": "15000\n"}, 25_000),
        (
            {
                "memory.max": "40000\n",
                "memory.current": "15000\n",
                "memory.stat": "anon 1\ninactive_file 4000\nfile 9\n",
            },
            29_000,
        ),
        ({"meminfo": MEMINFO, "memory.max": "40000\n", "memory.current": "45000\n"}, 0),
        ({"meminfo": "nothing one could read"}, None),
    ],
)
def test_the_tighter_of_machine_and_container_counts(
    tmp_path: Path, files: dict[str, str], expected: int | None
) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert available_bytes(meminfo=tmp_path / "meminfo", control_group=tmp_path) == expected


def test_this_machine_says() -> None:
    available = available_bytes()
    assert available is None or available > 0


def test_the_room_of_a_file_system_is_that_of_this_user(tmp_path: Path) -> None:
    status = os.statvfs(tmp_path)
    assert 0 < free_bytes_of(tmp_path) <= status.f_frsize * status.f_bfree
