"""The file tier alone in its directory."""

from __future__ import annotations

import errno
import json
import os
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fs_rig import FILE_BYTES, PATIENCE_SECONDS, Directory, held, load, store, touch

from aiokvoffload.clock import Clock
from aiokvoffload.errors import ConfigurationError
from aiokvoffload.keys import CacheIdentity
from aiokvoffload.managers.cpu import CPUOffloadingManager
from aiokvoffload.managers.tier_plan import TierPlan
from aiokvoffload.managers.tiered import TieredOffloadingManager
from aiokvoffload.testing.strategies import make_keys
from aiokvoffload.testing.tier_contract import (
    BLOCK_BYTES,
    CAPACITY_BLOCKS,
    IDENTITY,
    OTHER_IDENTITY,
    Hold,
    TierContract,
    payload,
)
from aiokvoffload.tiers.base import Tier
from aiokvoffload.tiers.breaker import BreakerState
from aiokvoffload.tiers.fs.tier import FileTier
from aiokvoffload.tiers.opening import open_tier
from aiokvoffload.tiers.outcomes import BlockOutcome, Reason


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Directory]:
    directory = Directory(tmp_path / "kv")
    yield directory
    directory.close()


class SlotRows:
    """The bytes of some slots."""

    def __init__(self, slot_count: int) -> None:
        self.rows = [bytearray(BLOCK_BYTES) for _ in range(slot_count)]

    def group_bytes(self, group: int) -> int:
        return BLOCK_BYTES

    def view(self, slot: int, group: int) -> memoryview:
        return memoryview(self.rows[slot])


class TestFileTier(TierContract):
    io = "auto"

    @pytest.fixture(autouse=True)
    def _directory(self, tmp_path: Path) -> Iterator[None]:
        self.directory = Directory(tmp_path / "kv", 2 * CAPACITY_BLOCKS)
        yield
        self.directory.files.let_go()

    def open_tier(self, identity: CacheIdentity, clock: Clock | None = None) -> FileTier:
        return self.directory.open(identity, io=self.io, clock=clock)

    def hold(self, tier: Tier) -> Hold:
        files = self.directory.files
        files.hold("open")
        return Hold(lambda: files.wait_held(0.0), files.let_go)


class TestFileTierThroughThePageCache(TestFileTier):
    io = "buffered"


# Capacity


def test_the_files_never_take_more_than_the_capacity(directory: Directory) -> None:
    tier = directory.open()
    for number in range(20):
        store(tier, number)
        assert directory.used_bytes() <= 8 * FILE_BYTES
        assert tier.statistics().holdings.used_bytes == directory.used_bytes()
    assert held(tier, *range(20)) == list(range(12, 20))
    assert tier.statistics().holdings.evicted_blocks == 12


def test_many_writers_at_once_stay_within_the_capacity(directory: Directory) -> None:
    tier = directory.open()
    calls = [
        tier.start_put(make_keys(*range(at, at + 10)), [payload(number) for number in range(at, at + 10)])
        for at in range(0, 60, 10)
    ]
    for call in calls:
        tier.wait(call)
        assert directory.used_bytes() <= 8 * FILE_BYTES
    holdings = tier.statistics().holdings
    assert (holdings.used_bytes, holdings.block_count) == (directory.used_bytes(), len(directory.block_files()))
    assert directory.leftovers() == []


def test_what_was_used_last_stays_also_after_a_restart(directory: Directory) -> None:
    tier = directory.open()
    store(tier, *range(8))
    touch(tier, 0, 3)
    tier.close()
    tier = directory.open()
    store(tier, 10, 11, 12, 13, 14, 15)
    assert held(tier, *range(16)) == [0, 3, *range(10, 16)]


def test_the_deepest_block_of_a_request_leaves_first_also_after_a_restart(directory: Directory) -> None:
    tier = directory.open()
    for depth in (16, 48, 32):
        store(tier, depth, request_id="r", depth=depth)
    store(tier, *range(100, 105))
    tier.close()
    tier = directory.open()
    store(tier, 200)
    assert held(tier, 16, 32, 48) == [16, 32]
    store(tier, 201)
    assert held(tier, 16, 32, 48) == [16]


def test_a_smaller_capacity_after_a_restart_removes_the_coldest(directory: Directory) -> None:
    tier = directory.open()
    store(tier, *range(8))
    touch(tier, 1)
    tier.close()
    directory.capacity_blocks = 3
    tier = directory.open()
    assert held(tier, *range(8)) == [1, 6, 7]
    assert directory.used_bytes() == 3 * FILE_BYTES


