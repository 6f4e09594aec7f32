from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from aiokvoffload.config import EngineShape, OffloadingConfig
from aiokvoffload.devices.base import Device, Direction
from aiokvoffload.devices.host import HostDevice
from aiokvoffload.errors import ClosedError, ConfigurationError, DeviceError, StateError
from aiokvoffload.events import EventKind, OffloadingEvent
from aiokvoffload.keys import make_offload_key
from aiokvoffload.kv_caches import CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor, KVGroup
from aiokvoffload.managers.base import OffloadingManager
from aiokvoffload.managers.cpu import CPUOffloadingManager
from aiokvoffload.managers.reuse import FilterReusedOffloadingManager
from aiokvoffload.spec import CPUOffloadingSpec, OffloadingSpec, OffloadingSpecFactory
from aiokvoffload.specs import CPULoadStoreSpec, GPULoadStoreSpec, LookupResult
from aiokvoffload.testing.clock import ManualClock
from aiokvoffload.testing.device import ManualDevice
from aiokvoffload.testing.streams import ManualStream
from aiokvoffload.transfers.base import Transfer
from aiokvoffload.transfers.worker import OffloadingWorker

KEYS = [make_offload_key(bytes([number]) * 16) for number in range(8)]
BLOCK_COUNT = 12
LAYER_BYTES = 64
LAYER_COUNT = 2
BLOCK_BYTES = LAYER_COUNT * LAYER_BYTES

PLUGIN = """
from dataclasses import dataclass

from aiokvoffload.config import OffloadingConfig
from aiokvoffload.spec import CPUOffloadingSpec, OffloadingSpec


class PluggedSpec(CPUOffloadingSpec):
    pass


class UnfinishedSpec(OffloadingSpec):
    def build_manager(self):
        raise NotImplementedError


class Unrelated:
    pass
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class TieredConfig(OffloadingConfig):
    tier_bytes: int = 0


class TieredSpec(CPUOffloadingSpec):
    config_class = TieredConfig


def config_of(slot_count: int = 4, **values: Any) -> OffloadingConfig:
    factor = int(values.get("block_size_factor", 1))
    return OffloadingConfig.from_mapping({"cpu_bytes_to_use": slot_count * factor * BLOCK_BYTES, **values})


def engine_shape(**changes: Any) -> EngineShape:
    sizes: dict[str, Any] = {
        "block_tokens": 16,
        "group_block_tokens": (16,),
        "block_count": BLOCK_COUNT,
        "kv_cache_bytes": BLOCK_COUNT * BLOCK_BYTES,
    }
    return EngineShape(**{**sizes, **changes})


def layers_of(count: int = LAYER_COUNT, block_count: int = BLOCK_COUNT) -> list[torch.Tensor]:
    return [
        torch.randint(0, 256, (block_count, LAYER_BYTES), dtype=torch.uint8, generator=torch.Generator().manual_seed(n))
        for n in range(count)
    ]


def kv_caches_of(groups: tuple[KVGroup, ...] = (), block_count: int = BLOCK_COUNT) -> CanonicalKVCaches:
    return CanonicalKVCaches.from_layers(layers_of(block_count=block_count), groups=groups)


class WatchedDevice(ManualDevice):
    """Remembers what is pinned, and can refuse to make streams."""

    def __init__(self, *, stream_error: str | None = None) -> None:
        super().__init__(auto_land=True)
        self.pinned: dict[int, int] = {}
        self.stream_error = stream_error

    def pin(self, address: int, byte_count: int) -> None:
        super().pin(address, byte_count)
        self.pinned[address] = byte_count

    def unpin(self, address: int) -> None:
        super().unpin(address)
        del self.pinned[address]

    def create_stream(self, name: str) -> ManualStream:
        if self.stream_error is not None:
            raise DeviceError(self.stream_error)
        return super().create_stream(name)


@pytest.fixture
def factory() -> OffloadingSpecFactory:
    return OffloadingSpecFactory()


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Name of a module with specs that nobody has imported."""
    name = "offloading_spec_plugin"
    (tmp_path / f"{name}.py").write_text(PLUGIN)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, name, raising=False)
    return name


