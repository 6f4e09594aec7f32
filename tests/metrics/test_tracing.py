"""Spans join the caller's trace."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

import anyio
import pytest
import torch
from offloader_rig import (
    BLOCK_BYTES,
    BLOCK_TOKENS,
    LAYER_COUNT,
    PAGE_BYTES,
    Rig,
    keys_of,
    on_both_loops,
    settle,
)
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from aiokvoffload import CacheIdentity, InvalidRequestError, OffloadKey, ReqContext, open_offloader
from aiokvoffload.metrics.tracing import trace_calls
from aiokvoffload.offloader.machine import OffloaderMachine
from aiokvoffload.testing.asserts import assert_idle
from aiokvoffload.testing.device import ManualDevice
from aiokvoffload.testing.manual_tier import ManualTier

pytestmark = pytest.mark.timeout(60)


class Recorder:
    """Takes spans."""

    def __init__(self) -> None:
        self.provider = TracerProvider(shutdown_on_exit=False)
        self._exporter = InMemorySpanExporter()
        self.provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.tracer = self.provider.get_tracer("engine")

    def spans(self) -> Sequence[ReadableSpan]:
        return self._exporter.get_finished_spans()

    def told(self) -> list[tuple[str, str | None, dict[str, object]]]:
        """Return name, parent's name and attributes of each span, in the order in which they ended."""
        names = {span.context.span_id: span.name for span in self.spans() if span.context is not None}
        return [
            (
                span.name.removeprefix("aiokvoffload."),
                None if span.parent is None else names[span.parent.span_id],
                {name.removeprefix("aiokvoffload."): value for name, value in (span.attributes or {}).items()},
            )
            for span in self.spans()
        ]


@on_both_loops
async def test_calls_are_children_of_whoever_calls() -> None:
    rig, recorder = Rig(), Recorder()
    async with rig.open() as offloader:
        trace_calls(offloader, recorder.provider)
        keys = keys_of(offloader, 2)

        async def serve(name: str) -> None:
            with recorder.tracer.start_as_current_span(name):
                await offloader.store(keys, [0, 1], ReqContext(name))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(serve, "first")
            await settle()
            tasks.start_soon(serve, "second")
            await settle()
            await rig.land()
        with recorder.tracer.start_as_current_span("third"):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(offloader.load, keys, [4, 5])
                await settle()
                await rig.land()
            assert await offloader.lookup_prefix(keys) == 8
        assert_idle(offloader)
    told = recorder.told()
    assert ("store", "first", {"blocks": 2, "stored_blocks": 2, "request_id": "first"}) in told
    assert ("store", "second", {"blocks": 2, "stored_blocks": 0, "request_id": "second"}) in told
    assert ("load", "third", {"blocks": 2, "tokens": 8}) in told
    assert ("lookup", "third", {"blocks": 2, "tokens": 8}) in told
    assert len(told) == 7


@on_both_loops
async def test_a_load_that_waits_has_a_span_within() -> None:
    rig, recorder = Rig(), Recorder()
    async with rig.open() as offloader:
        trace_calls(offloader, recorder.provider)
        keys = keys_of(offloader, 2)
        offloader.store_soon(keys, [0, 1])
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(offloader.load, keys, [4, 5])
            await settle()
            await rig.land()
            await rig.land()
    assert recorder.told() == [
        ("pending", "aiokvoffload.load", {"blocks": 2, "tokens": 8}),
        ("load", None, {"blocks": 2, "tokens": 8}),
    ]


class TierThatLandsWhenPolled(ManualTier):
    """A tier that answers at the poll after the call, and not before."""

    _is_polling = False

    def poll(self) -> None:
        if not self._is_polling:
            self._is_polling = True
            self.land()
            self._is_polling = False
        super().poll()


class TieredRig:
    """An offloader over such a tier, whose blocks are in the tier alone."""

    def __init__(self) -> None:
        self.recorder = Recorder()
        self.tier = TierThatLandsWhenPolled(CacheIdentity(), block_bytes=BLOCK_BYTES, capacity_bytes=1 << 16)
        self.device = ManualDevice()
        layers = [torch.zeros((8, PAGE_BYTES), dtype=torch.uint8) for _ in range(LAYER_COUNT)]
        self.context = open_offloader(
            layers, cpu_bytes=4 * BLOCK_BYTES, block_tokens=BLOCK_TOKENS, tiers=[self.tier], device=self.device
        )

    def put(self, offloader: OffloaderMachine) -> list[OffloadKey]:
        keys = keys_of(offloader, 2)
        call = self.tier.start_put(keys, [bytes(BLOCK_BYTES)] * 2)
        self.tier.poll()
        assert all(result.is_good for result in call.results)
        trace_calls(offloader, self.recorder.provider)
        return keys

    def check(self, *more: str) -> None:
        self.tier.close()
        told = self.recorder.told()
        assert told[:2] == [
            ("promotion", "aiokvoffload.load", {"blocks": 2, "tokens": 8}),
            ("load", None, {"blocks": 2, "tokens": 8}),
        ]
        assert [name for name, _, _ in told[2:]] == [*more]


@on_both_loops
async def test_a_promotion_is_a_span_within_its_load() -> None:
    rig = TieredRig()
    async with rig.context as offloader:
        keys = rig.put(offloader)
        loaded: list[int] = []

        async def load() -> None:
            loaded.append(await offloader.load(keys, [4, 5]))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(load)
            while not loaded:
                await settle()
                offloader.poll()
                rig.device.land_all()
        assert loaded == [8]
    rig.check()


def test_a_host_without_a_loop_has_the_same_spans() -> None:
    rig = TieredRig()
    with rig.context as offloader:
        keys = rig.put(offloader)
        assert offloader.load(keys, [4, 5]) == 8
        assert offloader.lookup_prefix(keys) == 8
        offloader.store(keys, [4, 5])
        offloader.demote(keys, [4, 5])
    rig.check("lookup", "store", "demotion")


@on_both_loops
async def test_errors_and_cancellations_are_told() -> None:
    rig, recorder = Rig(), Recorder()
    async with rig.open() as offloader:
        trace_calls(offloader, recorder.provider)
        with pytest.raises(InvalidRequestError):
            await offloader.store(keys_of(offloader, 1), [99])
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(offloader.store, keys_of(offloader, 1), [0])
                await settle()
                scope.cancel()
                await rig.land()
        assert_idle(offloader)
    failed, cancelled = recorder.spans()
    assert not failed.status.is_ok
    assert [event.name for event in failed.events] == ["exception"]
    assert (cancelled.attributes or {})["aiokvoffload.is_cancelled"] is True


def test_without_being_asked_for_nothing_is_imported() -> None:
    program = (
        "import sys, torch; from aiokvoffload import open_offloader; import aiokvoffload.metrics.catalogue\n"
        "with open_offloader([torch.zeros(4, 64)], cpu_bytes=1024) as offloader:\n"
        "    offloader.store(offloader.keys(range(16)), [0])\n"
        "print({'opentelemetry', 'prometheus_client', 'zmq', 'msgspec'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("set()\n", "")


@pytest.mark.parametrize(
    ("module", "package", "extra"),
    [("tracing", "opentelemetry", "otel"), ("prometheus", "prometheus_client", "prometheus")],
)
def test_a_missing_extra_is_the_command_that_installs_it(module: str, package: str, extra: str) -> None:
    program = f"import sys; sys.modules[{package!r}] = None; import aiokvoffload.metrics.{module}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert f"pip install 'aiokvoffload[{extra}]'" in done.stderr.splitlines()[-1]
