"""The GPU level of a replay: its prefix cache, hits per level, and both placements with and without bytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiokvoffload.cli.main import run
from aiokvoffload.cli.options import ReplayOptions, SweepOptions
from aiokvoffload.cli.prefix_cache import Grant, PrefixCache
from aiokvoffload.cli.report import GpuLevelReport, ReplayReport
from aiokvoffload.errors import ConfigurationError
from aiokvoffload.testing.policy_contract import CONTRACT_SETTINGS

CONVERSATION = Path(__file__).parents[3] / "shared" / "traces" / "mooncake_conversation.jsonl"
SMALL = [
    "replay",
    "--limit",
    "200",
    "--cpu-blocks",
    "150",
    "--gpu-blocks",
    "150",
    "--page-bytes",
    "64",
    "--layers",
    "2",
]


def report_of(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 0) -> dict[str, Any]:
    assert run([*SMALL, *arguments, "--json"]) == status
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


# The prefix cache


def contents(*numbers: int) -> list[bytes]:
    return [bytes([number]) for number in numbers]


def served(cache: PrefixCache, *numbers: int) -> Grant:
    grant = cache.take(contents(*numbers))
    assert grant is not None
    cache.publish(grant)
    cache.release(grant)
    return grant


def test_a_prefix_is_found_in_its_blocks() -> None:
    cache = PrefixCache(5)
    first = served(cache, 1, 2, 3)
    second = served(cache, 1, 2, 4)
    assert (first.hit_count, second.hit_count) == (0, 2)
    assert second.blocks[:2] == first.blocks[:2]
    assert second.given_up == []


def test_the_least_recently_used_is_given_up_its_deepest_block_first() -> None:
    cache = PrefixCache(4)
    first = served(cache, 1, 2)
    second = served(cache, 3, 4)
    third = served(cache, 1, 5, 6)
    assert third.given_up == [(b"\2", first.blocks[1]), (b"\4", second.blocks[1])]


def test_blocks_in_use_are_not_given_up() -> None:
    cache = PrefixCache(3)
    grant = cache.take(contents(1, 2))
    assert grant is not None
    cache.publish(grant)
    assert cache.take(contents(3, 4)) is None
    shared = cache.take(contents(1, 2, 5))
    assert shared is not None
    cache.release(grant)
    assert cache.take(contents(3)) is None
    cache.release(shared)
    assert cache.take(contents(3, 4, 6)) is not None


def test_a_content_that_was_computed_twice_is_kept_once() -> None:
    cache = PrefixCache(2)
    both = [cache.take(contents(1)) for _ in range(2)]
    for grant in both:
        assert grant is not None
        cache.publish(grant)
    for grant in both:
        assert grant is not None
        cache.release(grant)
    assert served(cache, 1, 2).given_up == []


def test_without_caching_nothing_is_found_and_nothing_is_given_up() -> None:
    cache = PrefixCache(2, is_caching=False)
    served(cache, 1, 2)
    again = served(cache, 1, 2)
    assert (again.hit_count, again.given_up) == (0, [])


@CONTRACT_SETTINGS
@given(st.data())
def test_no_block_is_ever_two_things(data: st.DataObject) -> None:
    cache = PrefixCache(6)
    open_grants: list[Grant] = []
    holds: dict[int, bytes] = {}
    for _ in range(data.draw(st.integers(0, 30))):
        if data.draw(st.booleans()) and open_grants:
            released = data.draw(st.integers(0, len(open_grants) - 1))
            cache.release(open_grants.pop(released))
            continue
        first, count = 10 * data.draw(st.integers(0, 2)), data.draw(st.integers(0, 6))
        grant = cache.take(contents(*range(first, first + count)))
        if grant is None:
            assert open_grants
            continue
        in_use = {block for other in open_grants for block in other.blocks}
        for content, block in zip(grant.hashes[: grant.hit_count], grant.blocks, strict=False):
            assert holds[block] == content
        for content, block in grant.given_up:
            assert holds.pop(block) == content
            assert block not in in_use
            assert block in grant.blocks[grant.hit_count :]
        assert not in_use & {*grant.blocks[grant.hit_count :]}
        assert len({*grant.blocks}) == len(grant.blocks)
        holds.update(zip(grant.blocks, grant.hashes, strict=True))
        cache.publish(grant)
        open_grants.append(grant)


# Replays


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
@pytest.mark.parametrize("policy", ["lru", "lrfu"])
def test_an_exclusive_replay_has_every_byte_right(
    capsys: pytest.CaptureFixture[str], backend: str, policy: str
) -> None:
    # How many hit depends on who comes first, so there are enough of them.
    report = report_of(capsys, "--limit", "400", "--placement", "exclusive", "--backend", backend, "--policy", policy)
    assert report["mismatches"] == report["order_violations"] == 0
    assert report["left_pinned"] == report["left_leased"] == 0
    assert report["blocks_verified"] == report["blocks_hit"]
    assert report["gpu_blocks_hit"] > 200
    assert report["cpu_blocks_hit"] > 100
    assert report["blocks_hit"] == report["gpu_blocks_hit"] + report["cpu_blocks_hit"]
    assert report["bytes_loaded"] == report["cpu_blocks_hit"] * 64 * 2


@pytest.mark.parametrize("placement", ["inclusive", "exclusive"])
def test_alone_the_requests_hit_as_without_data(capsys: pytest.CaptureFixture[str], placement: str) -> None:
    with_data = report_of(capsys, "--concurrency", "1", "--placement", placement)
    without = report_of(capsys, "--no-data", "--placement", placement)
    for name in ("blocks_hit", "gpu_blocks_hit", "evictions"):
        assert with_data[name] == without[name]


def test_levels_of_one_size_hold_twice_as_much_when_they_are_exclusive(capsys: pytest.CaptureFixture[str]) -> None:
    inclusive = report_of(capsys, "--no-data")
    exclusive = report_of(capsys, "--no-data", "--placement", "exclusive")
    assert inclusive["blocks_hit"] == inclusive["gpu_blocks_hit"] == exclusive["gpu_blocks_hit"]
    assert run(["replay", "--limit", "200", "--no-data", "--cpu-blocks", "300", "--json"]) == 0
    twice = json.loads(capsys.readouterr().out)
    assert exclusive["blocks_hit"] == pytest.approx(twice["blocks_hit"], rel=0.03)


def test_a_flipped_byte_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    found = report_of(capsys, "--placement", "exclusive", "--corrupt", "1", "--concurrency", "1", status=1)
    assert found["mismatches"] > 0


def test_several_gpu_blocks_per_block_below_a_gpu_level(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--block-size-factor", "3", "--gpu-blocks", "60", "--concurrency", "1"]
    with_data, without = report_of(capsys, *options), report_of(capsys, *options, "--no-data")
    assert with_data["blocks_hit"] == without["blocks_hit"] == with_data["blocks_verified"]
    assert with_data["mismatches"] == with_data["order_violations"] == 0
    assert with_data["cpu_blocks_hit"] > 0


def test_the_filter_works_below_a_gpu_level(capsys: pytest.CaptureFixture[str]) -> None:
    filtered = report_of(capsys, "--placement", "exclusive", "--store-threshold", "2")
    plain = report_of(capsys, "--placement", "exclusive")
    assert 0 < filtered["bytes_stored"] < plain["bytes_stored"]


def test_the_table_shows_each_level(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*SMALL, "--no-data", "--placement", "exclusive"]) == 0
    table = capsys.readouterr().out
    for label in ("placement", "GPU blocks", "blocks hit in the GPU", "hit rate of CPU memory"):
        assert f"\n{label} " in table


def test_a_report_without_a_level_above_says_nothing_of_it() -> None:
    report = ReplayReport(
        policy="lru",
        cpu_blocks=1,
        requests=0,
        blocks_looked_up=0,
        blocks_hit=0,
        evictions=0,
        refused_stores=0,
        left_pinned=0,
        left_leased=0,
        seconds=0.0,
    )
    assert "placement" not in report.figures()
    level = GpuLevelReport.of(ReplayOptions(gpu_blocks=3), 0)
    assert level == GpuLevelReport(placement="inclusive", gpu_blocks=3, gpu_blocks_hit=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"placement": "exclusive"}, "exclusive placement needs a level above: give --gpu-blocks"),
        ({"placement": "exclusive", "gpu_blocks": 4, "block_size_factor": 2}, "block_size_factor is 2; make it 1"),
        ({"placement": "both"}, "placement is 'both'"),
        ({"sweep": SweepOptions(), "with_data": False, "gpu_blocks": 4}, "a sweep has no GPU level"),
    ],
)
def test_options_that_contradict_each_other_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        ReplayOptions(**options)


@pytest.mark.parametrize("mode", [[], ["--no-data"]])
def test_a_gpu_too_small_for_a_request_is_a_clear_mistake(capsys: pytest.CaptureFixture[str], mode: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        run(["replay", "--limit", "50", "--gpu-blocks", "3", *mode])
    assert caught.value.code == 2
    assert "use --gpu-blocks" in capsys.readouterr().err


@pytest.mark.skipif(not CONVERSATION.exists(), reason="the trace is not here")
@pytest.mark.parametrize(
    ("policy", "percent"),
    [
        ("lru", 27.89),
        ("lrfu", 29.28),
    ],
)
def test_a_real_trace_hits_as_published(capsys: pytest.CaptureFixture[str], policy: str, percent: float) -> None:
    """Levels of 5 % of the distinct blocks each; with inclusive placement both together hit like one of them."""
    options = ["--cpu-blocks", "9139", "--gpu-blocks", "9139", "--placement", "exclusive", "--policy", policy]
    assert run(["replay", "--no-data", "--trace", str(CONVERSATION), *options, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert 100 * report["hit_rate"] == pytest.approx(percent, abs=0.3)
    assert 100 * report["gpu_hit_rate"] == pytest.approx(19.58, abs=0.3)
