"""What a manager adds to an engine's steps: this library's against vLLM's own, in one engine, by turns.

vLLM's own worker needs CUDA, so that only is replaced: one worker makes the copies of both, from slots of their own.
The connector, the requests and the scheduler are the same; between two rounds, with nothing under way and the GPU's
blocks forgotten, the other manager takes the place of the first.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engines import BLOCK_TOKENS, Engine, engine, prompt, sampling
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingMetricMetadata,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

from aiokvoffload.integrations.stepping.building import StepEngine, WorkerEnd
from aiokvoffload.integrations.stepping.settings import StepSettings
from aiokvoffload.integrations.vllm import AioKVOffloadSpec
from aiokvoffload.integrations.vllm.slots import SlotSpec
from aiokvoffload.integrations.vllm.worker import AioKVOffloadWorker, ComputeStream, translate_caches
from aiokvoffload.keys import CacheIdentity

CALLS = (
    "lookup",
    "get_load_source",
    "prepare_load",
    "complete_load",
    "prepare_store",
    "complete_store",
    "on_new_request",
    "on_request_finished",
    "on_schedule_end",
    "has_pending_work",
    "get_stats",
    "take_events",
)
CONNECTOR_CALLS = (
    "on_new_request",
    "get_num_new_matched_tokens",
    "get_external_cache_hit_sources",
    "update_state_after_alloc",
    "build_connector_meta",
    "update_connector_output",
    "request_finished",
    "request_finished_all_groups",
    "get_kv_connector_stats",
    "has_pending_push_work",
)


class SharedEngineSpec(AioKVOffloadSpec):
    """This library's spec, whose worker has slots for vLLM's CPU manager too."""

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, OffloadingMetricMetadata]:
        definitions: dict[str, OffloadingMetricMetadata] = CPUOffloadingSpec.build_metric_definitions(extra_config)
        return definitions

    def get_worker(self, kv_caches: CanonicalKVCaches) -> AioKVOffloadWorker:
        slot_bytes = self.config.worker_kv_bytes_per_block * self.blocks_per_chunk
        known = StepEngine(
            engine_id=self.config.engine_id,
            world_size=1,
            slot_bytes=slot_bytes,
            group_count=1,
            identity=CacheIdentity(),
        )
        settings = StepSettings(cpu_bytes_to_use=int(self.extra_config["cpu_bytes_to_use"]))
        both = StepSettings(cpu_bytes_to_use=2 * settings.cpu_bytes_to_use)
        caches = translate_caches(kv_caches, tuple(self.tokens_per_block))
        stream = ComputeStream(caches.device)
        return SharedWorker(
            WorkerEnd(both, known, 0, caches, self.blocks_per_chunk, current_stream=stream),
            known.block_count(settings),
        )


class SharedWorker(AioKVOffloadWorker):
    """Takes what either manager hands out; its copies end in the step they begin in, so that all steps are the same."""

    def __init__(self, end: WorkerEnd, first_slot_of_theirs: int) -> None:
        super().__init__(end)
        self._first_slot_of_theirs = first_slot_of_theirs
        self._under_way: set[int] = set()

    def get_finished(self) -> list[TransferResult]:
        self.wait(self._under_way)
        self._under_way.clear()
        return super().get_finished()

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        self._under_way.add(job_id)
        return super().submit_store(job_id, src_spec, self._slots(job_id, dst_spec))

    def submit_load(
        self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec, expedited: bool = False
    ) -> bool:
        self._under_way.add(job_id)
        return super().submit_load(job_id, self._slots(job_id, src_spec), dst_spec, expedited)

    def _slots(self, job_id: int, spec: LoadStoreSpec) -> LoadStoreSpec:
        if isinstance(spec, CPULoadStoreSpec):
            return SlotSpec(job_id, spec.chunk_ids + self._first_slot_of_theirs)
        return spec


class CallTimes:
    """Keeps how long calls took.

    A call is disturbed at times by whatever else the machine does, so the slowest twentieth is left out of the mean;
    what a manager puts off until every sixth call or so is not. No call waits, so that is processor time.

    Attributes:
        microseconds: Of each call, by name, without what the measuring takes.
    """

    def __init__(self) -> None:
        self.microseconds: dict[str, list[float]] = {name: [] for name in CALLS}
        self._own = 0.0
        nothing = self._timed("get_stats", lambda: None)
        for _ in range(10_000):
            nothing()
        self._own = self.mean("get_stats")
        self.microseconds["get_stats"].clear()

    def mean(self, name: str) -> float:
        """Return the mean of a call, without the slowest twentieth, and without the slowest one."""
        kept = sorted(self.microseconds[name])
        return statistics.mean(kept[: len(kept) - max(1, len(kept) // 20)] or kept or [0.0])

    def total(self, *, without: tuple[str, ...] = ()) -> float:
        """Return the microseconds of all calls, each counted with its mean."""
        return sum(len(kept) * self.mean(name) for name, kept in self.microseconds.items() if name not in without)

    @contextmanager
    def watching(self, manager: Any) -> Iterator[None]:
        """Measure the calls of a manager meanwhile."""
        with replaced(manager, {name: self._timed(name, getattr(manager, name)) for name in CALLS}):
            yield

    def _timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        kept = self.microseconds[name]

        def run(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                kept.append(1e6 * (time.perf_counter() - start) - self._own)

        return run


class ProcessorTime:
    """Adds up the processor time of the connector's half in the scheduler, with the manager in it.

    Attributes:
        seconds: So far.
    """

    def __init__(self) -> None:
        self.seconds = 0.0

    @contextmanager
    def watching(self, connector: Any) -> Iterator[None]:
        """Measure the calls of a connector meanwhile."""
        with replaced(connector, {name: self._timed(getattr(connector, name)) for name in CONNECTOR_CALLS}):
            yield

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            start = time.thread_time()
            try:
                return call(*args, **kwargs)
            finally:
                self.seconds += time.thread_time() - start

        return run


@contextmanager
def replaced(owner: Any, methods: dict[str, Callable[..., Any]]) -> Iterator[None]:
    """Let an object have other methods meanwhile."""
    for name, method in methods.items():
        setattr(owner, name, method)
    try:
        yield
    finally:
        for name in methods:
            delattr(owner, name)


@dataclass(frozen=True)
class Load:
    """What an engine is given to do, in each round the same.

    Attributes:
        name: What to call it.
        prompt_tokens: Length of the prompts.
        request_count: Requests that come at once.
        prompt_count: Different beginnings of prompts; three quarters of a prompt are shared, or with 0, nothing is.
        new_tokens: To be generated for each.
        slots: CPU memory of either manager, in blocks.
        rounds: How often either manager serves it, each way of measuring for itself.
    """

    name: str
    prompt_tokens: int
    request_count: int = 8
    prompt_count: int = 4
    new_tokens: int = 8
    slots: int = 8192
    rounds: int = 4

    def prompts(self, turn: int) -> list[list[int]]:
        """Return the prompts of a round."""
        if not self.prompt_count:
            first = turn * self.request_count
            return [prompt(1000 + first + number, self.prompt_tokens) for number in range(self.request_count)]
        shared = self.prompt_tokens * 3 // 4
        return [
            prompt(number % self.prompt_count, shared) + prompt(number + 100, self.prompt_tokens - shared)
            for number in range(self.request_count)
        ]


@dataclass
class Measured:
    """What was measured of one manager.

    Attributes:
        times: Of its calls.
        steps: While these were measured.
        connector_microseconds: Processor time of the connector's half in a step, by round.
    """

    times: CallTimes = field(default_factory=CallTimes)
    steps: int = 0
    connector_microseconds: list[float] = field(default_factory=list)


def serve(tested: Engine, load: Load, turn: int) -> int:
    """Serve the requests of a round to the end of their last copies; return the steps."""
    front = tested.llm.llm_engine
    if not tested.llm.reset_prefix_cache():
        raise RuntimeError("the engine still uses GPU blocks")
    for number, tokens in enumerate(load.prompts(turn)):
        front.add_request(f"{turn}-{number}", {"prompt_token_ids": tokens}, sampling(load.new_tokens))
    steps = 0
    while tested.core.scheduler.has_requests():
        front.step()
        steps += 1
    return steps


def measure(model: Path, load: Load) -> tuple[Measured, Measured]:
    """Return what was measured of this library's manager, and of vLLM's own."""
    with engine(
        model,
        {"cpu_bytes_to_use": load.slots * slot_bytes()},
        blocks=2 * load.prompt_tokens // BLOCK_TOKENS + 20,
        connector="OffloadingConnector",
        spec="SharedEngineSpec",
        spec_module=__name__,
        max_model_len=load.prompt_tokens + load.new_tokens + 32,
        max_num_batched_tokens=2048,
    ) as tested:
        connector = tested.core.scheduler.connector
        ours = tested.manager
        theirs = CPUOffloadingManager(num_chunks=ours.steps.statistics().total)
        measured = Measured(), Measured()
        for turn in range(1 + 2 * load.rounds):
            for manager, kept in zip((ours, theirs), measured, strict=True):
                connector.scheduler.manager = manager
                if not turn:
                    serve(tested, load, turn)
                elif turn % 2:
                    with kept.times.watching(manager):
                        kept.steps += serve(tested, load, turn)
                else:
                    clock = ProcessorTime()
                    with clock.watching(connector):
                        steps = serve(tested, load, turn)
                    kept.connector_microseconds.append(1e6 * clock.seconds / steps)
        connector.scheduler.manager = ours
    return measured


def slot_bytes() -> int:
    """Return the bytes of a block of the full model: 2 layers, keys and values, 2 heads of 32 numbers."""
    return 2 * 2 * 2 * 32 * 4 * BLOCK_TOKENS


def compare(model: Path, load: Load) -> dict[str, float]:
    """Print what both managers add to a step, and return the ratios, ours to theirs, by call and as a whole."""
    ours, theirs = measure(model, load)
    ratios = {}
    print(f"\n{load.name}: {load.request_count} prompts of {load.prompt_tokens // BLOCK_TOKENS} blocks at once")
    print(f"{'call':22}{'ours':>8}{'us':>9}{'theirs':>8}{'us':>9}{'ratio':>7}")
    for name in CALLS:
        our_mean, their_mean = ours.times.mean(name), theirs.times.mean(name)
        ratios[name] = our_mean / their_mean if their_mean else 0.0
        print(
            f"{name:22}{len(ours.times.microseconds[name]):8}{our_mean:9.2f}"
            f"{len(theirs.times.microseconds[name]):8}{their_mean:9.2f}{ratios[name]:7.2f}"
        )
    for name, left_out in (("all", ()), ("all but get_stats", ("get_stats",))):
        added = [one.times.total(without=left_out) / one.steps for one in (ours, theirs)]
        ratios[name] = added[0] / added[1]
        print(f"added to a step, {name}: {added[0]:.1f} us against {added[1]:.1f} us, ratio {ratios[name]:.2f}")
    halves = [statistics.median(one.connector_microseconds) for one in (ours, theirs)]
    ratios["connector"] = halves[0] / halves[1]
    print(
        f"processor time of the connector and the manager in a step: {halves[0]:.1f} us against {halves[1]:.1f} us, "
        f"ratio {ratios['connector']:.2f}; {ours.steps} steps against {theirs.steps}"
    )
    return ratios
