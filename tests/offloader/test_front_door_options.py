"""Options of `open_offloader` that reach the worker, and the synchronous twins of the async verbs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from aiokvoffload import ConfigurationError, open_offloader
from aiokvoffload.testing.asserts import assert_idle
from aiokvoffload.testing.device import ManualDevice
from aiokvoffload.transfers.worker import OffloadingWorker


def test_what_exceeds_the_byte_budget_waits_in_the_queue() -> None:
    device = ManualDevice()
    layers = [torch.zeros(8, 64)]
    with open_offloader(layers, cpu_bytes=1 << 16, device=device, in_flight_bytes=1) as offloader:
        keys = offloader.keys(range(32))
        first, second = (offloader.store_soon([key], [block]) for block, key in enumerate(keys))
        assert (first.is_sent, second.is_sent) == (True, False)
        assert second.cancel()
        device.land_all()
        assert offloader.poll() == [second, first]
        assert_idle(offloader)


@pytest.mark.parametrize("count", [1, 3])
def test_copies_are_spread_over_the_streams(count: int) -> None:
    device = ManualDevice()
    layers = [torch.zeros(8, 64)]
    with open_offloader(layers, cpu_bytes=1 << 16, device=device, streams_per_direction=count) as offloader:
        for block, key in enumerate(offloader.keys(range(48))):
            offloader.store_soon([key], [block])
        device.hang_direction(device.copies[0].direction)
        worker = offloader._worker
        assert isinstance(worker, OffloadingWorker)
        assert len({id(stream) for stream in worker._sent if worker._sent[stream]}) == count
        device.release()


@pytest.mark.parametrize("option", [{"in_flight_bytes": 0}, {"streams_per_direction": 0}])
def test_a_worker_that_could_move_nothing_is_refused(option: dict[str, Any]) -> None:
    opening = open_offloader([torch.zeros(8, 64)], cpu_bytes=1 << 16, **option)
    with pytest.raises(ConfigurationError, match="both must be at least 1"), opening:
        pass


def test_a_synchronous_host_resets_and_bumps() -> None:
    with open_offloader([torch.zeros(8, 64)], cpu_bytes=1 << 16) as offloader:
        keys = offloader.keys(range(16))
        offloader.store(keys, [0])
        assert offloader.lookup_prefix(keys) == 16
        offloader.reset()
        assert offloader.lookup_prefix(keys) == 0
        offloader.bump_epoch()
        assert offloader.keys(range(16)) != keys
