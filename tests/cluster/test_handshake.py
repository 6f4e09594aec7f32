"""How an engine begins, and why it does not."""

from __future__ import annotations

import os
import socket
import stat
import struct
import threading
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from cluster_rig import BLOCK_BYTES, ENGINE, PAGE_BYTES, PATIENCE_SECONDS, Cluster, PatientClock, Rank, Step, poll_until
from offloader_rig import Interrupted, on_both_loops

from aiokvoffload.clock import SystemClock
from aiokvoffload.cluster.admission import Admission
from aiokvoffload.cluster.messages import join_of
from aiokvoffload.cluster.peer import connect
from aiokvoffload.cluster.places import EngineLock, meeting_directory, socket_path
from aiokvoffload.devices.base import Proceed, ignore_bytes
from aiokvoffload.errors import ConfigurationError, DeviceError, LayoutError, StateError
from aiokvoffload.kv_caches import CanonicalKVCaches
from aiokvoffload.memory.base import PreparationProgress, PreparationStep
from aiokvoffload.memory.shared import SHARED_MEMORY
from aiokvoffload.offloader import Deadlines, open_offloader
from aiokvoffload.testing.device import ManualDevice
from aiokvoffload.testing.memory_contract import StopPreparing


def nothing_is_left(directory: Path) -> bool:
    return not list(directory.iterdir()) and not list(SHARED_MEMORY.glob(f"*{ENGINE}*"))


@pytest.mark.parametrize(
    ("options", "first", "second"),
    [
        ({"page_bytes": 16}, "group_page_bytes is ((16, 16),)", "((8, 8),)"),
        ({"block_tokens": 8}, "block_tokens=8", "block_tokens=4"),
        ({"block_size_factor": 2}, "block_size_factor is 2", "but 1"),
        ({"dtype": "float16"}, "dtype is float16", "bfloat16"),
        ({"layout": "NHD"}, "layout is NHD", "HND"),
        ({"world_size": 3}, "world_size is 3", "but 2 on the scheduler"),
    ],
)
def test_a_rank_that_differs_is_refused_with_both_values(
    tmp_path: Path, options: dict[str, Any], first: str, second: str
) -> None:
    common = {"dtype": "bfloat16", "layout": "HND"}
    cluster = Cluster(tmp_path, rank_options=lambda rank: {**common, **(options if rank == 1 else {})})
    cluster.ranks[0].join_soon()
    # In this order, so that it is clear who is compared with whom.
    second_joins: Step = (lambda joined: joined == 1, cluster.ranks[1].join_soon)
    with pytest.raises(ConfigurationError) as caught, cluster.context_doing(second_joins):
        raise AssertionError("it opened")
    reason = str(caught.value)
    assert first in reason
    assert second in reason
    for rank in cluster.ranks:
        error = str(rank.wait_joined().error)
        assert "is refused" in error
        assert reason in error
    assert nothing_is_left(tmp_path)


def test_the_engine_has_as_many_gpu_blocks_as_its_smallest_rank(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, 3, rank_options=lambda rank: {"block_count": (16, 12, 20)[rank]})
    first, *others = cluster.ranks
    first.join_soon()
    # One after the other, so that the smallest is neither the first nor the last.
    steps: list[Step] = [(lambda joined, rank=rank: joined == rank.number, rank.join_soon) for rank in others]  # type: ignore[misc]
    with cluster.context_doing(*steps) as offloader:
        for rank in cluster.ranks:
            rank.wait_joined()
        keys = offloader.keys(range(4))
        assert not offloader.store_soon(keys, [11]).is_idle
        with pytest.raises(ValueError, match="GPU block 12 is out of range: there are 12"):
            offloader.store_soon(keys, [12])
        cluster.step(offloader)
        cluster.land()
        poll_until(offloader, lambda: not offloader.statistics().sent_transfers)
    cluster.leave()


def test_tensors_of_the_scheduler_must_agree_with_the_ranks(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, 1)
    cluster.join_soon()
    message = r"group_page_bytes is \(\(8, 8\),\) on rank \d, but .* on the scheduler"
    with (
        pytest.raises(ConfigurationError, match=message),
        open_offloader(
            [torch.zeros(16, 4)] * 2,
            block_tokens=4,
            cpu_bytes=1 << 12,
            engine_id=ENGINE,
            world_size=1,
            directory=tmp_path,
        ),
    ):
        raise AssertionError("it opened")
    for rank in cluster.ranks:
        rank.wait_joined()


