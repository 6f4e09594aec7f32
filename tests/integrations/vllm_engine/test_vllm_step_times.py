"""What this library's manager adds to vLLM's steps, against the clock; run it on a quiet machine with -s."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest_plugins = ["vllm_models"]
pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.filterwarnings("default"), pytest.mark.timeout(600)]


@pytest.mark.parametrize(
    "load",
    [
        {"name": "shared beginnings", "prompt_tokens": 1500, "rounds": 12},
        {"name": "shared beginnings", "prompt_tokens": 6000, "rounds": 2},
        {"name": "shared beginnings, much memory", "prompt_tokens": 1500, "slots": 40_000, "rounds": 8},
        {"name": "nothing shared, full memory", "prompt_tokens": 1500, "prompt_count": 0, "slots": 512, "rounds": 6},
        {"name": "many waiting", "prompt_tokens": 1500, "request_count": 32, "rounds": 2},
        {"name": "long answers", "prompt_tokens": 200, "prompt_count": 0, "new_tokens": 256, "rounds": 1},
    ],
    ids=lambda load: f"{load['name']}-{load['prompt_tokens']}".replace(" ", "-"),
)
def test_what_steps_take_beside_the_engine_s_own_manager(full_model: Path, load: dict[str, Any]) -> None:
    from step_times import Load, compare

    assert compare(full_model, Load(**load))["all"] < 3  # what it is, is printed
