"""What a scrape reports, and that docs and dashboard name nothing else."""

from __future__ import annotations

import json
import os
import re
import urllib.request
from pathlib import Path

import anyio
import anyio.to_thread
import pytest
import torch
from offloader_rig import Rig, keys_of, on_both_loops, settle
from prometheus_client import CollectorRegistry, generate_latest, start_http_server
from prometheus_client.parser import text_string_to_metric_families

from aiokvoffload import CacheIdentity, ConfigurationError, TierPlan, WrongThreadError, open_offloader
from aiokvoffload.metrics.catalogue import METRICS
from aiokvoffload.metrics.metric import PREFIX, tier_label
from aiokvoffload.metrics.prometheus import OffloaderCollector
from aiokvoffload.testing.clock import ManualClock
from aiokvoffload.testing.manual_tier import ManualTier
from aiokvoffload.tiers.breaker import BreakerLimits, BreakerState
from aiokvoffload.tiers.outcomes import Reason, miss

pytestmark = pytest.mark.timeout(60)
DOCS = Path(__file__).parents[2] / "docs"
PATIENCE_SECONDS = 30.0
METRIC_NAME = re.compile(rf"\b{PREFIX}[a-z_]+\b")

Samples = dict[tuple[str, ...], float]
"""By name and values of labels, in the order of the labels' names."""


def registry_of(collector: OffloaderCollector) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(collector)
    return registry


def parse(text: str) -> Samples:
    samples: Samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = (value for name, value in sorted(sample.labels.items()) if name != "offloader")
            key = (sample.name.removeprefix(PREFIX), *labels)
            assert key not in samples
            samples[key] = sample.value
    return samples


def scrape(collector: OffloaderCollector) -> Samples:
    return parse(generate_latest(registry_of(collector)).decode())


@on_both_loops
async def test_a_scrape_reads_the_statistics_of_this_moment() -> None:
    rig = Rig(cpu_blocks=4)
    async with rig.open() as offloader:
        await settle()
        collector = OffloaderCollector({"a": offloader})
        keys = keys_of(offloader, 3)
        offloader.store_soon(keys[:2], [0, 1])
        samples = scrape(collector)
        assert samples["cpu_blocks", "writing"] == 2
        assert samples["pending_transfers", "sent"] == 1
        assert samples["in_flight_bytes",] == 32
        await rig.land()
        with offloader.prepare_load(keys) as ticket:
            assert ticket.token_count == 8
            samples = scrape(collector)
            statistics = offloader.statistics()
        assert samples["cpu_capacity_blocks",] == 4
        assert {key[1]: value for key, value in samples.items() if key[0] == "cpu_blocks"} == {
            "free": 2,
            "ready": 2,
            "writing": 0,
            "promoting": 0,
            "leased": 0,
        }
        assert samples["cpu_pinned_blocks",] == 2
        assert samples["hit_blocks_total",] == 2
        assert samples["missed_blocks_total", "absent"] == 1
        assert samples["transferred_bytes_total", "store"] == statistics.stored_bytes == 32
        assert samples["transfers_total", "store"] == 1
        assert samples["transfer_seconds_total", "store"] == statistics.store_seconds
        assert samples["transfers_total", "load"] == 0
        assert samples["polls_total",] == statistics.poll_count
        assert samples["fault",] == 0
        assert samples["statistics_age_seconds",] == 0


def test_a_tier_is_reported_with_its_breaker_and_its_misses() -> None:
    clock = ManualClock()
    limits = BreakerLimits(failures=1)
    tiers = [
        ManualTier(
            CacheIdentity(),
            block_bytes=16,
            capacity_bytes=1 << 16,
            clock=clock,
            url=f"memory://{n}",
            limits=limits,
        )
        for n in range(2)
    ]
    layers = [torch.zeros((8, 16), dtype=torch.uint8)]
    plan = TierPlan(cascade="reused")
    with open_offloader(
        layers, cpu_bytes=64, block_tokens=4, tiers=[(tier, plan) for tier in tiers], clock=clock
    ) as offloader:
        collector = OffloaderCollector({"a": offloader})
        keys = keys_of(offloader, 1)
        ticket = offloader.prepare_load(keys)
        clock.advance(0.5)
        tiers[0].land()
        clock.advance(0.25)
        tiers[1].land()
        offloader.poll()
        ticket.abort()
        tiers[1].start_contains(keys)
        tiers[1].land(result=miss(Reason.FAILED, "no answer"))
        samples = scrape(collector)
        statistics = offloader.statistics()
    for tier in tiers:
        tier.close()
    first, second = tier_label(0, "memory://0"), tier_label(1, "memory://1")
    assert (first, second) == ("0-memory", "1-memory")
    assert samples["tier_info", first, "memory://0"] == samples["tier_info", second, "memory://1"] == 1
    assert samples["tier_missed_blocks_total", "absent", first] == 1
    assert samples["tier_missed_blocks_total", "failed", second] == 1
    assert samples["tier_call_seconds_total", "lookup", first] == 0.5
    assert samples["tier_call_seconds_total", "lookup", second] == 0.25
    states = {key[1]: value for key, value in samples.items() if key[0] == "tier_breaker_state" and key[2] == second}
    assert states == {"closed": 0, "open": 1, "half-open": 0}
    assert samples["tier_breaker_openings_total", second] == 1
    assert samples["missed_blocks_total", "absent"] == 1
    assert samples["waits_total", "load"] == 1
    assert samples["wait_seconds_total", "load"] == 0.75
    assert samples["tier_capacity_bytes", first] == statistics.tiers[0].tier.holdings.capacity_bytes


