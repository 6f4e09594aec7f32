from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from aiokvoffload.errors import ConfigurationError
from aiokvoffload.keys import OffloadKey
from aiokvoffload.managers.cpu import CPUOffloadingManager
from aiokvoffload.policies.arc import ARCPolicy
from aiokvoffload.policies.base import POLICIES, Access, CachePolicy
from aiokvoffload.policies.lru import LRUPolicy
from aiokvoffload.specs import StoreOutcome
from aiokvoffload.testing.strategies import make_keys


class LastHashByteIsEven(LRUPolicy):
    """A policy that wants only some blocks."""

    def admit(self, keys: Sequence[OffloadKey], access: Access) -> Sequence[OffloadKey]:
        return [key for key in keys if key[15] % 2 == 0]


def test_names_classes_and_paths_are_the_same() -> None:
    assert POLICIES.resolve("lru") is LRUPolicy
    assert POLICIES.resolve("arc") is ARCPolicy
    assert POLICIES.resolve("aiokvoffload.policies.lru:LRUPolicy") is LRUPolicy
    assert POLICIES.resolve(LRUPolicy) is LRUPolicy


def test_an_unknown_policy_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigurationError, match=r"'lruu'; did you mean 'lru'.*arc, .*lru"):
        CPUOffloadingManager(4, policy="lruu")
    with pytest.raises(ConfigurationError, match="must be a subclass of CachePolicy"):
        CPUOffloadingManager(4, policy="aiokvoffload.keys:CacheIdentity")


def test_a_policy_can_be_installed_beside_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "evenness.py").write_text(
        "from aiokvoffload.policies.lru import LRUPolicy\nclass Evenness(LRUPolicy):\n    pass\n"
    )
    metadata = tmp_path / "evenness-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: evenness\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text("[aiokvoffload.policies]\neven = evenness:Evenness\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert "even" in POLICIES.names()
    try:
        assert POLICIES.resolve("even").__name__ == "Evenness"
        assert CPUOffloadingManager(2, policy="even").prepare_store_nowait(make_keys(1)).slots == [0]
    finally:
        sys.modules.pop("evenness", None)


@pytest.mark.parametrize("policy", [LastHashByteIsEven, LastHashByteIsEven(4)], ids=["class", "instance"])
def test_a_manager_takes_what_the_policy_admits(policy: type[CachePolicy] | CachePolicy) -> None:
    manager = CPUOffloadingManager(4, policy=policy)
    offered = make_keys(1, 2, 3, 4)
    ticket = manager.prepare_store_nowait(offered, depths=[10, 20, 30, 40])
    assert list(ticket.keys_to_store) == make_keys(2, 4)
    assert list(ticket.filtered_keys) == make_keys(1, 3)
    assert ticket.outcomes(offered) == (
        StoreOutcome.FILTERED,
        StoreOutcome.ACCEPTED,
        StoreOutcome.FILTERED,
        StoreOutcome.ACCEPTED,
    )
    manager.complete_store_nowait(ticket)
    # Their depths are still their own: the deepest leaves first.
    assert manager.prepare_store_nowait(make_keys(6, 8, 10)).evicted_keys == make_keys(4)


def test_a_policy_of_another_capacity_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="the policy ranks 3 slots, but the manager has 4"):
        CPUOffloadingManager(4, policy=LRUPolicy(3))