def test_nothing_is_stored_before_the_directory_is_known_but_all_is_found(directory: Directory) -> None:
    tier = directory.open()
    store(tier, 1)
    tier.close()
    tier = directory.open(is_known=False)
    assert load(tier, 1).is_good
    assert store(tier, 2)[0].reason is Reason.NOT_READY
    tier.upkeep_step()
    assert store(tier, 2)[0].is_good


def test_the_index_does_not_hold_up_the_start(directory: Directory) -> None:
    tier = directory.open()
    store(tier, 1)
    tier.close()
    held_up = directory.open(is_known=False)
    directory.files.hold("list")
    held_up._upkeep.start(1000.0)
    assert directory.files.wait_held(PATIENCE_SECONDS)
    assert not held_up.wait_until_known(0.0)
    assert not held_up.is_ready
    assert load(held_up, 1).is_good
    rung = threading.Event()
    held_up.add_doorbell(rung.set)
    directory.files.let_go()
    while not held_up.is_ready:
        assert rung.wait(PATIENCE_SECONDS)
        rung.clear()
        held_up.poll()
    assert held_up.wait_until_known(PATIENCE_SECONDS)
    assert store(held_up, 2)[0].is_good
    assert held_up.statistics().holdings.used_bytes == directory.used_bytes() == 2 * FILE_BYTES


def test_blocks_cascade_into_a_directory_once_it_is_known_and_never_beyond_its_capacity(directory: Directory) -> None:
    earlier = directory.open()
    store(earlier, *range(100, 108))  # as many as fit
    earlier.close()
    tier = directory.open(is_known=False)
    directory.files.hold("list")
    tier._upkeep.start(1000.0)
    assert directory.files.wait_held(PATIENCE_SECONDS)
    numbers, slots = range(4), SlotRows(4)
    manager = TieredOffloadingManager(CPUOffloadingManager(4), [(tier, TierPlan())], slots)
    ticket = manager.prepare_store_nowait(make_keys(*numbers))
    for number, slot in zip(numbers, ticket.slots, strict=True):
        slots.view(slot, 0)[:] = payload(number)
    manager.complete_store_nowait(ticket)
    manager.poll_nowait()
    assert manager.tier_statistics()[0].waiting_write_bytes == 4 * BLOCK_BYTES
    directory.files.let_go()
    assert tier.wait_until_known(PATIENCE_SECONDS)
    while not manager.is_at_rest:
        manager.poll_nowait()
        assert directory.used_bytes() <= 8 * FILE_BYTES
    counts = manager.tier_statistics()[0]
    assert (counts.written, counts.refused_writes, counts.dropped_writes) == (4, 0, 0)
    assert held(tier, *numbers, *range(100, 108)) == [*numbers, *range(104, 108)]
    assert all(load(tier, number).is_good for number in numbers)
    assert tier.statistics().holdings.used_bytes == directory.used_bytes() == 8 * FILE_BYTES


def test_the_file_system_keeps_its_floor(directory: Directory) -> None:
    tier = directory.open(keep_free_bytes=1000)
    directory.files.free = 1000 + FILE_BYTES
    store(tier, 1, 2)
    directory.files.free = 1000 - FILE_BYTES
    assert store(tier, 3)[0].is_good
    assert held(tier, 1, 2, 3) == [3]
    directory.files.free = 0
    assert store(tier, 4)[0].reason is Reason.FULL


def test_deleted_and_vanished_files_give_their_room_back(directory: Directory) -> None:
    tier = directory.open()
    store(tier, *range(8))
    tier.wait(tier.start_delete(make_keys(0)))
    assert tier.statistics().holdings.used_bytes == 7 * FILE_BYTES
    directory.file(1).unlink()
    assert load(tier, 1).reason is Reason.ABSENT
    assert store(tier, 1)[0].outcome is BlockOutcome.STORED
    assert tier.statistics().holdings.used_bytes == directory.used_bytes() == 7 * FILE_BYTES


def test_a_picky_policy_is_asked(directory: Directory) -> None:
    tier = directory.open(policy="picky:SecondUsePolicy")
    assert store(tier, 1)[0].reason is Reason.NOT_ADMITTED
    touch(tier, 1)
    assert store(tier, 1)[0].is_good


@pytest.mark.parametrize("policy", ["lru", "arc", "lru2", "lrfu", "s3fifo", "adaptive"])
def test_every_policy_keeps_the_books(directory: Directory, policy: str) -> None:
    tier = directory.open(policy=policy)
    for number in (*range(12), *range(6), *range(20, 26)):
        touch(tier, number)
        store(tier, number)
    assert tier.statistics().holdings.used_bytes == directory.used_bytes() <= 8 * FILE_BYTES