def test_a_rank_that_does_not_come_is_named(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, 3, deadlines=Deadlines(join_seconds=0.2), clock=SystemClock())
    cluster.ranks[1].join_soon()
    with pytest.raises(StateError, match=r"within 0.2 s, ranks 0, 2 did not join"), cluster.context():
        raise AssertionError("it opened")
    assert "did not join" in str(cluster.ranks[1].wait_joined().error)
    assert nothing_is_left(tmp_path)


class TryingDevice(ManualDevice):
    """Says three times how far its preparation is, and does something before the second time.

    Args:
        meanwhile: Done then.
    """

    def __init__(self, meanwhile: Callable[[], object] = lambda: None) -> None:
        super().__init__()
        self._meanwhile = meanwhile

    def prepare(self, page_bytes: Collection[int], proceed: Proceed = ignore_bytes) -> None:
        assert set(page_bytes) == {PAGE_BYTES}
        proceed(0, 2)
        self._meanwhile()
        proceed(1, 2)
        proceed(2, 2)


def test_a_device_is_prepared_before_the_memory_of_its_rank(tmp_path: Path) -> None:
    told: list[PreparationProgress] = []
    cluster = Cluster(tmp_path, rank_options=lambda rank: {"on_progress": told.append} if rank else {})
    cluster.ranks[1].use(TryingDevice())
    with cluster.open() as offloader:
        assert offloader.statistics().fault is None
    first = told.index(PreparationProgress(PreparationStep.CALIBRATING, 0, 2))
    assert {progress.step for progress in told[:first]} <= {PreparationStep.WAITING}
    assert told[first : first + 3] == [PreparationProgress(PreparationStep.CALIBRATING, done, 2) for done in range(3)]
    assert PreparationStep.POPULATING in {progress.step for progress in told[first + 3 :]}


def test_an_engine_that_ends_while_a_device_is_prepared_ends_that_too(tmp_path: Path) -> None:
    is_trying, is_gone = threading.Event(), threading.Event()

    def wait_until_it_is_gone() -> None:
        is_trying.set()
        assert is_gone.wait(PATIENCE_SECONDS)

    def stop(_progress: PreparationProgress) -> None:
        if is_trying.is_set():
            raise StopPreparing

    cluster = Cluster(tmp_path, 1)
    (rank,) = cluster.ranks
    rank.use(TryingDevice(wait_until_it_is_gone))
    rank.join_soon()
    with pytest.raises(StopPreparing), cluster.context(on_progress=stop):
        raise AssertionError("it opened")
    is_gone.set()
    assert "the scheduler has ended the engine: the offloader was closed" in str(rank.wait_joined().error)
    assert nothing_is_left(tmp_path)


def test_a_device_that_cannot_be_used_is_told_to_the_scheduler(tmp_path: Path) -> None:
    def fail() -> None:
        raise DeviceError("GPU 1 was found broken")

    cluster = Cluster(tmp_path)
    cluster.ranks[1].use(TryingDevice(fail))
    cluster.join_soon()
    with pytest.raises(StateError, match="rank 1 has left: DeviceError: GPU 1 was found broken"), cluster.context():
        raise AssertionError("it opened")
    assert isinstance(cluster.ranks[1].wait_joined().error, DeviceError)
    cluster.ranks[0].wait_joined()
    assert nothing_is_left(tmp_path)


def test_a_rank_without_a_scheduler_waits_until_its_deadline(tmp_path: Path) -> None:
    rank = Rank(0, directory=tmp_path, timeout_seconds=0.05)
    rank.join_soon()
    assert "no scheduler has opened the engine on this host within 0.05 s" in str(rank.wait_joined().error)


def test_a_rank_joins_a_scheduler_that_comes_later(tmp_path: Path) -> None:
    (tmp_path / f"{ENGINE}.socket").touch()  # a dead one's
    cluster = Cluster(tmp_path, 1)
    with cluster.open() as offloader:
        assert offloader.statistics().fault is None
    assert nothing_is_left(tmp_path)


