"""Sweeps: the same hits as a replay, the bound above all, and every form of the report."""

from __future__ import annotations

import json
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aiokvoffload.cli.arguments import parse_arguments
from aiokvoffload.cli.clairvoyant import clairvoyant_hits, next_uses
from aiokvoffload.cli.main import run
from aiokvoffload.cli.options import SweepOptions
from aiokvoffload.errors import ConfigurationError

TRACES = Path(__file__).parents[3] / "shared" / "traces"
CONVERSATION = TRACES / "mooncake_conversation.jsonl"
SWEEP = ["replay", "--no-data", "--sweep", "--limit", "150"]


def cells_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, Any]]:
    assert run([*SWEEP, *arguments, "--json"]) == 0
    found: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    return found


def best_hits(requests: list[list[int]], capacity: int, held: frozenset[int] = frozenset()) -> int:
    """Try every choice of what to keep after every request."""
    if not requests:
        return 0
    blocks = requests[0]
    hits = next((index for index, block in enumerate(blocks) if block not in held), len(blocks))
    reachable = sorted(held.union(blocks))
    choices = [
        frozenset(block for block, is_kept in zip(reachable, kept, strict=True) if is_kept)
        for kept in product([False, True], repeat=len(reachable))
        if sum(kept) <= capacity
    ]
    return hits + max(best_hits(requests[1:], capacity, choice) for choice in choices)


@settings(derandomize=True, database=None, deadline=None, max_examples=60)
@given(st.lists(st.sampled_from([[1], [1, 2], [1, 2, 3], [1, 4], [5], [5, 6]]), max_size=4), st.integers(1, 3))
def test_the_bound_is_the_best_of_all_choices(requests: list[list[int]], capacity: int) -> None:
    assert clairvoyant_hits(requests, capacity) == best_hits(requests, capacity)


def test_next_uses_name_the_next_request() -> None:
    assert next_uses([[1, 2], [3], [1], [1, 2]]) == [[2, 3], [-1], [3], [-1, -1]]


