"""From a configuration to running parts: specs, and the factory that finds a spec by its name."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any, ClassVar

from aiokvoffload.clock import Clock, SystemClock
from aiokvoffload.config import DEFAULT_SPEC_NAME, EngineShape, OffloadingConfig, check_mapping, check_text
from aiokvoffload.devices.base import Device, check_copies, device_for_tensors
from aiokvoffload.errors import ClosedError, ConfigurationError, StateError
from aiokvoffload.events import EventSink
from aiokvoffload.kv_caches import CanonicalKVCaches, KVGroup
from aiokvoffload.managers.base import OffloadingManager
from aiokvoffload.managers.cpu import CPUOffloadingManager
from aiokvoffload.managers.reuse import with_reuse_filter
from aiokvoffload.memory.base import HostMemory
from aiokvoffload.memory.pinned import PinnedMemory
from aiokvoffload.registry import Registry, nearest_name
from aiokvoffload.specs import check_placement
from aiokvoffload.transfers.assembly import build_worker, prepare_device
from aiokvoffload.transfers.pointers import SlotLayout
from aiokvoffload.transfers.worker import OffloadingWorker

ENTRY_POINT_GROUP = "aiokvoffload.specs"


class OffloadingSpec(ABC):
    """Makes the manager and the worker that a configuration asks for, each once and only when it is asked for.

    The two may be asked for in different processes, one per rank for the workers, so neither looks at the other.

    Args:
        config: What the user has set.
        engine: The sizes of the engine's KV cache.
        device: Does the copying; by default what the KV caches lie on.
        event_sink: Takes the manager's events, if the configuration enables them.
        clock: Where deadlines are read.

    Attributes:
        config_class: What the factory reads a mapping with; a subclass of `OffloadingConfig` adds keys.
        block_size_factor: GPU blocks per offloaded block.
        hash_block_tokens: Tokens that one block hash covers.
        gpu_block_tokens: Tokens of a GPU block of each KV group.
        offloaded_block_tokens: Tokens of an offloaded block of each KV group.
        groups: The KV groups, in tokens of the request.
        parts: What `close` gives back, last first; filled by the `build_` methods.

    Raises:
        ConfigurationError: The configuration does not fit the engine.
    """

    config_class: ClassVar[type[OffloadingConfig]] = OffloadingConfig

    def __init__(
        self,
        config: OffloadingConfig,
        engine: EngineShape,
        *,
        device: Device | None = None,
        event_sink: EventSink | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.config = config
        self.engine = engine
        self.device = device
        self.event_sink = event_sink
        self.clock: Clock = clock or SystemClock()
        self.block_size_factor = config.block_size_factor_for(engine)
        check_placement(config.placement, self.block_size_factor)
        self.hash_block_tokens = engine.hash_block_tokens
        self.gpu_block_tokens = engine.gpu_block_tokens
        self.offloaded_block_tokens = tuple(tokens * self.block_size_factor for tokens in engine.gpu_block_tokens)
        self.groups = tuple(
            KVGroup(tokens, group.layers, group.kind, group.window_tokens)
            for tokens, group in zip(engine.gpu_block_tokens, engine.groups, strict=True)
        )
        self.parts = ExitStack()
        self._manager: OffloadingManager | None = None
        self._worker: OffloadingWorker | None = None
        self._kv_caches: CanonicalKVCaches | None = None
        self._is_closed = False

    def get_manager(self) -> OffloadingManager:
        """Return the manager.

        Raises:
            ConfigurationError: It cannot be made from this configuration.
            ClosedError: The spec is closed.
        """
        self._check_open()
        if self._manager is None:
            self._manager = self.build_manager()
        return self._manager

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """Return the worker of this process, which moves blocks of `kv_caches`.

        Raises:
            ConfigurationError: The KV caches do not fit the configuration or the engine's sizes.
            StateError: The worker was made for other KV caches.
            ClosedError: The spec is closed.
        """
        self._check_open()
        if self._worker is None:
            self._worker = self.build_worker(kv_caches)
            self._kv_caches = kv_caches
        elif kv_caches is not self._kv_caches:
            raise StateError("the worker of this spec moves blocks of other KV caches; create a spec for each")
        return self._worker

    def close(self) -> None:
        """Close the manager and give back what the spec has made; idempotent.

        Raises:
            StateError: Copies are queued or under way, which touch memory that would be given back.
        """
        if self._is_closed:
            return
        if self._worker is not None and (count := self._worker.queued_count + self._worker.sent_count):
            raise StateError(f"{count} transfers are not over; poll the worker until they are, then close")
        if self._manager is not None:
            self._manager.close_nowait()
        self._is_closed = True
        self.parts.close()

    @abstractmethod
    def build_manager(self) -> OffloadingManager:
        """Make the manager; called once."""

    @abstractmethod
    def build_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """Make the worker; called once."""

    def _check_open(self) -> None:
        if self._is_closed:
            raise ClosedError("this spec is closed; create a new one")


class CPUOffloadingSpec(OffloadingSpec):
    """Keeps blocks in CPU memory of this process.

    Attributes:
        block_count: Offloaded blocks that CPU memory holds. It follows from the configuration and the engine's
            sizes alone, so that the manager and the workers of all ranks agree without a word.
        memory: The slots of this process, as many as `block_count`; None until the worker is made.

    Raises:
        ConfigurationError: See `OffloadingSpec`, or the memory is too little for one block.
    """

    def __init__(
        self,
        config: OffloadingConfig,
        engine: EngineShape,
        *,
        device: Device | None = None,
        event_sink: EventSink | None = None,
        clock: Clock | None = None,
    ) -> None:
        super().__init__(config, engine, device=device, event_sink=event_sink, clock=clock)
        self.block_count = config.cpu_block_count_for(engine)
        self.memory: HostMemory | None = None

    def build_manager(self) -> OffloadingManager:
        """Make a CPU manager, behind a reuse filter if the threshold asks for one."""
        config = self.config
        if config.enable_kv_cache_events and self.event_sink is None:
            raise ConfigurationError("enable_kv_cache_events is on, but nobody takes the events; give event_sink")
        return with_reuse_filter(
            CPUOffloadingManager(
                self.block_count,
                policy=config.eviction_policy,
                groups=self.groups,
                block_size_factor=self.block_size_factor,
                blocks_above=self.engine.block_count if config.placement == "exclusive" else 0,
                event_sink=self.event_sink if config.enable_kv_cache_events else None,
                clock=self.clock,
            ),
            config.store_threshold,
            config.max_tracker_size,
        )

    def build_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """Make the slots, a handler per direction and the worker above them."""
        self._check_groups(kv_caches)
        layout = SlotLayout(kv_caches, self.block_size_factor)
        self._check_room(layout.slot_bytes)
        with ExitStack() as parts:
            device = self.device
            if device is None:
                device = device_for_tensors(kv_caches.device.type, kv_caches.device.index)
                parts.callback(device.close)
            check_copies(device, kv_caches.device)
            memory = PinnedMemory(self.block_count, layout.slot_bytes, device)
            parts.callback(memory.close)
            prepare_device(layout, device)
            memory.prepare()
            worker = build_worker(layout, memory, device, self.clock)
            self.device, self.memory = device, memory
            self.parts.callback(parts.pop_all().close)
        return worker

    def _check_groups(self, kv_caches: CanonicalKVCaches) -> None:
        """Refuse KV caches that are not those the engine's sizes speak of."""
        expected, found = (_describe(groups) for groups in (self.engine.groups, kv_caches.groups))
        if expected != found:
            raise ConfigurationError(
                f"the engine's sizes are of {len(expected)} KV groups ({', '.join(expected)}), but the KV caches have "
                f"{len(found)} ({', '.join(found)}); give the same groups to both"
            )
        if kv_caches.block_count != self.engine.block_count:
            raise ConfigurationError(
                f"the engine's sizes are of {self.engine.block_count} GPU blocks, but the KV caches have "
                f"{kv_caches.block_count}; check block_count"
            )

    def _check_room(self, slot_bytes: int) -> None:
        """Refuse slots that would take more memory than there is, however the engine has counted."""
        needed_bytes = self.block_count * slot_bytes * self.engine.world_size
        if needed_bytes > self.config.cpu_bytes_to_use:
            raise ConfigurationError(
                f"a slot of these KV caches takes {slot_bytes} bytes, but by the engine's sizes "
                f"{self.engine.block_bytes * self.block_size_factor}: {self.block_count} slots on "
                f"{self.engine.world_size} ranks would need {needed_bytes} bytes of the {self.config.cpu_bytes_to_use} "
                "of cpu_bytes_to_use; check kv_cache_bytes and block_count"
            )