def test_a_second_engine_of_the_same_name_is_refused(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    with cluster.open() as offloader:
        message = f"an engine 'engine' is open already, by process {os.getpid()}"
        with pytest.raises(ConfigurationError, match=message), cluster.context():
            raise AssertionError("it opened")
        cluster.write([0])
        handle = offloader.store_soon(offloader.keys(range(4)), [0])
        cluster.step(offloader)
        cluster.land()
        assert handle.wait(timeout_seconds=PATIENCE_SECONDS).success


def test_strangers_are_refused_alone(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    shape = CanonicalKVCaches.from_layers(cluster.ranks[0].layers, block_tokens=4).shape()

    def join(rank: int, boot_id: str = "") -> str:
        admission = Admission(ENGINE, rank, SystemClock(), PATIENCE_SECONDS, tmp_path)
        with pytest.raises(ConfigurationError, match="is refused") as caught:
            admission.ask(join_of(shape, rank, boot_id=boot_id))
        admission.scheduler.close()
        return str(caught.value)

    found: list[str] = []

    def intrude() -> None:
        found.append(join(2))
        found.append(join(0, boot_id="of another machine"))

    intruder = threading.Thread(target=intrude)
    with cluster.context_doing(
        (lambda _: True, intruder.start), (lambda _: not intruder.is_alive(), cluster.join_soon)
    ) as offloader:
        assert "rank is 2, but there are 2 ranks" in found[0]
        assert "it runs on another host" in found[1]
        peer = connect(tmp_path / f"{ENGINE}.socket")
        assert peer is not None
        peer.send(join_of(shape, 0))
        poll_until(offloader, lambda: bool(answer := peer.receive()) and "has started already" in str(answer))
        peer.close()
        assert offloader.statistics().fault is None
    cluster.leave()


def test_a_rank_that_joins_twice_is_refused_and_the_first_one_stays(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    twin = Rank(0, directory=tmp_path)

    cluster.ranks[0].join_soon()
    with cluster.context_doing(
        (lambda joined: joined == 1, twin.join_soon), (lambda _: twin.error, cluster.ranks[1].join_soon)
    ):
        pass
    assert "rank 0 has joined already: process" in str(twin.wait_joined().error)
    cluster.leave()


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x00" * 100,
        struct.pack(">4sHI", b"akvo", 1, 0xFFFFFFFF),
        struct.pack(">4sHI", b"akvo", 1, 5) + b"\x81\xa4typ",
    ],
)
def test_garbage_on_the_socket_drops_that_connection_and_harms_nobody(
    tmp_path: Path, garbage: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    cluster = Cluster(tmp_path)
    with cluster.open() as offloader:
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.connect(str(tmp_path / f"{ENGINE}.socket"))
            stranger.settimeout(PATIENCE_SECONDS)
            stranger.sendall(garbage)
            with suppress(ConnectionResetError):
                assert stranger.recv(1) == b""
        assert len([record for record in caplog.records if "dropped the connection of process" in record.message]) == 1
        cluster.write([0])
        handle = offloader.store_soon(offloader.keys(range(4)), [0])
        cluster.step(offloader)
        cluster.land()
        assert handle.wait(timeout_seconds=PATIENCE_SECONDS).success
        assert offloader.statistics().fault is None


def test_sockets_are_for_this_user_alone(tmp_path: Path) -> None:
    directory = tmp_path / "meeting"
    cluster = Cluster(directory)
    with cluster.open():
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        assert stat.S_IMODE((directory / f"{ENGINE}.socket").stat().st_mode) == 0o600
    directory.chmod(0o755)
    with pytest.raises(ConfigurationError, match="is no directory of this user alone"):
        meeting_directory(directory)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match="cannot make the directory"):
        meeting_directory(tmp_path / "file")
    with pytest.raises(ConfigurationError, match="too long for a socket"):
        socket_path(tmp_path / ("x" * 100), ENGINE)


@pytest.mark.parametrize("engine_id", ["", "../x", "a/b", "x" * 200])
def test_an_engine_id_names_files(tmp_path: Path, engine_id: str) -> None:
    with (
        pytest.raises(ConfigurationError, match="it names a file"),
        open_offloader(None, cpu_bytes=1, engine_id=engine_id, world_size=1, directory=tmp_path),
    ):
        raise AssertionError("it opened")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cpu_bytes": BLOCK_BYTES}, f"but one block of 1 GPU blocks needs {2 * BLOCK_BYTES} on all ranks together"),
        ({"policy": "lruu"}, "did you mean 'lru'"),
        ({"cpu_bytes": 1 << 60}, "use less CPU memory"),
        ({"placement": "exclusive"}, "block_size_factor is 2"),
    ],
)
def test_an_option_that_does_not_fit_the_ranks_is_told_to_all(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    factor = 2 if "placement" in options else 1
    cluster = Cluster(tmp_path, rank_options=lambda rank: {"block_size_factor": factor}, **options)
    cluster.join_soon()
    with pytest.raises(ConfigurationError, match=message), cluster.context():
        raise AssertionError("it opened")
    for rank in cluster.ranks:
        assert "is refused" in str(rank.wait_joined().error)
    assert nothing_is_left(tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"world_size": 2}, "give engine_id too"),
        ({"on_lost_rank": "close"}, "give engine_id too"),
        ({"engine_id": "e", "device": "host"}, "is for the ranks to name, in join_offloader"),
        ({"engine_id": "e", "block_size_factor": 2}, "is for the ranks to name"),
        ({"engine_id": "e", "world_size": 0}, "world_size is 0, it must be at least 1"),
        ({"engine_id": "e", "on_lost_rank": "panic"}, "must be one of miss, close"),
        ({}, "only an offloader with an engine_id takes them from its ranks"),
    ],
)
def test_options_that_contradict_each_other(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message), open_offloader(None, cpu_bytes=1 << 20, **options):
        raise AssertionError("it opened")