def cpu_spec(
    config: OffloadingConfig | None = None, engine: EngineShape | None = None, **parts: Any
) -> CPUOffloadingSpec:
    return CPUOffloadingSpec(config or config_of(), engine or engine_shape(), **parts)


def total_slots(manager: OffloadingManager) -> int:
    return manager.statistics().total


# Sizes


def test_a_spec_knows_the_tokens_of_its_blocks() -> None:
    engine = engine_shape(group_block_tokens=(16, 32), decode_context_parallel_size=2, prefill_context_parallel_size=2)
    spec = cpu_spec(config_of(block_size_factor=3), engine)
    assert spec.block_size_factor == 3
    assert spec.hash_block_tokens == 64
    assert spec.gpu_block_tokens == (64, 128)
    assert spec.offloaded_block_tokens == (192, 384)
    assert [group.block_tokens for group in spec.groups] == [64, 128]


@pytest.mark.parametrize("world_size", [1, 8])
@pytest.mark.parametrize("factor", [1, 2, 3, 4])
def test_manager_and_memory_have_as_many_blocks_as_fit(factor: int, world_size: int) -> None:
    cpu_bytes = 5 * BLOCK_BYTES * world_size * factor + 7
    config = config_of(cpu_bytes_to_use=cpu_bytes, block_size_factor=factor)
    spec = cpu_spec(config, engine_shape(world_size=world_size), device=ManualDevice())
    spec.get_worker(kv_caches_of())
    assert spec.block_count == 5
    assert total_slots(spec.get_manager()) == 5
    assert spec.memory is not None
    assert (spec.memory.slot_count, spec.memory.slot_bytes) == (5, BLOCK_BYTES * factor)
    spec.close()


def test_manager_and_worker_agree_whichever_comes_first() -> None:
    # Pages are half padding: going by the slots, twice as many would fit.
    caches = CanonicalKVCaches.from_layers(layers_of(), page_bytes=LAYER_BYTES // 2)
    first, second = (cpu_spec(device=ManualDevice()) for _ in range(2))
    counts = [total_slots(first.get_manager())]
    for spec in (first, second):
        spec.get_worker(caches)
        assert spec.memory is not None
        assert spec.memory.slot_bytes == BLOCK_BYTES // 2
        counts.append(spec.memory.slot_count)
    counts.append(total_slots(second.get_manager()))
    assert counts == [4, 4, 4, 4]


def test_slots_of_several_groups_are_as_large_as_the_largest() -> None:
    groups = (KVGroup(16, [0]), KVGroup(16, [1, 2], kind="window", window_tokens=40))
    caches = CanonicalKVCaches.from_layers(layers_of(3), groups=groups)
    engine = engine_shape(group_block_tokens=(), groups=groups, kv_cache_bytes=BLOCK_COUNT * 3 * LAYER_BYTES)
    spec = cpu_spec(config_of(cpu_bytes_to_use=4 * 3 * LAYER_BYTES), engine, device=ManualDevice())
    spec.get_worker(caches)
    assert spec.memory is not None
    assert (spec.memory.slot_count, spec.memory.slot_bytes) == (4, 2 * LAYER_BYTES)


def test_too_little_memory_for_one_block_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=f"give at least {BLOCK_BYTES * 2}: "):
        cpu_spec(config_of(cpu_bytes_to_use=BLOCK_BYTES), engine_shape(world_size=2))


def test_kv_caches_larger_than_the_engine_said_are_refused() -> None:
    spec = cpu_spec(config_of(), engine_shape(kv_cache_bytes=BLOCK_COUNT * LAYER_BYTES))
    message = (
        f"a slot of these KV caches takes {BLOCK_BYTES} bytes, but by the engine's sizes {LAYER_BYTES}: 8 slots on 1 "
        f"ranks would need {8 * BLOCK_BYTES} bytes of the {4 * BLOCK_BYTES} of cpu_bytes_to_use; check kv_cache_bytes"
    )
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        spec.get_worker(kv_caches_of())
    assert spec.memory is None


