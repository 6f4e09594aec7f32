"""What every remote tier has to bear of its server, beside the contract of a tier."""

from __future__ import annotations

import json
import threading
import uuid
from abc import abstractmethod
from collections.abc import Iterator

import pytest
from servers import Server, wait_until

from aiokvoffload.cli.main import run
from aiokvoffload.clock import Clock, SystemClock
from aiokvoffload.keys import CacheIdentity
from aiokvoffload.testing.strategies import make_keys
from aiokvoffload.testing.tier_contract import (
    BLOCK_BYTES,
    IDENTITY,
    OTHER_IDENTITY,
    Hold,
    TierContract,
    payload,
    wait_until_over,
)
from aiokvoffload.tiers.base import Tier, TierSettings
from aiokvoffload.tiers.breaker import BreakerState
from aiokvoffload.tiers.names import block_id, block_name, identity_name
from aiokvoffload.tiers.outcomes import BlockOutcome, BlockResult, Reason
from aiokvoffload.tiers.url import TierUrl
from aiokvoffload.tiers.value_tier import ValueTier


class ServiceContract(TierContract):
    """A tier over a server that is stopped, killed and started again.

    Attributes:
        server: The server; the tests of a class share it.
        prefix: What the names of a test begin with.
    """

    server: Server
    prefix: str

    @abstractmethod
    def url(self, **options: str) -> str:
        """Return where the blocks of this test are."""

    @abstractmethod
    def open_tier(self, identity: CacheIdentity, clock: Clock | None = None, **options: str) -> ValueTier:
        """Open a tier on the server; options go into its URL."""

    @pytest.fixture(autouse=True)
    def fresh(self, server: Server) -> Iterator[None]:
        """The server, with nothing in it for this test, and serving again after it."""
        self.server = server
        self.prefix = uuid.uuid4().hex
        yield
        server.go_on()

    def hold(self, tier: Tier) -> Hold:
        self.server.stop()
        return Hold(lambda: has_begun(tier), self.server.go_on)

    # The server

    def test_a_stopped_server_costs_a_deadline_and_then_nothing(self) -> None:
        tier = self.open_tier(IDENTITY, timeout="1s", breaker_pause="0.2s")
        wait_until(lambda: put(tier, 1).is_good)
        self.server.stop()
        assert get(tier, 1).reason in (Reason.DEADLINE, Reason.FAILED)
        wait_until(lambda: get(tier, 1).reason is Reason.BREAKER_OPEN)
        assert tier.statistics().breaker is BreakerState.OPEN
        self.server.go_on()
        wait_until(lambda: get(tier, 1).is_good)
        assert tier.statistics().breaker is BreakerState.CLOSED
        tier.close()

    def test_a_killed_server_is_a_miss_and_a_new_one_is_found(self) -> None:
        tier = self.open_tier(IDENTITY, timeout="2s", breaker_pause="0.2s")
        put(tier, 1)
        self.server.kill()
        assert get(tier, 1).reason in (Reason.FAILED, Reason.DEADLINE)
        assert put(tier, 2).outcome is BlockOutcome.REFUSED
        self.restart()
        wait_until(lambda: put(tier, 3).is_good)
        assert get(tier, 3).is_good
        assert not get(tier, 1).is_good
        tier.close()

    def test_a_server_restarted_empty_within_a_heartbeat_is_only_misses(self) -> None:
        tier = self.open_tier(IDENTITY)
        put(tier, 1)
        self.server.kill()
        self.restart()
        wait_until(lambda: get(tier, 1).reason is Reason.ABSENT)
        wait_until(lambda: put(tier, 1).is_good)
        assert get(tier, 1).is_good
        tier.close()

    def test_a_server_that_is_dead_at_the_start_is_found_when_it_comes(self) -> None:
        self.server.kill()
        tier = self.open_tier(IDENTITY, timeout="2s", breaker_pause="0.2s")
        found = tier.statistics()
        assert found.breaker is BreakerState.OPEN
        assert "did not answer when it was opened" in found.breaker_reason
        assert get(tier, 1).reason is Reason.BREAKER_OPEN
        self.restart()
        wait_until(lambda: put(tier, 1).is_good)
        assert get(tier, 1).is_good
        tier.close()

    def test_closing_with_a_stopped_server_is_bounded(self) -> None:
        tier = self.open_tier(IDENTITY)
        put(tier, 1)
        self.server.stop()
        call = tier.start_get_into(make_keys(1), [bytearray(BLOCK_BYTES)])
        wait_until(lambda: has_begun(tier))
        tier.close(drain_seconds=0.0)
        assert call.results[0].reason is Reason.CLOSED
        self.server.go_on()
        wait_until_over(tier, lambda: call.is_over)

    # Values

    def test_two_writers_of_one_key(self) -> None:
        """Both find it there afterwards, whoever was first."""
        tiers = [self.open_tier(IDENTITY) for _ in range(2)]
        calls = [tier.start_put(make_keys(*range(20)), [payload(n) for n in range(20)]) for tier in tiers]
        for tier, call in zip(tiers, calls, strict=True):
            assert all(result.is_good for result in tier.wait(call))
        for tier in tiers:
            assert all(get(tier, number).is_good for number in range(20))
            tier.close()

    def test_a_value_that_was_altered_is_a_miss_and_removed(self) -> None:
        tier = self.open_tier(IDENTITY)
        for alter, reason in (
            (lambda value: value[:-1], Reason.WRONG_LENGTH),
            (lambda value: value + b"\0", Reason.WRONG_LENGTH),
            (lambda value: value[: len(value) // 2], Reason.WRONG_LENGTH),
            (lambda value: value[:-1] + bytes([value[-1] ^ 1]), Reason.WRONG_CHECKSUM),
            (lambda value: b"somebody else's".ljust(len(value)), Reason.WRONG_MAGIC),
        ):
            assert put(tier, 1).outcome is BlockOutcome.STORED
            place = place_of(1)
            value = self.read(place)
            self.write(place, alter(value))
            assert get(tier, 1).reason is reason
            assert get(tier, 1).reason is Reason.ABSENT
        assert sum(tier.statistics().removed_by_reason.values()) == 5
        tier.close()

    def test_a_value_of_another_model_is_a_miss(self) -> None:
        tier, other = self.open_tier(IDENTITY), self.open_tier(OTHER_IDENTITY)
        put(tier, 1)
        put(other, 1)
        self.write(place_of(1), self.read(place_of(1, OTHER_IDENTITY)))
        assert get(tier, 1).reason is Reason.WRONG_IDENTITY
        tier.close()
        other.close()

    def test_values_of_megabytes(self) -> None:
        tier = self.open_tier(IDENTITY)
        for number, byte_count in enumerate((1 << 20, (4 << 20) + 1, 16 << 20)):
            buffer = bytearray(byte_count)
            stored = tier.wait(tier.start_put(make_keys(number), [payload(number, byte_count)]))
            assert stored[0].outcome is BlockOutcome.STORED
            assert tier.wait(tier.start_get_into(make_keys(number), [buffer]))[0].is_good
            assert buffer == payload(number, byte_count)
            tier.wait(tier.start_delete(make_keys(number)))
        tier.close()

    def test_two_engines_share_what_one_has_stored(self) -> None:
        """Each in its thread, as in a process of its own."""
        numbers = range(12)

        def engine(results: list[bool]) -> None:
            tier = self.open_tier(IDENTITY)
            results.extend(get(tier, number).is_good for number in numbers)
            for number in numbers:
                put(tier, number)
            tier.close()

        found: list[list[bool]] = [[], []]
        for results in found:
            thread = threading.Thread(target=engine, args=(results,))
            thread.start()
            thread.join()
        assert found == [[False] * 12, [True] * 12]

    def test_of_two_replaying_processes_one_hits_what_the_other_has_stored(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        small = ["--limit", "30", "--concurrency", "1", "--page-bytes", "64", "--layers", "2", "--cpu-blocks", "4000"]
        assert run(["replay", *small, "--engines", "2", "--tier", self.url(), "--cascade", "wait", "--json"]) == 0
        report = json.loads(capsys.readouterr().out)
        assert report["blocks_verified"] == report["blocks_hit"] > 0
        assert report["mismatches"] == 0
        # Nothing of its own leaves the CPU memory of an engine: what it finds in the tier, the other one has stored.
        assert report["tiers"][0]["hits"] > 0
        assert report["tiers"][0]["bytes_read"] > 0

    def restart(self) -> None:
        """Start the server again, empty."""
        self.server.start()

    @abstractmethod
    def read(self, place: str) -> bytes:
        """Return a value, past the tier."""

    @abstractmethod
    def write(self, place: str, value: bytes) -> None:
        """Put a value in the place of another, past the tier."""


def put(tier: Tier, number: int) -> BlockResult:
    """Store a block."""
    return tier.wait(tier.start_put(make_keys(number), [payload(number)]))[0]


def get(tier: Tier, number: int) -> BlockResult:
    """Load a block; whatever is called a hit has the right bytes."""
    buffer = bytearray(BLOCK_BYTES)
    result = tier.wait(tier.start_get_into(make_keys(number), [buffer]))[0]
    assert not result.is_good or buffer == payload(number)
    return result


def place_of(number: int, identity: CacheIdentity = IDENTITY) -> str:
    """Return where a block is in the store."""
    return block_id(identity_name(identity), block_name(make_keys(number)[0]))


def has_begun(tier: Tier) -> bool:
    """Return whether a thread has taken up a block of a call that is not over."""
    return any(call.open_since() is not None for call in tier._desk.calls)


def open_url(kind: type[ValueTier], url: str, identity: CacheIdentity, clock: Clock | None = None) -> ValueTier:
    """Open a tier with a clock of the test's choice."""
    settings = TierSettings(identity=identity, block_bytes=(BLOCK_BYTES,), clock=clock or SystemClock())
    return kind.from_url(TierUrl.parse(url), settings)
