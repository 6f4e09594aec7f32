"""What this library's manager adds to vLLM's steps, against the clock; run it on a quiet machine with -s."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest_plugins = ["vllm_models"]
pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.filterwarnings("default"), pytest.mark.timeout(600)]


def test_steps_take_no_longer_than_with_the_engine_s_own_manager(full_model: Path) -> None:
    from step_times import compare

    assert compare(full_model)["step"] < 1.5
