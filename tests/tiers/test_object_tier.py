"""The object tier over a directory; over a server of objects it is tested in tests/services."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest
from value_rig import GatedStore, Rig, directory_store, flip, obstore

from aiokvoffload.clock import Clock
from aiokvoffload.errors import ConfigurationError
from aiokvoffload.keys import CacheIdentity
from aiokvoffload.testing.strategies import make_keys
from aiokvoffload.testing.tier_contract import IDENTITY, OTHER_IDENTITY, Hold, TierContract, payload
from aiokvoffload.tiers.administration import Verification
from aiokvoffload.tiers.base import Tier
from aiokvoffload.tiers.breaker import BreakerState
from aiokvoffload.tiers.names import identity_name
from aiokvoffload.tiers.object import ObjectStore, ObjectTier
from aiokvoffload.tiers.opening import administer_tier, open_tier
from aiokvoffload.tiers.outcomes import BlockOutcome, Reason

Corrupt = Callable[[bytearray], bytes | bytearray]


class TestObjectTier(TierContract):
    @pytest.fixture(autouse=True)
    def directory(self, tmp_path: Path) -> Iterator[None]:
        self.path = tmp_path
        self.stores: list[GatedStore] = []
        yield
        for store in self.stores:
            store.gate.set()

    def open_tier(self, identity: CacheIdentity, clock: Clock | None = None) -> ObjectTier:
        self.stores.append(GatedStore(directory_store(self.path)))
        return ObjectTier(self.stores[-1], identity, url="object+file:///test", clock=clock)

    def hold(self, tier: Tier) -> Hold:
        store = self.stores[-1]
        store.gate.clear()
        return Hold(store.reached.is_set, store.gate.set)


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path)
    yield rig
    rig.tier.close()


@pytest.mark.parametrize(
    ("corrupt", "reason"),
    [
        (lambda stored: stored[:-1], Reason.WRONG_LENGTH),
        (lambda stored: stored + b"\0", Reason.WRONG_LENGTH),
        (lambda stored: b"", Reason.WRONG_LENGTH),
        (lambda stored: flip(stored, 0), Reason.WRONG_MAGIC),
        (lambda stored: flip(stored, 9), Reason.WRONG_VERSION),
        (lambda stored: flip(stored, 45), Reason.WRONG_IDENTITY),
        (lambda stored: flip(stored, 75), Reason.WRONG_KEY),
        (lambda stored: flip(stored, -1), Reason.WRONG_CHECKSUM),
        (lambda stored: b"x" * len(stored), Reason.WRONG_MAGIC),
    ],
)
def test_a_value_that_was_altered_is_a_miss_and_removed(rig: Rig, corrupt: Corrupt, reason: Reason) -> None:
    rig.put(1)
    rig.file(1).write_bytes(corrupt(bytearray(rig.file(1).read_bytes())))
    assert rig.get(1).reason is reason
    assert not rig.file(1).exists()
    assert rig.tier.statistics().removed_by_reason == {reason.value: 1}
    assert rig.put(1)[0].outcome is BlockOutcome.STORED
    assert rig.get(1).is_good


def test_two_values_that_were_swapped_are_misses(rig: Rig) -> None:
    rig.put(1, 2)
    first, second = rig.file(1).read_bytes(), rig.file(2).read_bytes()
    rig.file(1).write_bytes(second)
    rig.file(2).write_bytes(first)
    assert [rig.get(1).reason, rig.get(2).reason] == [Reason.WRONG_KEY] * 2


def test_a_value_of_another_identity_in_a_blocks_place_is_a_miss(rig: Rig) -> None:
    other = ObjectTier(directory_store(rig.path), OTHER_IDENTITY, url="object+file:///test")
    other.wait(other.start_put(make_keys(1), [payload(1)]))
    rig.put(1)
    rig.file(1).write_bytes(rig.file(1, OTHER_IDENTITY).read_bytes())
    assert rig.get(1).reason is Reason.WRONG_IDENTITY
    other.close()


def test_half_a_value_is_no_block_and_is_replaced(rig: Rig) -> None:
    rig.put(1)
    rig.file(1).write_bytes(rig.file(1).read_bytes()[:60])
    assert rig.contains(1).reason is Reason.WRONG_LENGTH
    assert rig.put(1)[0].outcome is BlockOutcome.STORED
    assert rig.get(1).is_good


def test_a_value_that_vanishes_between_lookup_and_load_is_a_miss(rig: Rig) -> None:
    rig.put(1)
    assert rig.contains(1).is_good
    rig.file(1).unlink()
    assert rig.get(1).reason is Reason.ABSENT


def test_a_value_of_another_length_is_not_read() -> None:
    class Answer:
        """Says how long it is, and must not be asked for the rest."""

        meta: ClassVar[dict[str, int]] = {"size": 1 << 40}

        def stream(self, min_chunk_size: int) -> list[bytes]:
            raise AssertionError("it was read")

    library = SimpleNamespace(exceptions=obstore.exceptions, get=lambda client, path: Answer())
    store = ObjectStore(library, None, prefix="test")
    assert store.read_into("name", [memoryview(bytearray(8))]) is Reason.WRONG_LENGTH


@pytest.mark.parametrize("pieces", [[b"12345"], [b"1234", b"56789"], [b"12345678", b"9"]])
def test_a_store_that_sends_more_or_less_than_it_says_is_not_believed(pieces: list[bytes]) -> None:
    answer = SimpleNamespace(meta={"size": 8}, stream=lambda min_chunk_size: pieces)
    library = SimpleNamespace(exceptions=obstore.exceptions, get=lambda client, path: answer)
    store = ObjectStore(library, None, prefix="test")
    assert store.read_into("name", [memoryview(bytearray(8))]) is Reason.WRONG_LENGTH


def test_the_identity_lies_beside_its_blocks_in_words(rig: Rig) -> None:
    rig.put(1)
    path = rig.path / "aiokvoffload" / identity_name(IDENTITY) / "identity.json"
    assert json.loads(path.read_text())["model"] == "contract"


def test_it_is_looked_at_from_outside(rig: Rig) -> None:
    rig.put(1, 2, 3, 4)
    administration = administer_tier(f"object+file://{rig.path}")
    found = administration.stored()
    assert [(stored.name, stored.block_count) for stored in found] == [(identity_name(IDENTITY), 4)]
    assert found[0].used_bytes == 4 * rig.file(1).stat().st_size
    assert found[0].description["model"] == "contract"
    for number, corrupt in ((1, lambda stored: flip(stored, -1)), (2, lambda stored: stored[:100])):
        rig.file(number).write_bytes(corrupt(bytearray(rig.file(number).read_bytes())))
    rig.file(4).write_bytes(rig.file(3).read_bytes())
    (rig.path / "aiokvoffload" / "something-else").write_bytes(b"not ours")
    bad = {"wrong-checksum": 1, "wrong-length": 1, "wrong-key": 1}
    assert administration.verify() == Verification(1, bad, 0)
    assert administration.verify(remove_bad=True) == Verification(1, bad, 3)
    assert administration.purge() == 1
    assert administration.stored() == []
    assert (rig.path / "aiokvoffload" / "something-else").exists()


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("s3://", "names no bucket; write s3://BUCKET/PREFIX"),
        ("s3://key:secret@bucket/prefix", "credentials do not belong into this URL"),
        ("s3://bucket/a//b", "the prefix 'a//b' cannot be used"),
        ("s3://bucket/../b", "the prefix '../b' cannot be used"),
        ("s3://bucket/prefix?regoin=eu", "unknown option 'regoin'; did you mean 'region'"),
        ("az://container?regoin=eu", "cannot be used: .*Account must be specified"),
        ("s3://bucket?create=always", "create is 'always', it must be conditional or plain"),
        ("object+file://host/path", "names no directory; write object\\+file:///path"),
        ("object+file:///tmp/x?ttl=1d", "unknown option 'ttl'"),
    ],
)
def test_a_bad_url_is_refused_with_a_sentence(url: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message) as caught:
        open_tier(url, identity=IDENTITY, block_bytes=1000)
    assert "secret" not in str(caught.value)


def test_nobody_there_is_no_error_and_shows_no_secret(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "a-secret")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    url = f"s3://bucket/prefix?endpoint=http://127.0.0.1:{port}&region=here&timeout=1s"
    tier = open_tier(url, identity=IDENTITY, block_bytes=1000)
    found = tier.statistics()
    assert (found.url, found.breaker) == ("s3://bucket/prefix", BreakerState.OPEN)
    assert "did not answer" in found.breaker_reason
    assert "a-secret" not in caplog.text + repr(found) + repr(vars(tier))
    tier.close()
