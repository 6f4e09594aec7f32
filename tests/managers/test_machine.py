from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any, Literal, cast

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
    run_state_machine_as_test,
)

from aiokvoffload.errors import StateError
from aiokvoffload.events import OffloadingEvent
from aiokvoffload.keys import OffloadKey
from aiokvoffload.kv_caches import KVGroup
from aiokvoffload.managers.cpu import CPUOffloadingManager
from aiokvoffload.policies.base import POLICIES, CachePolicy
from aiokvoffload.specs import Completion, Lease, PrepareLoadOutput, PrepareStoreOutput, ReqContext
from aiokvoffload.testing.manager_contract import assert_adds_up, assert_at_rest
from aiokvoffload.testing.models import ARCModel, LRUModel, ManagerModel, ModelBlock, ModelLoad, ModelStore
from aiokvoffload.testing.policy_contract import CONTRACT_SETTINGS
from aiokvoffload.testing.strategies import group_layouts, make_keys

KEYS_PER_GROUP = 6

MODEL_POLICIES: dict[str, Callable[[int], CachePolicy]] = {
    "lru": LRUModel,
    "arc": ARCModel,
    "arc-reference": lambda capacity: ARCModel(capacity, are_ghosts_frequent=False),
    # Their own models are beside them in tests/policies; here the model only has to ask them the same.
    **{name: POLICIES.resolve(name) for name in ("adaptive", "lru2", "lrfu", "s3fifo")},
}

StorePair = tuple[PrepareStoreOutput, ModelStore]
LoadPair = tuple[PrepareLoadOutput, ModelLoad]
LeasePair = tuple[Lease, list[ModelBlock]]

requests = st.sampled_from(["", "", "a", "b", "c", "d", "e"])


