"""vLLM's connector, which also turns failed copies into recomputations and missing blocks instead of an engine's end.

vLLM's own knows no failed jobs. This one lets workers report every job as finished, and says beside it which have
failed: to vLLM the requests of failed loads, which it then computes itself (`kv_load_failure_policy="recompute"`), and
to the manager all of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
    OffloadingWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector

from aiokvoffload.errors import ConfigurationError
from aiokvoffload.integrations.vllm.manager import AioKVOffloadManager
from aiokvoffload.integrations.vllm.worker import AioKVOffloadWorker

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput

_SYNC_BUDGET = "sync_load_budget_bytes"


@dataclass
class StepMetadata(OffloadingConnectorMetadata):
    """What the scheduler tells the workers in a step.

    Attributes:
        void_tickets: Loads that must count as failed, for the weights have changed.
    """

    void_tickets: set[int] = field(default_factory=set)


@dataclass
class StepReport(OffloadingWorkerMetadata):
    """What the workers tell the scheduler in a step.

    Attributes:
        failed_tickets: Copies that have failed on some worker.
    """

    failed_tickets: set[int] = field(default_factory=set)

    def aggregate(self, other: OffloadingWorkerMetadata) -> StepReport:
        """Return what two workers tell together."""
        merged = super().aggregate(other)
        failed = self.failed_tickets | (other.failed_tickets if isinstance(other, StepReport) else set())
        return StepReport(**_values(merged), failed_tickets=failed)


class AioKVOffloadConnector(OffloadingConnector):
    """vLLM's `OffloadingConnector`, over this library's spec.

    Raises:
        ConfigurationError: Failed loads would fail the request, or another spec is named.
    """

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        if vllm_config.kv_transfer_config.kv_load_failure_policy != "recompute":
            raise ConfigurationError(
                'AioKVOffloadConnector needs kv_load_failure_policy="recompute": a block that cannot be loaded is no '
                "reason to fail a request"
            )
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        if int(extra.get(_SYNC_BUDGET, 0)) and len(kv_cache_config.kv_cache_groups) > 1:
            raise ConfigurationError(
                f"{_SYNC_BUDGET} loads within a step, and for a model with several KV groups vLLM cannot recompute "
                "such a load; leave it out"
            )
        super().__init__(vllm_config, role, kv_cache_config)
        self._request_of: dict[int, str] = {}
        self._sync_blocks_of: dict[int, set[int]] = {}
        self._failed_tickets: set[int] = set()
        self._invalid_blocks: set[int] = set()
        if self.connector_scheduler is not None:
            self._manager().recomputes = True

    # In the scheduler

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> StepMetadata:
        """Say also which loads are void."""
        metadata = super().build_connector_meta(scheduler_output)
        manager = self._manager()
        void, manager.void_tickets = manager.void_tickets, set()
        return StepMetadata(**_values(metadata), void_tickets=void)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Tell the manager what has failed, before it is told that it is over."""
        report = connector_output.kv_connector_worker_meta
        if isinstance(report, StepReport):
            for ticket in report.failed_tickets:
                self._manager().steps.note_failure(ticket)
        super().update_connector_output(connector_output)

    # In a worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Make the worker, and tell it that failures are taken care of."""
        super().register_kv_caches(kv_caches)
        self._worker().recomputes = True

    def handle_preemptions(self, kv_connector_metadata: StepMetadata) -> None:
        """Let void loads fail, in the step that flushes them."""
        if kv_connector_metadata.void_tickets:
            self._worker().void(kv_connector_metadata.void_tickets)
        super().handle_preemptions(kv_connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Start loads, and remember whose they are."""
        for job_id, job in self._connector_metadata.load_jobs.items():
            if getattr(job, "sync", False):
                self._sync_blocks_of[job_id] = set(job.dst_spec.block_ids.tolist())
            else:
                self._request_of[job_id] = job.req_id
        super().start_load_kv(forward_context, **kwargs)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Say also which requests' loads have failed."""
        results = super().get_transfer_results(finished_req_ids)
        failed_jobs, self._worker().failed_jobs = self._worker().failed_jobs, {}
        for job_id, ticket in failed_jobs.items():
            self._failed_tickets.add(ticket)
            if job_id in self._request_of:
                results.failed_recving.add(self._request_of[job_id])
            self._invalid_blocks |= self._sync_blocks_of.get(job_id, set())
        return results

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the GPU blocks of failed loads that requests of this very step count on."""
        invalid, self._invalid_blocks = self._invalid_blocks, set()
        return invalid

    def build_connector_worker_meta(self) -> OffloadingWorkerMetadata | None:
        """Say also what has failed."""
        report = super().build_connector_worker_meta()
        if report is None:
            return None
        for job_id in report.completed_jobs:
            self._request_of.pop(job_id, None)
            self._sync_blocks_of.pop(job_id, None)
        failed, self._failed_tickets = self._failed_tickets, set()
        return StepReport(**_values(report), failed_tickets=failed)

    # Inside

    def _manager(self) -> AioKVOffloadManager:
        manager = self.scheduler.manager
        if not isinstance(manager, AioKVOffloadManager):
            raise ConfigurationError(
                f'AioKVOffloadConnector needs "spec_name": "AioKVOffloadSpec", but the manager is a '
                f"{type(manager).__name__}"
            )
        return manager

    def _worker(self) -> AioKVOffloadWorker:
        worker = None if self.connector_worker is None else self.connector_worker.worker
        if not isinstance(worker, AioKVOffloadWorker):
            raise ConfigurationError(
                f'AioKVOffloadConnector needs "spec_name": "AioKVOffloadSpec", but the worker is a '
                f"{type(worker).__name__}"
            )
        return worker


def _values(message: Any) -> dict[str, Any]:
    """Return the fields of a message of vLLM's, whatever its version has."""
    return {one.name: getattr(message, one.name) for one in fields(message)}
