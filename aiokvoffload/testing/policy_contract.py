"""The contract of an eviction policy as tests: subclass `PolicyContract` and say how to make the policy."""

# ruff: noqa: S101 - assertions are what a contract suite consists of

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Sequence
from types import FrameType
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from aiokvoffload.keys import OffloadKey
from aiokvoffload.policies.base import Access, CachePolicy
from aiokvoffload.policies.slots import slot_array
from aiokvoffload.testing.strategies import accesses, key_batches, make_keys

_Answer = TypeVar("_Answer")

CONTRACT_SETTINGS = settings(
    derandomize=True, database=None, deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow]
)
"""The same examples in every run, and nothing written to the file system."""


def count_instructions(work: Callable[[], object]) -> int:
    """Return how many Python bytecode instructions `work` executes; the same on a busy and on an idle machine."""
    executed = 0

    def trace(frame: FrameType, event: str, _argument: object) -> Callable[..., Any]:
        nonlocal executed
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        executed += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return executed


def fill(policy: CachePolicy, slots: Iterable[int], access: Access, *, is_ready: bool = True) -> None:
    """Insert slots, each under the key of its number, and unpin them."""
    slots = list(slots)
    policy.insert(slots, make_keys(*slots), access)
    if is_ready:
        policy.unpin(slots)


def order_of(policy: CachePolicy) -> list[int]:
    """Return all evictable slots in the order in which they would leave."""
    return policy.coldest(policy.capacity)


