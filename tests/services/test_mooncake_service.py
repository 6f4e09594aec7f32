"""The Mooncake tier over a master and a process that contributes memory, over TCP."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from servers import Server, mooncake_client, run_child, start_mooncake, wait_until
from service_contract import ServiceContract, get, open_url, put

from aiokvoffload.clock import Clock
from aiokvoffload.errors import ConfigurationError
from aiokvoffload.keys import CacheIdentity
from aiokvoffload.testing.tier_contract import IDENTITY
from aiokvoffload.tiers.mooncake import MooncakeTier
from aiokvoffload.tiers.opening import administer_tier
from aiokvoffload.tiers.outcomes import Reason
from aiokvoffload.tiers.value_tier import ValueTier

pytestmark = pytest.mark.services


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Server]]:
    master, segment = start_mooncake(tmp_path_factory.mktemp("mooncake"))
    yield master, segment
    segment.kill()
    master.kill()


@pytest.fixture(scope="module")
def server(processes: tuple[Server, Server]) -> Server:
    return processes[0]


class TestMooncakeTier(ServiceContract):
    def url(self, **options: str) -> str:
        query = "".join(f"&{name}={value}" for name, value in options.items())
        return f"mooncake://127.0.0.1:{self.server.port}/{self.prefix}?buffer=64MiB{query}"

    def open_tier(self, identity: CacheIdentity, clock: Clock | None = None, **options: str) -> ValueTier:
        return open_url(MooncakeTier, self.url(**options), identity, clock)

    def read(self, place: str) -> bytes:
        with mooncake_client(self.server.port) as client:
            return bytes(memoryview(client.get_buffer(f"{self.prefix}/{place}")))

    def write(self, place: str, value: bytes) -> None:
        with mooncake_client(self.server.port) as client:
            assert client.remove(f"{self.prefix}/{place}", True) == 0
            assert client.put(f"{self.prefix}/{place}", value) == 0

    def test_a_store_without_room_refuses_and_goes_on_answering(self, processes: tuple[Server, Server]) -> None:
        tier = self.open_tier(IDENTITY)
        put(tier, 1)
        processes[0].kill()
        processes[1].kill()
        processes[0].start()
        wait_until(lambda: put(tier, 1).reason is Reason.FULL)
        processes[1].start()
        wait_until(lambda: put(tier, 1).is_good)
        tier.close()

    def test_blocks_whose_memory_has_died_are_misses(self, processes: tuple[Server, Server]) -> None:
        tier = self.open_tier(IDENTITY)
        put(tier, 1)
        processes[1].kill()
        assert not get(tier, 1).is_good
        processes[1].start()
        wait_until(lambda: put(tier, 2).is_good and get(tier, 2).is_good)
        tier.close()

    def test_a_process_may_contribute_memory(self, processes: tuple[Server, Server]) -> None:
        processes[1].kill()
        processes[0].kill()
        processes[0].start()
        tier = self.open_tier(IDENTITY, segment="16MiB")
        wait_until(lambda: put(tier, 1).is_good)
        tier.close()
        processes[1].start()

    def test_it_cannot_be_looked_at_from_outside(self) -> None:
        with pytest.raises(ConfigurationError, match="does not list"):
            administer_tier(f"mooncake://127.0.0.1:{self.server.port}/test").stored()

    def test_a_process_ends_while_a_stopped_master_holds_its_threads(self) -> None:
        done = run_child(_LEAVE, f"mooncake://127.0.0.1:{self.server.port}", str(self.server.process_id))
        self.server.go_on()
        assert (done.returncode, done.stdout) == (0, "left\n"), done.stderr


_LEAVE = """
import os, signal, sys
from aiokvoffload.keys import CacheIdentity
from aiokvoffload.tiers.opening import open_tier
tier = open_tier(sys.argv[1], identity=CacheIdentity(model="child"), block_bytes=1000)
assert tier.wait(tier.start_put([b"k" * 36], [bytes(1000)]))[0].is_good
os.kill(int(sys.argv[2]), signal.SIGSTOP)
tier.start_put([b"l" * 36], [bytes(1000)])
tier.close(drain_seconds=0.1)
print("left")
"""