def test_a_rank_whose_tensors_are_none_does_not_disturb_the_engine(tmp_path: Path) -> None:
    from aiokvoffload.cluster import join_offloader

    with pytest.raises(LayoutError), join_offloader([], engine_id=ENGINE, rank=0, directory=tmp_path):
        raise AssertionError("it joined")


def test_seventy_restarts_in_a_row_leave_nothing(tmp_path: Path) -> None:
    descriptors = len(os.listdir("/proc/self/fd"))
    for _ in range(70):
        with Cluster(tmp_path, 1).open() as offloader:
            assert offloader.statistics().fault is None
    assert nothing_is_left(tmp_path)
    assert len(os.listdir("/proc/self/fd")) <= descriptors + 2


def test_the_lock_goes_to_the_next_one_when_it_is_released(tmp_path: Path) -> None:
    first = EngineLock(tmp_path, ENGINE)
    first.release()
    first.release()
    EngineLock(tmp_path, ENGINE).release()
    assert not list(tmp_path.iterdir())


@on_both_loops
async def test_the_async_offloader_opens_over_ranks(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    cluster.join_soon()
    async with cluster.context() as offloader:
        for rank in cluster.ranks:
            rank.wait_joined()
        cluster.write([0, 1])
        keys = offloader.keys(range(8))
        handle = offloader.store_soon(keys, [0, 1])
        jobs = offloader.take_jobs()
        for rank in cluster.ranks:
            rank.port.submit(jobs)
        await handle.sent()
        cluster.land()
        with anyio.fail_after(PATIENCE_SECONDS):
            assert (await handle).success
        polls = offloader.poll_count
        assert polls < 10
    cluster.leave()
    assert nothing_is_left(tmp_path)


@on_both_loops
async def test_an_opening_cancelled_at_any_await_leaves_nothing(tmp_path: Path) -> None:
    suspension = 0
    while True:
        suspension += 1
        clock = PatientClock()
        cluster = Cluster(tmp_path, rank_options=lambda rank, clock=clock: {"clock": clock})  # type: ignore[misc]
        cluster.join_soon()
        with anyio.CancelScope() as scope:
            context = cluster.context()
            opening = Interrupted(context.__aenter__(), scope.cancel, suspension)
            await opening
        if not scope.cancelled_caught:
            await context.__aexit__(None, None, None)
        clock.advance(2 * PATIENCE_SECONDS)  # ranks that come too late need not wait any longer
        cluster.leave()
        for rank in cluster.ranks:
            assert rank.error is None or isinstance(rank.error, StateError)
        assert nothing_is_left(tmp_path)
        if opening.suspension_count < suspension:
            break
    assert suspension > 2
