"""The worker: both directions of transfer, ordered where they share bytes.

Two transfers conflict if one writes a GPU block or a slot that the other reads or writes. The later one then
waits for the earlier one, on the device where both are sent. Everything else may overtake: loads go first, but a
store that was passed over `MAX_PASSED_OVER` times goes next. A load that asks for copies which are under way
already, the same bytes into the same GPU block, joins them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial

import numpy as np

from aiokvoffload.clock import Clock
from aiokvoffload.devices.base import CopyPlan, Device, Direction, Event, Stream
from aiokvoffload.errors import DeviceError, StateError
from aiokvoffload.transfers.base import ALREADY_DONE, After, Transfer, TransferState, TransferWorker
from aiokvoffload.transfers.device_host import SingleDirectionOffloadingHandler
from aiokvoffload.transfers.pointers import Places, SlotLayout

MAX_PASSED_OVER = 8
LANDING_SECONDS = 30.0
STREAMS_PER_DIRECTION = 2
IN_FLIGHT_BYTES = 1 << 30
_ASSUMED_BYTES_PER_SECOND = 8e9
_BANDWIDTH_WEIGHT = 0.2


class OffloadingWorker(TransferWorker):
    """Sends transfers to the device of this process and finds out when they have landed.

    Args:
        device: Does the copying.
        layout: How GPU blocks lie in slots.
        handlers: One for each direction.
        clock: Where deadlines are read.
        compute_stream: The engine's; transfers wait for it unless told otherwise, and `fence` holds it back.
        streams_per_direction: Streams of each direction.
        in_flight_bytes: How much may be sent and not landed. One transfer that is larger may beside it, so that what is
            small never waits for it.
        landing_seconds: A transfer not landed this long after it was sent is overdue; one not sent this long after it
            was submitted has failed.
    """

    def __init__(
        self,
        device: Device,
        layout: SlotLayout,
        handlers: Mapping[Direction, SingleDirectionOffloadingHandler],
        clock: Clock,
        *,
        compute_stream: Stream | None = None,
        streams_per_direction: int = STREAMS_PER_DIRECTION,
        in_flight_bytes: int = IN_FLIGHT_BYTES,
        landing_seconds: float = LANDING_SECONDS,
    ) -> None:
        super().__init__()
        self._device = device
        self._compute_stream = compute_stream
        self._layout = layout
        self._handlers = handlers
        self._clock = clock
        self._in_flight_limit = in_flight_bytes
        self._landing_seconds = landing_seconds
        self._streams = {
            direction: [
                device.create_stream(f"{direction.name.lower()}-{number}") for number in range(streams_per_direction)
            ]
            for direction in Direction
        }
        self._sent: dict[Stream, deque[Transfer]] = {
            stream: deque() for streams in self._streams.values() for stream in streams
        }
        self._queued: dict[Direction, deque[Transfer]] = {direction: deque() for direction in Direction}
        self._plans: dict[Transfer, CopyPlan] = {}
        self._joiners: list[Transfer] = []
        self._users: dict[int, tuple[Transfer, ...]] = {}
        self._last_load_into: dict[int, Transfer] = {}
        self._bytes_per_second = dict.fromkeys(Direction, _ASSUMED_BYTES_PER_SECOND)
        self._last_job_id = 0
        self._large_count = self._counted_bytes = 0
        self._finished: list[Transfer] = []

    @property
    def queued_count(self) -> int:
        """How many transfers have not been sent."""
        return sum(map(len, self._queued.values()))

    @property
    def sent_count(self) -> int:
        """How many transfers have been sent and have not landed."""
        return sum(map(len, self._sent.values())) + len(self._joiners)

    def event_after(self, after: After) -> Event | None:
        """Return what a transfer that is asked for now must wait for."""
        if after is None:
            after = self._compute_stream
        if after is None or after is ALREADY_DONE:
            return None
        if isinstance(after, Event):
            with suppress(DeviceError):  # failed work is over; another device's event is refused here
                return None if self._device.is_done(after) else after
            return None
        return self._device.mark(self._device.adopt_stream(after))

    def submit(self, transfer: Transfer) -> None:
        """Take a transfer over, and send it if there is room."""
        self._take_over(transfer)
        self._queued[transfer.direction].append(transfer)
        self.send_queued()

    def submit_now(self, transfer: Transfer) -> None:
        """Take a store over and send it before returning, ahead of what is queued."""
        if self.blocks_with_queued_loads(transfer.gpu_spec.block_ids.tolist()):
            raise StateError("loads into these GPU blocks are queued, so nothing that reads them can be sent now")
        self._take_over(transfer)
        for queue in self._queued.values():
            if queue:
                queue[0].passed_over_count += 1
        self._send(transfer, self._plans[transfer])

    def sendable_bytes(self) -> int | None:
        """Return how much may be sent now ahead of what is queued; None for as much as there is."""
        if any(queue[0].passed_over_count >= MAX_PASSED_OVER for queue in self._queued.values() if queue):
            return 0
        return max(0, self._in_flight_limit - self.in_flight_bytes) if self.in_flight_bytes else None

    def blocks_with_queued_loads(self, gpu_blocks: Iterable[int]) -> set[int]:
        """Return those GPU blocks that a load will fill which is not sent yet."""
        return {
            block
            for block in gpu_blocks
            if any(user.direction is Direction.LOAD and _is_queued(user) for user in self._users.get(block, ()))
        }

    def end_events(self, transfer: Transfer) -> list[Event]:
        """Return the events that are done when all of a sent transfer's bytes have arrived.

        Raises:
            DeviceError: One of them could not be had when the copies were sent, and cannot now.
        """
        sent = [transfer]
        for each in sent:
            sent += each.joined
            if each.stream is not None and not each.is_over:
                self._end_event(each, each.stream)
        return transfer.end_events()

    def _take_over(self, transfer: Transfer) -> None:
        """Number a transfer, plan its copies, and note what it touches and whom it waits for."""
        handler = self._handlers[transfer.direction]
        places_of = self._layout.places(transfer.gpu_spec, transfer.cpu_spec)
        joined = self._copies_under_way(transfer, places_of)
        keep = ~np.isin(transfer.gpu_spec.block_ids, list(joined)) if joined else None
        plan = handler.plan(transfer.gpu_spec, transfer.cpu_spec, keep)
        self._last_job_id += 1
        transfer.job_id = self._last_job_id
        transfer.submitted_at = self._clock.now()
        transfer.byte_count = plan.total_bytes
        transfer.joined = list(dict.fromkeys(joined.values()))
        for other in transfer.joined:
            other.joined_by.append(transfer)
        self.joined_block_count += len(joined)
        for block in joined:
            del places_of[block]
        self._register(transfer, places_of)
        self._plans[transfer] = plan

    def send_at_once(self, transfer: Transfer) -> None:
        """Send a transfer now if it is still queued, and before it what it must wait for, whatever the byte budget."""
        while _is_queued(transfer):
            chosen = _first_to_send(transfer)
            self._queued[chosen.direction].remove(chosen)
            self._send(chosen, self._plans[chosen])

    def fence(self, transfer: Transfer) -> None:
        """Let the compute stream wait for a sent transfer."""
        if transfer.state is not TransferState.SENT:
            raise StateError("the copies are still queued; await handle.sent() before fence()")
        if self._compute_stream is None:
            raise StateError("no compute stream was named when the offloader was opened; await the handle instead")
        for event in self.end_events(transfer):
            self._device.wait_event(self._compute_stream, event)

    def withdraw(self, transfer: Transfer) -> bool:
        """Take back a transfer that is not sent and that no other has joined; return whether that was so."""
        if not _is_queued(transfer) or not all(other.is_withdrawn for other in transfer.joined_by):
            return False
        self._queued[transfer.direction].remove(transfer)
        transfer.is_withdrawn = True
        self._give_up(transfer)
        return True

    def poll(self) -> list[Transfer]:
        """End what has landed, send what is queued, and return the transfers that ended since the last poll."""
        fault: Exception | None = None
        steps: list[Callable[[], None]] = [partial(self._land_heads, stream) for stream in self._sent]
        for step in (*steps, self._expire):
            try:
                step()
            except Exception as exc:  # noqa: BLE001  raised below
                fault = fault or exc
        self.send_queued()
        if fault is not None:
            raise fault
        finished, self._finished = self._finished, []
        return finished

    def send_queued(self) -> None:
        """Send what is queued, as far as the byte budget goes."""
        while (transfer := self._next_to_send()) is not None:
            plan = self._plans[transfer]
            if not self._has_room(transfer):
                return
            self._queued[transfer.direction].remove(transfer)
            self._send(transfer, plan)

    def seconds_to_landing(self) -> float | None:
        """Return an estimate for the transfer that lands next, from the bandwidth measured so far."""
        heads = [sent[0] for sent in self._sent.values() if sent]
        expected = [head.sent_at + head.byte_count / self._bytes_per_second[head.direction] for head in heads]
        return min(expected) - self._clock.now() if expected else None

    def seconds_to_deadline(self) -> float | None:
        """Return when the next transfer becomes overdue; None if none will."""
        deadlines = [transfer.sent_at for transfer in self._under_way() if not transfer.is_overdue]
        deadlines += [queue[0].submitted_at for queue in self._queued.values() if queue]
        return min(deadlines) + self._landing_seconds - self._clock.now() if deadlines else None

    def under_way(self) -> list[Transfer]:
        """Return the transfers that have been sent and have not landed, oldest first."""
        return sorted(self._under_way(), key=lambda transfer: transfer.job_id)

    def wait_for(self, transfer: Transfer, timeout_seconds: float) -> None:
        """Block the thread on the device until the copies are over, or the timeout."""
        deadline = self._clock.now() + timeout_seconds
        for event in transfer.end_events():
            self._device.synchronize(event, max(0.0, deadline - self._clock.now()))

    def wait_for_news(self, timeout_seconds: float) -> None:
        """Block the thread until the oldest copies under way are over, or the timeout."""
        for transfer in self.under_way()[:1]:
            self.wait_for(transfer, timeout_seconds)

    def add_doorbell(self, ring: Callable[[], None]) -> Callable[[], None] | None:
        """Add a doorbell to the device."""
        return self._device.add_doorbell(ring)

    def withdraw_all(self) -> None:
        """Take back everything that is not sent, last first."""
        queued = sorted(
            (transfer for queue in self._queued.values() for transfer in queue),
            key=lambda transfer: transfer.job_id,
            reverse=True,
        )
        for transfer in queued:
            self.withdraw(transfer)

    def expire_all(self) -> None:
        """Make everything overdue that has been sent and has not landed."""
        _make_overdue(self._under_way())

    def _under_way(self) -> list[Transfer]:
        return [transfer for sent in self._sent.values() for transfer in sent] + self._joiners

    def _copies_under_way(self, transfer: Transfer, places_of: Mapping[int, Places]) -> dict[int, Transfer]:
        """Return the GPU blocks for which the same copies are under way and nothing has come after them."""
        joined: dict[int, Transfer] = {}
        if transfer.direction is Direction.STORE or not self._last_load_into:
            return joined
        for block, places in places_of.items():
            last = self._last_load_into.get(block)
            if last is not None and last.places_of[block] == places and not self._is_rewritten_after(last, places):
                joined[block] = last
        return joined

    def _is_rewritten_after(self, load: Transfer, places: Places) -> bool:
        """Return whether a store that came after `load` will change what it reads."""
        return any(
            user.direction is Direction.STORE and user.job_id > load.job_id
            for slot in self._layout.slots_of(places)
            for user in self._users.get(_slot_resource(slot), ())
        )

    def _register(self, transfer: Transfer, places_of: dict[int, Places]) -> None:
        """Note which GPU blocks and slots a transfer touches, and which earlier transfers it must wait for."""
        is_load = transfer.direction is Direction.LOAD
        slots = {_slot_resource(slot) for places in places_of.values() for slot in self._layout.slots_of(places)}
        waits_for: dict[Transfer, None] = {}
        alone = (transfer,)
        for resources, is_written in ((places_of.keys(), is_load), (slots, not is_load)):
            for resource in resources:
                users = self._users.get(resource)
                if users is None:
                    self._users[resource] = alone
                    continue
                for user in users:
                    if is_written or (user.direction is Direction.LOAD) == (resource >= 0):
                        waits_for[user] = None
                self._users[resource] = (*users, transfer)
        transfer.waits_for = list(waits_for)
        transfer.resources = places_of.keys() | slots
        transfer.places_of = places_of
        if is_load:
            self._last_load_into.update(dict.fromkeys(places_of, transfer))

    def _next_to_send(self) -> Transfer | None:
        """Return what goes next: loads before stores, and before either what it must wait for."""
        load, store = self._next_queued(Direction.LOAD), self._next_queued(Direction.STORE)
        if store is not None and (load is None or store.passed_over_count >= MAX_PASSED_OVER):
            return _first_to_send(store)
        return None if load is None else _first_to_send(load)

    def _next_queued(self, direction: Direction) -> Transfer | None:
        """Return the oldest transfer of a queue, but for larger ones than the budget while another such is sent."""
        return next(
            (queued for queued in self._queued[direction] if not (self._large_count and self._is_large(queued))), None
        )

    def _is_large(self, transfer: Transfer) -> bool:
        return transfer.byte_count > self._in_flight_limit

    def _has_room(self, transfer: Transfer) -> bool:
        if self._is_large(transfer):
            return not self._large_count
        return self._counted_bytes + transfer.byte_count <= self._in_flight_limit

    def _count(self, transfer: Transfer, sign: int) -> None:
        """Add what was sent, or take away what has landed."""
        self.in_flight_bytes += sign * transfer.byte_count
        if self._is_large(transfer):
            self._large_count += sign
        else:
            self._counted_bytes += sign * transfer.byte_count

    def _send(self, transfer: Transfer, plan: CopyPlan) -> None:
        stores = self._queued[Direction.STORE]
        if transfer.direction is Direction.LOAD and stores:
            stores[0].passed_over_count += 1
        transfer.state = TransferState.SENT
        transfer.sent_at = self._clock.now()
        self.queue_seconds[transfer.direction] += transfer.sent_at - transfer.submitted_at
        if not len(plan.sources):
            transfer.on_sent()
            self._end_or_wait_for_joined(transfer)
            return
        stream = min(
            self._streams[transfer.direction],
            key=lambda candidate: sum(other.byte_count for other in self._sent[candidate]),
        )
        try:
            for other in transfer.waits_for:
                if not other.is_over and other.stream is not None and other.stream is not stream:
                    self._device.wait_event(stream, self._end_event(other, other.stream))
            if transfer.after is not None:
                self._device.wait_event(stream, transfer.after)
            transfer.start_event = self._device.mark(stream)
        except Exception as exc:  # noqa: BLE001  told by the transfer; nothing has been submitted
            self._fail(transfer, exc)
            return
        try:
            self._handlers[transfer.direction].send(plan, stream)
        except DeviceError as exc:
            self._fail(transfer, exc)
            return
        except Exception as exc:  # noqa: BLE001  told by the transfer; the copies may be running even so
            transfer.error = _describe(exc)
        transfer.stream = stream
        self._sent[stream].append(transfer)
        self._count(transfer, 1)
        with suppress(Exception):  # asked for again, and then reported, when the landing is awaited
            self._end_event(transfer, stream)
        transfer.on_sent()

    def _fail(self, transfer: Transfer, exc: Exception) -> None:
        transfer.error = _describe(exc)
        self._give_up(transfer)

    def _give_up(self, transfer: Transfer) -> None:
        """End a transfer none of whose own copies was sent, once those that it has joined are over."""
        self._unregister(transfer)
        transfer.state = TransferState.DROPPED
        transfer.sent_at = transfer.submitted_at
        self._end_or_wait_for_joined(transfer)

    def _end_event(self, transfer: Transfer, stream: Stream) -> Event:
        """Return the event after a sent transfer's own copies; if it could not be had before, a later one will do."""
        if transfer.end_event is None:
            transfer.end_event = self._device.record(stream)
        return transfer.end_event

    def _land_heads(self, stream: Stream) -> None:
        sent = self._sent[stream]
        while sent and self._has_landed(sent[0], stream):
            self._land(sent.popleft())

    def _end_or_wait_for_joined(self, transfer: Transfer) -> None:
        if _has_all_joined(transfer):
            self._end(transfer)
        else:
            self._joiners.append(transfer)

    def _has_landed(self, transfer: Transfer, stream: Stream) -> bool:
        try:
            return self._device.is_done(self._end_event(transfer, stream))
        except DeviceError as exc:
            transfer.error = transfer.error or _describe(exc)
            return True

    def _land(self, transfer: Transfer) -> None:
        self._count(transfer, -1)
        try:
            if transfer.error is None and transfer.start_event is not None and transfer.end_event is not None:
                transfer.seconds = self._device.elapsed_seconds(transfer.start_event, transfer.end_event)
                self._measure(transfer)
        finally:
            # Whatever becomes of the measurement, the copies are over.
            self._end_or_wait_for_joined(transfer)

    def _measure(self, transfer: Transfer) -> None:
        direction = transfer.direction
        self.landed_count[direction] += 1
        self.byte_count[direction] += transfer.byte_count
        self.busy_seconds[direction] += transfer.seconds
        if transfer.seconds > 0:
            measured = transfer.byte_count / transfer.seconds
            self._bytes_per_second[direction] += _BANDWIDTH_WEIGHT * (measured - self._bytes_per_second[direction])

    def _end(self, transfer: Transfer) -> None:
        """Nothing touches its bytes any more: let go of them and tell."""
        transfer.state = TransferState.OVER
        if transfer.error is None and not transfer.is_withdrawn:
            failed = next((other for other in transfer.joined if not other.success), None)
            if failed is not None:
                transfer.error = f"the copy it joined has failed: {failed.error}"
        for other in transfer.joined:
            other.joined_by.remove(transfer)
        self._plans.pop(transfer, None)
        self._unregister(transfer)
        transfer.waits_for = []
        self._finished.append(transfer)
        try:
            transfer.on_over()
        finally:
            for other in list(transfer.joined_by):
                if other in self._joiners and _has_all_joined(other):
                    self._joiners.remove(other)
                    self._end(other)

    def _unregister(self, transfer: Transfer) -> None:
        """Forget what the transfer's own copies touch; they are over, or will never be sent."""
        for resource in transfer.resources:
            users = self._users[resource]
            if len(users) == 1:
                del self._users[resource]
            else:
                self._users[resource] = tuple(user for user in users if user is not transfer)
            if self._last_load_into.get(resource) is transfer:
                del self._last_load_into[resource]
        transfer.resources = ()

    def _expire(self) -> None:
        _make_overdue(transfer for transfer in self._under_way() if self._is_late(transfer.sent_at))
        for queue in self._queued.values():
            for transfer in [queued for queued in queue if self._is_late(queued.submitted_at)]:
                # What has joined it fails with it.
                if transfer in queue:
                    queue.remove(transfer)
                    transfer.error = f"it could not be sent within {self._landing_seconds:g} s"
                    self._give_up(transfer)

    def _is_late(self, since: float) -> bool:
        # The same sum as in seconds_to_deadline: rounded in another way, a deadline of 0 s might not be one yet.
        return since + self._landing_seconds <= self._clock.now()


def _make_overdue(transfers: Iterable[Transfer]) -> None:
    for transfer in transfers:
        if not transfer.is_overdue:
            transfer.is_overdue = True
            transfer.on_overdue()


def _slot_resource(slot: int) -> int:
    """Return the number of a slot among the resources, where GPU blocks have those from 0 up."""
    return -1 - slot


def _is_queued(transfer: Transfer) -> bool:
    return transfer.state is TransferState.QUEUED


def _first_to_send(chosen: Transfer) -> Transfer:
    """Return `chosen`, or the queued transfer that must be sent before it."""
    while blockers := [other for other in (*chosen.waits_for, *chosen.joined) if _is_queued(other)]:
        chosen = blockers[0]
    return chosen


def _has_all_joined(transfer: Transfer) -> bool:
    return all(other.is_over for other in transfer.joined)


def _describe(exc: Exception) -> str:
    return str(exc) or type(exc).__name__
