"""The object tier over a server that speaks S3."""

from __future__ import annotations

import logging
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from servers import Server, start_s3
from service_contract import ServiceContract, get, open_url, place_of, put

from aiokvoffload.clock import Clock
from aiokvoffload.errors import ConfigurationError
from aiokvoffload.keys import CacheIdentity
from aiokvoffload.testing.tier_contract import IDENTITY
from aiokvoffload.tiers.administration import Verification
from aiokvoffload.tiers.names import identity_name
from aiokvoffload.tiers.object import ObjectTier
from aiokvoffload.tiers.opening import administer_tier
from aiokvoffload.tiers.value_tier import ValueTier

pytestmark = pytest.mark.services
obstore: Any = pytest.importorskip("obstore", reason="needs the extra s3")

BUCKET = "blocks"
SECRET = "a-secret-of-the-test"  # noqa: S105 - of a server that this test starts


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = start_s3(tmp_path_factory.mktemp("s3"))
    create_bucket(server.port)
    yield server
    server.kill()


def create_bucket(port: int) -> None:
    request = urllib.request.Request(f"http://127.0.0.1:{port}/{BUCKET}", method="PUT")
    urllib.request.urlopen(request).close()  # noqa: S310


class TestObjectTier(ServiceContract):
    @pytest.fixture(autouse=True)
    def credentials(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)

    def open_tier(self, identity: CacheIdentity, clock: Clock | None = None, **options: str) -> ValueTier:
        return open_url(ObjectTier, self.url(**options), identity, clock)

    def url(self, *, bucket: str = BUCKET, **options: str) -> str:
        query = "".join(f"&{name}={value}" for name, value in options.items())
        return f"s3://{bucket}/some/{self.prefix}?region=us-east-1&endpoint=http://127.0.0.1:{self.server.port}{query}"

    def restart(self) -> None:
        super().restart()
        create_bucket(self.server.port)

    def client(self) -> Any:
        return obstore.store.S3Store(
            BUCKET,
            region="us-east-1",
            endpoint=f"http://127.0.0.1:{self.server.port}",
            client_options={"allow_http": True},
        )

    def read(self, place: str) -> bytes:
        return bytes(obstore.get(self.client(), f"some/{self.prefix}/{place}").bytes())

    def write(self, place: str, value: bytes) -> None:
        obstore.put(self.client(), f"some/{self.prefix}/{place}", value)

    def test_a_bucket_that_does_not_exist_is_one_clear_error(self) -> None:
        with pytest.raises(ConfigurationError, match="does not exist; create it"):
            open_url(ObjectTier, self.url(bucket="nowhere"), IDENTITY)

    def test_a_store_that_cannot_create_only_is_told_to_put(self) -> None:
        tier = self.open_tier(IDENTITY, create="plain")
        assert put(tier, 1).is_good
        assert get(tier, 1).is_good
        tier.close()

    def test_it_is_looked_at_from_outside(self) -> None:
        tier = self.open_tier(IDENTITY)
        put(tier, 1)
        put(tier, 2)
        tier.close()
        administration = administer_tier(self.url())
        stored = administration.stored()
        assert [(found.name, found.block_count) for found in stored] == [(identity_name(IDENTITY), 2)]
        assert stored[0].description["model"] == "contract"
        self.write(place_of(2), self.read(place_of(2))[:-1] + b"?")
        assert administration.verify(remove_bad=True) == Verification(1, {"wrong-checksum": 1}, 1)
        assert administration.purge() == 1
        assert administration.stored() == []

    def test_no_secret_is_shown(self, caplog: pytest.LogCaptureFixture) -> None:
        tier = self.open_tier(IDENTITY, timeout="1s")
        self.server.kill()
        with caplog.at_level(logging.DEBUG):
            found = [put(tier, 1), get(tier, 1)]
        self.restart()
        assert all(result.detail for result in found)
        assert SECRET not in str(found) + caplog.text + repr(tier.statistics()) + repr(vars(tier))
        tier.close()
