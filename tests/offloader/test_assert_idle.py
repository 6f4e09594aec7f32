"""`assert_idle` names what is left."""

from __future__ import annotations

from dataclasses import replace

import pytest
from offloader_rig import Rig, keys_of

from aiokvoffload import SyncOffloader
from aiokvoffload.devices.base import Direction
from aiokvoffload.offloader.statistics import OffloaderStatistics
from aiokvoffload.testing.asserts import assert_idle


def complaints(offloader: SyncOffloader) -> set[str]:
    with pytest.raises(AssertionError) as caught:
        assert_idle(offloader)
    return set(str(caught.value).removeprefix("the offloader is not idle: ").split("; "))


def test_what_is_under_way_and_what_waits() -> None:
    rig = Rig(in_flight_bytes=1)
    with rig.open() as offloader:
        assert_idle(offloader)
        keys = keys_of(offloader, 2)
        offloader.store_soon(keys, [0, 1])
        offloader.store_soon(keys_of(offloader, 1, salt="queued"), [2])
        pending = offloader.prepare_load(keys)
        assert complaints(offloader) == {
            "transfers queued: 1",
            "transfers sent and not landed: 1",
            "bytes in flight: 32",
            "slots being written: 3",
            "loads waiting: 1",
        }
        for _ in range(2):
            rig.manual_device.land_all()
            offloader.poll()
        assert complaints(offloader) == {"slots pinned: 2"}
        pending.abort()
        assert_idle(offloader)
    assert_idle(offloader)


def test_what_is_leased_and_who_stands_in_line() -> None:
    rig = Rig(cpu_blocks=1)
    with rig.open() as offloader:
        offloader.store_soon(keys_of(offloader, 1), [0])
        offloader.reset_nowait()
        waiting = offloader.manager.prepare_store_nowait(keys_of(offloader, 1, salt="waiting"), when_full="wait")
        assert complaints(offloader) == {
            "transfers sent and not landed: 1",
            "bytes in flight: 16",
            "slots leased without a key: 1",
            "stores waiting: 1",
        }
        offloader.manager.complete_store_nowait(waiting, success=False)
        rig.manual_device.land_all()
        offloader.poll()
        assert_idle(offloader)


class Miscounting(SyncOffloader):
    """Has lost a slot, and says that something is wrong."""

    def statistics(self) -> OffloaderStatistics:
        statistics = super().statistics()
        return replace(statistics, manager=replace(statistics.manager, free=7), fault="RuntimeError: lost it")


def test_a_fault_and_a_slot_that_is_lost() -> None:
    rig = Rig(cpu_blocks=8)
    offloader = Miscounting(rig.parts())
    assert complaints(offloader) == {
        "fault: RuntimeError: lost it",
        "slots free + ready + writing + promoting + leased without a key = 7 + 0 + 0 + 0 + 0 = 7, but there are 8",
    }
    rig.manual_device.hang_direction(Direction.STORE)
    offloader.close()