@pytest.mark.parametrize("policy", ["lru", "arc", "lru2", "lrfu", "s3fifo", "adaptive"])
@pytest.mark.parametrize("factor", ["1", "2"])
def test_a_sweep_hits_as_a_replay(capsys: pytest.CaptureFixture[str], policy: str, factor: str) -> None:
    bound, cell = cells_of(capsys, "--policies", policy, "--capacities", "7.5", "--block-size-factor", factor)
    arguments = ["--policy", policy, "--cpu-blocks", str(cell["cpu_blocks"]), "--block-size-factor", factor]
    assert run(["replay", "--no-data", "--limit", "150", *arguments, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert cell["blocks_hit"] == report["blocks_hit"] > 0
    assert cell["blocks_looked_up"] == report["blocks_looked_up"]
    assert bound["policy"] == "clairvoyant"
    assert bound["blocks_hit"] > cell["blocks_hit"]


def test_the_table_has_a_row_per_policy_and_a_column_per_capacity(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*SWEEP, "--policies", "lru,lru2", "--capacities", "5,50"]) == 0
    title, head, *rows = capsys.readouterr().out.splitlines()
    assert title.startswith("built-in workload")
    assert head.split() == ["policy", "5", "%", "50", "%"]
    assert [row.split()[0] for row in rows] == ["clairvoyant", "lru", "lru2"]
    assert all(float(row.split()[1]) < float(row.split()[2]) for row in rows)


def test_several_traces(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for name in ("one", "two"):
        line = {"timestamp": 0, "input_length": 1024, "output_length": 1, "hash_ids": [1, 2]}
        (tmp_path / name).write_text(f"{json.dumps(line)}\n" * (2 if name == "one" else 3))
    traces = ["--trace", str(tmp_path / "one"), "--trace", str(tmp_path / "two")]
    cells = cells_of(capsys, *traces, "--policies", "lru", "--capacities", "100")
    assert [(cell["trace"], cell["hit_percent"]) for cell in cells[::2]] == [("one", 50.0), ("two", 100 * 4 / 6)]


def test_without_names_all_policies_are_swept(capsys: pytest.CaptureFixture[str]) -> None:
    found = {cell["policy"] for cell in cells_of(capsys, "--capacities", "10")}
    assert {"clairvoyant", "lru", "arc", "arc-reference", "lru2", "lrfu", "s3fifo", "adaptive", "lru+2"} <= found


@pytest.mark.parametrize("name", ["lru+2", "lru2+3"])
def test_a_row_with_a_reuse_filter_hits_as_a_replay_with_it(capsys: pytest.CaptureFixture[str], name: str) -> None:
    policy, _, threshold = name.partition("+")
    _, plain, filtered = cells_of(capsys, "--policies", f"{policy},{name}", "--capacities", "7.5")
    arguments = ["--policy", policy, "--store-threshold", threshold, "--cpu-blocks", str(filtered["cpu_blocks"])]
    assert run(["replay", "--no-data", "--limit", "150", *arguments, "--json"]) == 0
    assert filtered["blocks_hit"] == json.loads(capsys.readouterr().out)["blocks_hit"] > 0
    assert filtered["policy"] == name
    assert filtered["blocks_stored"] < plain["blocks_stored"]


@pytest.mark.parametrize("name", ["lru+", "lru+1", "lru+x", "lru+-2"])
def test_a_reuse_filter_that_filters_nothing_is_named(capsys: pytest.CaptureFixture[str], name: str) -> None:
    with pytest.raises(SystemExit) as caught:
        run([*SWEEP, "--policies", name])
    assert caught.value.code == 2
    assert "at least 2, such as lru+2" in capsys.readouterr().err


def test_a_plot_without_matplotlib_is_a_clear_mistake(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(SystemExit) as caught:
        run([*SWEEP, "--plot", str(tmp_path / "curves.png")])
    assert caught.value.code == 2
    assert "pip install aiokvoffload[plot]" in capsys.readouterr().err


def test_curves_are_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "curves.png"
    assert run([*SWEEP, "--policies", "lru", "--capacities", "5,50", "--plot", str(path)]) == 0
    assert path.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(SystemExit):
        run([*SWEEP, "--policies", "lru", "--capacities", "5", "--plot", str(tmp_path / "nowhere" / "a.png")])
    assert "cannot be written" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("replay --sweep", "give --no-data too"),
        ("replay --no-data --policies lru", "--policies is for --sweep"),
        ("replay --no-data --plot a.png", "--plot is for --sweep"),
        ("replay --trace a --trace b", "only with --sweep"),
        ("replay --no-data --sweep --capacities 0", "percentages above 0"),
        ("replay --no-data --sweep --capacities 1,x", "percentages above 0"),
        ("replay --no-data --sweep --policies lru,,arc", "names with commas"),
        ("replay --no-data --sweep --store-threshold 2", "give --policies lru+2"),
    ],
)
def test_mistakes_are_named(arguments: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_arguments(arguments.split())
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_an_unknown_policy_is_named_before_anything_runs(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run([*SWEEP, "--policies", "lru,lruu"])
    assert "did you mean 'lru'?" in capsys.readouterr().err


def test_a_capacity_must_be_above_0() -> None:
    with pytest.raises(ConfigurationError, match="percentage above 0"):
        SweepOptions(capacity_percents=(5.0, -1.0))


@pytest.mark.slow
@pytest.mark.skipif(not CONVERSATION.exists(), reason="the trace is not here")
@pytest.mark.parametrize(
    ("policy", "percent"),
    [("clairvoyant", 24.64), ("lru2", 10.34), ("lrfu", 5.40), ("s3fifo", 7.52), ("adaptive", 10.34)],
)
def test_hit_rates_of_a_real_trace(capsys: pytest.CaptureFixture[str], policy: str, percent: float) -> None:
    """Of the whole conversation trace, at 1 % of its blocks, where the policies differ most."""
    # Of the bound itself, any policy will do beside it.
    name = "lru" if policy == "clairvoyant" else policy
    arguments = ["--trace", str(CONVERSATION), "--policies", name, "--capacities", "1", "--json"]
    assert run(["replay", "--no-data", "--sweep", *arguments]) == 0
    found = {cell["policy"]: cell["hit_percent"] for cell in json.loads(capsys.readouterr().out)}
    assert found[policy] == pytest.approx(percent, abs=0.3)
