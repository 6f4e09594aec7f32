"""A synchronous offloader against a plain model, one random call or landing at a time.

The model knows what every GPU block and every stored block must hold, who holds which slot, and how every transfer
must end. It leaves one thing open: whom the policy evicts.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from enum import Enum

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from numpy.typing import NDArray

from aiokvoffload import (
    ALREADY_DONE,
    CacheIdentity,
    CanonicalKVCaches,
    Deadlines,
    DeviceError,
    InvalidRequestError,
    LoadTicket,
    LookupResult,
    OffloadKey,
    ReqContext,
    StateError,
    StoreOutcome,
    SyncOffloader,
    TransferHandle,
)
from aiokvoffload.devices.base import CopyPlan, Direction, Stream
from aiokvoffload.keys import make_offload_key
from aiokvoffload.offloader import OffloaderContext
from aiokvoffload.offloader.parts import build_parts
from aiokvoffload.testing.clock import ManualClock
from aiokvoffload.testing.device import ManualDevice
from aiokvoffload.testing.order import OrderChecker
from aiokvoffload.testing.streams import ManualStream, Operation

GPU_BLOCKS = 6
SLOTS = 4
LAYERS = 2
BLOCK_TOKENS = 4
PAGE_BYTES = 8
LANDING_SECONDS = 10.0
BUDGET_BLOCKS = 4
KEYS = [make_offload_key(bytes([number]) * 16) for number in range(8)]
SEQUENCES = [KEYS[:5], [*KEYS[:2], *KEYS[5:]]]
"""Two requests that part after two blocks."""

REFUSED = "refused on purpose"
EXPIRED = "could not be sent"

indices = st.integers(0, 11)
drawn_blocks = st.integers(0, 9999)
"""Says which GPU blocks, in one number: hypothesis bounds how much a run may draw."""


class RecordingDevice(ManualDevice):
    """Remembers its streams, and refuses batches while asked to."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__(clock=clock)
        self.streams: list[ManualStream] = []
        self.refusal_count = 0
        self.attempts: list[tuple[CopyPlan, bool]] = []

    def create_stream(self, name: str) -> ManualStream:
        stream = super().create_stream(name)
        self.streams.append(stream)
        return stream

    def copy_batch(self, plan: CopyPlan, stream: Stream) -> None:
        is_refused = self.refusal_count > 0
        self.attempts.append((plan, is_refused))
        if is_refused:
            self.refusal_count -= 1
            raise DeviceError(REFUSED)
        super().copy_batch(plan, stream)

    def ready_work(self, stream: ManualStream) -> object:
        """Return what would land next on a stream, or None."""
        head = stream.queue[0] if stream.queue else None
        return head.work if isinstance(head, Operation) else None


@dataclass(eq=False)
class Value:
    """What a block holds: a number, or whatever another value is; undefined if it was lost on the way."""

    source: int | Value
    is_lost: bool = False

    @property
    def number(self) -> int | None:
        if self.is_lost:
            return None
        return self.source if isinstance(self.source, int) else self.source.number


class EntryState(Enum):
    WRITING = 1
    READY = 2
    GONE = 3


@dataclass(eq=False)
class Entry:
    """One slot in use."""

    key: OffloadKey
    values: list[Value]
    state: EntryState = EntryState.WRITING
    user_count: int = 0


@dataclass(eq=False)
class Transfer:
    """One store or load under way; `places` says for each GPU block which part of which entry."""

    direction: Direction
    handle: TransferHandle
    entries: list[Entry]
    blocks: list[int]
    places: list[tuple[Entry, int]]
    values: list[Value]
    generation: int
    epoch: int
    own_blocks: list[int]
    joined: list[Transfer] = field(default_factory=list)
    plan: CopyPlan | None = None
    refused_plan: CopyPlan | None = None
    has_landed: bool = False
    has_failed: bool = False
    is_withdrawn: bool = False
    is_overdue: bool = False
    give_up_error: str | None = None
    is_fenced: bool = False
    is_over: bool = False
    is_good: bool = False

    @property
    def bytes_arrived(self) -> bool:
        """Whether its bytes are right, deadlines and resets aside."""
        own = not self.own_blocks or (self.has_landed and not self.has_failed)
        return own and self.give_up_error is None and all(other.bytes_arrived for other in self.joined)


@dataclass(eq=False)
class Pin:
    """A load ticket."""

    ticket: LoadTicket
    keys: Sequence[OffloadKey]
    resident_blocks: int
    epoch: int
    entries: list[Entry] = field(default_factory=list)
    writes: set[Transfer] = field(default_factory=set)
    is_waiting: bool = False


