"""Both ends of an engine agree without a word, and meet in shared memory only for tiers; settings are checked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from aiokvoffload.devices.base import Direction
from aiokvoffload.devices.host import HostDevice
from aiokvoffload.errors import ConfigurationError, StateError
from aiokvoffload.integrations.stepping.building import SchedulerEnd, StepEngine, WorkerEnd, build_scheduler_end
from aiokvoffload.integrations.stepping.jobs import Job
from aiokvoffload.integrations.stepping.requests import Answer
from aiokvoffload.integrations.stepping.settings import StepSettings
from aiokvoffload.keys import CacheIdentity, OffloadKey, make_offload_key
from aiokvoffload.kv_caches import CanonicalKVCaches
from aiokvoffload.managers.tier_plan import TierPlan
from aiokvoffload.specs import CPULoadStoreSpec, GPULoadStoreSpec

BLOCK_BYTES = 256
KEYS = [make_offload_key(bytes([number]) * 16, 3) for number in range(8)]


class TwoRanks:
    """A scheduler's end and those of two workers, in one process, made in the order in which engines make them."""

    def __init__(self, settings: StepSettings, engine_id: str) -> None:
        engine = StepEngine(
            engine_id=engine_id, world_size=2, slot_bytes=BLOCK_BYTES, group_count=4, identity=CacheIdentity("model")
        )
        self.gpu = [torch.zeros((8, BLOCK_BYTES), dtype=torch.int8) for _ in range(2)]
        self.devices = [HostDevice(), HostDevice()]
        self.workers = [
            WorkerEnd(
                settings,
                engine,
                rank,
                CanonicalKVCaches.from_layers([tensor]),
                1,
                current_stream=lambda: None,
                device=device,
            )
            for rank, (tensor, device) in enumerate(zip(self.gpu, self.devices, strict=True))
        ]
        self.scheduler: SchedulerEnd = build_scheduler_end(settings, engine)

    def move(self, direction: Direction, number: int, blocks: list[int], slots: list[int]) -> None:
        """Copy on both ranks, and wait."""
        for worker in self.workers:
            gpu_spec = GPULoadStoreSpec(blocks, [len(blocks)], [0])
            worker.mover.start(Job(number, number, direction, gpu_spec, CPULoadStoreSpec(slots)))
            worker.mover.wait({number})
            assert [result.error for result in worker.mover.take_results()] == [None]

    def store(self, keys: list[OffloadKey], blocks: list[int]) -> None:
        request = self.scheduler.manager.open_request("storing")
        decision = self.scheduler.manager.prepare_store(request, keys)
        assert decision is not None
        self.move(Direction.STORE, decision.number, blocks, list(decision.slots))
        self.scheduler.manager.complete_store(set(keys))

    def load(self, keys: list[OffloadKey], blocks: list[int]) -> None:
        manager = self.scheduler.manager
        request = manager.open_request("loading")
        while any(manager.lookup(request, key) is not Answer.HIT for key in keys):
            assert all(manager.lookup(request, key) is not Answer.MISS for key in keys)
            manager.end_step()
        decision = manager.prepare_load(request, keys)
        assert decision.slots is not None
        self.move(Direction.LOAD, decision.number, blocks, list(decision.slots))
        manager.complete_load(request)
        manager.close_request(request)

    def close(self) -> None:
        self.scheduler.close()
        for worker, device in zip(self.workers, self.devices, strict=True):
            worker.close()
            device.close()


@pytest.mark.parametrize("has_tiers", [False, True])
def test_what_ranks_store_comes_back_to_each(tmp_path: Path, has_tiers: bool) -> None:
    tiers = ((f"file://{tmp_path}?capacity=16MiB", TierPlan()),) if has_tiers else ()
    ends = TwoRanks(StepSettings(cpu_bytes_to_use=16 * BLOCK_BYTES, tiers=tiers), f"round-trip-{has_tiers}")
    for rank, gpu in enumerate(ends.gpu):
        gpu[:2] = torch.tensor([[10 + rank], [20 + rank]])
    ends.store(KEYS[:2], [0, 1])
    ends.load(KEYS[:2], [5, 4])
    assert [gpu[[5, 4], 0].tolist() for gpu in ends.gpu] == [[10, 20], [11, 21]]
    ends.close()


def test_blocks_of_all_ranks_survive_the_engine(tmp_path: Path) -> None:
    settings = StepSettings(
        cpu_bytes_to_use=16 * BLOCK_BYTES, tiers=((f"file://{tmp_path}?capacity=16MiB", TierPlan()),)
    )
    ends = TwoRanks(settings, "first")
    for rank, gpu in enumerate(ends.gpu):
        gpu[0] = 10 + rank
    ends.store(KEYS[:1], [0])
    ends.close()  # writes down what waits for it
    ends = TwoRanks(settings, "second")
    ends.load(KEYS[:1], [7])
    assert [int(gpu[7, 0]) for gpu in ends.gpu] == [10, 11]
    ends.close()


