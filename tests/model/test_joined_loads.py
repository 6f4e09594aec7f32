"""Loads that join copies under way: none is over while these touch its blocks, however it ends itself."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from aiokvoffload import CacheIdentity, CanonicalKVCaches, Deadlines, SyncOffloader, TransferHandle
from aiokvoffload.offloader import OffloaderContext
from aiokvoffload.offloader.parts import build_parts
from aiokvoffload.testing.clock import ManualClock
from aiokvoffload.testing.device import ManualDevice

BLOCK_BYTES = 8
LANDING_SECONDS = 10.0


class Setting:
    """Two stored blocks, of which one is being loaded into GPU block 2; no more than two blocks may be under way."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.device = ManualDevice(clock=self.clock)
        layer = torch.ones((8, BLOCK_BYTES), dtype=torch.int8)
        parts = build_parts(
            CanonicalKVCaches.from_layers([layer], block_tokens=1),
            cpu_bytes=4 * BLOCK_BYTES,
            block_size_factor=1,
            identity=CacheIdentity(),
            policy="lru",
            store_threshold=0,
            device=self.device,
            compute_stream=None,
            deadlines=Deadlines(landing_seconds=LANDING_SECONDS),
            clock=self.clock,
            in_flight_bytes=2 * BLOCK_BYTES,
        )
        self.context = OffloaderContext(lambda: parts)

    def start(self, offloader: SyncOffloader, blocks: list[int]) -> TransferHandle:
        keys = offloader.keys(range(len(blocks)))
        return offloader.prepare_load(keys).start(blocks)


@pytest.fixture
def setting() -> Setting:
    return Setting()


@pytest.fixture
def offloader(setting: Setting) -> Iterator[SyncOffloader]:
    with setting.context as offloader:
        offloader.store(offloader.keys(range(2)), [0, 1])
        yield offloader
        setting.device.land_all()
        offloader.poll()
        manager = offloader.statistics().manager
        assert (manager.ready, manager.free, manager.pinned) == (2, 2, 0)


def test_a_load_that_is_withdrawn_is_idle_once_the_copy_it_joined_has_landed(
    setting: Setting, offloader: SyncOffloader
) -> None:
    first = setting.start(offloader, [2])
    setting.start(offloader, [2, 3])
    third = setting.start(offloader, [2, 4])
    assert third.is_sent is False
    assert third.cancel()
    assert not third.is_idle
    setting.device.land_all()
    offloader.poll()
    assert first.is_idle
    assert third.is_idle
    assert third.result is not None
    assert not third.result.success


def test_a_load_that_is_refused_is_idle_once_the_copy_it_joined_has_landed(
    setting: Setting, offloader: SyncOffloader
) -> None:
    setting.start(offloader, [2])
    setting.device.refuse_next("refused on purpose")
    second = setting.start(offloader, [2, 3])
    assert not second.is_idle
    setting.device.land_all()
    offloader.poll()
    assert second.is_idle
    assert second.result is not None
    assert second.result.error == "refused on purpose"


def test_a_load_that_expires_in_the_queue_is_overdue_while_the_copy_it_joined_is_under_way(
    setting: Setting, offloader: SyncOffloader
) -> None:
    setting.start(offloader, [2])
    setting.start(offloader, [5, 3])
    third = setting.start(offloader, [2, 4])
    setting.clock.advance(LANDING_SECONDS)
    offloader.poll()
    offloader.poll()
    assert not third.is_idle
    assert third.is_settled
    assert 2 in offloader.gpu_blocks_in_flight()
    setting.device.land_all()
    offloader.poll()
    assert third.is_idle


def test_queued_loads_that_have_joined_each_other_can_all_be_taken_back(
    setting: Setting, offloader: SyncOffloader
) -> None:
    setting.start(offloader, [2, 3])
    second = setting.start(offloader, [4, 5])
    third = setting.start(offloader, [4, 5])
    assert not second.cancel(), "the third load has joined it"
    assert third.cancel()
    assert second.cancel()
    offloader.poll()
    assert second.is_idle
    assert third.is_idle
