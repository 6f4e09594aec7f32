"""Placement as an engine configures it."""

from __future__ import annotations

from typing import Any

import pytest

from aiokvoffload.config import EngineShape, OffloadingConfig
from aiokvoffload.errors import ConfigurationError
from aiokvoffload.policies.lru import LRUPolicy
from aiokvoffload.spec import OffloadingSpecFactory

ENGINE = EngineShape(block_tokens=16, group_block_tokens=[16], block_count=12, kv_cache_bytes=12 * 128)


class HearingPolicy(LRUPolicy):
    """Remembers what it was told of the level above."""

    blocks_above: tuple[int, ...] = ()

    def widen(self, blocks_above: int) -> None:
        HearingPolicy.blocks_above += (blocks_above,)


def configured(**values: Any) -> OffloadingConfig:
    return OffloadingConfig.from_mapping({"cpu_bytes_to_use": 1 << 20, **values})


def test_the_manager_of_an_exclusive_configuration_knows_the_level_above(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HearingPolicy, "blocks_above", ())
    for placement in ("inclusive", "exclusive"):
        config = configured(placement=placement, eviction_policy=f"{__name__}:HearingPolicy")
        spec = OffloadingSpecFactory().create_spec(config, ENGINE)
        assert spec.config.placement == placement
        spec.get_manager()
        spec.close()
    assert HearingPolicy.blocks_above == (12,)


@pytest.mark.parametrize("value", ["both", "", None, 3, ["exclusive"]])
def test_a_placement_that_is_none_is_refused(value: object) -> None:
    with pytest.raises(ConfigurationError, match="it must be one of inclusive, exclusive"):
        configured(placement=value)


@pytest.mark.parametrize("size", [{"block_size": 32}, {"block_size_factor": 2}])
def test_exclusive_placement_needs_single_blocks(size: dict[str, int]) -> None:
    with pytest.raises(ConfigurationError, match="block_size_factor is 2; make it 1, or use inclusive placement"):
        OffloadingSpecFactory().create_spec(configured(placement="exclusive", **size), ENGINE)