# What else may stand in a block's place


def corrupt(directory: Directory, number: int, position: int) -> None:
    with directory.file(number).open("r+b") as file:
        file.seek(position)
        byte = file.read(1)
        file.seek(position)
        file.write(bytes([byte[0] ^ 0x10]))


def truncate(directory: Directory) -> None:
    os.truncate(directory.file(1), FILE_BYTES - 1)


def empty(directory: Directory) -> None:
    os.truncate(directory.file(1), 0)


def extend(directory: Directory) -> None:
    os.truncate(directory.file(1), FILE_BYTES + 4096)


def swap(directory: Directory) -> None:
    first, second, aside = directory.file(1), directory.file(2), directory.path / "aside"
    first.rename(aside)
    second.rename(first)
    aside.rename(second)


def put_other_model(directory: Directory) -> None:
    directory.file(1, OTHER_IDENTITY).rename(directory.file(1))


@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        (truncate, Reason.WRONG_LENGTH),
        (empty, Reason.WRONG_LENGTH),
        (extend, Reason.WRONG_LENGTH),
        (swap, Reason.WRONG_KEY),
        (put_other_model, Reason.WRONG_IDENTITY),
        (lambda directory: corrupt(directory, 1, 0), Reason.WRONG_MAGIC),
        (lambda directory: corrupt(directory, 1, 9), Reason.WRONG_VERSION),
        (lambda directory: corrupt(directory, 1, 20), Reason.WRONG_LENGTH),
        (lambda directory: corrupt(directory, 1, 30), Reason.WRONG_CHECKSUM),
        (lambda directory: corrupt(directory, 1, 4000), Reason.WRONG_PADDING),
        (lambda directory: corrupt(directory, 1, 4096), Reason.WRONG_CHECKSUM),
        (lambda directory: corrupt(directory, 1, FILE_BYTES - 1), Reason.WRONG_PADDING),
    ],
)
@pytest.mark.parametrize("io", ["auto", "buffered"])
def test_a_file_that_is_not_what_was_stored_is_a_miss_and_removed(
    directory: Directory, io: str, harm: Callable[[Directory], None], reason: Reason
) -> None:
    tier, other = directory.open(io=io), directory.open(OTHER_IDENTITY, io=io)
    store(tier, 1, 2)
    store(other, 1)
    harm(directory)
    assert load(tier, 1).reason is reason
    assert not directory.file(1).exists()
    assert tier.statistics().removed_by_reason == {reason.value: 1}
    assert tier.statistics().misses_by_reason == {reason.value: 1}
    tier.upkeep_step()
    assert store(tier, 1)[0].outcome is BlockOutcome.STORED
    assert load(tier, 1).is_good


def test_a_file_deleted_between_lookup_and_load_is_a_miss(directory: Directory) -> None:
    tier = directory.open()
    store(tier, 1)
    assert held(tier, 1) == [1]
    directory.file(1).unlink()
    assert load(tier, 1).reason is Reason.ABSENT
    assert tier.breaker.state is BreakerState.CLOSED


def test_a_block_evicted_between_lookup_and_load_is_a_miss(directory: Directory) -> None:
    tier = directory.open()
    store(tier, 1)
    assert held(tier, 1) == [1]
    store(tier, *range(10, 18))
    assert load(tier, 1).reason is Reason.ABSENT
    assert store(tier, 1)[0].outcome is BlockOutcome.STORED
    assert load(tier, 1).is_good


def make_link(path: Path) -> None:
    target = path.with_name("target")
    path.rename(target)
    path.symlink_to(target)


def make_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def make_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("io", ["auto", "buffered"])
@pytest.mark.parametrize("replace", [make_link, make_pipe, make_directory])
def test_what_is_no_file_is_refused_and_left_alone(
    directory: Directory, io: str, replace: Callable[[Path], None]
) -> None:
    tier = directory.open(io=io)
    store(tier, 1)
    replace(directory.file(1))
    assert held(tier, 1) == []
    assert load(tier, 1).reason is Reason.NOT_A_FILE
    assert store(tier, 1)[0].reason is Reason.NOT_A_FILE
    assert os.path.lexists(directory.file(1))