class OffloadingSpecFactory:
    """Finds specs by name and imports them only when one is created.

    It knows `CPUOffloadingSpec`, what is registered with it, and what installed plug-ins announce as entry points
    of the group `aiokvoffload.specs`.
    """

    def __init__(self) -> None:
        self._targets = {DEFAULT_SPEC_NAME: f"{__name__}:CPUOffloadingSpec"}

    def register_spec(self, name: str, module_path: str, class_name: str) -> None:
        """Make a spec known under a name; its module is not imported yet.

        Raises:
            ConfigurationError: The name is taken, or one of the three is no name.
        """
        check_text("name", name)
        check_text("module_path", module_path)
        check_text("class_name", class_name)
        if name in self._targets:
            raise ConfigurationError(
                f"offloading spec {name!r} is registered already, as {self._targets[name]!r}; choose another name"
            )
        self._targets[name] = f"{module_path}:{class_name}"

    def create_spec(
        self,
        config: OffloadingConfig | Mapping[str, Any],
        engine: EngineShape,
        *,
        device: Device | None = None,
        event_sink: EventSink | None = None,
        clock: Clock | None = None,
    ) -> OffloadingSpec:
        """Create the spec that a configuration names; a known name goes before `spec_module_path`.

        Raises:
            ConfigurationError: The spec is unknown, cannot be imported or is none, or the configuration cannot work.
        """
        if not isinstance(config, OffloadingConfig):
            check_mapping(config)
            spec_class = self._find(config.get("spec_name", DEFAULT_SPEC_NAME), config.get("spec_module_path"))
            config = spec_class.config_class.from_mapping(config)
        else:
            spec_class = self._find(config.spec_name, config.spec_module_path)
            if not isinstance(config, spec_class.config_class):
                raise ConfigurationError(
                    f"{spec_class.__name__} is configured by a {spec_class.config_class.__name__}, "
                    f"not by a {type(config).__name__}; give that, or a mapping"
                )
        return spec_class(config, engine, device=device, event_sink=event_sink, clock=clock)

    def _find(self, name: object, module_path: object) -> type[OffloadingSpec]:
        spec_name = check_text("spec_name", name)
        registry = Registry("offloading spec", OffloadingSpec, self._targets, ENTRY_POINT_GROUP)
        known = registry.names()
        if spec_name not in known:
            if module_path is None:
                raise ConfigurationError(
                    f"unknown offloading spec {spec_name!r}{nearest_name(spec_name, known) or '.'} "
                    f"Known: {', '.join(known)}; or give spec_module_path, the module that has it"
                )
            spec_name = f"{check_text('spec_module_path', module_path)}:{spec_name}"
        spec_class = registry.resolve(spec_name)
        if inspect.isabstract(spec_class):
            missing = ", ".join(sorted(spec_class.__abstractmethods__))
            raise ConfigurationError(f"offloading spec {spec_name!r} is abstract; it must define {missing}")
        return spec_class


def _describe(groups: Sequence[KVGroup]) -> list[str]:
    return [
        f"{group.kind} of {group.block_tokens} tokens"
        + (f" in a window of {group.window_tokens}" if group.window_tokens is not None else "")
        for group in groups
    ]
