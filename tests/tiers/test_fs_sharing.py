"""Several tiers in one directory, as several processes would have."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from fs_rig import FILE_BYTES, PATIENCE_SECONDS, Directory, held, load, store, touch

from aiokvoffload.keys import CacheIdentity
from aiokvoffload.testing.strategies import make_keys
from aiokvoffload.testing.tier_contract import BLOCK_BYTES, OTHER_IDENTITY, payload, wait_until_over
from aiokvoffload.tiers.outcomes import BlockOutcome, Reason

BUDGET_BLOCKS = 3


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Directory]:
    directory = Directory(tmp_path / "kv")
    yield directory
    directory.close()


def test_the_first_evicts_and_the_others_see_its_blocks(directory: Directory) -> None:
    first, second = directory.open(), directory.open()
    assert (first.is_evicting, second.is_evicting) == (True, False)
    store(first, 1)
    assert load(second, 1).is_good
    store(second, 2)
    assert load(first, 2).is_good
    assert store(first, 2)[0].outcome is BlockOutcome.PRESENT


def test_all_together_exceed_the_capacity_by_at_most_the_budget(directory: Directory) -> None:
    tiers = [directory.open(budget_bytes=BUDGET_BLOCKS * FILE_BYTES) for _ in range(3)]
    most = 0
    stored_count = 0
    for number in range(60):
        tier = tiers[number % 3]
        stored_count += store(tier, number)[0].outcome is BlockOutcome.STORED
        most = max(most, directory.used_bytes())
        if number % 7 == 6:
            tiers[0].upkeep_step()
            assert directory.used_bytes() <= 8 * FILE_BYTES
            assert tiers[0].statistics().holdings.used_bytes == directory.used_bytes()
    assert 8 * FILE_BYTES < most <= (8 + BUDGET_BLOCKS) * FILE_BYTES
    assert stored_count > 40


def test_who_has_too_much_uncounted_waits_for_the_one_who_evicts(directory: Directory) -> None:
    first, second = (directory.open(budget_bytes=BUDGET_BLOCKS * FILE_BYTES) for _ in range(2))
    assert [result.reason for result in store(second, 1, 2, 3, 4)] == [None, None, None, Reason.BUSY]
    assert second.statistics().refusals_by_reason == {"busy": 1}
    first.upkeep_step()
    assert store(second, 4)[0].is_good
    assert directory.used_bytes() == 4 * FILE_BYTES


def test_capacity_is_that_of_all_identities(directory: Directory) -> None:
    first, other = directory.open(), directory.open(OTHER_IDENTITY)
    store(first, *range(8))
    store(other, 1)
    first.upkeep_step()
    assert held(first, *range(8)) == list(range(1, 8))
    assert held(other, 1) == [1]


def test_what_somebody_else_has_used_stays(directory: Directory) -> None:
    first, second = directory.open(), directory.open()
    store(first, *range(8))
    touch(second, 0, 2)
    store(first, 10, 11, 12)
    assert held(first, *range(8)) == [0, 2, 5, 6, 7]


def test_another_takes_over_and_knows_everything(directory: Directory) -> None:
    first, second, third = (directory.open(budget_bytes=8 * FILE_BYTES) for _ in range(3))
    store(first, 1, 2)
    store(second, 3)
    first.close()
    second.upkeep_step()
    third.upkeep_step()
    assert (second.is_evicting, third.is_evicting) == (True, False)
    assert second.statistics().holdings.used_bytes == directory.used_bytes() == 3 * FILE_BYTES
    store(third, *range(10, 15))
    second.upkeep_step()
    store(second, 20)
    assert held(second, 1, 2, 3) == [2, 3]
    assert directory.leftovers() == []


def test_a_block_written_while_another_takes_over_is_counted(directory: Directory) -> None:
    first, second = directory.open(), directory.open()
    directory.files.hold("rename")
    call = second.start_put(make_keys(1), [payload(1)])
    assert directory.files.wait_held(PATIENCE_SECONDS)
    first.close()
    second.upkeep_step()
    assert second.is_evicting
    assert second.statistics().holdings.used_bytes == 0
    directory.files.let_go()
    assert second.wait(call)[0].is_good
    second.upkeep_step()
    assert second.statistics().holdings.used_bytes == FILE_BYTES
    assert directory.leftovers() == []


def test_two_writers_of_one_block(directory: Directory) -> None:
    first, second = directory.open(), directory.open()
    directory.files.hold("rename")
    calls = [(tier, tier.start_put(make_keys(1), [payload(1)])) for tier in (first, second)]
    for _ in calls:
        assert directory.files.wait_held(PATIENCE_SECONDS)
    directory.files.let_go()
    assert {tier.wait(call)[0].outcome for tier, call in calls} == {BlockOutcome.STORED}
    first.upkeep_step()
    assert load(first, 1).is_good
    assert first.statistics().holdings.used_bytes == directory.used_bytes() == FILE_BYTES


def test_one_tier_writes_a_block_once_at_a_time(directory: Directory) -> None:
    tier = directory.open()
    directory.files.hold("rename")
    first = tier.start_put(make_keys(1), [payload(1)])
    assert directory.files.wait_held(PATIENCE_SECONDS)
    second = tier.start_put(make_keys(1), [payload(1)])
    assert tier.wait(second)[0].reason is Reason.BUSY
    directory.files.let_go()
    assert tier.wait(first)[0].is_good


def test_a_block_evicted_while_it_is_read_is_read_to_its_end(directory: Directory) -> None:
    tier = directory.open()
    store(tier, *range(8))
    directory.files.hold("read")
    buffer = bytearray(BLOCK_BYTES)
    call = tier.start_get_into(make_keys(0), [buffer])
    assert directory.files.wait_held(PATIENCE_SECONDS)
    store(tier, 9)
    assert held(tier, 0) == []
    directory.files.let_go()
    assert tier.wait(call)[0].is_good
    assert buffer == payload(0)


def test_a_reported_block_that_is_gone_by_then_is_not_counted(directory: Directory) -> None:
    first, second = directory.open(), directory.open()
    store(second, 1)
    second.wait(second.start_delete(make_keys(1)))
    first.upkeep_step()
    assert first.statistics().holdings.used_bytes == 0
    assert directory.leftovers() == []


def test_what_the_dead_leave_is_swept(directory: Directory) -> None:
    tier = directory.open()
    dead = directory.path / "writers" / "dead"
    dead.mkdir()
    (dead / "lock").touch()
    (dead / "7").write_bytes(b"half a block")
    name = f"{directory.file(1).parts[-3]}.{directory.file(1).name}.{FILE_BYTES}.dead"
    (directory.path / "reports" / name).touch()
    (directory.path / "reports" / "not-ours").touch()
    tier.close()
    tier = directory.open()
    assert not dead.exists()
    assert [path.name for path in directory.path.glob("reports/*")] == ["not-ours"]
    assert tier.statistics().holdings.used_bytes == 0


def test_the_living_are_not_swept(directory: Directory) -> None:
    first, second, third = (directory.open() for _ in range(3))
    directory.files.hold("rename")
    call = second.start_put(make_keys(1), [payload(1)])
    assert directory.files.wait_held(PATIENCE_SECONDS)
    first.close()
    third.upkeep_step()
    assert third.is_evicting
    assert len(directory.leftovers()) == 2
    directory.files.let_go()
    assert second.wait(call)[0].is_good
    third.upkeep_step()
    assert third.statistics().holdings.used_bytes == FILE_BYTES


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="forking with threads around warns")
def test_a_forked_child_does_not_keep_the_lock(directory: Directory) -> None:
    first, second = directory.open(), directory.open()
    reader, writer = os.pipe()
    child_reader, child_writer = os.pipe()
    child = os.fork()
    if not child:
        os.write(child_writer, b"x")
        os.read(reader, 1)
        os._exit(0)
    try:
        os.read(child_reader, 1)
        first.close()
        second.upkeep_step()
        assert second.is_evicting
    finally:
        os.write(writer, b"x")
        os.waitpid(child, 0)
        for descriptor in (reader, writer, child_reader, child_writer):
            os.close(descriptor)


OTHER_PROCESS = """
import sys
from fs_rig import Directory, store
from pathlib import Path
tier = Directory(Path(sys.argv[1])).open(upkeep_seconds=0.005)
assert tier.wait_until_known(60)
print([result.outcome.value for result in store(tier, 1, 2)], flush=True)
sys.stdin.read()
"""


def test_processes_share_a_directory_and_one_takes_over_when_the_other_is_killed(directory: Directory) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    other = subprocess.Popen(
        [sys.executable, "-c", OTHER_PROCESS, str(directory.path)],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert other.stdout is not None
        assert other.stdout.readline() == "['stored', 'stored']\n"
        tier = directory.open()
        assert not tier.is_evicting
        assert load(tier, 1).is_good
        store(tier, 3)
        # Counted by the other process, whenever it next looks.
        wait_until_over(tier, lambda: not list(directory.path.glob("reports/*")))
        other.send_signal(signal.SIGKILL)
        other.wait(PATIENCE_SECONDS)
        tier.upkeep_step()
        assert tier.is_evicting
        assert tier.statistics().holdings.used_bytes == directory.used_bytes() == 3 * FILE_BYTES
        assert len(list(directory.path.glob("writers/*"))) == 1
    finally:
        other.kill()
        other.communicate()


def test_another_parallel_shape_is_another_identity(directory: Directory) -> None:
    one = directory.open(CacheIdentity(model="m", parallel_shape=(("tensor", 1),)))
    two = directory.open(CacheIdentity(model="m", parallel_shape=(("tensor", 2),)))
    store(one, 1)
    assert held(two, 1) == []
    assert load(two, 1).reason is Reason.ABSENT


def test_nothing_is_written_uncounted_while_another_takes_over(directory: Directory) -> None:
    first, second = directory.open(), directory.open()
    store(first, 1)
    assert store(second, 2)[0].is_good
    first.close()
    directory.files.hold("list")
    second._upkeep.start(1000.0)
    assert directory.files.wait_held(PATIENCE_SECONDS)
    assert store(second, 3)[0].reason is Reason.NOT_READY
    assert load(second, 1).is_good
    directory.files.let_go()


def test_a_good_block_put_in_the_place_of_a_bad_one_is_not_removed(directory: Directory) -> None:
    tier = directory.open()
    store(tier, 1)
    good = directory.file(1).read_bytes()
    with directory.file(1).open("r+b") as file:
        file.seek(5000)
        file.write(b"bad")
    directory.files.hold("read")
    call = tier.start_get_into(make_keys(1), [bytearray(BLOCK_BYTES)])
    assert directory.files.wait_held(PATIENCE_SECONDS)
    (directory.path / "beside").write_bytes(good)
    (directory.path / "beside").rename(directory.file(1))
    directory.files.let_go()
    assert tier.wait(call)[0].reason is Reason.WRONG_CHECKSUM
    assert load(tier, 1).is_good