@on_both_loops
async def test_two_offloaders_of_one_process_are_told_apart() -> None:
    first, second = Rig(), Rig(cpu_blocks=3)
    async with first.open() as one, second.open() as other:
        collector = OffloaderCollector({"one": one})
        collector.add("other", other)
        with pytest.raises(ConfigurationError, match="reported as 'one' already"):
            collector.add("one", other)
        registry = registry_of(collector)
        name = "aiokvoffload_cpu_capacity_blocks"
        assert registry.get_sample_value(name, {"offloader": "one"}) == 8
        assert registry.get_sample_value(name, {"offloader": "other"}) == 3
        collector.remove("one")
        collector.remove("one")
        assert registry.get_sample_value(name, {"offloader": "one"}) is None
        with pytest.raises(ValueError, match="Duplicated timeseries"):
            registry.register(OffloaderCollector())


@on_both_loops
async def test_a_server_in_another_thread_is_answered_by_the_owner() -> None:
    rig = Rig()
    async with rig.open() as offloader:
        await settle()
        registry = registry_of(OffloaderCollector({"a": offloader}, timeout_seconds=PATIENCE_SECONDS))
        server, thread = start_http_server(0, addr="127.0.0.1", registry=registry)
        try:
            offloader.store_soon(keys_of(offloader, 2), [0, 1])
            await rig.land()
            url = f"http://127.0.0.1:{server.server_port}/metrics"

            def fetch() -> str:
                with urllib.request.urlopen(url, timeout=PATIENCE_SECONDS) as response:
                    text: str = response.read().decode()
                    return text

            samples = parse(await anyio.to_thread.run_sync(fetch))
        finally:
            server.shutdown()
            server.server_close()
            thread.join(PATIENCE_SECONDS)
    assert samples["stored_blocks_total",] == 2
    assert samples["statistics_age_seconds",] == 0


@on_both_loops
async def test_a_thread_that_the_owner_does_not_answer_gets_old_numbers_and_their_age() -> None:
    rig = Rig()
    with rig.open() as offloader:
        collector = OffloaderCollector({"a": offloader}, timeout_seconds=0.001)
        offloader.store(keys_of(offloader, 2), [0, 1])
        rig.manual_clock.advance(5)
        samples = await anyio.to_thread.run_sync(scrape, collector)
        assert samples["stored_blocks_total",] == 0
        assert samples["statistics_age_seconds",] >= 5


def test_a_forked_process_is_refused() -> None:
    rig = Rig()
    with rig.open() as offloader:
        collector = OffloaderCollector({"a": offloader})
        child = os.fork()
        if not child:
            try:
                list(collector.collect())
            except WrongThreadError:
                os._exit(7)
            finally:
                os._exit(1)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 7


# Names


def test_names_follow_the_conventions() -> None:
    names = [metric.name for metric in METRICS]
    assert len(set(names)) == len(names)
    for metric in METRICS:
        assert metric.name.endswith("_total") == (metric.kind == "counter"), metric.name
        assert re.fullmatch(rf"{PREFIX}[a-z]+(_[a-z]+)*", metric.name), metric.name
        assert metric.help.endswith("."), metric.name
        assert "offloader" not in metric.labels


def test_labels_have_only_words_of_this_library() -> None:
    misses = {reason.value for reason in Reason}
    assert all(re.fullmatch(r"[a-z-]+", word) for word in misses | {state.value for state in BreakerState})


def test_the_docs_have_one_row_for_each_metric_with_its_kind_and_labels() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \| ([^|]*) \|", (DOCS / "metrics.md").read_text(), re.MULTILINE)
    assert [(name, kind, tuple(re.findall(r"`(\w+)`", labels))) for name, kind, labels in rows] == [
        (metric.name, metric.kind, metric.labels) for metric in METRICS
    ]


def test_docs_and_dashboard_name_only_metrics_that_exist() -> None:
    known = {metric.name for metric in METRICS}
    dashboard = json.loads((DOCS / "grafana" / "aiokvoffload.json").read_text())
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])]
    shown = {name for expression in expressions for name in METRIC_NAME.findall(expression)}
    variables = " ".join(str(variable.get("query", "")) for variable in dashboard["templating"]["list"])
    named = {*shown, *METRIC_NAME.findall(variables), *METRIC_NAME.findall((DOCS / "metrics.md").read_text())}
    assert named - known == set()
    assert known - shown == {f"{PREFIX}{name}" for name in NOT_SHOWN}


NOT_SHOWN = {"cpu_memory_is_pinned", "tier_info", "statistics_age_seconds"}
"""Metrics that are for alerts and joins, and no panel shows."""
