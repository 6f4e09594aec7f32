"""Jobs travel in the engine's messages: what is lost, doubled, out of turn or foreign is found where it arrives."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from cluster_rig import PATIENCE_SECONDS, Cluster
from hypothesis import given
from hypothesis import strategies as st

from aiokvoffload.cluster.jobs import decode_batch
from aiokvoffload.cluster.messages import PROTOCOL_VERSION
from aiokvoffload.errors import InvalidRequestError, StateError
from aiokvoffload.testing.asserts import assert_idle


def test_lost_doubled_and_reordered_jobs_are_refused_and_change_nothing(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    with cluster.open() as offloader:
        keys = offloader.keys(range(12))
        batches = []
        handles = []
        for block in range(3):
            handles.append(offloader.store_soon(keys[block : block + 1], [block]))
            batches.append(offloader.take_jobs())
        for rank in cluster.ranks:
            submit = rank.port.submit
            with pytest.raises(StateError, match=r"jobs number 2 have come, but number 1 is due: those in between"):
                submit(batches[1])
            assert rank.device.copies == []
            submit(batches[0])
            with pytest.raises(StateError, match=r"jobs number 1 have come, but number 2 is due: they were submitted"):
                submit(batches[0])
            with pytest.raises(StateError, match=r"rank \d: jobs number 3 have come, but number 2 is due"):
                submit(batches[2])
            submit(batches[1])
            submit(batches[2])
            assert len(rank.device.copies) == 3
        cluster.land()
        assert all(handle.wait(timeout_seconds=PATIENCE_SECONDS).success for handle in handles)
        assert_idle(offloader)


def test_jobs_of_another_engine_are_refused(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    with cluster.open() as first:
        first.store_soon(first.keys(range(4)), [0])
        foreign = first.take_jobs()
        for rank in cluster.ranks:
            rank.port.submit(foreign)
        cluster.land()
    cluster = Cluster(tmp_path)
    with (
        cluster.open(),
        pytest.raises(InvalidRequestError, match=r"these jobs are of engine 'engine-.*, but"),
    ):
        cluster.ranks[0].port.submit(foreign)


@given(st.binary(max_size=200))
def test_other_bytes_are_no_jobs(data: bytes) -> None:
    with pytest.raises(InvalidRequestError, match=r"these are no jobs from take_jobs\(\)"):
        decode_batch(data)


def test_jobs_of_another_version_are_refused() -> None:
    body = {"version": PROTOCOL_VERSION + 1, "engine": "e", "number": 1, "jobs": [], "fences": []}
    with pytest.raises(InvalidRequestError, match="use the same version of aiokvoffload in all processes"):
        decode_batch(msgspec.msgpack.encode(body))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({4: b"1234567"}, "7 bytes are no whole number of block numbers"),
        ({7: (99).to_bytes(8, "little")}, "slot 99 is out of range"),
        ({5: [1, 0]}, "but the GPU blocks come in 2"),
    ],
)
def test_a_job_that_cannot_be_done_fails_and_the_next_ones_go_on(
    tmp_path: Path, changes: dict[int, object], reason: str
) -> None:
    cluster = Cluster(tmp_path)
    with cluster.open() as offloader:
        bad = offloader.store_soon(offloader.keys(range(4)), [0])
        good = offloader.store_soon(offloader.keys(range(4), salt="good"), [1])
        batch = msgspec.msgpack.decode(offloader.take_jobs())
        for field, value in changes.items():
            batch["jobs"][0][field] = value
        if 5 in changes:
            batch["jobs"][0][6] = [0, 0]
        jobs = msgspec.msgpack.encode(batch)
        for rank in cluster.ranks:
            rank.port.submit(jobs)
        cluster.land()
        result = bad.wait(timeout_seconds=PATIENCE_SECONDS)
        assert not result.success
        assert reason in str(result.error)
        assert good.wait(timeout_seconds=PATIENCE_SECONDS).success
        assert_idle(offloader)
