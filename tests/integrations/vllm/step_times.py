"""What a manager adds to an engine's steps: this library's against vLLM's own, in the same engine.

vLLM's own worker needs CUDA, so that only is replaced: the copies are the same for both.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engines import Engine, engine, prompt, sampling
from vllm.v1.kv_offload.base import CanonicalKVCaches, GPULoadStoreSpec, LoadStoreSpec
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

from aiokvoffload.integrations.stepping.building import StepEngine, WorkerEnd
from aiokvoffload.integrations.stepping.settings import StepSettings
from aiokvoffload.integrations.vllm.slots import SlotSpec
from aiokvoffload.integrations.vllm.worker import AioKVOffloadWorker, ComputeStream, translate_caches
from aiokvoffload.keys import CacheIdentity

PROMPT_TOKENS = 1500
SHARED_TOKENS = 640
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
    """Counts the seconds of a manager's calls.

    Attributes:
        seconds: By call, without what the counting takes.
        counts: By call.
    """

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(CALLS, 0.0)
        self.counts = dict.fromkeys(CALLS, 0)
        self._own_seconds = 0.0
        nothing = self.timed("get_stats", lambda: None)
        for _ in range(10_000):
            nothing()
        self._own_seconds = self.seconds["get_stats"] / 10_000
        self.seconds["get_stats"] = self.counts["get_stats"] = 0

    def timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return a call that is counted."""

        def run(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                self.seconds[name] += time.perf_counter() - start - self._own_seconds
                self.counts[name] += 1

        return run

    def watch(self, manager: Any) -> None:
        """Count the calls of a manager from now on."""
        for name in CALLS:
            setattr(manager, name, self.timed(name, getattr(manager, name)))


def serve(tested: Engine, request_count: int, rounds: int) -> tuple[float, int]:
    """Serve requests that share their beginnings, several times over; return the seconds and the number of steps."""
    front = tested.llm.llm_engine
    steps = 0
    start = time.perf_counter()
    for turn in range(rounds):
        for number in range(request_count):
            tokens = prompt(number % 4, SHARED_TOKENS) + prompt(number + 10, PROMPT_TOKENS - SHARED_TOKENS)
            front.add_request(f"{turn}-{number}", {"prompt_token_ids": tokens}, sampling(8))
        while front.has_unfinished_requests():
            front.step()
            steps += 1
    return time.perf_counter() - start, steps


def measure(model: Path, *, is_ours: bool, request_count: int = 16, rounds: int = 3) -> tuple[CallTimes, float, int]:
    """Return the times of one manager's calls, the seconds of the whole run, and its steps."""
    spec, module = ("AioKVOffloadSpec", "aiokvoffload.integrations.vllm") if is_ours else ("TheirManagerSpec", __name__)
    with engine(
        model,
        {"cpu_bytes_to_use": 1 << 26},
        blocks=200,
        connector="OffloadingConnector",
        spec=spec,
        spec_module=module,
        max_model_len=2048,
        max_num_batched_tokens=2048,
    ) as tested:
        serve(tested, 4, 1)
        times = CallTimes()
        times.watch(tested.manager)
        seconds, steps = serve(tested, request_count, rounds)
    return times, seconds, steps


def compare(model: Path) -> dict[str, float]:
    """Print what both managers add to a step, and return the ratios, ours to theirs, by call and as a whole."""
    ours, our_seconds, our_steps = measure(model, is_ours=True)
    theirs, their_seconds, their_steps = measure(model, is_ours=False)
    ratios = {}
    print(f"{'call':22}{'count':>8}{'ours us/call':>14}{'count':>8}{'theirs us/call':>15}{'ratio':>7}")
    for name in CALLS:
        each = [
            1e6 * times.seconds[name] / times.counts[name] if times.counts[name] else 0.0 for times in (ours, theirs)
        ]
        ratios[name] = each[0] / each[1] if each[1] else 0.0
        print(f"{name:22}{ours.counts[name]:8}{each[0]:14.2f}{theirs.counts[name]:8}{each[1]:15.2f}{ratios[name]:7.2f}")
    added = [1e6 * sum(times.seconds.values()) / steps for times, steps in ((ours, our_steps), (theirs, their_steps))]
    ratios["step"] = added[0] / added[1]
    print(f"added to a step: {added[0]:.1f} us against {added[1]:.1f} us, ratio {ratios['step']:.2f}")
    print(
        f"a step as a whole: {1e3 * our_seconds / our_steps:.2f} ms against {1e3 * their_seconds / their_steps:.2f} ms"
    )
    return ratios