class OffloaderMachineTest(RuleBasedStateMachine):
    """Calls, landings and faults in any order.

    Args:
        factor: GPU blocks per offloaded block.
        policy: Name of the eviction policy.
        seen: Counts what has happened, over all runs.
    """

    def __init__(self, factor: int, policy: str, seen: Counter[str]) -> None:
        super().__init__()
        self.factor = factor
        self.seen = seen
        self.clock = ManualClock()
        self.device = RecordingDevice(self.clock)
        self.checker = OrderChecker(self.device, strict=True)
        self.compute_stream = self.checker.create_stream("compute")
        self.tensors = [torch.zeros((GPU_BLOCKS, PAGE_BYTES), dtype=torch.int8) for _ in range(LAYERS)]
        self.pages: list[NDArray[np.int64]] = [tensor.numpy().view(np.int64)[:, 0] for tensor in self.tensors]
        self.offloader = self.open(policy)
        self.generation = self.epoch = 0
        self.last_number = 0
        self.gpu = [Value(0) for _ in range(GPU_BLOCKS)]
        self.entry_of: dict[OffloadKey, Entry] = {}
        self.entries: list[Entry] = []
        self.transfers: list[Transfer] = []
        self.transfer_of: dict[CopyPlan, Transfer] = {}
        self.last_load_into: dict[int, tuple[Transfer, tuple[Entry, int]]] = {}
        self.pins: list[Pin] = []
        self.joined_count = 0
        self.unpolled: list[TransferHandle] = []
        self.expiring: set[Transfer] = set()
        self.computing = 0
        self.reads: list[tuple[Value, list[int]]] = []
        self.ctx = ReqContext("0")
        self.ctx_epoch: int | None = None
        self.attempt_count = 0
        self.problem: BaseException | None = None

    def open(self, policy: str) -> SyncOffloader:
        parts = build_parts(
            CanonicalKVCaches.from_layers(self.tensors, block_tokens=BLOCK_TOKENS),
            cpu_bytes=SLOTS * self.factor * LAYERS * PAGE_BYTES,
            block_size_factor=self.factor,
            identity=CacheIdentity(model="model"),
            policy=policy,
            store_threshold=0,
            device=self.checker,
            compute_stream=self.compute_stream,
            deadlines=Deadlines(landing_seconds=LANDING_SECONDS),
            clock=self.clock,
            in_flight_bytes=BUDGET_BLOCKS * LAYERS * PAGE_BYTES,
        )
        memory = parts.memory
        self.checker.watch("slots", memory.address, SLOTS, memory.slot_bytes, cell_bytes=PAGE_BYTES)
        for layer, tensor in enumerate(self.tensors):
            self.checker.watch(f"layer {layer}", tensor.data_ptr(), GPU_BLOCKS, PAGE_BYTES)
        self.stack = ExitStack()
        return self.stack.enter_context(OffloaderContext(lambda: parts))

    # What the engine does

    @rule(block=st.integers(0, GPU_BLOCKS - 1))
    def compute_write(self, block: int) -> None:
        """Overwrite a block that is the engine's: nobody touches it, or only stores that are fenced."""
        touching = [it for it in self.under_way() if block in it.handle.gpu_blocks]
        if any(it.direction is Direction.LOAD or not it.is_fenced for it in touching):
            return
        self.seen["overwrites behind a fence"] += bool(touching)
        self.last_number += 1
        number = self.last_number

        def work() -> None:
            for layer, pages in enumerate(self.pages):
                pages[block] = content(number, layer)

        self.launch(work, [block], is_write=True)
        self.gpu[block] = Value(number)

    @rule(block=st.integers(0, GPU_BLOCKS - 1))
    def compute_read(self, block: int) -> None:
        """Read a block that nobody writes, or only loads that are fenced."""
        loads = [it for it in self.under_way(Direction.LOAD) if block in it.handle.gpu_blocks]
        if not all(it.is_fenced for it in loads):
            return
        self.seen["reads behind a fence"] += bool(loads)
        found: list[int] = []
        self.launch(lambda: found.extend(int(pages[block]) for pages in self.pages), [block], is_write=False)
        self.reads.append((self.gpu[block], found))

    @precondition(lambda self: self.under_way())
    @rule(index=indices)
    def fence(self, index: int) -> None:
        """Fence a transfer, which must be sent, and read what it loads or overwrite what it stores."""
        transfer = self.under_way()[index % len(self.under_way())]
        if not transfer.handle.is_sent:
            with pytest.raises(StateError):
                transfer.handle.fence()
            return
        transfer.handle.fence()
        transfer.is_fenced = True
        for block in transfer.blocks[:2]:
            (self.compute_read if transfer.direction is Direction.LOAD else self.compute_write)(block)

    # Stores and loads

    @rule(
        sequence=st.sampled_from([0, 1]),
        first=st.integers(0, 3),
        count=st.integers(1, 5),
        draw=drawn_blocks,
        is_filtered=st.booleans(),
        after=st.integers(0, 3),
        with_context=st.booleans(),
    )
    def store_soon(
        self,
        sequence: int,
        first: int,
        count: int,
        draw: int,
        is_filtered: bool,
        after: int,
        with_context: bool,
    ) -> None:
        """Store any GPU blocks under any run of keys."""
        keys = SEQUENCES[sequence][first : first + count]
        blocks = random.Random(draw).choices(range(GPU_BLOCKS), k=len(keys) * self.factor)
        ctx = self.context(with_context)
        expected, accepted = self.expect_outcomes(keys, ctx)
        before = {key for key, entry in self.entry_of.items() if entry.state is EntryState.READY}
        free = SLOTS - len(self.entries)
        handle = self.offloader.store_soon(
            keys, blocks, ctx, filtered=is_filtered, first_block=first, after=self.draw_after(after)
        )
        evicted = {key for key in before if self.offloader.manager.lookup_nowait([key]) == [LookupResult.MISS]}
        assert len(evicted) == max(0, len(accepted) - free)
        for key in evicted:
            entry = self.entry_of.pop(key)
            assert key not in keys
            assert not entry.user_count
            self.entries.remove(entry)
        self.seen["evictions"] += len(evicted)
        entries, stored, places = [], [], []
        for position in accepted:
            span = blocks[position * self.factor : (position + 1) * self.factor]
            entry = Entry(keys[position], [Value(self.gpu[block]) for block in span], user_count=2)
            self.entry_of[entry.key] = entry
            entries.append(entry)
            stored += span
            places += [(entry, part) for part in range(self.factor)]
        self.entries += entries
        if not entries:
            assert handle.is_idle
            assert handle.outcomes == expected
            return
        values = [value for entry in entries for value in entry.values]
        transfer = Transfer(
            Direction.STORE, handle, entries, stored, places, values, self.generation, self.epoch, stored
        )
        assert handle.gpu_blocks == set(stored)
        if not handle.is_idle:
            assert handle.outcomes == expected
        self.add(transfer)

    @rule(
        sequence=st.sampled_from([0, 1]),
        count=st.integers(1, 5),
        resident=st.integers(0, 3),
        with_context=st.booleans(),
    )
    def prepare_load(self, sequence: int, count: int, resident: int, with_context: bool) -> None:
        """Match and pin a prefix."""
        keys = SEQUENCES[sequence][:count]
        resident = min(resident, count * self.factor)
        ctx = self.context(with_context)
        is_current = self.bound_epoch(ctx) == self.epoch
        ticket = self.offloader.prepare_load(keys, ctx, resident_tokens=resident * BLOCK_TOKENS)
        pin = Pin(ticket, keys, resident, self.epoch)
        if is_current:
            self.hold_run(pin, {EntryState.WRITING, EntryState.READY})
        pin.writes = {
            transfer
            for transfer in self.under_way(Direction.STORE)
            for entry in pin.entries
            if entry in transfer.entries and entry.state is EntryState.WRITING
        }
        pin.is_waiting = bool(pin.writes)
        self.seen["pending loads"] += pin.is_waiting
        self.seen["hits"] += bool(pin.entries)
        self.pins.append(pin)

    @rule(sequence=st.sampled_from([0, 1]), count=st.integers(1, 5), draw=drawn_blocks)
    def load_at_once(self, sequence: int, count: int, draw: int) -> None:
        """Match, pin and start, as far as there is nothing to wait for."""
        self.prepare_load(sequence, count, 0, False)
        self.pins.insert(0, self.pins.pop())
        self.start(0, draw, 0)

    @rule(sequence=st.sampled_from([0, 1]), first=st.integers(0, 3), draw=drawn_blocks)
    def store_and_land(self, sequence: int, first: int, draw: int) -> None:
        """Store two blocks and let everything land."""
        self.store_soon(sequence, first, 2, draw, True, 0, False)
        self.land_some(11)
        self.poll()

    @precondition(lambda self: self.pins)
    @rule(index=indices, draw=drawn_blocks, after=st.integers(0, 3))
    def start(self, index: int, draw: int, after: int) -> None:
        """Start a load into any GPU blocks, also such as are being stored or loaded."""
        pin = self.pins[index % len(self.pins)]
        if pin.is_waiting:
            with pytest.raises(StateError):
                pin.ticket.start([])
            return
        size = pin.ticket.group_sizes[0]
        first = pin.ticket.block_indices[0]
        # Loads of the same bytes into the same blocks are what joins: make them frequent.
        order = list(range(first, first + GPU_BLOCKS))
        if draw % 2:
            random.Random(draw).shuffle(order)
        blocks = [block % GPU_BLOCKS for block in order[:size]]
        if size > GPU_BLOCKS:
            with pytest.raises(InvalidRequestError):
                pin.ticket.start(blocks)
            return
        handle = pin.ticket.start(blocks, after=self.draw_after(after))
        with pytest.raises(StateError):
            pin.ticket.start(blocks)
        pin.ticket.abort()  # changes nothing any more
        self.pins.remove(pin)
        if not pin.entries:
            assert handle.is_idle
            return
        offset = first - pin.resident_blocks // self.factor * self.factor
        places = [
            (pin.entries[(offset + position) // self.factor], (offset + position) % self.factor)
            for position in range(size)
        ]
        transfer = Transfer(Direction.LOAD, handle, pin.entries, blocks, places, [], self.generation, pin.epoch, [])
        for block, place in zip(blocks, places, strict=True):
            other, its_place = self.last_load_into.get(block, (None, None))
            if other is not None and its_place == place:
                transfer.joined.append(other)
                self.joined_count += 1
                continue
            transfer.own_blocks.append(block)
            self.last_load_into[block] = (transfer, place)
            self.gpu[block] = Value(place[0].values[place[1]])
            transfer.values.append(self.gpu[block])
        for entry in pin.entries:
            entry.user_count += 1
        self.seen["loads"] += 1
        self.seen["joins"] += bool(transfer.joined)
        self.add(transfer)

    @precondition(lambda self: self.pins)
    @rule(index=indices, is_abort=st.booleans())
    def stop_waiting(self, index: int, is_abort: bool) -> None:
        """Give a ticket up, or let it go on with what is there."""
        pin = self.pins[index % len(self.pins)]
        if is_abort:
            pin.ticket.abort()
            self.let_go(pin)
            self.seen["aborts"] += 1
            return
        pin.ticket.settle()
        if pin.is_waiting:
            self.end_wait(pin)
            self.seen["cut waits"] += 1

    @precondition(lambda self: self.under_way())
    @rule(index=indices)
    def cancel(self, index: int) -> None:
        """Take a transfer back, which works as long as it is queued and nobody has joined it."""
        transfer = self.under_way()[index % len(self.under_way())]
        is_joined = any(transfer in other.joined and not other.is_withdrawn for other in self.under_way())
        is_queued = not transfer.handle.is_sent and transfer.give_up_error is None
        is_expected = is_queued and not is_joined
        if is_expected:
            transfer.is_withdrawn = True
            self.give_up(transfer, "withdrawn")
            self.seen["withdrawals"] += 1
        assert transfer.handle.cancel() is is_expected
        # What it has joined is still being copied into its blocks.
        assert transfer.is_over is (is_expected and all(other.is_over for other in transfer.joined))

    # The whole

    @precondition(lambda self: len(self.entries) > 2)
    @rule(what=st.integers(0, 7))
    def disturb(self, what: int) -> None:
        """Do what happens seldom: empty CPU memory, change the weights, refuse a submission, go on with a request."""
        if what == 0:
            self.offloader.reset_nowait()
            self.forget_all()
            self.seen["resets"] += 1
        elif what == 1:
            self.offloader.bump_epoch_nowait()
            self.epoch += 1
            self.forget_all()
            self.seen["epochs"] += 1
        elif what == 2:
            self.last_number += 1
            self.ctx, self.ctx_epoch = ReqContext(str(self.last_number)), None
        elif what == 3:
            self.device.refusal_count = 1
        elif what == 4:
            self.pass_the_deadline()

    # What the device does

    @precondition(lambda self: self.device.pending_copies or self.computing)
    @rule(index=indices, moved=st.integers(0, 2), fails=st.sampled_from([False, False, False, True]))
    def land(self, index: int, moved: int, fails: bool) -> None:
        """Let one batch of copies, or one step of the engine, land; or fail half-way."""
        ready = [stream for stream in self.device.streams if self.device.ready_work(stream) is not None]
        if not ready:
            return
        stream = ready[index % len(ready)]
        plan = self.device.ready_work(stream)
        if fails and isinstance(plan, CopyPlan):
            self.device.fail_next(stream, "failed on purpose", moved_copies=moved)
        assert self.device.land_next(stream)
        if not isinstance(plan, CopyPlan):
            self.computing -= 1
            return
        transfer = self.transfer_of[plan]
        transfer.has_landed = True
        transfer.has_failed = fails
        self.seen["failures" if fails else "landings"] += 1
        if not fails:
            self.check_landed(transfer)
        elif transfer.direction is Direction.LOAD:
            self.lose(transfer.values)

    @precondition(lambda self: self.device.pending_copies or self.computing)
    @rule(index=indices)
    def land_some(self, index: int) -> None:
        """Let several land, so that runs come to an end."""
        for step in range(index):
            self.land(index + step, 0, False)

    @rule()
    def poll(self) -> None:
        """Find out what has landed."""
        self.take_polled()
        for transfer in self.under_way():
            assert not transfer.has_landed or transfer.joined

    # Invariants

    @invariant()
    def no_callback_has_failed(self) -> None:
        """What the model found wrong while the library called it."""
        if self.problem is not None:
            raise self.problem

    @invariant()
    def slots_add_up(self) -> None:
        """Every slot is somewhere, and where the model has it."""
        self.seen["steps"] += 1
        counts = self.offloader.statistics().manager
        by_state = Counter(entry.state for entry in self.entries)
        assert counts.free + counts.ready + counts.writing + counts.promoting + counts.leased_without_key == SLOTS
        assert counts.ready == by_state[EntryState.READY]
        assert counts.writing == by_state[EntryState.WRITING]
        assert counts.leased_without_key == by_state[EntryState.GONE]
        assert counts.pinned == sum(e.state is EntryState.READY and e.user_count > 0 for e in self.entries)
        assert counts.waiting_loads == sum(pin.is_waiting for pin in self.pins)
        assert self.offloader.statistics().joined_blocks == self.joined_count
        assert self.offloader.statistics().fault is None

    @invariant()
    def lookups_agree(self) -> None:
        """What can be loaded is what the model says."""
        expected = [
            LookupResult.MISS
            if (entry := self.entry_of.get(key)) is None
            else LookupResult.HIT
            if entry.state is EntryState.READY
            else LookupResult.PENDING
            for key in KEYS
        ]
        assert self.offloader.manager.lookup_nowait(KEYS) == expected

    @invariant()
    def tickets_agree(self) -> None:
        """What a ticket promises is what the model has pinned."""
        for pin in self.pins:
            ticket = pin.ticket
            hit = LookupResult.HIT if pin.entries else LookupResult.MISS
            assert ticket.result is (LookupResult.PENDING if pin.is_waiting else hit)
            first = pin.resident_blocks // self.factor
            end = (first + len(pin.entries)) * self.factor if pin.entries else pin.resident_blocks
            assert ticket.token_count == end * BLOCK_TOKENS
            assert ticket.group_sizes == (end - pin.resident_blocks,)
            if pin.entries:
                assert ticket.block_indices == (pin.resident_blocks,)

    @invariant()
    def blocks_in_use_are_known(self) -> None:
        """No copy is pending for a handle that is idle, and the others name all blocks that are touched."""
        sent = [it for it in self.under_way() if it.handle.is_sent or it.give_up_error is not None]
        named = {block for transfer in sent for block in transfer.blocks}
        assert self.offloader.gpu_blocks_in_flight() == named
        for plan in self.device.pending_copies:
            assert not self.transfer_of[plan].is_over
        for transfer in self.transfers:
            assert transfer.handle.is_idle is transfer.is_over
            assert transfer.handle.is_settled is (transfer.is_over or transfer.is_overdue)

    @invariant()
    def nobody_else_touches_what_is_written(self) -> None:
        """Nothing came too early, and no two copies that may run at the same time share bytes that one writes."""
        assert list(map(str, self.checker.violations)) == []
        pending = self.device.pending_copies
        ready = [work for stream in self.device.streams if isinstance(work := self.device.ready_work(stream), CopyPlan)]
        for plans, is_on_gpu in ((pending, False), (ready, True)):
            for index, plan in enumerate(plans):
                for other in plans[index + 1 :]:
                    writers = {plan.direction, other.direction} - {Direction.STORE if is_on_gpu else Direction.LOAD}
                    if writers:
                        assert not ranges(plan, is_on_gpu) & ranges(other, is_on_gpu)

    def teardown(self) -> None:
        """Let everything end, and load all that is left."""
        with self.stack:
            if self.problem is None:
                self.end_all()

    # The model

    def end_all(self) -> None:
        self.device.refusal_count = 0
        for pin in list(self.pins):
            pin.ticket.abort()
            self.let_go(pin)
        while self.under_way():
            while any(self.device.ready_work(stream) is not None for stream in self.device.streams):
                self.land(0, 0, False)
            self.take_polled()
        while self.computing:
            self.land(0, 0, False)
        self.no_callback_has_failed()
        self.slots_add_up()
        self.lookups_agree()
        self.nobody_else_touches_what_is_written()
        self.take_polled()
        assert self.take_polled() == []
        assert all(not entry.user_count for entry in self.entries)
        assert all(entry.state is EntryState.READY for entry in self.entries)
        for key, entry in self.entry_of.items():
            blocks = list(range(self.factor))
            assert self.offloader.load([key], blocks) == self.factor * BLOCK_TOKENS
            for block, value in zip(blocks, entry.values, strict=True):
                assert value.number is None or self.holds(block, value.number)
        for value, found in self.reads:
            if value.number is not None:
                assert found == [content(value.number, layer) for layer in range(LAYERS)]
        assert self.checker.violation_count == 0

    def pass_the_deadline(self) -> None:
        """Let so much time pass that everything sent is overdue, and everything queued fails."""
        late = [transfer for transfer in self.under_way() if not transfer.is_overdue]
        self.clock.advance(LANDING_SECONDS)
        self.expiring = {transfer for transfer in late if not transfer.handle.is_sent}
        # What expires in the queue, but has joined copies under way, is overdue by the next poll.
        for _ in range(2):
            self.take_polled()
            for transfer in self.expiring:
                self.expire(transfer)
        self.expiring = set()
        for transfer in late:
            if not transfer.is_over:
                assert transfer.handle.is_settled
                assert not transfer.handle.is_idle
                transfer.is_overdue = True
                self.close_ticket(transfer, is_good=False)
                self.seen["overdue"] += 1
        assert all(transfer.is_overdue for transfer in self.under_way())

    def under_way(self, direction: Direction | None = None) -> list[Transfer]:
        return [it for it in self.transfers if not it.is_over and direction in (None, it.direction)]

    def launch(self, work: object, blocks: list[int], *, is_write: bool) -> None:
        assert callable(work)
        rows = [(f"layer {layer}", blocks) for layer in range(LAYERS)]
        reads, writes = ([], rows) if is_write else (rows, [])
        self.checker.launch(self.compute_stream, work, reads, writes)
        self.computing += 1

    def draw_after(self, number: int) -> object:
        """Return something to wait for; that nothing need be waited for is said only if it has been seen."""
        if number == 1 and self.checker.is_done(self.checker.record(self.compute_stream)):
            return ALREADY_DONE
        if number == 2:
            return self.checker.record(self.compute_stream)
        return self.compute_stream if number == 3 else None

    def context(self, with_context: bool) -> ReqContext | None:
        return self.ctx if with_context else None

    def bound_epoch(self, ctx: ReqContext | None) -> int:
        """Return the epoch of a request's first call, which may be this one."""
        if ctx is None:
            return self.epoch
        if self.ctx_epoch is None:
            self.ctx_epoch = self.epoch
        return self.ctx_epoch

    def expect_outcomes(
        self, keys: list[OffloadKey], ctx: ReqContext | None
    ) -> tuple[tuple[StoreOutcome, ...], list[int]]:
        """Return what must become of an offer, and the positions of what is accepted."""
        if self.bound_epoch(ctx) != self.epoch:
            self.seen["stores of an older epoch"] += 1
            return (StoreOutcome.REFUSED,) * len(keys), []
        evictable = [e for e in self.entries if e.state is EntryState.READY and not e.user_count and e.key not in keys]
        room = SLOTS - len(self.entries) + len(evictable)
        missing = [position for position, key in enumerate(keys) if key not in self.entry_of]
        outcomes = [StoreOutcome.RESIDENT] * len(keys)
        for count, position in enumerate(missing):
            outcomes[position] = StoreOutcome.ACCEPTED if count < room else StoreOutcome.REFUSED
        self.seen["stores"] += 1
        self.seen["refused blocks"] += max(0, len(missing) - room)
        return tuple(outcomes), missing[:room]

    def add(self, transfer: Transfer) -> None:
        """Note a transfer, whose handle may have ended already."""
        self.transfers.append(transfer)
        self.match_plans()

        def end(_handle: TransferHandle) -> None:
            # What a callback raises is only logged; keep it for the end of the rule.
            try:
                self.end(transfer)
            except BaseException as exc:  # noqa: BLE001
                self.problem = self.problem or exc

        transfer.handle.on_idle(end)

    def match_plans(self) -> None:
        """Find out whose copies were submitted since the last time; of those that fit, the oldest are sent first."""
        for plan, is_refused in self.device.attempts[self.attempt_count :]:
            transfer = self.find_sender(plan, is_refused)
            if transfer is None:
                return  # it is not noted yet
            self.attempt_count += 1
            if not is_refused:
                transfer.plan = plan
                self.transfer_of[plan] = transfer
                continue
            transfer.refused_plan = plan
            if transfer.give_up_error is None:
                self.give_up(transfer, REFUSED)

    def find_sender(self, plan: CopyPlan, is_refused: bool) -> Transfer | None:
        blocks = self.blocks_of(plan)
        for it in self.transfers:
            is_same = it.direction is plan.direction and set(it.own_blocks) == blocks
            is_open = it.plan is None and it.refused_plan is None
            if is_same and is_open and (it.give_up_error is None or (is_refused and it.give_up_error == REFUSED)):
                return it
        return None

    def expire(self, transfer: Transfer) -> None:
        """Note that a transfer has waited too long in the queue."""
        if transfer.give_up_error is None:
            self.give_up(transfer, EXPIRED)
            self.seen["expired in the queue"] += 1

    def give_up(self, transfer: Transfer, error: str) -> None:
        """Note that a transfer's own copies will never be made."""
        transfer.give_up_error = error
        self.seen["refusals"] += error == REFUSED
        if transfer.direction is Direction.LOAD:
            self.lose(transfer.values)
        self.forget_loads(transfer)

    def forget_loads(self, transfer: Transfer) -> None:
        """Let nobody join a load any more."""
        self.last_load_into = {b: place for b, place in self.last_load_into.items() if place[0] is not transfer}

    def blocks_of(self, plan: CopyPlan) -> set[int]:
        """Return the GPU blocks that a plan touches."""
        addresses = plan.sources if plan.direction is Direction.STORE else plan.destinations
        start = self.tensors[0].data_ptr()
        return {
            (address + offset - start) // PAGE_BYTES
            for address, size in zip(addresses.tolist(), plan.byte_counts.tolist(), strict=True)
            for offset in range(0, size, PAGE_BYTES)
            if 0 <= address - start < GPU_BLOCKS * PAGE_BYTES
        }

    def check_landed(self, transfer: Transfer) -> None:
        """Look at the GPU side of copies that have landed this moment."""
        place_of = dict(zip(transfer.blocks, transfer.places, strict=True))
        for block in transfer.own_blocks:
            entry, part = place_of[block]
            number = entry.values[part].number
            assert number is None or self.holds(block, number)

    def holds(self, block: int, number: int) -> bool:
        return all(int(pages[block]) == content(number, layer) for layer, pages in enumerate(self.pages))

    def take_polled(self) -> list[TransferHandle]:
        """Poll; it returns each handle that has ended once."""
        polled = self.offloader.poll()
        self.match_plans()
        assert sorted(map(id, polled)) == sorted(map(id, self.unpolled))
        self.unpolled.clear()
        return polled

    def end(self, transfer: Transfer) -> None:
        """The library says that a transfer is over: it must be, and end as the model has it."""
        assert not transfer.is_over
        transfer.is_over = True
        self.unpolled.append(transfer.handle)
        result = transfer.handle.result
        assert result is not None
        self.match_plans()
        if transfer in self.expiring:
            self.expire(transfer)
        elif transfer.own_blocks and transfer.plan is None and transfer.give_up_error is None:
            self.give_up(transfer, REFUSED)
        if transfer.give_up_error is not None:
            assert transfer.give_up_error in str(result.error)
        else:
            assert transfer.has_landed or not transfer.own_blocks
        assert all(other.is_over for other in transfer.joined)
        ticket_counts = (
            transfer.generation == self.generation
            if transfer.direction is Direction.STORE
            else transfer.epoch == self.epoch
        )
        transfer.is_good = transfer.bytes_arrived and not transfer.is_overdue and ticket_counts
        assert result.success is transfer.is_good, result
        assert (result.error is None) is transfer.is_good
        if transfer.is_overdue:
            self.seen["late landings"] += 1
        elif not ticket_counts:
            self.seen["stale ends"] += 1
        if transfer.direction is Direction.STORE:
            assert (StoreOutcome.ACCEPTED in transfer.handle.outcomes) is transfer.is_good
        elif not transfer.is_good:
            self.lose(transfer.values)
        if not transfer.is_overdue:
            self.close_ticket(transfer, is_good=transfer.is_good)
        self.release(transfer.entries)
        self.forget_loads(transfer)

    def lose(self, values: list[Value]) -> None:
        """What was to be loaded has not arrived, or does not count."""
        for value in values:
            value.is_lost = True

    def close_ticket(self, transfer: Transfer, *, is_good: bool) -> None:
        """Commit or drop what a store has reserved; unpin what a load has pinned."""
        if transfer.direction is Direction.STORE:
            for entry in transfer.entries:
                if entry.state is EntryState.WRITING:
                    entry.state = EntryState.READY if is_good else EntryState.GONE
                    if not is_good:
                        del self.entry_of[entry.key]
            for pin in self.pins:
                pin.writes.discard(transfer)
                if pin.is_waiting and not pin.writes:
                    self.end_wait(pin)
        self.release(transfer.entries)

    def release(self, entries: list[Entry]) -> None:
        for entry in entries:
            entry.user_count -= 1
            if not entry.user_count and entry.state is EntryState.GONE:
                self.entries.remove(entry)

    def hold_run(self, pin: Pin, states: set[EntryState]) -> None:
        """Pin the longest run of blocks in one of `states` behind the resident ones."""
        pin.entries = []
        for key in pin.keys[pin.resident_blocks // self.factor :]:
            entry = self.entry_of.get(key)
            if entry is None or entry.state not in states:
                break
            pin.entries.append(entry)
            entry.user_count += 1

    def end_wait(self, pin: Pin) -> None:
        """Settle a waiting load: with all its blocks if they are ready, else with the run that is."""
        pin.is_waiting = False
        pin.writes = set()
        if any(entry.state is not EntryState.READY for entry in pin.entries):
            held = pin.entries
            self.hold_run(pin, {EntryState.READY})
            self.release(held)
            self.seen["shrunken loads"] += 1

    def let_go(self, pin: Pin) -> None:
        self.pins.remove(pin)
        self.release(pin.entries)

    def forget_all(self) -> None:
        """Take all keys away; what is in use stays where it is."""
        self.generation += 1
        self.entry_of.clear()
        for entry in list(self.entries):
            entry.state = EntryState.GONE
            if not entry.user_count:
                self.entries.remove(entry)
        for pin in self.pins:
            if pin.is_waiting:
                self.end_wait(pin)


def content(number: int, layer: int) -> int:
    """Return what a block that holds `number` holds in one layer."""
    return number if layer == 0 else -number


def ranges(plan: CopyPlan, is_on_gpu: bool) -> set[int]:
    """Return the page addresses of one side of a plan."""
    is_source = is_on_gpu == (plan.direction is Direction.STORE)
    starts = (plan.sources if is_source else plan.destinations).tolist()
    return {
        start + offset
        for start, size in zip(starts, plan.byte_counts.tolist(), strict=True)
        for offset in range(0, size, PAGE_BYTES)
    }


def take_random_step(machine: OffloaderMachineTest, source: random.Random) -> None:
    """Do what a rule of the machine does, often what happens often in a server."""
    index, draw, after = source.randrange(12), source.randrange(10_000), source.randrange(4)
    sequence, first, count = source.randrange(2), source.randrange(4), source.randrange(1, 5)
    match source.randrange(20):
        case 0 | 1 | 2:
            machine.store_soon(sequence, first, count, draw, source.random() < 0.5, after, source.random() < 0.3)
        case 3:
            machine.prepare_load(sequence, count, source.randrange(4), source.random() < 0.3)
        case 4 if machine.pins:
            machine.start(index, draw, after)
        case 5 | 6 | 7:
            machine.load_at_once(sequence, count, draw)
        case 8 | 9 | 10 | 11 if machine.device.pending_copies or machine.computing:
            machine.land(index, source.randrange(3), source.random() < 0.1)
        case 12:
            machine.land_some(source.randrange(6))
        case 13 | 14:
            machine.poll()
        case 15:
            machine.compute_write(draw % GPU_BLOCKS)
        case 16:
            machine.compute_read(draw % GPU_BLOCKS)
        case 17 if machine.under_way():
            machine.fence(index)
        case 18 if machine.under_way():
            machine.cancel(index)
        case 19 if machine.pins and source.random() < 0.5:
            machine.stop_waiting(index, source.random() < 0.5)
        case 19 if source.random() < 0.5:
            machine.disturb(source.randrange(5))


def check_invariants(machine: OffloaderMachineTest) -> None:
    machine.no_callback_has_failed()
    machine.slots_add_up()
    machine.lookups_agree()
    machine.tickets_agree()
    machine.blocks_in_use_are_known()
    machine.nobody_else_touches_what_is_written()


MACHINES = pytest.mark.parametrize(("factor", "policy"), [(1, "lru"), (1, "arc"), (2, "lru"), (2, "arc")])


@pytest.mark.timeout(600)  # for making a failure small
@MACHINES
def test_an_offloader_does_what_the_model_does(factor: int, policy: str) -> None:
    seen: Counter[str] = Counter()

    class Machine(OffloaderMachineTest):
        def __init__(self) -> None:
            super().__init__(factor, policy, seen)

    run_state_machine_as_test(
        seed(factor)(Machine),
        settings=settings(
            max_examples=150,  # how much they see depends on what else is imported: hypothesis draws from that too
            stateful_step_count=50,
            derandomize=True,
            deadline=None,
            database=None,
            phases=[Phase.generate, Phase.shrink],
            suppress_health_check=list(HealthCheck),
        ),
    )
    assert seen["landings"] > 100


@MACHINES
def test_an_offloader_does_what_the_model_does_in_long_runs(factor: int, policy: str) -> None:
    seen: Counter[str] = Counter()
    for number in range(40):
        machine = OffloaderMachineTest(factor, policy, seen)
        source = random.Random(number)
        for _ in range(150):
            take_random_step(machine, source)
            check_invariants(machine)
        machine.teardown()
    for event in (
        "landings",
        "failures",
        "refusals",
        "stores",
        "refused blocks",
        "evictions",
        "loads",
        "hits",
        "joins",
        "pending loads",
        "shrunken loads",
        "cut waits",
        "aborts",
        "withdrawals",
        "resets",
        "epochs",
        "stale ends",
        "overdue",
        "late landings",
        "expired in the queue",
        "stores of an older epoch",
        "reads behind a fence",
        "overwrites behind a fence",
    ):
        assert seen[event] >= 5, f"{event!r} hardly happened: {seen}"
