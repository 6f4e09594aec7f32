"""The stand-in driver library, built once."""

from __future__ import annotations

from pathlib import Path

import pytest
from cuda_rig import StandIn, build_stand_in


@pytest.fixture(scope="session")
def stand_in_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_stand_in(tmp_path_factory.mktemp("standin"))


@pytest.fixture
def stand_in(stand_in_library: Path) -> StandIn:
    stand_in = StandIn(stand_in_library)
    stand_in.reset()
    return stand_in
