"""Fixtures that more than one folder of tests may want."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from cuda_rig import StandIn, build_stand_in

from aiokvoffload.memory.shared import SHARED_MEMORY


@pytest.fixture
def directory() -> Iterator[Path]:
    """An empty directory on the file system that regions are made for; it has to be empty again after the test."""
    with tempfile.TemporaryDirectory(prefix="aiokvoffload_tests_", dir=SHARED_MEMORY) as name:
        yield Path(name)
        assert os.listdir(name) == []


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Torch computes in one thread: tiny models take longer to share their work out than to do it."""
    count = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(count)


@pytest.fixture(scope="session")
def stand_in_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library that stands in for NVIDIA's driver, built once."""
    return build_stand_in(tmp_path_factory.mktemp("standin"))


@pytest.fixture
def stand_in(stand_in_library: Path) -> StandIn:
    """The stand-in driver as after loading it."""
    stand_in = StandIn(stand_in_library)
    stand_in.reset()
    return stand_in
