"""A directory for regions, on the file system that they are made for."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from aiokvoffload.memory.shared import SHARED_MEMORY


@pytest.fixture
def directory() -> Iterator[Path]:
    """An empty directory, which has to be empty again after the test."""
    with tempfile.TemporaryDirectory(prefix="aiokvoffload_tests_", dir=SHARED_MEMORY) as name:
        yield Path(name)
        assert os.listdir(name) == []
