from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

from aiokvoffload.config import EngineShape, OffloadingConfig
from aiokvoffload.errors import ConfigurationError
from aiokvoffload.kv_caches import KVGroup

GIB = 1 << 30


def engine_shape(**changes: Any) -> EngineShape:
    """One group of 100 GPU blocks, each of 16 tokens and 1024 bytes."""
    sizes: dict[str, Any] = {
        "block_tokens": 16,
        "group_block_tokens": (16,),
        "block_count": 100,
        "kv_cache_bytes": 102_400,
    }
    return EngineShape(**{**sizes, **changes})


def config_of(**values: Any) -> OffloadingConfig:
    return OffloadingConfig.from_mapping({"cpu_bytes_to_use": 10 * GIB, **values})


# The engine's sizes


@pytest.mark.parametrize(
    ("changes", "factor", "hash_block_tokens", "gpu_block_tokens", "block_bytes"),
    [
        ({}, 1, 16, (16,), 1024),
        ({"decode_context_parallel_size": 2}, 2, 32, (32,), 1024),
        ({"prefill_context_parallel_size": 3}, 3, 48, (48,), 1024),
        ({"decode_context_parallel_size": 2, "prefill_context_parallel_size": 2}, 4, 64, (64,), 1024),
        ({"group_block_tokens": (16, 48, 784)}, 1, 16, (16, 48, 784), 1024),
        ({"group_block_tokens": [32, 16], "decode_context_parallel_size": 2}, 2, 32, (64, 32), 1024),
        ({"block_tokens": 1, "block_count": 1}, 1, 1, (16,), 102_400),
    ],
)
def test_tokens_and_bytes_of_an_engines_blocks(
    changes: dict[str, Any], factor: int, hash_block_tokens: int, gpu_block_tokens: tuple[int, ...], block_bytes: int
) -> None:
    engine = engine_shape(**changes)
    assert engine.context_parallel_factor == factor
    assert engine.hash_block_tokens == hash_block_tokens
    assert engine.gpu_block_tokens == gpu_block_tokens
    assert engine.block_bytes == block_bytes


def test_groups_say_the_tokens_of_their_blocks() -> None:
    groups = [KVGroup(16, ()), KVGroup(32, (), kind="window", window_tokens=100)]
    engine = engine_shape(group_block_tokens=(), groups=groups)
    assert engine.group_block_tokens == (16, 32)
    assert engine.groups == tuple(groups)
    assert engine_shape(group_block_tokens=(16, 32), groups=groups) == engine


def test_tokens_alone_mean_full_attention() -> None:
    assert engine_shape(group_block_tokens=(16, 32)).groups == (KVGroup(16, ()), KVGroup(32, ()))


def test_an_engine_shape_can_be_changed_and_compared() -> None:
    engine = engine_shape(group_block_tokens=[np.int64(16)], block_count=np.int64(50), kv_cache_bytes="102400")
    assert engine == engine_shape(block_count=50)
    assert hash(engine) == hash(engine_shape(block_count=50))
    assert dataclasses.replace(engine, world_size=2).world_size == 2
    assert type(engine.block_count) is int
    with pytest.raises(dataclasses.FrozenInstanceError):
        engine.block_count = 7  # type: ignore[misc]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_tokens": 0}, "block_tokens is 0, it must be at least 1"),
        ({"block_count": 0}, "block_count is 0, it must be at least 1"),
        ({"kv_cache_bytes": -4}, "kv_cache_bytes is -4, it must be at least 1"),
        ({"world_size": 0}, "world_size is 0, it must be at least 1"),
        ({"world_size": True}, "world_size is True, it must be a whole number"),
        ({"decode_context_parallel_size": 0}, "decode_context_parallel_size is 0, it must be at least 1"),
        ({"prefill_context_parallel_size": 1.5}, "prefill_context_parallel_size is 1.5, it must be a whole number"),
        ({"group_block_tokens": (16, 0)}, "group_block_tokens of KV group 1 is 0, it must be at least 1"),
        ({"group_block_tokens": ()}, "there is no KV group; give group_block_tokens, or groups, one per KV group"),
        ({"group_block_tokens": 16}, "group_block_tokens is 16, it must be a sequence with one entry per KV group"),
        ({"group_block_tokens": "16"}, "group_block_tokens is '16', it must be a sequence"),
        ({"groups": KVGroup(16, ())}, "groups is KVGroup(block_tokens=16,"),
        ({"groups": [16]}, "groups are KVGroups, but there is 16"),
        (
            {"groups": [KVGroup(32, ())]},
            "group_block_tokens (16,) and the groups' block_tokens (32,) differ; give only one of them",
        ),
        (
            {"group_block_tokens": (32, 24)},
            "KV group 1 has GPU blocks of 24 tokens, no multiple of the hash block's 16; let the engine align",
        ),
        (
            {"group_block_tokens": (8,), "decode_context_parallel_size": 2, "prefill_context_parallel_size": 2},
            "KV group 0 has GPU blocks of 32 tokens, no multiple of the hash block's 64;",
        ),
        (
            {"kv_cache_bytes": 102_407},
            "102407 bytes of KV cache do not divide into 100 GPU blocks: 7 bytes are left over;",
        ),
    ],
)
def test_engine_sizes_that_cannot_be_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        engine_shape(**changes)


