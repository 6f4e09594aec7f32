"""The machine that figures were taken on."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_CPU_INFO = Path("/proc/cpuinfo")


def describe_machine() -> str:
    """Return processor, cores, memory and versions in one line."""
    memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    parts = [
        _processor_name(),
        f"{os.cpu_count()} cores",
        f"{memory_bytes / 2**30:.0f} GiB of memory",
        f"{platform.system()} {platform.release()}",
        f"{platform.python_implementation()} {platform.python_version()}",
        f"torch {_installed('torch')}",
        f"numpy {_installed('numpy')}",
    ]
    return ", ".join(parts)


def _processor_name() -> str:
    """Return the name that Linux knows, elsewhere the architecture."""
    if _CPU_INFO.exists():
        for line in _CPU_INFO.read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return f"{value.strip()} ({platform.machine()})"
    return platform.processor() or platform.machine()


def _installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
