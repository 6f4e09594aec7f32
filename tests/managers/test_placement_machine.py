"""The machine of the manager, with demotions, loads that take blocks along, and hints."""

from __future__ import annotations

import itertools
from typing import Any, cast

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule, run_state_machine_as_test
from test_machine import KEYS_PER_GROUP, LoadPair, ManagerMachine, StorePair, requests

from aiokvoffload.keys import OffloadKey
from aiokvoffload.kv_caches import KVGroup
from aiokvoffload.managers.cpu import CPUOffloadingManager
from aiokvoffload.specs import ReqContext
from aiokvoffload.testing.clock import ManualClock
from aiokvoffload.testing.models import ARCModel, LRUModel, ManagerModel
from aiokvoffload.testing.policy_contract import CONTRACT_SETTINGS
from aiokvoffload.testing.strategies import group_layouts, make_keys

SESSION_OF = {"a": "one", "b": "one", "c": "two", "d": "two"}


class PlacementMachine(ManagerMachine):
    """Adds what moves blocks for reasons that are no accesses."""

    @initialize(block_count=st.integers(1, 7), groups=st.just([]) | group_layouts(max_groups=2, block_tokens=(1, 2)))
    def open(self, block_count: int, groups: list[KVGroup]) -> None:
        super().open(block_count, groups)
        self.clock = ManualClock()
        self.manager = CPUOffloadingManager(
            block_count, policy=self.policy, groups=groups, event_sink=self.events.append, clock=self.clock
        )
        model_policy = LRUModel(block_count) if self.policy == "lru" else ARCModel(block_count)
        self.model = ManagerModel(block_count, model_policy, groups)
        self.model.session_of = SESSION_OF

    def context(self, req_id: str, data: st.DataObject) -> ReqContext | None:
        if not req_id:
            return super().context(req_id, data)
        return self.contexts.setdefault(req_id, ReqContext(req_id, session_id=SESSION_OF.get(req_id)))

    @rule(target=ManagerMachine.stores, req_id=requests, data=st.data())
    def prepare_demotion(self, req_id: str, data: st.DataObject) -> Any:
        keys, depths = self.batch(data)
        ticket = self.manager.prepare_demotion_nowait(keys, self.context(req_id, data), depths=depths)
        ticket.on_settled(lambda: self.settled.append(ticket))
        pair = ticket, self.model.prepare_demotion(keys, req_id, depths)
        self.all_stores.append(pair)
        return pair

    @rule(target=ManagerMachine.stores, data=st.data())
    def demote(self, data: st.DataObject) -> Any:
        """A whole demotion in one go."""
        pair = cast("StorePair", self.prepare_demotion("", data))
        self.complete_store(pair, True)
        return pair

    @rule(pair=ManagerMachine.loads)
    def take_along(self, pair: LoadPair) -> None:
        ticket, load = pair
        found = self.manager.complete_load_nowait(ticket, take_along=True)
        assert found is self.model.complete_load(load, take_along=True)

    @rule(target=ManagerMachine.loads, data=st.data())
    def load_and_take_along(self, data: st.DataObject) -> Any:
        """A whole load in one go."""
        pair = cast("LoadPair", self.prepare_load("", "leading", 0, data))
        self.take_along(pair)
        return pair

    def request(self, data: st.DataObject) -> tuple[list[OffloadKey], list[int] | None]:
        parts = self.parts(data)
        depths = [range(1, len(part) + 1) for part in parts]
        return list(itertools.chain(*parts)), data.draw(st.sampled_from([None, list(itertools.chain(*depths))]))

    @rule(data=st.data())
    def end_session(self, data: st.DataObject) -> None:
        keys, depths = self.request(data)
        found = self.manager.hint(keys, session_ended=True, depths=depths)
        assert found == self.model.hint(keys, session_ended=True, depths=depths)

    @rule(keep_seconds=st.sampled_from([0, 1, 2, 2, 5]), data=st.data())
    def keep(self, keep_seconds: float, data: st.DataObject) -> None:
        keys, _ = self.request(data)
        assert self.manager.hint(keys, keep_seconds=keep_seconds) == self.model.hint(keys, keep_seconds=keep_seconds)

    @rule(seconds=st.sampled_from([0.5, 1, 3]))
    def pass_time(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.model.now += seconds

    def teardown(self) -> None:
        if hasattr(self, "manager"):
            pool = [
                key for group in range(self.group_count) for key in make_keys(*range(KEYS_PER_GROUP), group_index=group)
            ]
            self.manager.hint(pool, keep_seconds=0)
            assert not self.manager.statistics().kept
        super().teardown()


@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_the_manager_answers_as_a_plain_model(policy: str) -> None:
    machine = type("Machine", (PlacementMachine,), {"policy": policy})
    run_state_machine_as_test(machine, settings=settings(CONTRACT_SETTINGS, max_examples=60, stateful_step_count=40))
