"""What the tests with real engines share; `nox -s vllm` installs vLLM. Everywhere else they are deselected."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

ENVIRONMENT = {
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}


@pytest.fixture(scope="session")
def environment() -> None:
    """Whatever vLLM looks at when it is imported; several engines in a row share it."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)


@pytest.fixture(scope="session")
def models(environment: None, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model with full attention, and one that mixes it with windows."""
    from engines import save_models

    return save_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def full_model(models: tuple[Path, Path]) -> Path:
    """A model with full attention."""
    return models[0]


@pytest.fixture(scope="session")
def mixed_model(models: tuple[Path, Path]) -> Path:
    """A model with layers of full attention and layers with windows."""
    return models[1]