@pytest.mark.parametrize("spare_bytes", [0, 1])
def test_larger_slots_are_taken_as_long_as_they_fit(spare_bytes: int) -> None:
    """Two ranks, three slots: each slot is a byte larger than the engine said."""
    tensor = torch.zeros((BLOCK_COUNT, 33), dtype=torch.int8)
    cpu_bytes = 3 * 33 * 2 - 1 + spare_bytes
    spec = cpu_spec(
        config_of(cpu_bytes_to_use=cpu_bytes),
        engine_shape(kv_cache_bytes=BLOCK_COUNT * 32, world_size=2),
        device=ManualDevice(),
    )
    assert spec.block_count == 3
    if spare_bytes:
        spec.get_worker(CanonicalKVCaches.from_layers([tensor]))
    else:
        with pytest.raises(ConfigurationError, match="3 slots on 2 ranks would need 198 bytes of the 197"):
            spec.get_worker(CanonicalKVCaches.from_layers([tensor]))


@pytest.mark.parametrize(
    ("engine", "groups", "message"),
    [
        (
            engine_shape(group_block_tokens=(16, 16)),
            (),
            "of 2 KV groups (full of 16 tokens, full of 16 tokens), but the KV caches have 1 (full of 16 tokens); give",
        ),
        (engine_shape(group_block_tokens=(32,)), (), "1 KV groups (full of 32 tokens), but the KV caches have 1 (full"),
        (
            engine_shape(group_block_tokens=(16, 16)),
            (KVGroup(16, [0]), KVGroup(16, [1], kind="window", window_tokens=99)),
            "have 2 (full of 16 tokens, window of 16 tokens in a window of 99)",
        ),
        (
            engine_shape(block_count=6),
            (),
            "the engine's sizes are of 6 GPU blocks, but the KV caches have 12; check bl",
        ),
    ],
)
def test_kv_caches_that_are_not_the_engines_are_refused(
    engine: EngineShape, groups: tuple[KVGroup, ...], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        cpu_spec(config_of(), engine).get_worker(kv_caches_of(groups))


# Parts


def test_parts_are_made_once() -> None:
    spec = cpu_spec(device=ManualDevice())
    caches = kv_caches_of()
    assert spec.get_manager() is spec.get_manager()
    assert spec.get_worker(caches) is spec.get_worker(caches)
    with pytest.raises(StateError, match="the worker of this spec moves blocks of other KV caches"):
        spec.get_worker(kv_caches_of())


def test_parts_are_made_only_when_asked_for() -> None:
    device = WatchedDevice()
    spec = cpu_spec(device=device)
    spec.get_manager()
    assert (spec.memory, device.pinned) == (None, {})
    spec.get_worker(kv_caches_of())
    assert list(device.pinned.values()) == [4 * BLOCK_BYTES]


@pytest.mark.parametrize("threshold", [0, 1])
def test_a_low_threshold_means_no_filter(threshold: int) -> None:
    assert type(cpu_spec(config_of(store_threshold=threshold)).get_manager()) is CPUOffloadingManager


def test_a_threshold_puts_a_filter_in_front() -> None:
    manager = cpu_spec(config_of(store_threshold=2, max_tracker_size=3)).get_manager()
    assert isinstance(manager, FilterReusedOffloadingManager)
    assert manager.prepare_store_nowait(KEYS[:4]).filtered_keys == KEYS[:4]
    assert manager.tracked_count == 3
    assert manager.prepare_store_nowait(KEYS[:4]).keys_to_store == KEYS[:3]


@pytest.mark.parametrize(("policy", "evicted"), [("lru", KEYS[:1]), ("arc", KEYS[1:2])])
def test_the_policy_is_the_configured_one(policy: str, evicted: list[object]) -> None:
    """Block 0 is used twice, then blocks 1, 2 and 3 once each: only LRU lets it go first."""
    manager = cpu_spec(config_of(eviction_policy=policy)).get_manager()
    manager.complete_store_nowait(manager.prepare_store_nowait(KEYS[:1]))
    manager.touch(KEYS[:1])
    for key in KEYS[1:4]:
        manager.complete_store_nowait(manager.prepare_store_nowait([key]))
    assert manager.prepare_store_nowait(KEYS[4:5]).evicted_keys == evicted


def test_prefixes_are_counted_in_tokens_of_the_request() -> None:
    groups = [KVGroup(16, [0]), KVGroup(16, [1], kind="window", window_tokens=20)]
    engine = engine_shape(group_block_tokens=(), groups=groups, decode_context_parallel_size=2)
    spec = cpu_spec(config_of(slot_count=5, block_size_factor=2), engine)
    manager = spec.get_manager()
    # Of the window group, the first of three blocks is missing and not needed.
    full, window = KEYS[:3], KEYS[3:6]
    manager.complete_store_nowait(manager.prepare_store_nowait([*full, *window[1:]]))
    assert manager.lookup_prefix_nowait([*full, *window], group_sizes=[3, 3]) == 3 * 64


def test_events_go_to_the_sink_if_they_are_enabled() -> None:
    events: list[OffloadingEvent] = []
    for enabled in (False, True):
        manager = cpu_spec(config_of(enable_kv_cache_events=enabled), event_sink=events.append).get_manager()
        manager.complete_store_nowait(manager.prepare_store_nowait(KEYS[:1]))
    assert [(event.kind, event.keys) for event in events] == [(EventKind.STORED, tuple(KEYS[:1]))]


def test_events_without_a_sink_are_refused_where_they_would_arise() -> None:
    spec = cpu_spec(config_of(enable_kv_cache_events=True), device=ManualDevice())
    spec.get_worker(kv_caches_of())
    with pytest.raises(ConfigurationError, match="enable_kv_cache_events is on, but nobody takes the events; give ev"):
        spec.get_manager()


def test_the_clock_is_handed_on() -> None:
    clock = ManualClock(start=70.0)
    device = ManualDevice()
    spec = cpu_spec(device=device, clock=clock)
    assert spec.get_manager().clock is clock
    worker = spec.get_worker(kv_caches_of())
    transfer = Transfer(Direction.STORE, GPULoadStoreSpec([0], [1], [0]), CPULoadStoreSpec([0]))
    worker.submit(transfer)
    assert transfer.sent_at == 70.0


def test_without_a_device_tensors_decide() -> None:
    spec = cpu_spec()
    assert spec.device is None
    spec.get_worker(kv_caches_of())
    assert isinstance(spec.device, HostDevice)
    spec.close()
    with pytest.raises(ClosedError):
        spec.device.create_stream("late")


@pytest.mark.parametrize(
    ("device", "message"),
    [
        (None, "no device is known for KV caches on 'meta'; known: cpu, cuda; or give device"),
        (ManualDevice(), "ManualDevice copies CPU memory, but the KV caches lie on meta"),
    ],
)
def test_tensors_where_no_device_can_copy_are_refused(device: Device | None, message: str) -> None:
    tensor = torch.empty((BLOCK_COUNT, BLOCK_BYTES), dtype=torch.int8, device="meta")
    caches = CanonicalKVCaches(
        (CanonicalKVCacheTensor(tensor, BLOCK_BYTES),), ((CanonicalKVCacheRef(0, BLOCK_BYTES),),), (KVGroup(16, [0]),)
    )
    with pytest.raises(ConfigurationError, match=message):
        cpu_spec(device=device).get_worker(caches)


# The end of a spec


def test_closing_gives_everything_back_but_a_device_of_the_caller() -> None:
    device = WatchedDevice()
    spec = cpu_spec(device=device)
    manager = spec.get_manager()
    spec.get_worker(caches := kv_caches_of())
    spec.close()
    spec.close()
    assert device.pinned == {}
    device.create_stream("still open")
    with pytest.raises(ClosedError):
        manager.lookup_nowait(KEYS[:1])
    for get in (spec.get_manager, lambda: spec.get_worker(caches)):
        with pytest.raises(ClosedError, match="this spec is closed; create a new one"):
            get()


def test_a_spec_without_parts_can_be_closed() -> None:
    cpu_spec().close()


def test_a_spec_is_not_closed_under_a_copy() -> None:
    device = ManualDevice()
    spec = cpu_spec(device=device)
    worker = spec.get_worker(kv_caches_of())
    manager = spec.get_manager()
    worker.submit(Transfer(Direction.STORE, GPULoadStoreSpec([0], [1], [0]), CPULoadStoreSpec([0])))
    with pytest.raises(StateError, match="1 transfers are not over; poll the worker until they are, then close"):
        spec.close()
    assert manager.lookup_nowait(KEYS[:1]) == [LookupResult.MISS]
    device.land_all()
    worker.poll()
    spec.close()


def test_a_worker_that_cannot_be_made_leaves_nothing_pinned() -> None:
    device = WatchedDevice(stream_error="no stream left")
    spec = cpu_spec(device=device)
    with pytest.raises(DeviceError, match="no stream left"):
        spec.get_worker(kv_caches_of())
    assert (device.pinned, spec.memory) == ({}, None)
    device.stream_error = None
    spec.get_worker(kv_caches_of())
    assert len(device.pinned) == 1


# The factory


def test_the_default_is_the_cpu_spec(factory: OffloadingSpecFactory) -> None:
    device = ManualDevice()
    clock = ManualClock()
    sink: list[OffloadingEvent] = []
    spec = factory.create_spec(
        {"cpu_bytes_to_use": "512"}, engine_shape(), device=device, event_sink=sink.append, clock=clock
    )
    assert type(spec) is CPUOffloadingSpec
    assert (spec.block_count, spec.device, spec.clock) == (4, device, clock)
    assert spec.event_sink == sink.append
    assert spec.config == OffloadingConfig(cpu_bytes_to_use=512)


def test_a_finished_configuration_will_do(factory: OffloadingSpecFactory) -> None:
    config = config_of()
    assert factory.create_spec(config, engine_shape()).config is config


def test_a_registered_spec_is_imported_when_it_is_created(factory: OffloadingSpecFactory, plugin: str) -> None:
    factory.register_spec("mine", plugin, "PluggedSpec")
    factory.create_spec(config_of(), engine_shape())
    assert plugin not in sys.modules
    spec = factory.create_spec(config_of(spec_name="mine"), engine_shape())
    assert plugin in sys.modules
    assert type(spec) is sys.modules[plugin].PluggedSpec


def test_factories_know_nothing_of_each_other(factory: OffloadingSpecFactory, plugin: str) -> None:
    factory.register_spec("mine", plugin, "PluggedSpec")
    with pytest.raises(ConfigurationError, match="unknown offloading spec 'mine'"):
        OffloadingSpecFactory().create_spec(config_of(spec_name="mine"), engine_shape())
    OffloadingSpecFactory().register_spec("mine", plugin, "PluggedSpec")


def test_a_name_is_registered_once(factory: OffloadingSpecFactory, plugin: str) -> None:
    factory.register_spec("mine", plugin, "PluggedSpec")
    with pytest.raises(ConfigurationError, match=f"'mine' is registered already, as '{plugin}:PluggedSpec'; choose an"):
        factory.register_spec("mine", "elsewhere", "OtherSpec")
    with pytest.raises(ConfigurationError, match="'CPUOffloadingSpec' is registered already"):
        factory.register_spec("CPUOffloadingSpec", plugin, "PluggedSpec")
    assert type(factory.create_spec(config_of(spec_name="mine"), engine_shape())).__name__ == "PluggedSpec"


@pytest.mark.parametrize("names", [("", "module", "Spec"), ("mine", "", "Spec"), ("mine", "module", "")])
def test_nothing_is_registered_under_no_name(factory: OffloadingSpecFactory, names: tuple[str, str, str]) -> None:
    with pytest.raises(ConfigurationError, match="is '', it must be a name"):
        factory.register_spec(*names)


def test_an_unregistered_spec_is_found_in_its_module(factory: OffloadingSpecFactory, plugin: str) -> None:
    values = {"spec_name": "PluggedSpec", "spec_module_path": plugin, "cpu_bytes_to_use": 512}
    assert type(factory.create_spec(values, engine_shape())) is sys.modules[plugin].PluggedSpec
    config = OffloadingConfig.from_mapping(values)
    assert type(factory.create_spec(config, engine_shape())) is sys.modules[plugin].PluggedSpec


def test_a_registered_name_goes_before_a_module(factory: OffloadingSpecFactory, plugin: str) -> None:
    spec = factory.create_spec(config_of(spec_module_path=plugin), engine_shape())
    assert type(spec) is CPUOffloadingSpec
    assert plugin not in sys.modules


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        (
            "CPUOfloadingSpec",
            "'CPUOfloadingSpec'; did you mean 'CPUOffloadingSpec'? Known: CPUOffloadingSpec, tiered; ",
        ),
        ("zzz", "'zzz'. Known: CPUOffloadingSpec, tiered; or give spec_module_path, the module that has it"),
    ],
)
def test_an_unknown_spec_is_refused_with_the_known_ones(factory: OffloadingSpecFactory, name: str, answer: str) -> None:
    factory.register_spec("tiered", __name__, "TieredSpec")
    with pytest.raises(ConfigurationError, match=re.escape(f"unknown offloading spec {answer}")):
        factory.create_spec({"spec_name": name}, engine_shape())


