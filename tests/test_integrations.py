"""What plugs into engines is imported with them; without them, everything else works."""

from __future__ import annotations

import subprocess
import sys

import pytest

from aiokvoffload.errors import ConfigurationError


def run(code: str) -> str:
    """Run code in a fresh process in which vLLM cannot be imported, and return what it prints."""
    hidden = "import sys; sys.modules['vllm'] = None; "
    return subprocess.run([sys.executable, "-c", hidden + code], check=True, capture_output=True, text=True).stdout


def test_integrations_need_no_engine() -> None:
    code = "import aiokvoffload.integrations, aiokvoffload.integrations.stepping.building; print('fine')"
    assert run(code) == "fine\n"


def test_module_for_vllm_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    monkeypatch.delitem(sys.modules, "aiokvoffload.integrations.vllm", raising=False)
    with pytest.raises(ConfigurationError, match=r"pip install 'vllm>=0\.32,<0\.34'"):
        import aiokvoffload.integrations.vllm  # noqa: F401
