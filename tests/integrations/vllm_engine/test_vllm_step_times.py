"""What this library's manager adds to vLLM's steps, against the clock; run it on a quiet machine with -s."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest_plugins = ["vllm_models"]
pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.filterwarnings("default"), pytest.mark.timeout(600)]


@pytest.mark.parametrize("prompt_tokens", [1500, 6000])
def test_what_steps_take_beside_the_engine_s_own_manager(full_model: Path, prompt_tokens: int) -> None:
    from step_times import compare

    assert compare(full_model, prompt_tokens)["all"] < 3  # of medians; what it is, is printed