# The user's configuration


def test_defaults_are_those_of_the_reference() -> None:
    config = OffloadingConfig.from_mapping({"cpu_bytes_to_use": GIB})
    assert config == OffloadingConfig(cpu_bytes_to_use=GIB)
    assert dataclasses.asdict(config) == {
        "spec_name": "CPUOffloadingSpec",
        "spec_module_path": None,
        "cpu_bytes_to_use": GIB,
        "block_size": None,
        "block_size_factor": None,
        "eviction_policy": "lru",
        "store_threshold": 0,
        "max_tracker_size": 64_000,
        "placement": "inclusive",
        "enable_kv_cache_events": False,
    }


def test_every_key_is_read() -> None:
    values = {
        "spec_name": "Other",
        "spec_module_path": "some.module",
        "cpu_bytes_to_use": "1073741824",
        "block_size_factor": np.int64(4),
        "block_size": None,
        "eviction_policy": "arc",
        "store_threshold": "2",
        "max_tracker_size": 1e3,
        "enable_kv_cache_events": True,
    }
    config = OffloadingConfig.from_mapping(MappingProxyType(values))
    assert config == OffloadingConfig(
        spec_name="Other",
        spec_module_path="some.module",
        cpu_bytes_to_use=GIB,
        block_size_factor=4,
        eviction_policy="arc",
        store_threshold=2,
        max_tracker_size=1000,
        enable_kv_cache_events=True,
    )
    numbers = (config.cpu_bytes_to_use, config.block_size_factor, config.store_threshold, config.max_tracker_size)
    assert [type(number) for number in numbers] == [int, int, int, int]


@pytest.mark.parametrize(
    "name", ["cpu_bytes_to_use", "block_size", "block_size_factor", "store_threshold", "max_tracker_size"]
)
@pytest.mark.parametrize("value", [True, 1.5, float("inf"), float("nan"), "many", "1.0", "", "0x10", [1], b"1", {}])
def test_a_value_that_is_no_whole_number_is_refused(name: str, value: object) -> None:
    with pytest.raises(ConfigurationError, match=f"^{name} is {re.escape(repr(value))}, it must be a whole number$"):
        config_of(**{name: value})


@pytest.mark.parametrize(
    ("name", "value", "minimum"),
    [
        ("cpu_bytes_to_use", 0, 1),
        ("cpu_bytes_to_use", "-1", 1),
        ("block_size", 0, 1),
        ("block_size_factor", -2, 1),
        ("store_threshold", -1, 0),
        ("max_tracker_size", 0, 1),
    ],
)
def test_a_number_that_is_too_small_is_refused(name: str, value: object, minimum: int) -> None:
    with pytest.raises(ConfigurationError, match=f"^{name} is {value}, it must be at least {minimum}$"):
        config_of(**{name: value})


@pytest.mark.parametrize("name", ["cpu_bytes_to_use", "store_threshold", "max_tracker_size"])
def test_a_number_cannot_be_none(name: str) -> None:
    with pytest.raises(ConfigurationError, match=f"^{name} is None, it must be a whole number$"):
        config_of(**{name: None})


