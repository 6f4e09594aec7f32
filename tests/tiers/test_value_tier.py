"""What a tier does with the answers of a store of values."""

from __future__ import annotations

import errno
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from value_rig import FaultyStore, GatedStore, Rig, directory_store

from aiokvoffload.testing.clock import ManualClock
from aiokvoffload.testing.strategies import make_keys
from aiokvoffload.testing.tier_contract import IDENTITY, wait_until_over
from aiokvoffload.tiers.breaker import BreakerState
from aiokvoffload.tiers.object import ObjectTier
from aiokvoffload.tiers.outcomes import BlockOutcome, Reason
from aiokvoffload.tiers.value_store import Filler


@pytest.fixture
def faulty(tmp_path: Path) -> Iterator[tuple[Rig, FaultyStore]]:
    store = FaultyStore(directory_store(tmp_path))
    rig = Rig(tmp_path, store)
    yield rig, store
    rig.tier.close()


def test_the_loser_of_two_writers_finds_the_block_present(tmp_path: Path) -> None:
    class Late(GatedStore):
        """Another writer comes between the look and the write."""

        def create(self, name: str, parts: Sequence[bytes | memoryview]) -> bool:
            super().create(name, parts)
            return super().create(name, parts)

    rig = Rig(tmp_path, Late(directory_store(tmp_path)))
    assert rig.put(1)[0].outcome is BlockOutcome.PRESENT
    assert rig.get(1).is_good
    rig.tier.close()


@pytest.mark.parametrize(("number", "reason"), [(errno.ENOSPC, Reason.FULL), (errno.EROFS, Reason.READ_ONLY)])
def test_a_store_without_room_refuses_and_stays_in_use(
    faulty: tuple[Rig, FaultyStore], number: int, reason: Reason
) -> None:
    rig, store = faulty
    rig.put(1)
    store.faulty = {"create"}
    store.error = OSError(number, "no")
    assert [rig.put(2)[0].reason for _ in range(5)] == [reason] * 5
    assert rig.get(1).is_good
    assert rig.tier.statistics().breaker is BreakerState.CLOSED


def test_errors_of_the_store_open_the_breaker(faulty: tuple[Rig, FaultyStore]) -> None:
    rig, store = faulty
    rig.put(1)
    store.error = OSError("it is on fire")
    assert [rig.get(1).reason, rig.contains(1).reason, rig.put(2)[0].reason] == [Reason.FAILED] * 3
    assert rig.get(1).reason is Reason.BREAKER_OPEN
    assert "it is on fire" in rig.tier.statistics().breaker_reason


def test_an_error_that_nobody_expects_is_logged_and_a_miss(
    faulty: tuple[Rig, FaultyStore], caplog: pytest.LogCaptureFixture
) -> None:
    rig, store = faulty
    store.error = ZeroDivisionError("a bug")
    assert rig.contains(1).detail == "ZeroDivisionError: a bug"
    assert "contains failed" in caplog.text


def test_a_bad_value_that_cannot_be_removed_is_a_miss_all_the_same(
    faulty: tuple[Rig, FaultyStore], caplog: pytest.LogCaptureFixture
) -> None:
    rig, store = faulty
    rig.put(1)
    rig.file(1).write_bytes(b"x" * len(rig.file(1).read_bytes()))
    store.faulty = {"remove"}
    store.error = OSError(errno.EROFS, "no")
    assert rig.get(1).reason is Reason.WRONG_MAGIC
    assert rig.tier.statistics().removed_by_reason == {}
    assert "cannot be removed" in caplog.text


def test_a_store_that_does_not_answer_at_the_start_is_tried_again(tmp_path: Path) -> None:
    clock = ManualClock()
    store = FaultyStore(directory_store(tmp_path))
    store.error = OSError("nobody there")
    tier = ObjectTier(store, IDENTITY, url="object+file:///test", clock=clock)
    assert tier.start_contains(make_keys(1)).results[0].reason is Reason.BREAKER_OPEN
    assert tier.statistics().breaker_reason == "it did not answer when it was opened: nobody there"
    store.error = None
    clock.advance(5.0)
    call = tier.start_contains(make_keys(1))
    wait_until_over(tier, lambda: call.is_over)
    assert call.results[0].reason is Reason.ABSENT
    assert tier.statistics().breaker is BreakerState.CLOSED
    tier.close(drain_seconds=0.0)


def test_lookups_go_to_the_store_together(tmp_path: Path) -> None:
    class Counting(GatedStore):
        """Says how many names it was asked for together."""

        def sizes(self, names: Sequence[str], *, is_use: bool) -> list[int | Reason]:
            asked.append(len(names))
            return super().sizes(names, is_use=is_use)

    asked: list[int] = []
    store = Counting(directory_store(tmp_path))
    store.names_per_call = 256
    rig = Rig(tmp_path, store)
    assert len(rig.tier.wait(rig.tier.start_contains(make_keys(*range(300))))) == 300
    assert sorted(asked) == [44, 256]
    rig.tier.close()


@pytest.mark.parametrize("pieces", [[5], [2, 3], [1, 1, 1, 1, 1], [0, 5]])
def test_pieces_fill_buffers_whatever_their_length(pieces: list[int]) -> None:
    parts = [memoryview(bytearray(size)) for size in (2, 0, 3)]
    filler = Filler(parts)
    content = iter(b"abcde")
    assert all(filler.add(bytes(next(content) for _ in range(size))) for size in pieces)
    assert filler.is_full
    assert b"".join(parts) == b"abcde"
    assert filler.add(b"")
    assert not filler.add(b"f")
