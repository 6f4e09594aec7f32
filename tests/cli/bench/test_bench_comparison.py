"""The comparison: with a stand-in where vLLM is not installed, with the real one where it is."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from aiokvoffload.cli.bench.manager import MEASURED
from aiokvoffload.cli.main import run

COMPARED = ["bench", "manager", "--quick", "--blocks", "256", "--policy", "lru", "arc", "s3fifo"]
BASE = """
from enum import Enum

class LookupResult(Enum):
    MISS = 0
    HIT = 1

class ReqContext:
    def __init__(self, req_id):
        self.positions, self.is_new, self.is_finished = {}, True, False

    def set_offload_key_position(self, key, end_token):
        self.positions[key] = end_token
"""
MANAGER = """
from vllm.v1.kv_offload.base import LookupResult

class CPUOffloadingManager:
    def __init__(self, num_chunks, cache_policy):
        self.room, self.keys, self.pins = num_chunks, {}, {}
        assert cache_policy in ("lru", "arc")

    def on_new_request(self, context):
        assert context.is_new
        context.is_new = False

    def lookup(self, key, context):
        return LookupResult.HIT if self.keys.get(key) else LookupResult.MISS

    def touch(self, keys, context):
        for key in keys:
            self.keys[key] = self.keys.pop(key)

    def prepare_load(self, keys, context):
        assert not context.is_new and all(self.keys[key] for key in keys)
        self.pins.update(dict.fromkeys(keys))

    def complete_load(self, keys, context):
        for key in keys:
            del self.pins[key]

    def prepare_store(self, keys, context):
        assert not context.is_new and not self.pins and set(keys) <= set(context.positions)
        for key in list(self.keys)[: len(self.keys) + len(keys) - self.room]:
            del self.keys[key]
        self.keys.update(dict.fromkeys(keys, False))

    def complete_store(self, keys, context):
        self.keys.update(dict.fromkeys(keys, True))

    def on_request_finished(self, context):
        assert not context.is_new and not context.is_finished
        context.is_finished = True
"""


@pytest.fixture
def forget_vllm(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Undo what a test imports under the name of vLLM."""
    kept = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "vllm"}
    for name in kept:
        del sys.modules[name]
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        del sys.modules[name]
    sys.modules.update(kept)


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forget_vllm: None) -> Path:
    """A package with the interface that the bench calls, which asserts that it is called properly."""
    package = tmp_path / "vllm" / "v1" / "kv_offload"
    (package / "cpu").mkdir(parents=True)
    for folder in (tmp_path / "vllm", package.parent, package, package / "cpu"):
        (folder / "__init__.py").touch()
    (package / "base.py").write_text(BASE)
    manager = package / "cpu" / "manager.py"
    manager.write_text(MANAGER)
    monkeypatch.syspath_prepend(tmp_path)
    return manager


def lines_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, Any]]:
    assert run([*COMPARED, *arguments, "--json"]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("option", [[], ["--compare"]])
def test_what_is_installed_is_measured_operation_for_operation(
    capsys: pytest.CaptureFixture[str], option: list[str]
) -> None:
    *_, lru, arc = lines_of(capsys, *option)
    for cost, policy in ((lru, "lru"), (arc, "arc")):
        assert (cost["bench"], cost["policy"]) == ("comparison", policy)
        assert cost["request_count"] > 0
        for name in MEASURED:
            assert cost["ratios"][name] == pytest.approx(cost["own"][name] / cost["others"][name])
        assert cost["request_ratio"] == pytest.approx(cost["others_request_ms"] / cost["own_request_ms"])


@pytest.mark.usefixtures("stand_in")
def test_the_table_and_the_plot_show_it(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert run([*COMPARED, "--plot", str(tmp_path / "speeds.svg")]) == 0
    printed = capsys.readouterr().out
    assert "Times as fast as vLLM" in printed
    assert "all calls of a request" in printed
    assert "vLLM" in (tmp_path / "speeds.svg").read_text()


@pytest.mark.usefixtures("stand_in")
def test_it_can_be_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert {cost["bench"] for cost in lines_of(capsys, "--no-compare")} == {"manager"}


def test_without_it_nothing_is_compared_and_that_is_said(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    assert run([*COMPARED[:-2]]) == 0
    assert "Not compared with vLLM in this run: vllm is not installed." in capsys.readouterr().out


def test_asking_for_what_is_not_installed_is_a_mistake(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(SystemExit) as caught:
        run([*COMPARED, "--compare"])
    assert caught.value.code == 2
    assert "needs vLLM 0.32 and 0.33, which cannot be used here" in capsys.readouterr().err


@pytest.mark.parametrize("source", ["raise RuntimeError('no driver')", "class CPUOffloadingManager: ..."])
def test_one_that_cannot_be_used_spoils_nothing(
    capsys: pytest.CaptureFixture[str], stand_in: Path, source: str
) -> None:
    stand_in.write_text(source)
    assert run([*COMPARED[:-2]]) == 0
    printed = capsys.readouterr().out
    assert "which cannot be used here" in printed
    assert "prepare_store" in printed
    with pytest.raises(SystemExit):
        run([*COMPARED, "--compare"])


@pytest.mark.filterwarnings("default")  # of what is imported, not of ours
def test_the_real_one_is_called_properly(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("vllm.v1.kv_offload.cpu.manager", reason="vLLM is not installed", exc_type=ImportError)
    costs = lines_of(capsys, "--compare")
    assert [cost["policy"] for cost in costs if cost["bench"] == "comparison"] == ["lru", "arc"]
