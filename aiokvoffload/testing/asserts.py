"""Assertions for tests of engines that use an offloader."""

from __future__ import annotations

from aiokvoffload.offloader.machine import OffloaderMachine


def assert_idle(offloader: OffloaderMachine) -> None:
    """Check that nothing is under way, nothing is held, nothing went wrong, and every slot is accounted for.

    Nothing is awaited or polled: a copy that has landed counts from the poll on that finds it.

    Args:
        offloader: An `Offloader` or a `SyncOffloader`, open or closed.

    Raises:
        AssertionError: The message names everything that is left.
    """
    statistics = offloader.statistics()
    manager = statistics.manager
    left = {
        "transfers queued": statistics.queued_transfers,
        "transfers sent and not landed": statistics.sent_transfers,
        "bytes in flight": statistics.in_flight_bytes,
        "slots being written": manager.writing,
        "slots being promoted": manager.promoting,
        "slots leased without a key": manager.leased_without_key,
        "slots pinned": manager.pinned,
        "loads waiting": manager.waiting_loads,
        "stores waiting": manager.waiting_stores,
    }
    complaints = [f"{what}: {count}" for what, count in left.items() if count]
    if statistics.fault is not None:
        complaints.append(f"fault: {statistics.fault}")
    counts = (manager.free, manager.ready, manager.writing, manager.promoting, manager.leased_without_key)
    if sum(counts) != manager.total or min(counts) < 0:
        named = " + ".join(map(str, counts))
        complaints.append(
            f"slots free + ready + writing + promoting + leased without a key = {named} = {sum(counts)}, "
            f"but there are {manager.total}"
        )
    if complaints:
        raise AssertionError("the offloader is not idle: " + "; ".join(complaints))