@pytest.mark.parametrize(
    ("module_path", "name", "message"),
    [
        ("offloading_spec_plugin", "Unrelated", "is no offloading spec: it must be a subclass of OffloadingSpec"),
        ("offloading_spec_plugin", "dataclass", "is no offloading spec: it must be a subclass of OffloadingSpec"),
        ("offloading_spec_plugin", "Missing", "'offloading_spec_plugin:Missing' cannot be imported"),
        ("offloading_spec_missing", "Spec", "'offloading_spec_missing:Spec' cannot be imported"),
        ("offloading_spec_plugin", "UnfinishedSpec", "is abstract; it must define build_worker"),
        ("", "Spec", "spec_module_path is '', it must be a name"),
        (7, "Spec", "spec_module_path is 7, it must be a name"),
        (None, 7, "spec_name is 7, it must be a name"),
    ],
)
@pytest.mark.usefixtures("plugin")
def test_what_is_no_spec_is_refused(
    factory: OffloadingSpecFactory, module_path: object, name: object, message: str
) -> None:
    values = {"spec_module_path": module_path, "spec_name": name, "cpu_bytes_to_use": 512}
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        factory.create_spec(values, engine_shape())


def test_what_is_registered_must_be_a_spec(factory: OffloadingSpecFactory, plugin: str) -> None:
    factory.register_spec("mine", plugin, "Unrelated")
    with pytest.raises(ConfigurationError, match="'mine' is no offloading spec"):
        factory.create_spec(config_of(spec_name="mine"), engine_shape())


