"""Stores that are sent before the call returns, or not at all."""

from __future__ import annotations

import pytest
from transfers_rig import BLOCK_BYTES, WorkerRig

from aiokvoffload.devices.base import Direction
from aiokvoffload.errors import InvalidRequestError, StateError
from aiokvoffload.specs import CPULoadStoreSpec, GPULoadStoreSpec
from aiokvoffload.transfers.base import Transfer, TransferState
from aiokvoffload.transfers.worker import MAX_PASSED_OVER


def store_now(rig: WorkerRig, *pairs: tuple[int, int]) -> Transfer:
    transfer = Transfer(
        Direction.STORE,
        GPULoadStoreSpec([block for block, _ in pairs], [len(pairs)], [0]),
        CPULoadStoreSpec([slot for _, slot in pairs]),
        on_over=lambda: rig.over.append(transfer),
    )
    rig.worker.submit_now(transfer)
    return transfer


def test_it_is_sent_ahead_of_what_is_queued() -> None:
    rig = WorkerRig(in_flight_blocks=2)
    rig.store((0, 0), (1, 1))
    queued = rig.load((2, 2))
    now = store_now(rig, (3, 3))
    assert (queued.state, now.state) == (TransferState.QUEUED, TransferState.SENT)
    rig.land()
    rig.land()
    assert [transfer.success for transfer in (queued, now)] == [True, True]
    assert rig.slots()[3] == 4


def test_the_budget_says_how_much_may_be_sent() -> None:
    rig = WorkerRig(in_flight_blocks=3)
    assert rig.worker.sendable_bytes() is None
    rig.store((0, 0))
    assert rig.worker.sendable_bytes() == 2 * BLOCK_BYTES
    store_now(rig, (1, 1), (2, 2), (3, 3))
    assert rig.worker.sendable_bytes() == 0
    rig.land()
    assert rig.worker.sendable_bytes() is None


def test_what_is_queued_is_passed_over_a_few_times_only() -> None:
    rig = WorkerRig(in_flight_blocks=20)
    rig.store(*((block, block) for block in range(8)))
    rig.worker._in_flight_limit = 8 * BLOCK_BYTES + 1
    queued = rig.load((9, 9))
    rig.worker._in_flight_limit = 100 * BLOCK_BYTES
    for number in range(MAX_PASSED_OVER):
        assert rig.worker.sendable_bytes()
        store_now(rig, (number, number))
    assert rig.worker.sendable_bytes() == 0
    rig.worker.send_queued()
    assert queued.state is TransferState.SENT
    assert rig.worker.sendable_bytes()
    rig.land()
    rig.land()


def test_a_block_that_a_queued_load_will_fill_cannot_be_sent() -> None:
    rig = WorkerRig(in_flight_blocks=1)
    rig.load((0, 0))
    queued = rig.load((1, 1))
    assert rig.worker.blocks_with_queued_loads([0, 1, 2]) == {1}
    with pytest.raises(StateError, match="loads into these GPU blocks are queued"):
        store_now(rig, (2, 2), (1, 3))
    assert rig.worker.queued_count == 1
    rig.land()
    assert rig.worker.blocks_with_queued_loads([0, 1, 2]) == set()
    store_now(rig, (1, 3))
    assert queued.state is TransferState.SENT
    rig.land()
    assert rig.slots()[3] == 102


def test_two_ends_that_do_not_fit_take_nothing_over() -> None:
    rig = WorkerRig()
    with pytest.raises(InvalidRequestError, match="slot"):
        store_now(rig, (0, 10_000))
    assert rig.worker.sent_count == rig.worker.queued_count == 0


def test_a_refused_batch_is_over_before_the_call_returns() -> None:
    rig = WorkerRig()
    rig.device.refuse_next("on purpose")
    transfer = store_now(rig, (0, 0))
    assert (transfer.is_over, transfer.success, transfer.error) == (True, False, "on purpose")
    assert rig.over == [transfer]