class PolicyContract(ABC):
    """What `aiokvoffload.policies.base` promises of every policy.

    ::

        class TestMyPolicy(PolicyContract):
            def make_policy(self, capacity: int) -> MyPolicy:
                return MyPolicy(capacity)
    """

    @abstractmethod
    def make_policy(self, capacity: int) -> CachePolicy:
        """Return a new policy for this many slots."""

    # Residence and pins

    def test_a_new_policy_holds_nothing(self) -> None:
        """There is nothing to evict."""
        policy = self.make_policy(4)
        assert policy.capacity == 4
        assert policy.evictable_count == 0
        assert policy.coldest(4) == []
        assert policy.evict(1) is None
        assert policy.evict(0) == []

    def test_inserted_slots_are_pinned_until_they_are_unpinned(self) -> None:
        """A block that is being written cannot leave."""
        policy = self.make_policy(4)
        fill(policy, [0, 1, 2], Access(1), is_ready=False)
        assert policy.evictable_count == 0
        assert policy.coldest(4) == []
        assert policy.evict(1) is None
        policy.unpin([1])
        assert policy.evictable_count == 1
        assert policy.evict(1) == [1]

    def test_a_pinned_slot_stays(self) -> None:
        """Whatever the order, and however many are evicted."""
        policy = self.make_policy(6)
        fill(policy, range(6), Access(1))
        first, second, *others = order_of(policy)
        policy.pin([first, second])
        assert policy.evictable_count == 4
        assert order_of(policy) == others
        assert policy.evict(5) is None
        assert policy.evict(4) == others
        policy.unpin([second, first])
        assert policy.evict(2) == [first, second]

    def test_pinning_keeps_the_rank(self) -> None:
        """A slot comes back to where it was, not as most recent."""
        policy = self.make_policy(9)
        for tick in (1, 2, 3):
            fill(policy, range(3 * tick - 3, 3 * tick), Access(tick))
        before = order_of(policy)
        for pinned in ([4], [0, 8], range(9), [7, 1, 3]):
            policy.pin(pinned)
            policy.unpin(pinned)
            assert order_of(policy) == before

    def test_removed_slots_are_gone(self) -> None:
        """Pinned, unpinned and not yet written ones."""
        policy = self.make_policy(6)
        fill(policy, range(4), Access(1))
        fill(policy, [4, 5], Access(2), is_ready=False)
        policy.pin([0])
        policy.remove([0, 1, 4])
        assert sorted(order_of(policy)) == [2, 3]
        assert policy.evictable_count == 2
        policy.unpin([5])
        assert sorted(policy.evict(3) or []) == [2, 3, 5]

    def test_slots_can_be_used_again(self) -> None:
        """After an eviction, a removal and a clear; what a slot was before does not matter."""
        policy = self.make_policy(3)
        fill(policy, range(3), Access(1))
        policy.touch([0], Access(2))
        policy.demote([1])
        evicted = policy.evict(1) or []
        policy.insert(evicted, make_keys(10), Access(3))
        assert not {*evicted} & {*order_of(policy)}
        policy.unpin(evicted)
        assert sorted(order_of(policy)) == [0, 1, 2]
        policy.remove([2])
        policy.insert([2], make_keys(11), Access(4))
        policy.clear()
        fill(policy, range(3), Access(5, depths=[1, 2, 3]))
        assert policy.evictable_count == 3
        assert sorted(policy.evict(3) or []) == [0, 1, 2]

    def test_clear_drops_everything(self) -> None:
        """Pinned slots too."""
        policy = self.make_policy(4)
        fill(policy, range(4), Access(1))
        policy.pin([0])
        policy.clear()
        assert policy.evictable_count == 0
        assert order_of(policy) == []
        fill(policy, [0], Access(1))
        assert policy.evict(1) == [0]

    def test_admitted_keys_are_some_of_those_offered_in_order(self) -> None:
        """By default all of them."""
        policy = self.make_policy(4)
        offered = make_keys(3, 1, 2)
        admitted = list(policy.admit(offered, Access(1)))
        assert admitted == [key for key in offered if key in admitted]

    # Eviction

    def test_evict_drops_all_or_changes_nothing(self) -> None:
        """One too many is none at all."""
        policy = self.make_policy(8)
        fill(policy, range(8), Access(1))
        policy.touch([1, 2], Access(2))
        policy.pin([3])
        before = order_of(policy)
        assert policy.evict(8) is None
        assert policy.evict(7, protected=[0]) is None
        assert policy.evict(1, protected=range(8)) is None
        assert policy.evictable_count == 7
        assert order_of(policy) == before
        assert policy.evict(7) == before
        assert policy.evictable_count == 0

    def test_protected_slots_stay_and_keep_their_rank(self) -> None:
        """Protected slots may be pinned; then they count as pinned, not twice."""
        policy = self.make_policy(8)
        fill(policy, range(8), Access(1))
        first, second, *others = order_of(policy)
        policy.pin([others[-1]])
        assert policy.evict(2, protected=[first, others[-1]]) == [second, others[0]]
        assert order_of(policy) == [first, *others[1:-1]]
        assert policy.evict(4, protected=[others[-1], first]) == others[1:-1]
        assert policy.evict(1, protected=[first]) is None
        assert policy.evict(1) == [first]

    def test_evicting_none_changes_nothing(self) -> None:
        """Also with protected slots."""
        policy = self.make_policy(4)
        fill(policy, range(4), Access(1))
        before = order_of(policy)
        assert policy.evict(0) == []
        assert policy.evict(0, protected=[2, 0]) == []
        assert order_of(policy) == before

    def test_coldest_says_who_would_leave(self) -> None:
        """And changes nothing by saying so."""
        policy = self.make_policy(8)
        fill(policy, range(8), Access(1))
        policy.touch([0, 5], Access(2))
        before = order_of(policy)
        assert policy.coldest(0) == []
        assert [policy.coldest(count) for count in range(9)] == [before[:count] for count in range(9)]
        assert policy.coldest(100) == before
        assert policy.evict(3) == before[:3]
        assert policy.evict(5) == before[3:]

    # Accesses

    def test_a_second_touch_at_one_tick_changes_nothing(self) -> None:
        """Neither does one at an earlier tick."""
        policy, same = self.make_policy(8), self.make_policy(8)
        for each in (policy, same):
            fill(each, range(8), Access(1))
            each.touch([2, 1, 0], Access(3, depths=[1, 2, 3]))
        for slots, access in (
            ([0], Access(3)),
            ([1, 2, 0], Access(3, depths=[9, 8, 7])),
            ([2, 0], Access(2)),
            (range(3, 8), Access(1)),
        ):
            policy.touch(slots, access)
            assert order_of(policy) == order_of(same)
        assert policy.evict(8) == same.evict(8)

    def test_a_block_is_stored_as_used_by_its_request(self) -> None:
        """So its own request cannot make it look used again."""
        policy, same = self.make_policy(4), self.make_policy(4)
        for each in (policy, same):
            fill(each, range(4), Access(2))
        policy.touch([3, 0], Access(2))
        policy.touch([1], Access(1))
        assert order_of(policy) == order_of(same)

    def test_pinned_slots_can_be_touched(self) -> None:
        """They stay pinned."""
        policy = self.make_policy(4)
        fill(policy, range(4), Access(1))
        policy.pin([0, 1])
        policy.touch([0, 1, 2], Access(2))
        assert sorted(order_of(policy)) == [2, 3]
        policy.unpin([0, 1])
        assert sorted(order_of(policy)) == [0, 1, 2, 3]

    def test_empty_batches_are_fine(self) -> None:
        """Nothing changes."""
        policy = self.make_policy(4)
        fill(policy, range(4), Access(1))
        before = order_of(policy)
        policy.insert([], [], Access(2))
        policy.touch([], Access(2, depths=[]))
        policy.miss([], Access(2))
        policy.pin([])
        policy.unpin([])
        policy.demote([])
        policy.remove([])
        assert order_of(policy) == before

    # Demotion and ghosts

    def test_demoted_slots_leave_first_in_the_order_given(self) -> None:
        """Those used once and those used again, whatever else could leave."""
        policy = self.make_policy(8)
        fill(policy, range(8), Access(1, depths=list(range(8))))
        policy.touch([4, 5, 6, 7], Access(2, depths=[1, 2, 3, 4]))
        policy.demote([5, 2, 6])
        assert order_of(policy)[:3] == [5, 2, 6]
        assert policy.evict(2) == [5, 2]
        assert policy.evict(1) == [6]

    def test_pinned_slots_can_be_demoted(self) -> None:
        """They leave first once they are unpinned, also those that were not written yet."""
        policy = self.make_policy(6)
        fill(policy, range(4), Access(1))
        fill(policy, [4, 5], Access(2), is_ready=False)
        policy.pin([3])
        policy.demote([5, 3])
        assert sorted(order_of(policy)) == [0, 1, 2]
        policy.unpin([3, 4, 5])
        assert order_of(policy)[:2] == [5, 3]

    def test_slots_that_are_demoted_for_a_reason_leave_first_too(self) -> None:
        """Those that a load has taken along and those of an ended session, in the order of the calls."""
        policy = self.make_policy(8)
        fill(policy, range(8), Access(1, depths=list(range(8))))
        policy.touch([4, 5, 6, 7], Access(2, depths=[1, 2, 3, 4]))
        policy.pin([3])
        policy.take_along([6, 3])
        policy.end_session([1, 5])
        assert order_of(policy)[:3] == [6, 1, 5]
        policy.unpin([3])
        assert policy.evict(4) == [6, 3, 1, 5]

    def test_a_touch_promotes_what_was_demoted(self) -> None:
        """Also at the tick of its last use: whoever asks for it again wants it."""
        for tick in (2, 3):
            policy = self.make_policy(8)
            fill(policy, range(8), Access(1))
            policy.touch([4, 5, 6, 7], Access(2))
            policy.demote([5])
            policy.take_along([7])
            policy.touch([7, 5], Access(tick))
            assert not {5, 7} & {*order_of(policy)[:4]}

    def test_rescued_slots_are_among_the_others_again(self) -> None:
        """Those that were demoted and those that a load has taken along, pinned or not."""
        policy = self.make_policy(8)
        fill(policy, range(8), Access(1))
        policy.touch([4, 5, 6, 7], Access(2))
        policy.demote([5, 4])
        policy.take_along([7, 6])
        policy.pin([6])
        policy.rescue([7, 6, 4], Access(3, depths=[1, 2, 3]))
        assert order_of(policy)[0] == 5
        policy.unpin([6])
        assert sorted(order_of(policy)) == [*range(8)]
        assert policy.evict(1) == [5]
        assert sorted(policy.evict(7) or []) == [0, 1, 2, 3, 4, 6, 7]

    def test_a_rescue_keeps_the_order_of_depth(self) -> None:
        """The deepest leaves first."""
        policy = self.make_policy(4)
        fill(policy, range(4), Access(1))
        policy.take_along([3, 2, 1, 0])
        policy.rescue([0, 1, 2, 3], Access(2, depths=[1, 2, 3, 4]))
        assert order_of(policy) == [3, 2, 1, 0]

    def test_demoted_slots_leave_no_ghost(self) -> None:
        """A policy learns nothing from a block that was sent away, whatever it was before."""

        def demote_and_evict(policy: CachePolicy) -> None:
            policy.demote([0])
            assert policy.evict(1) == [0]

        def use_demote_and_evict(policy: CachePolicy) -> None:
            policy.touch([0], Access(2))
            policy.pin([0])
            demote_while_pinned(policy)

        def demote_while_pinned(policy: CachePolicy) -> None:
            policy.take_along([0])
            policy.end_session([0])
            policy.unpin([0])
            assert policy.evict(1) == [0]

        self._check_that_a_miss_teaches_nothing(demote_and_evict)
        self._check_that_a_miss_teaches_nothing(use_demote_and_evict)

    def test_removed_slots_leave_no_ghost(self) -> None:
        """A write that failed says nothing."""
        self._check_that_a_miss_teaches_nothing(lambda policy: policy.remove([0]))

    def test_clear_drops_ghosts(self) -> None:
        """Of all keys."""

        def evict_and_clear(policy: CachePolicy) -> None:
            policy.evict(policy.evictable_count)
            policy.clear()
            fill(policy, range(1, 8), Access(1))

        self._check_that_a_miss_teaches_nothing(evict_and_clear)

    def test_an_insert_ends_a_ghost(self) -> None:
        """The key is resident again; gone without a ghost, it is a stranger."""

        def come_back(policy: CachePolicy) -> None:
            policy.pin(range(1, 8))
            assert policy.evict(1) == [0]
            policy.unpin(range(1, 8))
            fill(policy, [0], Access(2))
            policy.remove([0])

        self._check_that_a_miss_teaches_nothing(come_back)

    def test_a_miss_counts_once_per_tick(self) -> None:
        """However often a request asks."""
        policy, same = self.make_policy(8), self.make_policy(8)
        for each in (policy, same):
            fill(each, range(8), Access(1))
            each.touch(range(4, 8), Access(2))
            assert len(each.evict(4) or []) == 4
            each.miss(make_keys(*range(8)), Access(3))
        for number in range(8):
            policy.miss(make_keys(number), Access(3, depths=[1]))
        policy.miss(make_keys(*range(8)), Access(3))
        self._check_same(policy, same)

    def _check_that_a_miss_teaches_nothing(self, leave: Callable[[CachePolicy], None]) -> None:
        policy, same = self.make_policy(8), self.make_policy(8)
        for each in (policy, same):
            fill(each, range(8), Access(1))
            each.touch(range(4, 8), Access(2))
            leave(each)
        for tick in range(3, 8):
            policy.miss(make_keys(0), Access(tick))
        self._check_same(policy, same)

    def _check_same(self, policy: CachePolicy, same: CachePolicy) -> None:
        """Compare two policies now and after they have gone on alike, with blocks used once and used again."""
        assert order_of(policy) == order_of(same)
        for each in (policy, same):
            fill(each, sorted({*range(8)} - {*order_of(each)}), Access(10))
            each.touch([1, 3], Access(11))
        assert order_of(policy) == order_of(same)
        assert policy.evict(5) == same.evict(5)

    # Everything together

    def test_any_sequence_keeps_the_contract(self) -> None:
        """Whatever happens, the policy knows exactly which slots may leave."""

        @CONTRACT_SETTINGS
        @given(st.data())
        def check(data: st.DataObject) -> None:
            _play(self.make_policy(8), data, calls=[*_CALLS, "take_along", "rescue", "end_session"])

        check()

    def test_arrays_of_slots_are_as_good_as_lists(self) -> None:
        """Where a policy says that it takes them."""

        @CONTRACT_SETTINGS
        @given(st.data())
        def check(data: st.DataObject) -> None:
            policy, of_arrays = self.make_policy(8), self.make_policy(8)
            batch = slot_array if policy.takes_arrays else list
            calls = [*_CALLS, "take_along", "rescue", "end_session"]
            _play(_Both(policy, of_arrays, batch), data, lambda: _assert_same_order(policy, of_arrays), calls=calls)

        check()

    @pytest.mark.parametrize("kind", ["held", "pinned", "protected"])
    def test_costs_follow_the_batch(self, kind: str) -> None:
        """Not what else is held, pinned or protected by earlier calls: counted in instructions."""
        few, many = 400, 12_000

        def cost(size: int) -> int:
            policy = self.make_policy(size + 100)
            for tick, start in enumerate(range(0, size, 100), 1):
                fill(policy, range(start, start + 100), Access(tick))
            if kind == "pinned":
                policy.pin(range(size - 100))
            if kind == "protected":
                policy.evict(10, protected=range(size - 100))
                policy.insert(list(range(size, size + 10)), make_keys(*range(size, size + 10)), Access(size))
                policy.unpin(range(size, size + 10))
            first = size + 10

            def one_round() -> None:
                for slot in range(first, first + 20):
                    policy.insert([slot], make_keys(slot), Access(size + slot))
                    policy.unpin([slot])
                    policy.touch([slot, 0], Access(size + slot + 1))
                    policy.pin([slot])
                    policy.unpin([slot])
                    assert len(policy.coldest(1)) == 1
                    assert policy.evict(1, protected=[slot]) is not None

            return count_instructions(one_round)

        assert cost(many) <= 2 * cost(few)