@pytest.mark.parametrize("name", ["spec_name", "spec_module_path", "eviction_policy"])
@pytest.mark.parametrize("value", ["", 7, ["lru"]])
def test_a_name_must_be_one(name: str, value: object) -> None:
    with pytest.raises(ConfigurationError, match=f"^{name} is {re.escape(repr(value))}, it must be a name$"):
        config_of(**{name: value})


@pytest.mark.parametrize("value", [1, 0, "true", None])
def test_a_switch_is_true_or_false(value: object) -> None:
    with pytest.raises(ConfigurationError, match=f"^enable_kv_cache_events is {value!r}, it must be true or false$"):
        config_of(enable_kv_cache_events=value)


def test_an_unknown_policy_is_refused_with_the_known_ones() -> None:
    with pytest.raises(
        ConfigurationError, match=r"unknown eviction policy 'LUR'; did you mean 'lru'\? Known: .*arc.*lru"
    ):
        config_of(eviction_policy="LUR")


def test_a_policy_can_be_named_by_module_and_class() -> None:
    assert config_of(eviction_policy="aiokvoffload.policies.lru:LRUPolicy").eviction_policy.endswith("LRUPolicy")
    with pytest.raises(ConfigurationError, match="is no eviction policy"):
        config_of(eviction_policy="collections:OrderedDict")


def test_memory_must_be_given() -> None:
    with pytest.raises(
        ConfigurationError, match=r"^cpu_bytes_to_use is missing from the configuration; it must be given$"
    ):
        OffloadingConfig.from_mapping({})


