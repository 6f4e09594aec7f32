"""The Valkey tier over a server."""

from __future__ import annotations

import logging
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import pytest
from servers import Server, free_port, run_child, start_valkey, wait_until
from service_contract import ServiceContract, get, open_url, place_of, put

from aiokvoffload.clock import Clock
from aiokvoffload.errors import ConfigurationError
from aiokvoffload.keys import CacheIdentity
from aiokvoffload.testing.strategies import make_keys
from aiokvoffload.testing.tier_contract import IDENTITY, payload
from aiokvoffload.tiers.administration import Verification
from aiokvoffload.tiers.names import identity_name
from aiokvoffload.tiers.opening import administer_tier
from aiokvoffload.tiers.outcomes import BlockOutcome, Reason
from aiokvoffload.tiers.valkey import ValkeyStore, ValkeyTier
from aiokvoffload.tiers.valkey_client import ValkeyAddress
from aiokvoffload.tiers.value_tier import ValueTier

pytestmark = pytest.mark.services
redis: Any = pytest.importorskip("redis", reason="needs the extra valkey")

PASSWORD = "correct-horse"  # noqa: S105 - of a server that this test starts


def url_of(authority: str, **options: str) -> str:
    query = "&".join(f"{name}={value}" for name, value in options.items())
    return f"valkey://{authority}{'?' if query else ''}{query}"


def open_tier(
    authority: str, identity: CacheIdentity = IDENTITY, clock: Clock | None = None, **options: str
) -> ValueTier:
    return open_url(ValkeyTier, url_of(authority, **options), identity, clock)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = start_valkey(tmp_path_factory.mktemp("valkey"), "--requirepass", PASSWORD)
    yield server
    server.kill()