def play_beside(
    policy: CachePolicy,
    other: CachePolicy,
    data: st.DataObject,
    check: Callable[[], None] = lambda: None,
    *,
    is_order_asked: bool = True,
) -> None:
    """Play any calls that the contract allows on two policies, which must agree on who leaves and when.

    Args:
        policy: The policy under test.
        other: A model of it, of the same capacity.
        data: Where the calls are drawn from.
        check: Called after every call.
        is_order_asked: Whether the order is compared after every call too, or at the end only, for policies that leave
            work until somebody asks.
    """

    def check_both() -> None:
        if is_order_asked:
            _assert_same_order(policy, other)
        assert policy.evictable_count == other.evictable_count
        check()

    _play(_Both(policy, other), data, check_both)
    _assert_same_order(policy, other)


def _assert_same_order(policy: CachePolicy, other: CachePolicy) -> None:
    assert order_of(policy) == order_of(other)


class _Both(CachePolicy):
    """Makes each call on two policies."""

    def __init__(
        self, policy: CachePolicy, other: CachePolicy, batch: Callable[[Collection[int]], Any] = lambda slots: slots
    ) -> None:
        super().__init__(policy.capacity)
        self._policies = (policy, other)
        self._calls: tuple[tuple[CachePolicy, Callable[[Collection[int]], Any]], ...] = (
            (policy, lambda slots: slots),
            (other, batch),
        )

    @property
    def evictable_count(self) -> int:
        return self._same([policy.evictable_count for policy in self._policies])

    def insert(self, slots: Sequence[int], keys: Sequence[OffloadKey], access: Access) -> None:
        for policy, batch in self._calls:
            policy.insert(batch(slots), keys, access)

    def touch(self, slots: Sequence[int], access: Access) -> None:
        for policy, batch in self._calls:
            policy.touch(batch(slots), access)

    def miss(self, keys: Sequence[OffloadKey], access: Access) -> None:
        for policy in self._policies:
            policy.miss(keys, access)

    def pin(self, slots: Collection[int]) -> None:
        for policy, batch in self._calls:
            policy.pin(batch(slots))

    def unpin(self, slots: Collection[int]) -> None:
        for policy, batch in self._calls:
            policy.unpin(batch(slots))

    def demote(self, slots: Sequence[int]) -> None:
        for policy, batch in self._calls:
            policy.demote(batch(slots))

    def take_along(self, slots: Sequence[int]) -> None:
        for policy, batch in self._calls:
            policy.take_along(batch(slots))

    def rescue(self, slots: Sequence[int], access: Access) -> None:
        for policy, batch in self._calls:
            policy.rescue(batch(slots), access)

    def end_session(self, slots: Sequence[int]) -> None:
        for policy, batch in self._calls:
            policy.end_session(batch(slots))

    def coldest(self, count: int) -> list[int]:
        return self._same([policy.coldest(count) for policy in self._policies])

    def evict(self, count: int, protected: Collection[int] = ()) -> list[int] | None:
        first, second = self._policies
        victims = second.evict_array(count, protected)
        return self._same([first.evict(count, protected), None if victims is None else victims.tolist()])

    def remove(self, slots: Collection[int]) -> None:
        for policy, batch in self._calls:
            policy.remove(batch(slots))

    def clear(self) -> None:
        for policy in self._policies:
            policy.clear()

    def _same(self, answers: list[_Answer]) -> _Answer:
        assert answers[0] == answers[1]
        return answers[0]


