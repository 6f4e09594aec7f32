"""The Valkey tier without a server; with one it is tested in tests/services."""

from __future__ import annotations

import socket

import pytest

from aiokvoffload.errors import ConfigurationError
from aiokvoffload.testing.strategies import make_keys
from aiokvoffload.testing.tier_contract import IDENTITY
from aiokvoffload.tiers.breaker import BreakerState
from aiokvoffload.tiers.opening import open_tier
from aiokvoffload.tiers.outcomes import Reason
from aiokvoffload.tiers.valkey_client import CommandPacker, ValkeyAddress

pytest.importorskip("redis", reason="needs the extra valkey")


@pytest.fixture
def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("valkey://", "must name a host and the number of a database; write valkey://HOST:6379/0"),
        ("redis://host/first", "must name a host and the number of a database; write redis://HOST:6379/0"),
        ("valkey://host/1?cluster=yes", "a cluster has only the database 0"),
        ("valkey://host?cluster=true", "cluster is 'true', it must be yes or no"),
        ("valkey://host?ttl=1day", "ttl: '1day' is no duration"),
        ("valkey://host?prefix={a}", "the prefix '{a}' cannot be used"),
        ("valkey://host?prefix=", "the prefix '' cannot be used"),
        ("valkey://host?tll=1d", "unknown option 'tll'; did you mean 'ttl'"),
        ("valkey://host?password_env=NOWHERE_SET", "names the variable 'NOWHERE_SET', which is not set"),
        ("valkey://:hush@host?password_env=HOME", "a password and password_env are given"),
        ("valkeyy://host", "did you mean 'valkey'"),
    ],
)
def test_a_bad_url_is_refused_with_a_sentence(url: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message) as caught:
        open_tier(url, identity=IDENTITY, block_bytes=1000)
    assert "hush" not in str(caught.value)


def test_nobody_there_is_no_error_and_shows_no_password(closed_port: int, caplog: pytest.LogCaptureFixture) -> None:
    tier = open_tier(f"valkey://me:hush@127.0.0.1:{closed_port}/0", identity=IDENTITY, block_bytes=1000)
    found = tier.statistics()
    assert (found.url, found.breaker) == (f"valkey://127.0.0.1:{closed_port}/0", BreakerState.OPEN)
    assert "did not answer when it was opened" in found.breaker_reason
    assert tier.wait(tier.start_contains(make_keys(1)))[0].reason is Reason.BREAKER_OPEN
    assert "hush" not in caplog.text + repr(found) + repr(vars(tier))
    tier.close()


def test_an_address_shows_no_password() -> None:
    assert "hush" not in repr(ValkeyAddress(host="host", user="me", password="hush"))  # noqa: S106 - of nobody


def test_a_command_is_sent_in_pieces_without_a_copy() -> None:
    payload = memoryview(bytearray(b"payload"))
    pieces = CommandPacker().pack("SET", "name", (b"head", payload), "PX", 1000)
    assert pieces[2] is payload
    sent = b"*5\r\n$3\r\nSET\r\n$4\r\nname\r\n$11\r\nheadpayload\r\n$2\r\nPX\r\n$4\r\n1000\r\n"
    assert b"".join(pieces) == sent
    assert CommandPacker().pack("CLIENT INFO") == [b"*2\r\n$6\r\nCLIENT\r\n$4\r\nINFO\r\n"]