class TestValkeyTier(ServiceContract):
    def url(self, **options: str) -> str:
        return url_of(f":{PASSWORD}@127.0.0.1:{self.server.port}/0", prefix=self.prefix, **options)

    def open_tier(self, identity: CacheIdentity, clock: Clock | None = None, **options: str) -> ValueTier:
        return open_url(ValkeyTier, self.url(**options), identity, clock)

    def name(self, number: int) -> str:
        return f"{self.prefix}/{place_of(number)}"

    def client(self) -> Any:
        return redis.Redis(port=self.server.port, password=PASSWORD)

    def read(self, place: str) -> bytes:
        with self.client() as client:
            return bytes(client.get(f"{self.prefix}/{place}"))

    def write(self, place: str, value: bytes) -> None:
        with self.client() as client:
            client.set(f"{self.prefix}/{place}", value)

    def test_a_time_to_live_that_ends_between_lookup_and_load_is_a_miss(self) -> None:
        tier = self.open_tier(IDENTITY, ttl="1h")
        put(tier, 1)
        assert tier.wait(tier.start_contains(make_keys(1)))[0].is_good
        with self.client() as client:
            assert 3500 < client.ttl(self.name(1)) <= 3600
            client.pexpire(self.name(1), 1)
            wait_until(lambda: not client.exists(self.name(1)))
        assert get(tier, 1).reason is Reason.ABSENT
        tier.close()

    @pytest.mark.parametrize("use", ["put", "touch"])
    def test_a_use_lets_the_time_to_live_begin_again(self, use: str) -> None:
        tier = self.open_tier(IDENTITY, ttl="1h")
        put(tier, 1)
        with self.client() as client:
            client.expire(self.name(1), 60)
            get(tier, 1)
            assert client.ttl(self.name(1)) <= 60
            if use == "put":
                assert put(tier, 1).outcome is BlockOutcome.PRESENT
            else:
                tier.wait(tier.start_touch(make_keys(1)))
            assert client.ttl(self.name(1)) > 3500
        tier.close()

    def test_only_the_first_of_two_writers_writes(self) -> None:
        address = ValkeyAddress(host="127.0.0.1", port=self.server.port, password=PASSWORD)
        store = ValkeyStore(address, prefix=self.prefix)
        assert store.create("name", [b"fir", b"st"])
        assert not store.create("name", [b"second"])
        assert self.read("name") == b"first"
        store.close()

    def test_something_else_in_a_blocks_place_is_refused_and_stays(self) -> None:
        tier = self.open_tier(IDENTITY)
        with self.client() as client:
            client.rpush(self.name(1), "somebody else's")
            assert tier.wait(tier.start_contains(make_keys(1)))[0].reason is Reason.NOT_A_FILE
            assert get(tier, 1).reason is Reason.NOT_A_FILE
            assert put(tier, 1).reason is Reason.NOT_A_FILE
            assert client.llen(self.name(1)) == 1
        tier.close()

    def test_a_full_server_refuses_and_goes_on_answering(self) -> None:
        tier = self.open_tier(IDENTITY)
        put(tier, 1)
        with self.client() as client:
            client.config_set("maxmemory", 1)
            assert put(tier, 2).reason is Reason.FULL
            assert get(tier, 1).is_good
            client.config_set("maxmemory", 0)
        assert put(tier, 2).is_good
        tier.close()

    def test_a_user_who_may_only_read_stores_nothing_and_loads(self) -> None:
        writer = self.open_tier(IDENTITY)
        put(writer, 1)
        writer.close()
        with self.client() as client:
            client.acl_setuser("reader", enabled=True, passwords=["+pw"], keys=["*"], commands=["+@read", "+ping"])
        tier = open_tier(f"reader:pw@127.0.0.1:{self.server.port}/0", prefix=self.prefix)
        assert put(tier, 2).reason is Reason.READ_ONLY
        assert get(tier, 1).is_good
        tier.close()

    @pytest.mark.parametrize("credentials", [":wrong-secret@", ""])
    def test_a_wrong_password_is_one_clear_error_that_does_not_show_it(
        self, credentials: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        with caplog.at_level(logging.DEBUG), pytest.raises(ConfigurationError) as caught:
            open_tier(f"{credentials}127.0.0.1:{self.server.port}/0")
        assert "password" in str(caught.value)
        assert "wrong-secret" not in str(caught.value) + repr(caught.value.__cause__) + caplog.text

    def test_a_database_that_does_not_exist_is_one_clear_error(self) -> None:
        with pytest.raises(ConfigurationError, match="refuses to be used"):
            open_tier(f":{PASSWORD}@127.0.0.1:{self.server.port}/999")

    def test_a_password_changed_meanwhile_is_a_failure_that_does_not_show_it(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        tier = self.open_tier(IDENTITY)
        put(tier, 1)
        with self.client() as client:
            client.config_set("requirepass", "changed")
            client.client_kill_filter(_type="normal", skipme=True)
            with caplog.at_level(logging.DEBUG):
                found = get(tier, 1)
            client.config_set("requirepass", PASSWORD)
        assert found.reason is Reason.FAILED
        assert PASSWORD not in found.detail + caplog.text + repr(tier.statistics()) + repr(vars(tier))
        assert get(tier, 1).is_good
        tier.close()

    def test_it_is_looked_at_from_outside(self) -> None:
        tier = self.open_tier(IDENTITY)
        put(tier, 1)
        put(tier, 2)
        tier.close()
        administration = administer_tier(f"valkey://:{PASSWORD}@127.0.0.1:{self.server.port}/0?prefix={self.prefix}")
        stored = administration.stored()
        assert [(found.name, found.block_count) for found in stored] == [(identity_name(IDENTITY), 2)]
        assert stored[0].description["model"] == "contract"
        self.write(place_of(2), self.read(place_of(2))[:-1] + b"?")
        assert administration.verify(remove_bad=True) == Verification(1, {"wrong-checksum": 1}, 1)
        assert administration.purge() == 1
        assert administration.stored() == []

    def test_a_process_ends_while_a_stopped_server_holds_its_threads(self) -> None:
        self.server.stop()
        done = run_child(_LEAVE, f"valkey://:{PASSWORD}@127.0.0.1:{self.server.port}/0?timeout=600s")
        assert (done.returncode, done.stdout) == (0, "left\n"), done.stderr


_LEAVE = """
import sys
from aiokvoffload.keys import CacheIdentity
from aiokvoffload.tiers.opening import open_tier
tier = open_tier(sys.argv[1], identity=CacheIdentity(model="child"), block_bytes=1000)
tier.breaker._close()
tier.start_put([b"k" * 36], [bytes(1000)])
tier.close(drain_seconds=0.1)
print("left")
"""


@pytest.fixture(scope="module")
def ports(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[int]]:
    """Three servers that share the names."""
    directories = [tmp_path_factory.mktemp(f"node{number}") for number in range(3)]
    # Of its own choice, a server adds 10000 to its port for the others, and does not care where ports end.
    bus_ports = [free_port() for _ in directories]
    with ExitStack() as nodes:
        ports = []
        for path, bus_port in zip(directories, bus_ports, strict=True):
            node = start_valkey(path, "--dir", str(path), "--cluster-enabled", "yes", "--cluster-port", str(bus_port))
            nodes.callback(node.kill)
            ports.append(node.port)
        for port, (first, last) in zip(ports, [(0, 5000), (5001, 10000), (10001, 16383)], strict=True):
            with redis.Redis(port=port) as client:
                client.execute_command("CLUSTER", "ADDSLOTSRANGE", first, last)
                client.execute_command("CLUSTER", "MEET", "127.0.0.1", ports[0], bus_ports[0])
        wait_until(lambda: all(is_cluster_up(port) for port in ports))
        yield ports


def is_cluster_up(port: int) -> bool:
    with redis.Redis(port=port) as client:
        return b"cluster_state:ok" in client.execute_command("CLUSTER", "INFO")


def test_blocks_are_stored_in_all_of_a_cluster_and_found(ports: list[int]) -> None:
    tier = open_tier(f"127.0.0.1:{ports[1]}/0", cluster="yes", ttl="1h")
    numbers = range(40)
    stored = tier.wait(tier.start_put(make_keys(*numbers), [payload(number) for number in numbers]))
    assert {result.outcome for result in stored} == {BlockOutcome.STORED}
    found = tier.wait(tier.start_contains(make_keys(*range(50))))
    assert [result.is_good for result in found] == [True] * 40 + [False] * 10
    assert all(get(tier, number).is_good for number in numbers)
    assert all(result.is_good for result in tier.wait(tier.start_touch(make_keys(*numbers))))
    for port in ports:
        with redis.Redis(port=port) as client:
            assert client.dbsize() > 3
    deleted = tier.wait(tier.start_delete(make_keys(*range(50))))
    assert [result.is_good for result in deleted] == [True] * 40 + [False] * 10
    tier.close()


def test_a_cluster_that_is_none_is_one_clear_error(server: Server) -> None:
    with pytest.raises(ConfigurationError, match="cluster support disabled"):
        open_tier(f":{PASSWORD}@127.0.0.1:{server.port}/0", cluster="yes")
    with pytest.raises(ConfigurationError, match="refuses the user or the password"):
        open_tier(f":wrong@127.0.0.1:{server.port}/0", cluster="yes")


def test_an_encrypted_connection_needs_a_certificate_that_is_trusted(tmp_path: Path) -> None:
    trustme = pytest.importorskip("trustme")
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    server = start_valkey(tmp_path)
    with TlsFront(context, server.port) as front:
        url = f"valkeys://127.0.0.1:{front.port}/0"
        tier = open_url(ValkeyTier, f"{url}?ca={tmp_path / 'ca.pem'}", IDENTITY)
        assert put(tier, 1).outcome is BlockOutcome.STORED
        assert get(tier, 1).is_good
        tier.close()
        distrusting = open_url(ValkeyTier, url, IDENTITY)
        assert "certificate" in distrusting.statistics().breaker_reason
        distrusting.close()
    server.kill()


class TlsFront:
    """Takes encrypted connections and passes on what comes; the servers of the package index cannot.

    Args:
        context: With the certificate.
        target_port: Where it is passed on to.
    """

    def __init__(self, context: ssl.SSLContext, target_port: int) -> None:
        self._context = context
        self._target_port = target_port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]

    def __enter__(self) -> Self:
        threading.Thread(target=self._serve, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _serve(self) -> None:
        while True:
            try:
                plain, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._pass_on, args=(plain,), daemon=True).start()

    def _pass_on(self, plain: socket.socket) -> None:
        try:
            with (
                self._context.wrap_socket(plain, server_side=True) as front,
                socket.create_connection(("127.0.0.1", self._target_port)) as back,
            ):
                answers = threading.Thread(target=pump, args=(back, front), daemon=True)
                answers.start()
                pump(front, back)
                back.shutdown(socket.SHUT_WR)
                answers.join()
        except OSError:
            plain.close()


def pump(source: socket.socket, target: socket.socket) -> None:
    """Copy what comes until nothing comes any more."""
    try:
        while piece := source.recv(65536):
            target.sendall(piece)
    except OSError:
        return