def _play(
    policy: CachePolicy,
    data: st.DataObject,
    check: Callable[[], None] = lambda: None,
    calls: Sequence[str] = (),
) -> None:
    """Play any calls that the contract allows, beside two sets: the resident slots and the pinned ones."""
    resident: dict[int, OffloadKey] = {}
    pinned: set[int] = set()
    demoted: set[int] = set()
    numbers = iter(range(1_000_000))
    tick = 1

    def some(slots: Iterable[int]) -> list[int]:
        candidates = sorted(slots)
        if not candidates or data.draw(st.booleans(), label="all"):
            return candidates
        return data.draw(st.lists(st.sampled_from(candidates), unique=True))

    def access(size: int) -> Access:
        # Requests overlap: an older one may come again after a newer one.
        return data.draw(accesses(max(1, tick - data.draw(st.integers(0, 2))), size))

    for _ in range(data.draw(st.integers(0, 40), label="steps")):
        match call := data.draw(st.sampled_from(calls or _CALLS), label="call"):
            case "insert":
                slots = some(set(range(policy.capacity)) - set(resident))
                # Keys come back at times, so that there are ghosts to meet.
                keys = [make_keys(next(numbers) % 12)[0] for _ in slots]
                keys = [key if key not in resident.values() else make_keys(100 + next(numbers))[0] for key in keys]
                policy.insert(slots, keys, access(len(slots)))
                resident.update(zip(slots, keys, strict=True))
                pinned.update(slots)
                demoted.difference_update(slots)
            case "touch":
                tick += data.draw(st.integers(0, 1))
                slots = some(resident)
                policy.touch(slots, access(len(slots)))
            case "miss":
                keys = [key for key in data.draw(key_batches()) if key not in resident.values()]
                policy.miss(keys, access(len(keys)))
            case "pin":
                slots = some(set(resident) - pinned)
                policy.pin(slots)
                pinned.update(slots)
            case "unpin":
                slots = some(pinned)
                policy.unpin(slots)
                pinned.difference_update(slots)
            case "rescue":
                tick += 1
                slots = some(resident)
                policy.rescue(slots, access(len(slots)))
                demoted.difference_update(slots)
            case "demote" | "take_along" | "end_session":
                slots = some(resident)
                getattr(policy, call)(slots)
                demoted.update(slots)
                leaving = [slot for slot in slots if slot not in pinned]
                # Those demoted by earlier calls may stand before them.
                first = order_of(policy)
                first = first[: max(map(first.index, leaving), default=-1) + 1]
                assert [slot for slot in first if slot in leaving] == leaving
                assert demoted.issuperset(first)
            case "evict":
                _evict(policy, data, resident, pinned, some(resident) if data.draw(st.booleans()) else [])
            case "remove":
                slots = some(resident)
                policy.remove(slots)
                pinned.difference_update(slots)
                for slot in slots:
                    del resident[slot]
            case _:
                policy.clear()
                resident.clear()
                pinned.clear()
        assert policy.evictable_count == len(resident) - len(pinned)
        assert sorted(order_of(policy)) == sorted(set(resident) - pinned)
        check()


_CALLS = [
    *("insert", "unpin", "touch", "evict") * 2,
    *("miss", "pin", "demote", "remove", "clear"),
]


def _evict(
    policy: CachePolicy,
    data: st.DataObject,
    resident: dict[int, OffloadKey],
    pinned: set[int],
    protected: Sequence[int],
) -> None:
    before = order_of(policy)
    candidates = set(resident) - pinned - set(protected)
    count = data.draw(st.integers(0, len(candidates) + 1), label="count")
    victims = policy.evict(count, protected)
    if len(candidates) < count:
        assert victims is None
        assert order_of(policy) == before
        return
    assert victims is not None
    assert len(victims) == len(set(victims)) == count
    assert set(victims) <= candidates
    if not protected:
        assert victims == before[:count]
    for slot in victims:
        del resident[slot]