def test_a_file_of_another_length_is_replaced(directory: Directory) -> None:
    tier = directory.open()
    store(tier, 1)
    os.truncate(directory.file(1), 4096)
    assert store(tier, 1)[0].outcome is BlockOutcome.STORED
    assert load(tier, 1).is_good
    assert tier.statistics().holdings.used_bytes == directory.used_bytes()


def test_only_the_owner_may_look(directory: Directory) -> None:
    tier = directory.open()
    store(tier, 1)
    for path in directory.path.rglob("*"):
        mode = stat.S_IMODE(path.lstat().st_mode)
        assert mode == (0o700 if path.is_dir() else 0o600), path


def test_the_identity_is_described_beside_its_blocks(directory: Directory) -> None:
    identity = CacheIdentity(model="some/model", dtype="bfloat16", page_bytes=((64, 64), (32,)))
    directory.open(identity)
    described = json.loads(next(directory.path.glob("blocks/*/identity.json")).read_text())
    assert (described["model"], described["page_bytes"]) == ("some/model", [[64, 64], [32]])
    assert described["fingerprint"] == identity.fingerprint.hex()


# A file system in trouble


@pytest.mark.parametrize("call", ["write", "rename", "create"])
def test_a_full_file_system_evicts_and_recovers(directory: Directory, call: str) -> None:
    tier = directory.open()
    store(tier, 1, 2, 3)
    directory.files.fail(call, errno.ENOSPC, times=1)
    assert store(tier, 4)[0].outcome is BlockOutcome.STORED
    assert held(tier, 1, 2, 3, 4) == [2, 3, 4]
    assert tier.statistics().holdings.used_bytes == directory.used_bytes()
    assert directory.leftovers() == []


def test_a_file_system_that_stays_full_refuses(directory: Directory) -> None:
    tier = directory.open()
    store(tier, 1, 2, 3)
    directory.files.fail("write", errno.ENOSPC)
    assert store(tier, *range(10, 16))[-1].reason is Reason.FULL
    assert tier.breaker.state is BreakerState.CLOSED
    assert tier.statistics().holdings.used_bytes == directory.used_bytes()
    directory.files.heal()
    assert store(tier, 20)[0].is_good


@pytest.mark.parametrize("call", ["create", "write", "rename", "unlink"])
def test_a_read_only_file_system_stops_writes_and_keeps_reads(directory: Directory, call: str) -> None:
    tier = directory.open()
    store(tier, *range(8))
    directory.files.fail("set_times", errno.EROFS)
    directory.files.fail(call, errno.EROFS)
    assert store(tier, 9)[0].reason is Reason.READ_ONLY
    touch(tier, 3)
    assert load(tier, 3).is_good
    asked = directory.files.calls["create"]
    assert store(tier, 10)[0].reason is Reason.READ_ONLY
    assert directory.files.calls["create"] == asked
    assert tier.breaker.state is BreakerState.CLOSED


def test_a_bad_block_on_a_read_only_file_system_is_still_a_miss(directory: Directory) -> None:
    tier = directory.open()
    store(tier, 1)
    corrupt(directory, 1, 5000)
    directory.files.fail("unlink", errno.EROFS)
    assert load(tier, 1).reason is Reason.WRONG_CHECKSUM
    assert load(tier, 1).reason is Reason.WRONG_CHECKSUM
    assert tier.statistics().removed_by_reason == {}


def test_errors_of_the_device_are_misses_and_open_the_breaker(directory: Directory) -> None:
    tier = directory.open()
    store(tier, 1)
    directory.files.fail("read", errno.EIO)
    for _ in range(3):
        result = load(tier, 1)
        assert result.reason is Reason.FAILED
        assert "Input/output error" in result.detail
    assert load(tier, 1).reason is Reason.BREAKER_OPEN
    assert "Input/output error" in tier.statistics().breaker_reason
    assert directory.file(1).exists()


def test_a_failed_write_gives_its_room_back(directory: Directory) -> None:
    tier = directory.open()
    for call in ("write", "rename", "set_times", "create"):
        directory.files.fail(call, errno.EIO, times=1)
        assert store(tier, 1)[0].reason is Reason.FAILED
        assert tier.statistics().holdings.used_bytes == 0
        assert directory.leftovers() == []
        assert store(tier, 2)[0].is_good
        tier.wait(tier.start_delete(make_keys(2)))


def test_a_victim_that_cannot_be_removed_stays_counted(directory: Directory) -> None:
    tier = directory.open()
    store(tier, *range(8))
    directory.files.fail("unlink", errno.EIO, times=1)
    assert store(tier, 9)[0].reason is Reason.FAILED
    assert tier.statistics().holdings.used_bytes == directory.used_bytes() == 8 * FILE_BYTES
    assert store(tier, 9)[0].is_good
    assert held(tier, *range(8)) == list(range(1, 8))


