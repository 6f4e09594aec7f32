"""What a manager adds to an engine's steps: this library's against vLLM's own, in the same engine.

vLLM's own worker needs CUDA, so that only is replaced: the copies are the same for both.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engines import BLOCK_TOKENS, Engine, engine, prompt, sampling
from vllm.v1.kv_offload.base import CanonicalKVCaches, GPULoadStoreSpec, LoadStoreSpec
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

from aiokvoffload.integrations.stepping.building import StepEngine, WorkerEnd
from aiokvoffload.integrations.stepping.settings import StepSettings
from aiokvoffload.integrations.vllm.slots import SlotSpec
from aiokvoffload.integrations.vllm.worker import AioKVOffloadWorker, ComputeStream, translate_caches
from aiokvoffload.keys import CacheIdentity

ROUNDS = 4
REQUEST_COUNT = 8
CALLS = (
    "lookup",
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


class TheirManagerSpec(CPUOffloadingSpec):
    """vLLM's CPU manager over this library's worker."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> AioKVOffloadWorker:
        settings = StepSettings(cpu_bytes_to_use=int(self.extra_config["cpu_bytes_to_use"]))
        known = StepEngine(
            engine_id=self.config.engine_id,
            world_size=1,
            slot_bytes=self.kv_bytes_per_chunk,
            group_count=1,
            identity=CacheIdentity(),
        )
        caches = translate_caches(kv_caches, tuple(self.tokens_per_block))
        return ChunkWorker(
            WorkerEnd(settings, known, 0, caches, self.blocks_per_chunk, current_stream=ComputeStream(caches.device))
        )


class ChunkWorker(AioKVOffloadWorker):
    """Takes what vLLM's manager hands out."""

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        return super().submit_store(job_id, src_spec, SlotSpec(job_id, dst_spec.block_ids))

    def submit_load(
        self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec, expedited: bool = False
    ) -> bool:
        return super().submit_load(job_id, SlotSpec(job_id, src_spec.block_ids), dst_spec, expedited)


class CallTimes:
    """Keeps how long a manager's calls took.

    Attributes:
        microseconds: Of each call, by name, without what the measuring takes.
    """

    def __init__(self) -> None:
        self.microseconds: dict[str, list[float]] = {name: [] for name in CALLS}
        self._own = 0.0
        nothing = self.timed("get_stats", lambda: None)
        for _ in range(10_000):
            nothing()
        self._own = self.median("get_stats")
        self.microseconds["get_stats"].clear()

    def timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return a call that is measured."""
        kept = self.microseconds[name]

        def run(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                kept.append(1e6 * (time.perf_counter() - start) - self._own)

        return run

    def median(self, name: str) -> float:
        """Return the median of a call; single ones are disturbed by whatever else the machine does."""
        kept = self.microseconds[name]
        return statistics.median(kept) if kept else 0.0

    def total(self) -> float:
        """Return the microseconds of all calls, each counted with its median."""
        return sum(len(kept) * self.median(name) for name, kept in self.microseconds.items())

    def watch(self, manager: Any) -> None:
        """Count the calls of a manager from now on."""
        for name in CALLS:
            setattr(manager, name, self.timed(name, getattr(manager, name)))


def serve(tested: Engine, prompt_tokens: int, request_count: int, rounds: int) -> tuple[float, int]:
    """Serve requests that share most of their prompts, several times over; return the seconds and the steps."""
    front = tested.llm.llm_engine
    shared_tokens = prompt_tokens * 3 // 4
    steps = 0
    start = time.perf_counter()
    for turn in range(rounds):
        for number in range(request_count):
            tokens = prompt(number % 4, shared_tokens) + prompt(number + 10, prompt_tokens - shared_tokens)
            front.add_request(f"{turn}-{number}", {"prompt_token_ids": tokens}, sampling(8))
        while front.has_unfinished_requests():
            front.step()
            steps += 1
    return time.perf_counter() - start, steps


def measure(model: Path, prompt_tokens: int, *, is_ours: bool) -> tuple[CallTimes, float, int]:
    """Return the times of one manager's calls, the seconds of the whole run, and its steps."""
    spec, module = ("AioKVOffloadSpec", "aiokvoffload.integrations.vllm") if is_ours else ("TheirManagerSpec", __name__)
    with engine(
        model,
        {"cpu_bytes_to_use": 1 << 28},
        blocks=2 * prompt_tokens // BLOCK_TOKENS + 20,
        connector="OffloadingConnector",
        spec=spec,
        spec_module=module,
        max_model_len=prompt_tokens + 32,
        max_num_batched_tokens=2048,
    ) as tested:
        serve(tested, prompt_tokens, 4, 1)
        times = CallTimes()
        times.watch(tested.manager)
        seconds, steps = serve(tested, prompt_tokens, REQUEST_COUNT, ROUNDS)
    return times, seconds, steps


def compare(model: Path, prompt_tokens: int) -> dict[str, float]:
    """Print what both managers add to a step, and return the ratios, ours to theirs, by call and as a whole."""
    ours, our_seconds, our_steps = measure(model, prompt_tokens, is_ours=True)
    theirs, their_seconds, their_steps = measure(model, prompt_tokens, is_ours=False)
    ratios = {}
    print(f"prompts of {prompt_tokens} tokens, {prompt_tokens // BLOCK_TOKENS} blocks")
    print(f"{'call':22}{'ours':>8}{'us':>9}{'theirs':>8}{'us':>9}{'ratio':>7}")
    for name in CALLS:
        our_median, their_median = ours.median(name), theirs.median(name)
        ratios[name] = our_median / their_median if their_median else 0.0
        print(
            f"{name:22}{len(ours.microseconds[name]):8}{our_median:9.2f}"
            f"{len(theirs.microseconds[name]):8}{their_median:9.2f}{ratios[name]:7.2f}"
        )
    added = ours.total(), theirs.total()
    ratios["all"] = added[0] / added[1]
    print(f"added to the whole run: {added[0] / 1e3:.2f} ms against {added[1] / 1e3:.2f} ms, ratio {ratios['all']:.2f}")
    steps = [f"{us / count:.1f} us of {count}" for us, count in zip(added, (our_steps, their_steps), strict=True)]
    print(f"added to a step: {steps[0]}, {steps[1]}")
    print(
        f"a step as a whole: {1e3 * our_seconds / our_steps:.2f} ms against {1e3 * their_seconds / their_steps:.2f} ms"
    )
    return ratios
