from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from aiokvoffload.errors import InvalidRequestError
from aiokvoffload.keys import OffloadKey, make_offload_key
from aiokvoffload.specs import (
    CPULoadStoreSpec,
    GPULoadStoreSpec,
    Lease,
    LoadStoreSpec,
    LookupResult,
    PrepareLoadOutput,
    PrepareStoreOutput,
    ReqContext,
    StoreOutcome,
    TierFilter,
    TransferResult,
)


class CountingHolder:
    """Remembers what was held and given back."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[int, ...]]] = []

    def hold(self, slots: Sequence[int]) -> None:
        self.calls.append(("hold", tuple(slots)))

    def release(self, slots: Sequence[int]) -> None:
        self.calls.append(("release", tuple(slots)))


class RefusingHolder(CountingHolder):
    def release(self, slots: Sequence[int]) -> None:
        super().release(slots)
        raise RuntimeError("the books do not balance")


@pytest.fixture
def holder() -> CountingHolder:
    return CountingHolder()


def keys_of(*numbers: int) -> list[OffloadKey]:
    return [make_offload_key(bytes([number]) * 16) for number in numbers]


def sent_to_a_worker(value: Any, protocol: int = pickle.HIGHEST_PROTOCOL) -> Any:
    return pickle.loads(pickle.dumps(value, protocol))  # noqa: S301


# ---- ends of a transfer


@pytest.mark.parametrize(
    "block_ids", [[3, 1, 2], (3, 1, 2), np.array([3, 1, 2], dtype=np.uint8), torch.tensor([3, 1, 2]), iter([3, 1, 2])]
)
def test_block_ids_become_an_array(block_ids: Any) -> None:
    spec = CPULoadStoreSpec(block_ids)
    assert spec.block_ids.dtype == np.int64
    assert spec.block_ids.tolist() == [3, 1, 2]
    assert len(spec) == 3


def test_no_block_ids_are_fine() -> None:
    assert len(CPULoadStoreSpec([])) == 0
    assert len(GPULoadStoreSpec([], (), ())) == 0
    assert GPULoadStoreSpec([], (0, 0), (3, 0)).block_ids.dtype == np.int64


def test_block_ids_are_a_copy() -> None:
    block_ids = np.array([1, 2], dtype=np.int64)
    spec = CPULoadStoreSpec(block_ids)
    block_ids[0] = 9
    assert spec.block_ids.tolist() == [1, 2]


@pytest.mark.parametrize(
    "block_ids",
    [
        [1.0],
        [True],
        ["1"],
        [None],
        7,
        "12",
        [[1, 2]],
        [[1], [2, 3]],
        np.array([[1]]),
        np.array(1),
        np.array([1.0]),
        [1 << 64],
        np.array([(1 << 64) - 1], dtype=np.uint64),
    ],
    ids=repr,
)
def test_what_are_no_block_ids_is_refused(block_ids: Any) -> None:
    with pytest.raises(InvalidRequestError, match="block id"):
        CPULoadStoreSpec(block_ids)
    with pytest.raises(InvalidRequestError, match="block id"):
        GPULoadStoreSpec(block_ids, (1,), (0,))


def test_negative_block_ids_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="block id -2 is negative"):
        CPULoadStoreSpec([1, -2])


@pytest.mark.parametrize(
    ("group_sizes", "block_indices", "reason"),
    [
        ((), (), "add up to 0"),
        ((2,), (0,), "add up to 2"),
        ((4,), (0,), "add up to 4"),
        ((4, -1), (0, 0), "group sizes"),
        ((3,), (), "1 groups"),
        ((3,), (0, 0), "1 groups"),
        ((3, 0), (0,), "2 groups"),
        ((3,), (-1,), "at least 0"),
        ((3.0,), (0,), "whole numbers"),
        ((3,), (0.5,), "whole numbers"),
        (3, (0,), "whole numbers"),
        ("3", (0,), "whole numbers"),
    ],
)
def test_groups_that_do_not_fit_are_refused(group_sizes: Any, block_indices: Any, reason: str) -> None:
    with pytest.raises(InvalidRequestError, match=reason):
        GPULoadStoreSpec([4, 5, 6], group_sizes, block_indices)


def test_group_sizes_may_be_of_numpy() -> None:
    group_sizes: Any = np.array([1, 2])
    block_indices: Any = [np.int32(0), np.int64(5)]
    spec = GPULoadStoreSpec([4, 5, 6], group_sizes, block_indices)
    assert spec.group_sizes == (1, 2)
    assert [type(size) for size in spec.group_sizes] == [int, int]
    assert repr(spec) == "GPULoadStoreSpec([4, 5, 6], (1, 2), (0, 5))"


def test_media_name_the_direction_of_a_transfer() -> None:
    assert (GPULoadStoreSpec.medium(), CPULoadStoreSpec.medium()) == ("GPU", "CPU")


def test_a_spec_equals_its_like_only() -> None:
    gpu = GPULoadStoreSpec([1, 2], (2,), (0,))
    assert gpu == GPULoadStoreSpec(np.array([1, 2]), [2], [0])
    assert CPULoadStoreSpec([1, 2]) == CPULoadStoreSpec((1, 2))
    different = [
        GPULoadStoreSpec([2, 1], (2,), (0,)),
        GPULoadStoreSpec([1, 2], (1, 1), (0, 0)),
        GPULoadStoreSpec([1, 2], (2,), (1,)),
        GPULoadStoreSpec([1], (1,), (0,)),
        CPULoadStoreSpec([1, 2]),
        [1, 2],
    ]
    for other in different:
        assert gpu != other
        assert other != gpu
    assert CPULoadStoreSpec([1, 2]) != CPULoadStoreSpec([1, 2, 3])


def test_specs_hold_an_array_and_have_no_hash() -> None:
    for spec in (CPULoadStoreSpec([1]), GPULoadStoreSpec([1], (1,), (0,))):
        with pytest.raises(TypeError, match="unhashable"):
            hash(spec)


@given(st.lists(st.integers(0, 1 << 40), max_size=20), st.integers(0, 9))
def test_specs_travel_between_processes(block_ids: list[int], first_index: int) -> None:
    specs: list[LoadStoreSpec] = [
        CPULoadStoreSpec(block_ids),
        GPULoadStoreSpec(block_ids, (len(block_ids), 0), (first_index, 0)),
    ]
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        copies = sent_to_a_worker(specs, protocol)
        assert copies == specs
        assert [copied.block_ids.dtype for copied in copies] == [np.int64, np.int64]


def test_specs_have_room_for_their_attributes_only() -> None:
    with pytest.raises(AttributeError):
        CPULoadStoreSpec([1]).group_sizes = ()  # type: ignore[attr-defined]


# ---- values


def test_a_transfer_result_is_fixed() -> None:
    result = TransferResult(job_id=1, success=True, transfer_type=("GPU", "CPU"))
    assert (result.byte_count, result.seconds, result.token_count, result.error) == (0, 0.0, 0, None)
    with pytest.raises(dataclasses.FrozenInstanceError):
        result.success = False  # type: ignore[misc]
    assert sent_to_a_worker(result) == result


def test_contexts_of_one_request_do_not_share_what_managers_remember() -> None:
    first, second = ReqContext("a"), ReqContext("a")
    assert first == second
    assert first.bindings is not second.bindings
    assert "bindings" not in repr(first)


def test_tier_filters_combine() -> None:
    assert TierFilter.CPU | TierFilter.BELOW == TierFilter.ALL
    assert not TierFilter.NONE & TierFilter.ALL


# ---- leases and tickets


def test_a_lease_is_given_back_once(holder: CountingHolder) -> None:
    lease = Lease(holder, [4, 2])
    assert (lease.is_released, holder.calls) == (False, [("hold", (4, 2))])
    lease.release()
    lease.release()
    assert (lease.is_released, holder.calls) == (True, [("hold", (4, 2)), ("release", (4, 2))])


def test_a_lease_keeps_its_slots_when_the_list_changes(holder: CountingHolder) -> None:
    slots = [4, 2]
    lease = Lease(holder, slots)
    slots.append(7)
    lease.release()
    assert holder.calls == [("hold", (4, 2)), ("release", (4, 2))]


def test_a_lease_is_not_given_back_again_after_a_failure() -> None:
    holder = RefusingHolder()
    lease = Lease(holder, [1])
    with pytest.raises(RuntimeError, match="balance"):
        lease.release()
    lease.release()
    assert holder.calls == [("hold", (1,)), ("release", (1,))]


def test_each_user_of_a_ticket_has_a_lease_of_its_own(holder: CountingHolder) -> None:
    ticket = PrepareStoreOutput(holder, 3, 1)
    ticket.slots = [5, 6]
    first, second = ticket.lease(), ticket.lease()
    ticket.slots.clear()
    first.release()
    assert (first.is_released, second.is_released) == (True, False)
    second.release()
    assert holder.calls == [("hold", (5, 6)), ("hold", (5, 6)), ("release", (5, 6)), ("release", (5, 6))]


def test_a_new_ticket_is_open(holder: CountingHolder) -> None:
    ticket = PrepareStoreOutput(holder, 3, 1)
    assert (ticket.epoch, ticket.is_open, ticket.slots, ticket.is_refused) == (3, True, [], False)
    assert holder.calls == []


def test_outcomes_answer_each_key_in_the_order_asked(holder: CountingHolder) -> None:
    accepted, resident, pending, filtered, refused = keys_of(1, 2, 3, 4, 5)
    ticket = PrepareStoreOutput(holder, 0, 0)
    ticket.keys_to_store = [accepted]
    ticket.slots = [8]
    ticket.resident_keys = [resident]
    ticket.pending_keys = [pending]
    ticket.filtered_keys = [filtered]
    ticket.refused_keys = [refused]
    assert ticket.outcomes([refused, accepted, resident, accepted, pending, filtered]) == (
        StoreOutcome.REFUSED,
        StoreOutcome.ACCEPTED,
        StoreOutcome.RESIDENT,
        StoreOutcome.ACCEPTED,
        StoreOutcome.RESIDENT,
        StoreOutcome.FILTERED,
    )
    assert ticket.outcomes([]) == ()
    assert ticket.is_refused
    assert ticket.store_spec == CPULoadStoreSpec([8])


def test_a_settled_load_calls_back_at_once(holder: CountingHolder) -> None:
    ticket = PrepareLoadOutput(holder, 0, 0)
    called: list[LookupResult] = []
    assert ticket.result is LookupResult.MISS
    ticket.on_settled(lambda: called.append(ticket.result))
    ticket.keys, ticket.slots = keys_of(1), [3]
    ticket.on_settled(lambda: called.append(ticket.result))
    assert called == [LookupResult.MISS, LookupResult.HIT]
    assert ticket.load_spec == CPULoadStoreSpec([3])


def test_a_waiting_load_calls_back_in_the_step_that_settles_it(holder: CountingHolder) -> None:
    ticket = PrepareLoadOutput(holder, 0, 0)
    ticket.keys, ticket.slots, ticket.is_waiting = keys_of(1), [3], True
    called: list[tuple[str, LookupResult]] = []

    def ask_again() -> None:
        called.append(("first", ticket.result))
        ticket.on_settled(lambda: called.append(("late", ticket.result)))

    ticket.on_settled(ask_again)
    ticket.on_settled(lambda: called.append(("second", ticket.result)))
    assert (ticket.result, called) == (LookupResult.PENDING, [])
    ticket.settle()
    assert called == [("first", LookupResult.HIT), ("late", LookupResult.HIT), ("second", LookupResult.HIT)]
    ticket.settle()
    assert len(called) == 3


def test_a_settled_callback_that_raises_keeps_no_other_asleep(caplog: pytest.LogCaptureFixture) -> None:
    called: list[str] = []

    def fail() -> None:
        raise ValueError("on purpose")

    ticket = PrepareLoadOutput(CountingHolder(), 0, 0)
    ticket.is_waiting = True
    ticket.on_settled(fail)
    ticket.on_settled(lambda: called.append("woken"))
    ticket.settle()
    assert called == ["woken"]
    assert "on purpose" in caplog.text
