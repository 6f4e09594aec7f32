"""URLs of tiers, and what opens them."""

from __future__ import annotations

import pytest

from aiokvoffload.errors import ConfigurationError
from aiokvoffload.testing.tier_contract import IDENTITY
from aiokvoffload.tiers.base import TIERS, Tier
from aiokvoffload.tiers.memory import MemoryTier
from aiokvoffload.tiers.opening import open_tier
from aiokvoffload.tiers.requests import RequestTicks
from aiokvoffload.tiers.url import TierUrl

SECRET = "valkey://anna:s3cret@cache.example:6380/0/pre%20fix?ttl=1d&token=t0ken"  # noqa: S105  of nobody


def test_the_parts_of_a_url() -> None:
    url = TierUrl.parse(SECRET)
    assert (url.scheme, url.user, url.password) == ("valkey", "anna", "s3cret")
    assert (url.host, url.port, url.path) == ("cache.example", 6380, "/0/pre fix")
    assert url.options == (("ttl", "1d"), ("token", "t0ken"))


def test_nothing_that_is_shown_contains_a_secret() -> None:
    url = TierUrl.parse(SECRET)
    assert url.redacted == "valkey://cache.example:6380/0/pre%20fix"
    for shown in (repr(url), str(url), url.redacted, f"{url}"):
        assert not any(secret in shown for secret in ("anna", "s3cret", "t0ken"))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        "/var/cache",
        "file:/var/cache",
        "s3://u:s3cret@bucket:port/",
        "s3://u:s3cret@bucket?x",
        "s3://u:s3cret@bucket#part",
        "s3://[s3cret",
    ],
)
def test_what_is_no_url_is_refused_without_being_shown(text: str) -> None:
    with pytest.raises(ConfigurationError, match="a tier is given as a URL such as") as raised:
        TierUrl.parse(text)
    assert "s3cret" not in str(raised.value)


def test_options_are_read_once_each_and_what_is_left_is_refused() -> None:
    options = TierUrl.parse("x://h?capacity=1KiB&timeout=2m&threads=3&io=fast").read_options()
    assert options.size("capacity", 5) == 1024
    assert options.seconds("timeout", 1.0) == 120.0
    assert options.integer("threads", 1) == 3
    assert options.text("policy", "lru") == "lru"
    with pytest.raises(
        ConfigurationError, match=r"x://h: unknown option 'io'. Known: capacity, policy, threads, timeout"
    ):
        options.finish()
    assert options.text("io", "auto") == "fast"
    options.finish()


@pytest.mark.parametrize("value", ["0", "-1", "1.5", "x", "²"])
def test_a_number_of_something_is_at_least_one(value: str) -> None:
    options = TierUrl.parse(f"x://h?threads={value}").read_options()
    with pytest.raises(ConfigurationError, match=r"threads: .* must be a whole number of at least 1"):
        options.integer("threads", 1)


@pytest.mark.parametrize("block_bytes", [0, -1, [], [10, 0]])
def test_blocks_have_sizes(block_bytes: int | list[int]) -> None:
    with pytest.raises(ConfigurationError, match="give the size of a block, or several, at least 1"):
        open_tier("memory://", identity=IDENTITY, block_bytes=block_bytes)


def test_tiers_are_registered_by_scheme() -> None:
    assert {"file", "memory"} <= set(TIERS.names())
    for name in ("file", "memory"):
        assert issubclass(TIERS.resolve(name), Tier)
    assert TIERS.resolve(MemoryTier) is MemoryTier


def test_ticks_grow_and_are_the_same_for_all_calls_of_a_request() -> None:
    times = iter([100, 50, 300])
    ticks = RequestTicks(lambda _: next(times))
    assert [ticks.tick(request) for request in ("a", "b", "a", "c", "b")] == [100, 101, 100, 300, 101]


def test_only_the_last_requests_are_remembered() -> None:
    ticks = RequestTicks(lambda last: last + 1)
    for number in range(1024):
        ticks.tick(number)
    assert ticks.tick(0) == 1
    ticks.tick("one more")
    assert ticks.tick(0) == 1
    assert ticks.tick(1) == 1026
