"""What a user configures and what an engine says about its KV cache; both are checked when they are made."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from typing import Any, Self

from aiokvoffload.errors import ConfigurationError
from aiokvoffload.kv_caches import KVGroup
from aiokvoffload.managers.reuse import MAX_TRACKER_SIZE
from aiokvoffload.policies.base import POLICIES
from aiokvoffload.registry import nearest_name
from aiokvoffload.specs import Placement, check_placement

DEFAULT_SPEC_NAME = "CPUOffloadingSpec"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineShape:
    """The sizes of an engine's KV cache, as the engine knows them.

    Attributes:
        block_tokens: Tokens of the block that the engine hashes, before context parallelism.
        group_block_tokens: Tokens of a GPU block of each KV group, before context parallelism; may be left out
            where `groups` are given.
        groups: What each KV group needs of a prefix; without them, all are full attention. Their layers are not
            looked at.
        block_count: GPU blocks of one rank.
        kv_cache_bytes: Bytes of all KV tensors of one rank.
        world_size: Ranks that share the CPU memory.
        decode_context_parallel_size: Ranks that split the context while decoding.
        prefill_context_parallel_size: Ranks that split the context while prefilling.

    Raises:
        ConfigurationError: A value is no positive whole number, or the values do not fit each other.
    """

    block_tokens: int
    group_block_tokens: Sequence[int] = ()
    groups: Sequence[KVGroup] = ()
    block_count: int
    kv_cache_bytes: int
    world_size: int = 1
    decode_context_parallel_size: int = 1
    prefill_context_parallel_size: int = 1

    def __post_init__(self) -> None:
        for name in (
            "block_tokens",
            "block_count",
            "kv_cache_bytes",
            "world_size",
            "decode_context_parallel_size",
            "prefill_context_parallel_size",
        ):
            object.__setattr__(self, name, _whole_number(name, getattr(self, name), minimum=1))
        self._settle_groups()
        for group, gpu_block_tokens in enumerate(self.gpu_block_tokens):
            if gpu_block_tokens % self.hash_block_tokens:
                raise ConfigurationError(
                    f"KV group {group} has GPU blocks of {gpu_block_tokens} tokens, no multiple of the hash block's "
                    f"{self.hash_block_tokens}; let the engine align the block sizes of its groups"
                )
        if self.kv_cache_bytes % self.block_count:
            raise ConfigurationError(
                f"{self.kv_cache_bytes} bytes of KV cache do not divide into {self.block_count} GPU blocks: "
                f"{self.kv_cache_bytes % self.block_count} bytes are left over; check kv_cache_bytes and block_count"
            )

    def _settle_groups(self) -> None:
        """Fill in what was left out of the tokens of each group and the groups."""
        for name in ("group_block_tokens", "groups"):
            value = getattr(self, name)
            if not isinstance(value, Sequence) or isinstance(value, str | bytes):
                raise ConfigurationError(f"{name} is {value!r}, it must be a sequence with one entry per KV group")
        given, groups = tuple(self.group_block_tokens), tuple(self.groups)
        for group in groups:
            if not isinstance(group, KVGroup):
                raise ConfigurationError(f"groups are KVGroups, but there is {group!r}")
        tokens = tuple(
            _whole_number(f"group_block_tokens of KV group {group}", value, minimum=1)
            for group, value in enumerate(given)
        )
        declared = tuple(group.block_tokens for group in groups)
        if tokens and declared and tokens != declared:
            raise ConfigurationError(
                f"group_block_tokens {tokens} and the groups' block_tokens {declared} differ; give only one of them"
            )
        if not tokens and not declared:
            raise ConfigurationError("there is no KV group; give group_block_tokens, or groups, one per KV group")
        object.__setattr__(self, "group_block_tokens", tokens or declared)
        object.__setattr__(self, "groups", groups or tuple(KVGroup(block_tokens=value, layers=()) for value in tokens))

    @property
    def context_parallel_factor(self) -> int:
        """Ranks among which the tokens of a block are split, so that its block counts that many times its tokens."""
        return self.decode_context_parallel_size * self.prefill_context_parallel_size

    @property
    def hash_block_tokens(self) -> int:
        """Tokens of the request that one block hash covers."""
        return self.block_tokens * self.context_parallel_factor

    @property
    def gpu_block_tokens(self) -> tuple[int, ...]:
        """Tokens of the request in one GPU block of each KV group."""
        return tuple(tokens * self.context_parallel_factor for tokens in self.group_block_tokens)

    @property
    def block_bytes(self) -> int:
        """Bytes of one GPU block in all KV tensors of one rank."""
        return self.kv_cache_bytes // self.block_count


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadingConfig:
    """What a user can set, by its key in the configuration.

    Numbers may come as strings of digits and as floats without a fraction, as configuration files have them.

    Attributes:
        spec_name: Name of the offloading spec.
        spec_module_path: Module of a spec that is not registered under its name.
        cpu_bytes_to_use: Bytes of CPU memory, of all ranks together.
        block_size: Tokens of an offloaded block; in its place `block_size_factor` can be given.
        block_size_factor: GPU blocks per offloaded block, 1 where neither is given.
        eviction_policy: Name of the eviction policy, or `module:Class`.
        store_threshold: Uses that make a block worth storing; 0 and 1 store every block.
        placement: `"inclusive"`, or `"exclusive"` for an engine that demotes what its own prefix cache gives up.
        max_tracker_size: Blocks whose uses are remembered.
        enable_kv_cache_events: Announce stored and removed blocks.

    Raises:
        ConfigurationError: A value cannot work.
    """

    spec_name: str = DEFAULT_SPEC_NAME
    spec_module_path: str | None = None
    cpu_bytes_to_use: int
    block_size: int | None = None
    block_size_factor: int | None = None
    eviction_policy: str = "lru"
    store_threshold: int = 0
    max_tracker_size: int = MAX_TRACKER_SIZE
    placement: Placement = "inclusive"
    enable_kv_cache_events: bool = False

    def __post_init__(self) -> None:
        check_text("spec_name", self.spec_name)
        if self.spec_module_path is not None:
            check_text("spec_module_path", self.spec_module_path)
        check_text("eviction_policy", self.eviction_policy)
        POLICIES.resolve(self.eviction_policy)
        for name, minimum in (("cpu_bytes_to_use", 1), ("store_threshold", 0), ("max_tracker_size", 1)):
            object.__setattr__(self, name, _whole_number(name, getattr(self, name), minimum))
        for name in ("block_size", "block_size_factor"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, _whole_number(name, getattr(self, name), minimum=1))
        if self.block_size is not None and self.block_size_factor is not None:
            raise ConfigurationError(
                f"block_size is {self.block_size} and block_size_factor is {self.block_size_factor}; "
                "give only one of them: tokens of an offloaded block, or GPU blocks in it"
            )
        check_placement(self.placement, 1)
        if not isinstance(self.enable_kv_cache_events, bool):
            raise ConfigurationError(
                f"enable_kv_cache_events is {self.enable_kv_cache_events!r}, it must be true or false"
            )

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> Self:
        """Read a configuration by its keys.

        Raises:
            ConfigurationError: A key is unknown, a required one is missing, or a value cannot work.
        """
        check_mapping(mapping)
        known = {field.name: field for field in fields(cls)}
        for key in mapping:
            if key not in known:
                raise ConfigurationError(
                    f"unknown configuration key {key!r}{nearest_name(str(key), known) or '.'} Known: {', '.join(known)}"
                )
        for name, field in known.items():
            if name not in mapping and field.default is MISSING and field.default_factory is MISSING:
                raise ConfigurationError(f"{name} is missing from the configuration; it must be given")
        return cls(**mapping)

    def block_size_factor_for(self, engine: EngineShape) -> int:
        """Return how many GPU blocks an offloaded block holds.

        Raises:
            ConfigurationError: `block_size` is no multiple of the GPU block, or KV groups differ in theirs.
        """
        if self.block_size is None:
            return self.block_size_factor or 1
        gpu_block_tokens = engine.gpu_block_tokens[0]
        if len(set(engine.gpu_block_tokens)) > 1:
            raise ConfigurationError(
                f"block_size is {self.block_size}, but GPU blocks of the KV groups have "
                f"{', '.join(map(str, engine.gpu_block_tokens))} tokens; give block_size_factor in its place"
            )
        if self.block_size % gpu_block_tokens:
            below = self.block_size // gpu_block_tokens * gpu_block_tokens
            near = f"{below} or {below + gpu_block_tokens}" if below else f"{gpu_block_tokens}"
            raise ConfigurationError(
                f"block_size is {self.block_size} tokens, no multiple of the GPU block's {gpu_block_tokens}; "
                f"give {near}"
            )
        return self.block_size // gpu_block_tokens

    def cpu_block_count_for(self, engine: EngineShape) -> int:
        """Return how many offloaded blocks fit into the CPU memory.

        Raises:
            ConfigurationError: Not one does.
        """
        factor = self.block_size_factor_for(engine)
        offloaded_block_bytes = engine.block_bytes * engine.world_size * factor
        if self.cpu_bytes_to_use < offloaded_block_bytes:
            raise ConfigurationError(
                f"cpu_bytes_to_use is {self.cpu_bytes_to_use}, too little for one block; give at least "
                f"{offloaded_block_bytes}: {engine.block_bytes} bytes a GPU block, times {factor} GPU blocks, "
                f"times {engine.world_size} ranks"
            )
        return self.cpu_bytes_to_use // offloaded_block_bytes


def check_mapping(mapping: object) -> None:
    """Refuse a configuration that has no keys.

    Raises:
        ConfigurationError: It is not a mapping.
    """
    if not isinstance(mapping, Mapping):
        raise ConfigurationError(f"a configuration is a mapping of keys to values, not a {type(mapping).__name__}")


def check_text(name: str, value: object) -> str:
    """Return a value that is a name, and refuse any other.

    Raises:
        ConfigurationError: It is not a string, or an empty one.
    """
    if not isinstance(value, str) or not value:
        raise ConfigurationError(f"{name} is {value!r}, it must be a name")
    return value


def _whole_number(name: str, value: object, minimum: int) -> int:
    """Return the number that a value is or spells."""
    try:
        number = _read_number(value)
    except (TypeError, ValueError) as exc:
        raise ConfigurationError(f"{name} is {value!r}, it must be a whole number") from exc
    if number < minimum:
        raise ConfigurationError(f"{name} is {number}, it must be at least {minimum}")
    return number


def _read_number(value: Any) -> int:
    if isinstance(value, bool):
        raise TypeError("true and false are no numbers")
    if isinstance(value, str):
        return int(value)
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return operator.index(value)