def test_a_configuration_that_cannot_work_is_refused(factory: OffloadingSpecFactory) -> None:
    with pytest.raises(ConfigurationError, match=r"unknown configuration key 'spec_nme'; did you mean 'spec_name'\?"):
        factory.create_spec({"spec_nme": "mine", "cpu_bytes_to_use": 512}, engine_shape())
    not_a_mapping: Any = ["cpu_bytes_to_use"]
    with pytest.raises(ConfigurationError, match="a configuration is a mapping of keys to values, not a list"):
        factory.create_spec(not_a_mapping, engine_shape())


def test_a_spec_can_have_keys_of_its_own(factory: OffloadingSpecFactory) -> None:
    factory.register_spec("tiered", __name__, "TieredSpec")
    values = {"spec_name": "tiered", "cpu_bytes_to_use": 512, "tier_bytes": "7"}
    spec = factory.create_spec({**values, "tier_bytes": 7}, engine_shape())
    assert isinstance(spec.config, TieredConfig)
    assert spec.config.tier_bytes == 7
    with pytest.raises(ConfigurationError, match="TieredSpec is configured by a TieredConfig, not by a OffloadingConf"):
        factory.create_spec(config_of(spec_name="tiered"), engine_shape())


def test_installed_plugins_are_known(
    factory: OffloadingSpecFactory, plugin: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    distribution = tmp_path / "spec_plugin-1.0.dist-info"
    distribution.mkdir()
    (distribution / "METADATA").write_text("Metadata-Version: 2.1\nName: spec-plugin\nVersion: 1.0\n")
    (distribution / "entry_points.txt").write_text(f"[aiokvoffload.specs]\nplugged = {plugin}:PluggedSpec\n")
    assert type(factory.create_spec(config_of(spec_name="plugged"), engine_shape())).__name__ == "PluggedSpec"


def test_a_scheduler_needs_no_torch() -> None:
    script = """
import sys
from aiokvoffload.config import EngineShape
from aiokvoffload.spec import OffloadingSpecFactory
engine = EngineShape(block_tokens=16, group_block_tokens=(16,), block_count=4, kv_cache_bytes=4096)
print(OffloadingSpecFactory().create_spec({"cpu_bytes_to_use": 8192}, engine).get_manager().statistics().total)
print("torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["8", "False"]


# From a configuration to bytes


def land(spec: OffloadingSpec, worker: OffloadingWorker, transfer: Transfer) -> None:
    worker.submit(transfer)
    assert spec.device is not None
    for event in transfer.end_events():
        assert spec.device.synchronize(event, timeout_seconds=30)
    assert worker.poll() == [transfer]
    assert transfer.success, transfer.error


@pytest.mark.parametrize("make_device", [HostDevice, ManualDevice, lambda: None])
@pytest.mark.parametrize("factor", [1, 2])
def test_stored_blocks_come_back_in_other_gpu_blocks(
    factory: OffloadingSpecFactory, make_device: Callable[[], Device | None], factor: int
) -> None:
    layers = layers_of()
    device = make_device()
    values = {"cpu_bytes_to_use": 4 * factor * BLOCK_BYTES, "block_size": 16 * factor}
    spec = factory.create_spec(values, engine_shape(), device=device)
    manager = spec.get_manager()
    worker = spec.get_worker(CanonicalKVCaches.from_layers(layers))
    sources, targets = list(range(2 * factor)), list(range(11, 11 - 2 * factor, -1))
    expected = [layer[sources].clone() for layer in layers]

    store = manager.prepare_store_nowait(KEYS[:2])
    assert store.keys_to_store == KEYS[:2]
    gpu_spec = GPULoadStoreSpec(sources, [len(sources)], [0])
    land(spec, worker, Transfer(Direction.STORE, gpu_spec, store.store_spec))
    manager.complete_store_nowait(store)
    for layer in layers:
        layer[sources] = 0

    loaded = manager.prepare_load_nowait(KEYS[:2])
    assert loaded.result is LookupResult.HIT
    gpu_spec = GPULoadStoreSpec(targets, [len(targets)], [0])
    land(spec, worker, Transfer(Direction.LOAD, gpu_spec, loaded.load_spec))
    manager.complete_load_nowait(loaded)
    for layer, content in zip(layers, expected, strict=True):
        assert torch.equal(layer[targets], content)
        assert not torch.equal(layer[targets][0], layer[targets][1])

    spec.close()
    if device is not None:
        device.close()