def test_scheduler_that_never_comes_is_an_error_for_the_first_job(tmp_path: Path) -> None:
    settings = StepSettings(
        cpu_bytes_to_use=16 * BLOCK_BYTES,
        tiers=((f"file://{tmp_path}?capacity=16MiB", TierPlan()),),
        join_seconds=0.01,
    )
    engine = StepEngine(
        engine_id="alone", world_size=1, slot_bytes=BLOCK_BYTES, group_count=1, identity=CacheIdentity()
    )
    caches = CanonicalKVCaches.from_layers([torch.zeros((8, BLOCK_BYTES), dtype=torch.int8)])
    worker = WorkerEnd(settings, engine, 0, caches, 1, current_stream=lambda: None)
    with pytest.raises(StateError, match="the scheduler has not joined"):
        _ = worker.mover
    worker.close()


def test_blocks_larger_than_the_scheduler_counts_with_are_refused() -> None:
    engine = StepEngine(
        engine_id="small", world_size=1, slot_bytes=BLOCK_BYTES - 1, group_count=1, identity=CacheIdentity()
    )
    caches = CanonicalKVCaches.from_layers([torch.zeros((8, BLOCK_BYTES), dtype=torch.int8)])
    with pytest.raises(ConfigurationError, match=r"takes 256 bytes, but the scheduler counts with 255"):
        WorkerEnd(StepSettings(cpu_bytes_to_use=1 << 20), engine, 0, caches, 1, current_stream=lambda: None)


def test_memory_too_small_for_a_block_is_refused() -> None:
    engine = StepEngine(engine_id="tiny", world_size=2, slot_bytes=8, group_count=1, identity=CacheIdentity())
    with pytest.raises(ConfigurationError, match=r"cpu_bytes_to_use is 15, too little for one block of 16 bytes"):
        build_scheduler_end(StepSettings(cpu_bytes_to_use=15), engine)


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        ({}, "cpu_bytes_to_use is missing"),
        ({"cpu_bytes_to_use": 0}, "cpu_bytes_to_use is 0"),
        ({"cpu_bytes_to_use": "much"}, "cpu_bytes_to_use is 'much'"),
        ({"cpu_bytes_to_use": True}, "cpu_bytes_to_use is True"),
        ({"cpu_bytes_to_use": 1, "store_treshold": 2}, "unknown setting 'store_treshold'; did you mean"),
        ({"cpu_bytes_to_use": 1, "eviction_policy": "mru"}, "mru"),
        ({"cpu_bytes_to_use": 1, "tiers": "file:///x"}, "tiers is 'file:///x'; give a list"),
        ({"cpu_bytes_to_use": 1, "tiers": [7]}, "a tier is 7"),
        ({"cpu_bytes_to_use": 1, "tiers": [{"url": "memory://", "plan": {"speed": 1}}]}, "the plan of a tier"),
        ({"cpu_bytes_to_use": 1, "on_reset": "what"}, "on_reset is 'what'"),
        ({"cpu_bytes_to_use": 1, "hold_seconds": 0}, "hold_seconds is 0"),
    ],
)
def test_settings_that_cannot_work_are_refused(mapping: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        StepSettings.read(mapping, frozenset({"spec_name"}))


def test_settings_are_read_beside_the_engine_s_own() -> None:
    settings = StepSettings.read(
        {
            "spec_name": "its own",
            "cpu_bytes_to_use": "1024",
            "tiers": ["memory://", {"url": "memory://?capacity=1GiB", "plan": {"lookup_seconds": 2}}],
        },
        frozenset({"spec_name"}),
    )
    assert settings.cpu_bytes_to_use == 1024
    assert settings.tiers[0] == ("memory://", TierPlan())
    assert settings.tiers[1] == ("memory://?capacity=1GiB", TierPlan(lookup_seconds=2))


def test_worker_that_never_comes_is_an_error_for_the_scheduler(tmp_path: Path) -> None:
    settings = StepSettings(
        cpu_bytes_to_use=16 * BLOCK_BYTES,
        tiers=((f"file://{tmp_path}?capacity=16MiB", TierPlan()),),
        join_seconds=0.01,
    )
    engine = StepEngine(
        engine_id="halved", world_size=2, slot_bytes=BLOCK_BYTES, group_count=1, identity=CacheIdentity()
    )
    with pytest.raises(StateError, match="rank 0, rank 1 has not joined"):
        build_scheduler_end(settings, engine)