class ManagerMachine(RuleBasedStateMachine):
    """Does the same with a manager and with a plain model, and compares everything after each step."""

    policy: str

    stores: Bundle[StorePair] = Bundle("stores")
    loads: Bundle[LoadPair] = Bundle("loads")
    leases: Bundle[LeasePair] = Bundle("leases")

    @initialize(block_count=st.integers(1, 7), groups=st.just([]) | group_layouts(max_groups=2, block_tokens=(1, 2)))
    def open(self, block_count: int, groups: list[KVGroup]) -> None:
        self.events: list[OffloadingEvent] = []
        self.manager = CPUOffloadingManager(
            block_count, policy=self.policy, groups=groups, event_sink=self.events.append
        )
        self.model = ManagerModel(block_count, MODEL_POLICIES[self.policy](block_count), groups)
        self.group_count = max(1, len(groups))
        self.foreign = CPUOffloadingManager(3).prepare_store_nowait(make_keys(1))
        self.contexts: dict[str, ReqContext] = {}
        self.all_stores: list[StorePair] = []
        self.all_loads: list[LoadPair] = []
        self.all_leases: list[LeasePair] = []
        self.settled: list[object] = []

    def context(self, req_id: str, data: st.DataObject) -> ReqContext | None:
        """The request's context, the same one or made anew."""
        if not req_id:
            return data.draw(st.sampled_from([None, ReqContext("")]))
        if data.draw(st.booleans(), label="anew"):
            self.contexts[req_id] = ReqContext(req_id)
        return self.contexts.setdefault(req_id, ReqContext(req_id))

    def batch(self, data: st.DataObject) -> tuple[list[OffloadKey], list[int] | None]:
        pool = [
            key for group in range(self.group_count) for key in make_keys(*range(KEYS_PER_GROUP), group_index=group)
        ]
        keys = data.draw(st.lists(st.sampled_from(pool), max_size=6), label="keys")
        depths = data.draw(st.none() | st.lists(st.integers(0, 8), min_size=len(keys), max_size=len(keys)))
        return keys, depths

    def parts(self, data: st.DataObject) -> list[list[OffloadKey]]:
        numbers = st.integers(0, KEYS_PER_GROUP).map(lambda count: list(range(count)))
        anything = st.lists(st.integers(0, KEYS_PER_GROUP - 1), unique=True)
        return [
            make_keys(*data.draw(numbers | numbers | anything), group_index=group) for group in range(self.group_count)
        ]

    @rule(req_id=requests, data=st.data())
    def lookup(self, req_id: str, data: st.DataObject) -> None:
        keys, _ = self.batch(data)
        assert self.manager.lookup_nowait(keys, self.context(req_id, data)) == self.model.lookup(keys, req_id)

    @rule(req_id=requests, resident_tokens=st.integers(0, 4), data=st.data())
    def lookup_prefix(self, req_id: str, resident_tokens: int, data: st.DataObject) -> None:
        parts = self.parts(data)
        found = self.manager.lookup_prefix_nowait(
            list(itertools.chain(*parts)),
            self.context(req_id, data),
            group_sizes=[len(part) for part in parts],
            resident_tokens=resident_tokens,
        )
        assert found == self.model.lookup_prefix(parts, req_id, resident_tokens)

    @rule(req_id=requests, data=st.data())
    def touch(self, req_id: str, data: st.DataObject) -> None:
        keys, depths = self.batch(data)
        self.manager.touch(keys, self.context(req_id, data), depths=depths)
        self.model.touch(keys, req_id, depths)

    @rule(
        target=stores,
        req_id=requests,
        when_full=st.sampled_from(["refuse", "leading", "wait", "wait"]),
        data=st.data(),
    )
    def prepare_store(self, req_id: str, when_full: Literal["refuse", "leading", "wait"], data: st.DataObject) -> Any:
        keys, depths = self.batch(data)
        ticket = self.manager.prepare_store_nowait(keys, self.context(req_id, data), when_full=when_full, depths=depths)
        ticket.on_settled(lambda: self.settled.append(ticket))
        pair = ticket, self.model.prepare_store(keys, req_id, when_full=when_full, depths=depths)
        self.all_stores.append(pair)
        return pair

    @rule(pair=stores, success=st.sampled_from([True, True, False]))
    def complete_store(self, pair: StorePair, success: bool) -> None:
        ticket, store = pair
        assert self.manager.complete_store_nowait(ticket, success) is self.model.complete_store(store, success)

    @rule(target=stores, data=st.data())
    def store(self, data: st.DataObject) -> Any:
        """A whole store in one go, so that there is often something to find."""
        pair = cast("StorePair", self.prepare_store("", "refuse", data))
        self.complete_store(pair, True)
        return pair

    @rule(
        target=loads,
        req_id=requests,
        take=st.sampled_from(["all", "leading"]),
        resident_tokens=st.integers(0, 3),
        data=st.data(),
    )
    def prepare_load(
        self, req_id: str, take: Literal["all", "leading"], resident_tokens: int, data: st.DataObject
    ) -> Any:
        parts = self.parts(data)
        ticket = self.manager.prepare_load_nowait(
            list(itertools.chain(*parts)),
            self.context(req_id, data),
            take=take,
            group_sizes=[len(part) for part in parts],
            resident_tokens=resident_tokens,
        )
        ticket.on_settled(lambda: self.settled.append(ticket))
        pair = ticket, self.model.prepare_load(parts, req_id, take=take, resident_tokens=resident_tokens)
        self.all_loads.append(pair)
        return pair

    @rule(pair=loads)
    def complete_load(self, pair: LoadPair) -> None:
        ticket, load = pair
        assert self.manager.complete_load_nowait(ticket) is self.model.complete_load(load)

    @rule(target=leases, pair=stores | loads)
    def lease(self, pair: StorePair | LoadPair) -> Any:
        ticket, model = pair
        if not model.is_open:
            with pytest.raises(StateError):
                ticket.lease()
            return multiple()
        blocks = list(model.blocks)
        self.model.hold(blocks)
        leased = ticket.lease(), blocks
        self.all_leases.append(leased)
        return leased

    @rule(leased=consumes(leases))
    def release(self, leased: LeasePair) -> None:
        lease, blocks = leased
        self.all_leases.remove(leased)
        lease.release()
        lease.release()
        self.model.release(blocks)

    @rule(pair=stores | loads)
    def settle(self, pair: StorePair | LoadPair) -> None:
        ticket, model = pair
        self.manager.settle_nowait(ticket)
        self.model.settle(model)

    @rule(happens=st.integers(0, 4))
    def reset(self, happens: int) -> None:
        if happens == 0:
            self.manager.reset_nowait()
            self.model.reset()

    @rule(happens=st.integers(0, 9))
    def bump_epoch(self, happens: int) -> None:
        if happens == 0:
            self.manager.bump_epoch_nowait()
            self.model.bump_epoch()

    @rule(success=st.booleans())
    def complete_a_foreign_store(self, success: bool) -> None:
        assert self.manager.complete_store_nowait(self.foreign, success) is Completion.FOREIGN
        self.model.rejected += 1

    @invariant()
    def everything_is_the_same(self) -> None:
        assert_adds_up(self.manager)
        counts = dataclasses.asdict(self.manager.statistics())
        assert min(counts.pop("store_wait_seconds"), counts.pop("load_wait_seconds")) >= 0
        assert counts == self.model.counts()
        assert [(event.kind, event.keys) for event in self.events] == self.model.events
        assert [event.sequence for event in self.events] == list(range(len(self.events)))
        pool = [
            key for group in range(self.group_count) for key in make_keys(*range(KEYS_PER_GROUP), group_index=group)
        ]
        assert self.manager.lookup_nowait(pool) == self.model.lookup(pool)
        for ticket, store in self.all_stores:
            assert (ticket.is_open, ticket.is_waiting) == (store.is_open, store.is_waiting)
            if not store.is_waiting:
                self.assert_same_store(ticket, store)
        for load_ticket, load in self.all_loads:
            assert (load_ticket.is_open, load_ticket.result) == (load.is_open, load.result)
            assert list(load_ticket.keys) == load.keys
            if load.is_open:
                assert list(load_ticket.slots) == [block.slot for block in load.blocks]
            assert (load_ticket.group_sizes, load_ticket.first_indices) == (load.group_sizes, load.first_indices)
            assert load_ticket.token_count == load.token_count
        settled = [pair[0] for pair in [*self.all_stores, *self.all_loads] if not pair[0].is_waiting]
        assert len(self.settled) == len(settled)
        assert {*map(id, self.settled)} == {*map(id, settled)}

    def assert_same_store(self, ticket: PrepareStoreOutput, store: ModelStore) -> None:
        answers: Sequence[str] = ("keys_to_store", "evicted_keys", "resident_keys", "pending_keys", "refused_keys")
        for answer in answers:
            assert list(getattr(ticket, answer)) == getattr(store, answer), answer
        assert list(ticket.slots) == [block.slot for block in store.blocks]
        assert not ticket.filtered_keys

    def teardown(self) -> None:
        if not hasattr(self, "manager"):
            return
        for lease, _ in self.all_leases:
            lease.release()
        for load, _ in self.all_loads:
            self.manager.complete_load_nowait(load)
        for store, _ in self.all_stores:
            self.manager.complete_store_nowait(store)
        assert_at_rest(self.manager)


@pytest.mark.parametrize("policy", sorted(MODEL_POLICIES))
def test_the_manager_answers_as_a_plain_model(policy: str) -> None:
    machine = type("Machine", (ManagerMachine,), {"policy": policy})
    run_state_machine_as_test(machine, settings=settings(CONTRACT_SETTINGS, max_examples=80, stateful_step_count=40))


def test_no_policy_is_left_out() -> None:
    assert set(MODEL_POLICIES) == set(POLICIES.names())
