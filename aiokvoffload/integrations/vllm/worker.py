"""The worker as vLLM's worker processes call it."""

from __future__ import annotations

from collections.abc import Collection

import torch
from vllm.v1.kv_offload.base import CanonicalKVCaches, GPULoadStoreSpec, LoadStoreSpec, OffloadingWorker, TransferResult

from aiokvoffload import kv_caches as ours
from aiokvoffload import specs
from aiokvoffload.devices.base import Direction
from aiokvoffload.errors import InvalidRequestError
from aiokvoffload.integrations.stepping.building import WorkerEnd
from aiokvoffload.integrations.stepping.jobs import Job
from aiokvoffload.integrations.vllm.slots import SlotSpec


class AioKVOffloadWorker(OffloadingWorker):
    """Translates; `WorkerEnd` moves.

    Args:
        end: Moves the bytes.

    Attributes:
        recomputes: Whether the connector takes `failed_jobs` and turns failed loads into recomputations; else vLLM is
            told of a failure, on which it ends the engine.
        failed_jobs: Jobs that have failed since the connector last asked, each with the manager's number.
    """

    def __init__(self, end: WorkerEnd) -> None:
        self.recomputes = False
        self.failed_jobs: dict[int, int] = {}
        self._end = end

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        """Start to copy GPU blocks into slots; a failure is told later, never now."""
        self._start(job_id, Direction.STORE, src_spec, dst_spec)
        return True

    def submit_load(
        self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec, expedited: bool = False
    ) -> bool:
        """Start to copy slots into GPU blocks; one that is expedited goes ahead of what is queued."""
        self._start(job_id, Direction.LOAD, dst_spec, src_spec, is_urgent=expedited)
        return True

    def get_finished(self) -> list[TransferResult]:
        """Return what is over, whatever its end."""
        results = []
        for result in self._end.mover.take_results():
            if result.error is not None:
                self.failed_jobs[result.job.job_id] = result.job.ticket
            is_good = result.error is None
            results.append(
                TransferResult(
                    result.job.job_id,
                    success=is_good or self.recomputes,
                    transfer_size=result.byte_count if is_good else None,
                    transfer_time=result.seconds if is_good else None,
                )
            )
        return results

    def wait(self, job_ids: set[int]) -> None:
        """Block until jobs are over."""
        self._end.mover.wait(job_ids)

    def void(self, tickets: Collection[int]) -> None:
        """Let loads of some tickets count as failed."""
        self._end.mover.void(tickets)

    def shutdown(self) -> None:
        """Give everything back."""
        self._end.close()

    def _start(
        self,
        job_id: int,
        direction: Direction,
        gpu_spec: GPULoadStoreSpec,
        slots: LoadStoreSpec,
        *,
        is_urgent: bool = False,
    ) -> None:
        if not isinstance(slots, SlotSpec):
            raise InvalidRequestError(f"slots are given by a SlotSpec of this library's manager, not {slots!r}")
        blocks = specs.GPULoadStoreSpec(gpu_spec.block_ids, gpu_spec.group_sizes, gpu_spec.block_indices)
        cpu_spec = None if slots.slots is None else specs.CPULoadStoreSpec(slots.slots)
        self._end.mover.start(Job(job_id, slots.ticket, direction, blocks, cpu_spec, is_urgent))


def translate_caches(caches: CanonicalKVCaches, block_tokens: tuple[int, ...]) -> ours.CanonicalKVCaches:
    """Return vLLM's KV caches as this library sees them, without a copy.

    Args:
        caches: vLLM's.
        block_tokens: Tokens of a GPU block of each KV group.
    """
    group_refs = []
    for refs in caches.group_data_refs:
        used: dict[int, int] = {}  # layers of one group may share a tensor
        for ref in refs:
            used[ref.tensor_idx] = max(ref.page_size_bytes, used.get(ref.tensor_idx, 0))
        group_refs.append(tuple(ours.CanonicalKVCacheRef(index, count) for index, count in used.items()))
    return ours.CanonicalKVCaches(
        tensors=tuple(ours.CanonicalKVCacheTensor(one.tensor, one.page_size_bytes) for one in caches.tensors),
        group_refs=tuple(group_refs),
        groups=tuple(
            ours.KVGroup(tokens, range(len(refs))) for tokens, refs in zip(block_tokens, group_refs, strict=True)
        ),
    )


class ComputeStream:
    """Finds the stream that vLLM computes on at a moment.

    Args:
        device: Where the KV caches are.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def __call__(self) -> object | None:
        """Return the stream; None on a CPU, where work is done when a call returns."""
        if self._device.type == "cpu":
            return None
        current_stream: object = torch.get_device_module(self._device).current_stream(self._device)
        return current_stream