@pytest.mark.parametrize(
    ("key", "answer"),
    [
        ("cpu_byte_to_use", "'cpu_byte_to_use'; did you mean 'cpu_bytes_to_use'?"),
        ("Block_Size", "'Block_Size'; did you mean 'block_size'?"),
        ("store_treshold", "'store_treshold'; did you mean 'store_threshold'?"),
        ("zzz", "'zzz'."),
        (7, "7."),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_and_the_known_ones(key: object, answer: str) -> None:
    names = ", ".join(field.name for field in dataclasses.fields(OffloadingConfig))
    mapping: dict[Any, object] = {"cpu_bytes_to_use": GIB, key: 1}
    with pytest.raises(ConfigurationError, match=re.escape(f"unknown configuration key {answer} Known: {names}")):
        OffloadingConfig.from_mapping(mapping)


@pytest.mark.parametrize("value", [None, "cpu_bytes_to_use", [("cpu_bytes_to_use", 1)]])
def test_a_configuration_is_a_mapping(value: Any) -> None:
    with pytest.raises(ConfigurationError, match="a configuration is a mapping of keys to values, not a"):
        OffloadingConfig.from_mapping(value)


def test_block_size_and_factor_exclude_each_other() -> None:
    with pytest.raises(ConfigurationError, match="block_size is 32 and block_size_factor is 2; give only one of them"):
        config_of(block_size=32, block_size_factor=2)


def test_a_configuration_is_frozen() -> None:
    config = config_of()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.store_threshold = 3  # type: ignore[misc]
    assert not hasattr(config, "__dict__")


def test_a_subclass_adds_keys() -> None:
    @dataclass(frozen=True, slots=True, kw_only=True)
    class TieredConfig(OffloadingConfig):
        tier_path: str

    config = TieredConfig.from_mapping({"cpu_bytes_to_use": "8", "tier_path": "tier"})
    assert (config.cpu_bytes_to_use, config.tier_path) == (8, "tier")
    with pytest.raises(ConfigurationError, match="tier_path is missing"):
        TieredConfig.from_mapping({"cpu_bytes_to_use": 8})


# Derived sizes


@pytest.mark.parametrize(
    ("values", "changes", "factor"),
    [
        ({}, {}, 1),
        ({"block_size_factor": 3}, {}, 3),
        ({"block_size_factor": 3}, {"group_block_tokens": (16, 48)}, 3),
        ({"block_size": 16}, {}, 1),
        ({"block_size": 64}, {}, 4),
        ({"block_size": "64"}, {"decode_context_parallel_size": 2}, 2),
        ({"block_size": 64}, {"decode_context_parallel_size": 2, "prefill_context_parallel_size": 2}, 1),
        ({"block_size": 192}, {"decode_context_parallel_size": 2, "prefill_context_parallel_size": 2}, 3),
        ({"block_size": 96}, {"group_block_tokens": (32, 32)}, 3),
    ],
)
def test_gpu_blocks_of_an_offloaded_block(values: dict[str, Any], changes: dict[str, Any], factor: int) -> None:
    assert config_of(**values).block_size_factor_for(engine_shape(**changes)) == factor


@pytest.mark.parametrize(
    ("block_size", "changes", "message"),
    [
        (40, {}, "block_size is 40 tokens, no multiple of the GPU block's 16; give 32 or 48"),
        (8, {}, "block_size is 8 tokens, no multiple of the GPU block's 16; give 16"),
        (32, {"prefill_context_parallel_size": 4}, "no multiple of the GPU block's 64; give 64"),
        (96, {"group_block_tokens": (16, 48)}, "but GPU blocks of the KV groups have 16, 48 tokens; give block_size_f"),
    ],
)
def test_a_block_size_that_does_not_fit_is_refused(block_size: int, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        config_of(block_size=block_size).block_size_factor_for(engine_shape(**changes))


# 61 layers of 576 bfloat16 values a token, 64 tokens a block: 4,497,408 bytes a block
MLA_BLOCK_BYTES = 61 * 576 * 2 * 64
# 80 layers, 8 heads over 8 ranks, keys and values of 128 bfloat16, 16 tokens a block: 655,360 bytes a block and rank
GQA_BLOCK_BYTES = 80 * 2 * 128 * 2 * 16


@pytest.mark.parametrize(
    ("values", "changes", "block_count"),
    [
        ({"cpu_bytes_to_use": 1024}, {}, 1),
        ({"cpu_bytes_to_use": 10_239}, {}, 9),
        ({"cpu_bytes_to_use": 10_240}, {}, 10),
        ({"cpu_bytes_to_use": 10_240, "block_size_factor": 2}, {}, 5),
        ({"cpu_bytes_to_use": 10_240, "block_size_factor": 3}, {}, 3),
        ({"cpu_bytes_to_use": 10_240, "block_size": 64}, {}, 2),
        ({"cpu_bytes_to_use": 10_240, "block_size_factor": 2}, {"world_size": 2}, 2),
        # Context parallelism changes what a block counts, not what it holds.
        (
            {"cpu_bytes_to_use": 10_240, "block_size": 128},
            {"decode_context_parallel_size": 2, "prefill_context_parallel_size": 2, "world_size": 4},
            1,
        ),
        ({"cpu_bytes_to_use": 10_240}, {"group_block_tokens": (16, 784)}, 10),
        ({}, {"block_count": 1000, "kv_cache_bytes": 1000 * MLA_BLOCK_BYTES}, 2387),
        ({}, {"block_count": 5000, "kv_cache_bytes": 5000 * GQA_BLOCK_BYTES, "world_size": 8}, 2048),
        (
            {"block_size_factor": 4},
            {"block_count": 5000, "kv_cache_bytes": 5000 * GQA_BLOCK_BYTES, "world_size": 8},
            512,
        ),
    ],
)
def test_blocks_that_fit_into_cpu_memory(values: dict[str, Any], changes: dict[str, Any], block_count: int) -> None:
    assert config_of(**values).cpu_block_count_for(engine_shape(**changes)) == block_count


def test_too_little_memory_for_one_block_says_how_much_is_needed() -> None:
    engine = engine_shape(world_size=8)
    needed_bytes = 1024 * 8 * 2
    message = (
        "cpu_bytes_to_use is 16383, too little for one block; give at least 16384: "
        "1024 bytes a GPU block, times 2 GPU blocks, times 8 ranks"
    )
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        config_of(cpu_bytes_to_use=needed_bytes - 1, block_size=32).cpu_block_count_for(engine)
    assert config_of(cpu_bytes_to_use=needed_bytes, block_size=32).cpu_block_count_for(engine) == 1


def test_a_mapping_is_not_changed() -> None:
    values: Mapping[str, object] = {"cpu_bytes_to_use": "7", "store_threshold": "2"}
    OffloadingConfig.from_mapping(values)
    assert values == {"cpu_bytes_to_use": "7", "store_threshold": "2"}
