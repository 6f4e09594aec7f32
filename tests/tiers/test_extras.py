"""What a tier says whose library is not installed."""

from __future__ import annotations

import sys

import pytest

from aiokvoffload.errors import ConfigurationError
from aiokvoffload.testing.tier_contract import IDENTITY
from aiokvoffload.tiers.opening import open_tier


@pytest.mark.parametrize(
    ("url", "module", "extra"),
    [
        ("s3://bucket/prefix", "obstore", "s3"),
        ("gs://bucket/prefix", "obstore", "s3"),
        ("az://container/prefix", "obstore", "s3"),
        ("valkey://host", "redis", "valkey"),
        ("rediss://host", "redis", "valkey"),
        ("mooncake://127.0.0.1", "mooncake.store", "mooncake"),
    ],
)
def test_a_missing_extra_is_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch, url: str, module: str, extra: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigurationError, match=rf"pip install 'aiokvoffload\[{extra}\]'"):
        open_tier(url, identity=IDENTITY, block_bytes=1000)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("mooncake://", "must name a master, and nothing else; write mooncake://HOST:50051/PREFIX"),
        ("mooncake://me:hush@host", "must name a master, and nothing else"),
        ("mooncake://127.0.0.1?protocol=udp", "protocol is 'udp', it must be tcp or rdma"),
        ("mooncake://does-not-exist.invalid", "host 'does-not-exist.invalid' cannot be found"),
    ],
)
def test_a_bad_mooncake_url_is_refused_with_a_sentence(url: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message) as caught:
        open_tier(url, identity=IDENTITY, block_bytes=1000)
    assert "hush" not in str(caught.value)
