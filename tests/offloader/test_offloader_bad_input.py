"""Bad input gets one clear error, and changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from offloader_rig import BLOCK_BYTES, PAGE_BYTES, Rig, keys_of, on_both_loops

from aiokvoffload import (
    CanonicalKVCaches,
    ConfigurationError,
    Deadlines,
    InvalidRequestError,
    KVGroup,
    LayoutError,
    LookupResult,
    Offloader,
    OffloadKey,
    StateError,
    SyncOffloader,
    make_offload_key,
    open_offloader,
)
from aiokvoffload.devices.host import HostDevice
from aiokvoffload.testing.asserts import assert_idle
from aiokvoffload.testing.device import ManualDevice

pytestmark = pytest.mark.timeout(30)

WRONG_KEYS: dict[str, tuple[Sequence[Any], str]] = {
    "a group that does not exist": ([make_offload_key(b"h" * 16, 1)], "KV group 1"),
    "no bytes": (["key of text"], "a key is bytes"),
}
NOT_OF_THIS_DEVICE = r"of this ManualDevice|as a stream"


def layers(count: int = 1) -> list[torch.Tensor]:
    return [torch.zeros((4, PAGE_BYTES), dtype=torch.uint8) for _ in range(count)]


@pytest.fixture
def rig() -> Rig:
    return Rig()


@pytest.mark.parametrize("name", WRONG_KEYS)
def test_wrong_keys(rig: Rig, name: str) -> None:
    keys, message = WRONG_KEYS[name]
    with rig.open() as offloader:
        before = offloader.statistics()
        calls: list[Callable[[], object]] = [
            lambda: offloader.store_soon(keys, [0]),
            lambda: offloader.store(keys, [0]),
            lambda: offloader.load(keys, [0]),
            lambda: offloader.prepare_load(keys),
            lambda: offloader.lookup_prefix(keys),
        ]
        for call in calls:
            with pytest.raises(InvalidRequestError, match=message):
                call()
        assert offloader.statistics() == before


def test_keys_out_of_order() -> None:
    groups = [KVGroup(block_tokens=4, layers=[0]), KVGroup(block_tokens=4, layers=[1])]
    caches = CanonicalKVCaches.from_layers(layers(2), groups=groups)
    with open_offloader(caches, cpu_bytes=64 * PAGE_BYTES, device=ManualDevice()) as offloader:
        first, second = offloader.keys(range(4))
        with pytest.raises(InvalidRequestError, match="KV group 0 after one of group 1: give keys group after group"):
            offloader.store_soon([second, first], [0, 1])
        assert_idle(offloader)


@pytest.mark.parametrize(
    ("gpu_blocks", "message"),
    [
        ([0], "1 GPU blocks were given, but 2 are needed"),
        ([0, 1, 2], "3 GPU blocks were given, but 2 are needed"),
        ([0, 16], "GPU block 16 is out of range: there are 16, from 0"),
        ([0, -1], "GPU block -1 is out of range"),
        ([0, 1.5], "whole numbers"),
        ([0, "1"], "whole numbers"),
        (None, "whole numbers"),
    ],
)
def test_wrong_gpu_blocks(rig: Rig, gpu_blocks: Any, message: str) -> None:
    with rig.open() as offloader:
        keys = keys_of(offloader, 2)
        before = offloader.statistics()
        with pytest.raises(InvalidRequestError, match=message):
            offloader.store_soon(keys, gpu_blocks)
        with pytest.raises(InvalidRequestError, match=message):
            offloader.load(keys, gpu_blocks)
        assert offloader.statistics() == before
        offloader.store(keys, [0, 1])
        ticket = offloader.prepare_load(keys)
        with pytest.raises(InvalidRequestError, match=message):
            ticket.start(gpu_blocks)
        # The ticket stays good.
        assert ticket.start([2, 3]).wait(timeout_seconds=1).success
        assert_idle(offloader)


def test_numbers_of_other_libraries_are_numbers(rig: Rig) -> None:
    with rig.open() as offloader:
        keys = keys_of(offloader, 2)
        rig.write([0, 1])
        offloader.store(keys, torch.tensor([0, 1]))  # type: ignore[arg-type]
        assert offloader.load(keys, torch.tensor([4, 5]).numpy()) == 8  # type: ignore[arg-type]
        assert rig.holds([4, 5])


def test_a_gpu_block_or_a_key_given_twice_in_a_load(rig: Rig) -> None:
    with rig.open() as offloader:
        keys = keys_of(offloader, 2)
        offloader.store(keys, [0, 1])
        with pytest.raises(InvalidRequestError, match="a GPU block is given twice"):
            offloader.load(keys, [5, 5])
        assert_idle(offloader)
        with pytest.raises(InvalidRequestError, match="a key is given twice"):
            offloader.load([keys[0], keys[0]], [5, 6])
        with pytest.raises(InvalidRequestError, match="a key is given twice"):
            offloader.prepare_load([keys[0], keys[0]])
        assert_idle(offloader)


def test_resident_tokens_that_are_no_whole_blocks(rig: Rig) -> None:
    with rig.open() as offloader:
        keys = keys_of(offloader, 2)
        offloader.store(keys, [0, 1])
        for resident_tokens in (-4, 3, 5):
            with pytest.raises(InvalidRequestError, match=f"resident_tokens is {resident_tokens}"):
                offloader.prepare_load(keys, resident_tokens=resident_tokens)
        assert_idle(offloader)
        # More than the request has is no mistake: there is nothing to load.
        ticket = offloader.prepare_load(keys, resident_tokens=40)
        assert (ticket.result, ticket.token_count, ticket.group_sizes) == (LookupResult.MISS, 40, (0,))


def test_a_negative_first_block(rig: Rig) -> None:
    with rig.open() as offloader:
        with pytest.raises(InvalidRequestError, match="first_block is -1"):
            offloader.store_soon(keys_of(offloader, 1), [0], first_block=-1)
        assert_idle(offloader)
        assert offloader.statistics().manager.free == rig.cpu_blocks


@pytest.mark.parametrize("what", ["stream", "event", "nonsense"])
def test_after_something_that_is_not_this_devices(rig: Rig, what: str) -> None:
    other = ManualDevice()
    stream = other.create_stream("foreign")
    after: object = {"stream": stream, "event": other.record(stream), "nonsense": 7}[what]
    with rig.open() as offloader:
        keys = keys_of(offloader, 1)
        with pytest.raises(InvalidRequestError, match=NOT_OF_THIS_DEVICE):
            offloader.store_soon(keys, [0], after=after)
        assert offloader.statistics().manager.free == rig.cpu_blocks
        offloader.store(keys, [0])
        before = offloader.statistics()
        with pytest.raises(InvalidRequestError, match=NOT_OF_THIS_DEVICE):
            offloader.load(keys, [1], after=after)
        assert offloader.statistics() == before
        ticket = offloader.prepare_load(keys)
        with pytest.raises(InvalidRequestError, match=NOT_OF_THIS_DEVICE):
            ticket.start([1], after=after)
        assert ticket.start([1]).wait(timeout_seconds=1).success
        assert_idle(offloader)


@on_both_loops
async def test_the_async_calls_refuse_the_same() -> None:
    rig = Rig()
    async with rig.open() as offloader:
        keys = keys_of(offloader, 2)
        before = offloader.statistics()
        with pytest.raises(InvalidRequestError, match="but 2 are needed"):
            await offloader.store(keys, [0])
        with pytest.raises(InvalidRequestError, match="out of range"):
            await offloader.load(keys, [0, 99])
        with pytest.raises(InvalidRequestError, match="of this ManualDevice"):
            await offloader.load(keys, [0, 1], after=ManualDevice().create_stream("foreign"))
        with pytest.raises(InvalidRequestError, match="a key is bytes"):
            await offloader.lookup_prefix(["text"])  # type: ignore[list-item]
        assert offloader.statistics() == before


# Opening


def _open(**options: Any) -> SyncOffloader:
    caches = options.pop("caches", layers())
    return open_offloader(caches, **{"cpu_bytes": 16 * PAGE_BYTES, **options}).__enter__()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"cpu_bytes": PAGE_BYTES - 1}, ConfigurationError, f"needs {PAGE_BYTES}"),
        ({"cpu_bytes": 0}, ConfigurationError, f"needs {PAGE_BYTES}"),
        ({"cpu_bytes": 3 * PAGE_BYTES, "block_size_factor": 4}, ConfigurationError, f"needs {4 * PAGE_BYTES}"),
        ({"policy": "lur"}, ConfigurationError, "did you mean 'lru'.*Known: .*arc.*lru"),
        ({"policy": "fifo"}, ConfigurationError, "Known: .*arc.*lru"),
        ({"block_size_factor": 0}, ConfigurationError, "block_size_factor is 0"),
        ({"block_tokens": 0}, ConfigurationError, "block_tokens is 0"),
        ({"device": "tpu"}, ConfigurationError, "unknown device 'tpu'.*Known: .*host"),
        ({"device": 5}, ConfigurationError, "is no device"),
        ({"caches": []}, LayoutError, "no layers"),
        ({"caches": [torch.zeros((4, 4))[:, ::2]]}, LayoutError, "not a contiguous page"),
        ({"compute_stream": 5, "device": "host"}, InvalidRequestError, "stream"),
    ],
)
def test_what_cannot_be_opened(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        _open(**options)


class PinCountingDevice(ManualDevice):
    pin_count = 0

    def pin(self, address: int, byte_count: int) -> None:
        super().pin(address, byte_count)
        self.pin_count += 1

    def unpin(self, address: int) -> None:
        super().unpin(address)
        self.pin_count -= 1


def test_closing_unpins_the_memory() -> None:
    device = PinCountingDevice()
    with open_offloader(layers(), cpu_bytes=16 * PAGE_BYTES, device=device):
        assert device.pin_count == 1
    assert device.pin_count == 0


def test_a_failed_opening_leaves_nothing_on_the_device() -> None:
    device = PinCountingDevice()
    for options in ({"compute_stream": ManualDevice().create_stream("foreign")}, {"policy": "fifo"}, {"cpu_bytes": 1}):
        with pytest.raises(ValueError):
            _open(device=device, **options)
    assert device.pin_count == 0


@pytest.mark.parametrize("bound", ["landing_seconds", "pending_seconds", "drain_seconds"])
@pytest.mark.parametrize("seconds", [0, -1, float("nan")])
def test_deadlines_that_are_none(bound: str, seconds: float) -> None:
    with pytest.raises(ConfigurationError, match=f"{bound} is"):
        Deadlines(**{bound: seconds})


def test_a_device_is_closed_by_whom_it_was_made() -> None:
    device = HostDevice()
    with open_offloader(layers(), cpu_bytes=16 * PAGE_BYTES, device=device):
        pass
    device.create_stream("still open")
    device.close()


@on_both_loops
async def test_a_context_is_entered_once() -> None:
    context = Rig().open()
    async with context:
        pass
    with pytest.raises(StateError, match=r"call open_offloader\(\) again"):
        await context.__aenter__()
    with pytest.raises(StateError, match=r"call open_offloader\(\) again"):
        context.__enter__()


@on_both_loops
async def test_leaving_a_context_that_could_not_be_entered_is_harmless() -> None:
    context = open_offloader(layers(), cpu_bytes=1)
    with pytest.raises(ConfigurationError):
        await context.__aenter__()
    await context.__aexit__(None, None, None)


def test_little_memory_is_enough_for_one_block() -> None:
    rig = Rig(cpu_blocks=1)
    with rig.open() as offloader:
        assert offloader.block_count == 1
        assert isinstance(offloader, SyncOffloader)
        assert not isinstance(offloader, Offloader)
        assert offloader.memory.slot_bytes == BLOCK_BYTES
        keys: list[OffloadKey] = keys_of(offloader, 2)
        rig.write([0, 1])
        offloader.store(keys, [0, 1])
        assert offloader.load(keys, [2, 3]) == 4
        assert rig.holds([2])
