"""The spec that vLLM's `OffloadingConnector` finds by `spec_name` and `spec_module_path`."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence

from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingManager, OffloadingSpec, OffloadingWorker
from vllm.v1.kv_offload.config import OffloadingConfig

from aiokvoffload.devices.base import Device
from aiokvoffload.errors import ConfigurationError
from aiokvoffload.integrations.stepping.building import StepEngine, WorkerEnd, build_scheduler_end
from aiokvoffload.integrations.stepping.settings import StepSettings
from aiokvoffload.integrations.vllm.manager import AioKVOffloadManager, StepEvents
from aiokvoffload.integrations.vllm.worker import AioKVOffloadWorker, ComputeStream, translate_caches
from aiokvoffload.keys import CacheIdentity
from aiokvoffload.offloader.parts import TierChoice

_logger = logging.getLogger(__name__)

_NAMES_OF_VLLM = frozenset(
    {
        "spec_name",
        "spec_module_path",
        "block_size",
        "blocks_per_chunk",
        "offload_prompt_only",
        "self_describing_kv_events",
        "sync_load_budget_bytes",
        "canonical_layout",
    }
)
_SEED_OF_HASHES = "PYTHONHASHSEED"


class AioKVOffloadSpec(OffloadingSpec):
    """Makes the manager in the engine core and the worker in each worker process, from one configuration.

    Raises:
        ConfigurationError: A setting is unknown, or cannot work.
    """

    def __init__(self, config: OffloadingConfig) -> None:
        super().__init__(config)
        if config.canonical_layout:
            raise ConfigurationError("canonical_layout is not supported; leave it out")
        self._settings = StepSettings.read(self.extra_config, _NAMES_OF_VLLM)
        self._engine = _engine_of(config, self._settings)
        self._manager: AioKVOffloadManager | None = None
        self._worker: AioKVOffloadWorker | None = None

    def get_manager(self) -> OffloadingManager:
        """Return the manager; made by the first call."""
        if self._manager is None:
            if self._settings.tiers and _SEED_OF_HASHES not in os.environ:
                _logger.warning(
                    "%s is not set, so vLLM hashes blocks differently in each process: tiers will serve nobody but "
                    "this engine",
                    _SEED_OF_HASHES,
                )
            step_events = StepEvents() if self.kv_events_config.enable_kv_cache_events else None
            end = build_scheduler_end(
                self._settings,
                self._engine,
                tiers=self.build_tiers(),
                event_sink=None if step_events is None else step_events.note,
            )
            self._manager = AioKVOffloadManager(
                end.manager,
                end.close,
                step_events=step_events,
                starts_epoch=self._settings.on_reset == "new-weights",
                steps_under_way=max(2, self.config.parallel.pp_size),
            )
        return self._manager

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """Return the worker of this process; made by the first call."""
        if self._worker is None:
            caches = translate_caches(kv_caches, tuple(self.tokens_per_block))
            end = WorkerEnd(
                self._settings,
                self._engine,
                self.config.parallel.rank,
                caches,
                self.blocks_per_chunk,
                current_stream=ComputeStream(caches.device),
                device=self.build_device(),
            )
            self._worker = AioKVOffloadWorker(end)
        return self._worker

    def build_tiers(self) -> Sequence[TierChoice]:
        """Return the tiers below CPU memory, for a subclass with tiers of its own; some, if the settings name some."""
        return self._settings.tiers

    def build_device(self) -> Device | None:
        """Return what copies in a worker, for a subclass with a device of its own; None for that of the KV caches."""
        return None


def _engine_of(config: OffloadingConfig, settings: StepSettings) -> StepEngine:
    """Return what scheduler and workers both know, in each the same."""
    parallel, groups = config.parallel, config.groups
    slot_bytes = config.worker_kv_bytes_per_block * config.cache.blocks_per_chunk
    identity = CacheIdentity(
        model=config.model.name,
        revision=settings.revision,
        dtype=config.model.dtype,
        layout=f"vllm {config.kv_cache_layout or ''}",
        page_bytes=((slot_bytes,),) * len(groups),
        block_tokens=tuple(group.tokens_per_block * config.cache.blocks_per_chunk for group in groups),
        parallel_shape=(
            ("tensor", parallel.tp_size),
            ("pipeline", parallel.pp_size),
            ("prefill-context", parallel.pcp_size),
            ("decode-context", parallel.dcp_size),
        ),
    )
    return StepEngine(
        engine_id=config.engine_id,
        world_size=parallel.world_size,
        slot_bytes=slot_bytes,
        group_count=1 + max(group.group_id for group in groups),
        identity=identity,
    )
