"""How much memory there is to have: asked before it is taken, because a kernel that runs out kills somebody."""

from __future__ import annotations

import os
import re
from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
_CONTROL_GROUP = Path("/sys/fs/cgroup")


def free_bytes_of(directory: Path) -> int:
    """Return how many bytes a file system has left for this user."""
    status = os.statvfs(directory)
    return status.f_bavail * status.f_frsize


def available_bytes(*, meminfo: Path = _MEMINFO, control_group: Path = _CONTROL_GROUP) -> int | None:
    """Return how many bytes this machine, or the container around this process, can still give; None if nobody says.

    Args:
        meminfo: The kernel's figures.
        control_group: The folder of the control group, version 2, whose limit counts.
    """
    bounds = []
    found = re.search(r"^MemAvailable:\s+(\d+) kB$", _read(meminfo), re.MULTILINE)
    if found is not None:
        bounds.append(int(found[1]) * 1024)
    limit, used = (_read(control_group / name).strip() for name in ("memory.max", "memory.current"))
    if limit.isdecimal() and used.isdecimal():
        # Cached files count as used, but are dropped when memory is needed.
        cached = re.search(r"^inactive_file (\d+)$", _read(control_group / "memory.stat"), re.MULTILINE)
        bounds.append(max(0, int(limit) - int(used) + (int(cached[1]) if cached is not None else 0)))
    return min(bounds, default=None)


def _read(path: Path) -> str:
    """Return the text of a file, or nothing."""
    try:
        return path.read_text()
    except OSError:
        return ""
