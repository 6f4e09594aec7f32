"""Whatever the ranks do, in any order: each transfer ends once, and not before all of them are done with it."""

from __future__ import annotations

import socket
from dataclasses import dataclass, field

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from aiokvoffload.cluster.channel import Gone, Inbox, Received
from aiokvoffload.cluster.messages import Landing, Landings, Leaving
from aiokvoffload.cluster.peer import Peer
from aiokvoffload.cluster.scheduler import ClusterWorker
from aiokvoffload.devices.base import Direction
from aiokvoffload.errors import RankLostError
from aiokvoffload.kv_caches import CacheShape, KVGroup
from aiokvoffload.specs import CPULoadStoreSpec, GPULoadStoreSpec
from aiokvoffload.testing.clock import ManualClock
from aiokvoffload.transfers.base import Transfer, TransferState

WORLD = 3
LANDING_SECONDS = 10.0
CACHE = CacheShape(groups=(KVGroup(4, [0]),), block_count=100, group_page_bytes=((8,),))


@dataclass
class Known:
    """What is to be true of a transfer."""

    transfer: Transfer
    reported: dict[int, bool] = field(default_factory=dict)
    end_count: int = 0
    overdue_count: int = 0
    was_sent: bool = False


class SchedulerMachine(RuleBasedStateMachine):
    """One scheduler; the ranks are lines of this test, which report, lie, repeat themselves, leave and die."""

    def __init__(self) -> None:
        super().__init__()
        self.connections = [socket.socketpair() for _ in range(WORLD)]
        self.peers = [Peer(ours) for ours, _ in self.connections]
        self.inbox = Inbox()
        self.clock = ManualClock()
        self.known: list[Known] = []
        self.gone: set[int] = set()
        self.lost: set[int] = set()
        self.fault_count = 0
        self.batch_numbers: list[int] = []
        self.worker = ClusterWorker(
            CACHE,
            dict(enumerate(self.peers)),
            self.inbox,
            self.clock,
            engine="e",
            landing_seconds=LANDING_SECONDS,
        )

    def teardown(self) -> None:
        for peer, (_, theirs) in zip(self.peers, self.connections, strict=True):
            peer.close()
            theirs.close()

    @rule(direction=st.sampled_from(list(Direction)), is_urgent=st.booleans())
    def submit(self, direction: Direction, is_urgent: bool) -> None:
        block = len(self.known) % 100
        known = Known(Transfer(direction, GPULoadStoreSpec([block], [1], [0]), CPULoadStoreSpec([block])))

        def end() -> None:
            known.end_count += 1

        def expire() -> None:
            known.overdue_count += 1

        known.transfer.on_over = end
        known.transfer.on_overdue = expire
        (self.worker.submit_now if is_urgent else self.worker.submit)(known.transfer)
        self.known.append(known)

    @rule()
    def take_jobs(self) -> None:
        queued = [known for known in self.known if known.transfer.state is TransferState.QUEUED]
        data = self.worker.take_jobs()
        if not data:
            return
        batch = msgspec.msgpack.decode(data)
        self.batch_numbers.append(batch["number"])
        assert [job[0] for job in batch["jobs"]] == [known.transfer.job_id for known in queued]
        for known in queued:
            known.was_sent = True

    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        if self.known:
            known = data.draw(st.sampled_from(self.known))
            was_queued = known.transfer.state is TransferState.QUEUED
            assert self.worker.withdraw(known.transfer) is was_queued

    @rule(rank=st.integers(0, WORLD - 1), data=st.data(), is_good=st.booleans())
    def report(self, rank: int, data: st.DataObject, is_good: bool) -> None:
        sent = [known for known in self.known if known.was_sent]
        if rank in self.gone or not sent:
            return
        known = data.draw(st.sampled_from(sent))
        known.reported.setdefault(rank, is_good)
        landing = Landing(known.transfer.job_id, 8, 0.1, None if is_good else "broken")
        self.inbox.put(Received(self.peers[rank], Landings((landing,), 0)))

    @rule(rank=st.integers(0, WORLD - 1))
    def close_connection(self, rank: int) -> None:
        if rank not in self.gone:
            self.lost.add(rank)
            self.inbox.put(Gone(self.peers[rank], is_dead=False))

    @rule(rank=st.integers(0, WORLD - 1), is_drained=st.booleans())
    def leave(self, rank: int, is_drained: bool) -> None:
        if rank not in self.gone:
            self.lost.add(rank)
            if is_drained:
                self.give_up_on(rank)
            self.inbox.put(Received(self.peers[rank], Leaving("told to", is_drained)))

    @rule(rank=st.integers(0, WORLD - 1))
    def die(self, rank: int) -> None:
        self.lost.add(rank)
        self.give_up_on(rank)
        self.inbox.put(Gone(self.peers[rank], is_dead=True))

    def give_up_on(self, rank: int) -> None:
        self.gone.add(rank)
        for known in self.known:
            if known.was_sent:
                known.reported.setdefault(rank, False)

    @rule(seconds=st.sampled_from([1.0, LANDING_SECONDS]))
    def let_time_pass(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @rule()
    def poll(self) -> None:
        while True:
            try:
                self.worker.poll()
                return
            except RankLostError:
                self.fault_count += 1

    @invariant()
    def each_transfer_ends_once_and_not_too_early(self) -> None:
        self.poll()
        assert self.fault_count == len(self.lost)
        assert self.batch_numbers == list(range(1, len(self.batch_numbers) + 1))
        for known in self.known:
            transfer = known.transfer
            assert known.end_count == transfer.is_over
            assert known.overdue_count == transfer.is_overdue
            if known.was_sent:
                assert transfer.is_over == (len(known.reported) == WORLD)
                if transfer.is_over:
                    assert transfer.success == all(known.reported.values())
                else:
                    assert transfer.is_overdue == (self.clock.now() - transfer.sent_at >= LANDING_SECONDS)
            elif self.lost:
                assert transfer.is_over
        sent = [known.transfer for known in self.known if known.transfer.state is TransferState.SENT]
        assert self.worker.under_way() == sent
        assert self.worker.in_flight_bytes == 8 * WORLD * len(sent)


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