# Opening


def test_a_directory_with_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(ConfigurationError, match=r"holds something else, such as 'thesis.tex'"):
        Directory(tmp_path).open()
    assert (tmp_path / "thesis.tex").exists()


def test_a_directory_of_another_version_is_refused(directory: Directory) -> None:
    directory.open().close()
    (directory.path / "aiokvoffload.json").write_text('{"format": "aiokvoffload blocks", "version": 9}')
    with pytest.raises(ConfigurationError, match="holds blocks in layout 9, this version knows layout 1"):
        directory.open()


@pytest.mark.parametrize("error", [errno.EACCES, errno.EROFS])
def test_a_directory_that_cannot_be_written_is_refused(directory: Directory, error: int) -> None:
    directory.files.fail("create", error)
    with pytest.raises(ConfigurationError, match="give a directory that this process may write"):
        directory.open()


def test_a_file_in_the_place_of_the_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "kv").write_text("a file")
    with pytest.raises(ConfigurationError, match="cannot be used as a directory for blocks"):
        Directory(tmp_path / "kv").open()


def test_direct_io_that_is_demanded_must_work(directory: Directory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aiokvoffload.tiers.fs.tier.can_be_direct", lambda *_: False)
    with pytest.raises(ConfigurationError, match="takes no direct I/O"):
        directory.open(io="direct")
    assert not directory.open(io="auto").is_direct


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("file:///{}", "needs to know how much it may take"),
        ("file:///{}?capacity=8kB", "the capacity is 8000 bytes, but one block takes 12288 with its envelope"),
        ("file:///{}?capacity=1GB&io=fast", "io is 'fast', it must be auto or direct or buffered"),
        ("file:///{}?capacity=1GB&threads=0", "threads: '0' must be a whole number of at least 1"),
        ("file:///{}?capacity=1GB&polcy=lru", "unknown option 'polcy'; did you mean 'policy'"),
        ("file://{}?capacity=1GB", "names no directory of this machine"),
        ("file:///?capacity=1GB", "names no directory of this machine"),
        ("flie:///{}?capacity=1GB", "no tier is known for flie://; did you mean 'file'. Known: .*file://, .*memory://"),
        ("s4://bucket", r"no tier is known for s4://. Known: .*file://, .*memory://"),
        ("just/a/path", "a tier is given as a URL such as"),
        ("file:///x?capacity", "cannot be read"),
    ],
)
def test_a_bad_url_is_refused_with_a_sentence(tmp_path: Path, url: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        open_tier(url.format(str(tmp_path / "kv").lstrip("/")), identity=IDENTITY, block_bytes=BLOCK_BYTES)
    assert not (tmp_path / "kv").exists() or list((tmp_path / "kv").iterdir()) == []


def test_it_is_opened_by_url(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/kv%20cache?capacity=1MiB&keep_free=1&threads=2&io=buffered&timeout=500ms&budget=32KiB"
    tier = open_tier(url, identity=IDENTITY, block_bytes=[BLOCK_BYTES, 100])
    try:
        assert isinstance(tier, FileTier)
        assert (tmp_path / "kv cache" / "aiokvoffload.json").exists()
        assert tier.is_evicting
        assert not tier.is_direct
        assert store(tier, 1)[0].is_good
        assert "capacity" not in tier.statistics().url
    finally:
        tier.close()
    assert list((tmp_path / "kv cache" / "writers").iterdir()) == []


def test_a_block_larger_than_the_capacity_pushes_nothing_out(directory: Directory) -> None:
    tier = directory.open()
    store(tier, *range(8))
    big = [bytearray(9 * FILE_BYTES)]
    assert tier.wait(tier.start_put(make_keys(100), big))[0].reason is Reason.FULL
    assert held(tier, *range(8)) == list(range(8))


def test_a_floor_that_cannot_be_kept_costs_no_block(directory: Directory) -> None:
    tier = directory.open(keep_free_bytes=1 << 40)
    directory.files.free = 0
    assert store(tier, 1)[0].reason is Reason.FULL
    tier.close()
    tier = directory.open()
    directory.files.free = None
    store(tier, 1, 2)
    tier.close()
    tier = directory.open(keep_free_bytes=1 << 40)
    directory.files.free = 0
    assert store(tier, 3)[0].reason is Reason.FULL
    assert held(tier, 1, 2, 3) == [1, 2]
