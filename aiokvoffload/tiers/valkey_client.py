"""A client of redis-py that fits a tier: bounded waits, and values of megabytes without copies."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

DEFAULT_PORT = 6379
_READ_BYTES = 1 << 18


@dataclass(frozen=True, slots=True, kw_only=True)
class ValkeyAddress:
    """Where a server is and how it is spoken to; what is shown of it contains no password.

    Attributes:
        host: Host; of a cluster, that of any node.
        port: Port.
        database: Number of the database, 0 in a cluster.
        user: User name, None for the usual one.
        password: Password, None for none.
        is_encrypted: The connection is TLS.
        ca_path: File of the certificates that are trusted, None for those of the system.
        is_cluster: The server is a node of a cluster.
        timeout_seconds: Longest that one answer may take.
    """

    host: str
    port: int = DEFAULT_PORT
    database: int = 0
    user: str | None = None
    password: str | None = None
    is_encrypted: bool = False
    ca_path: str | None = None
    is_cluster: bool = False
    timeout_seconds: float = 10.0

    def __repr__(self) -> str:
        return f"<ValkeyAddress {self.host}:{self.port}/{self.database}>"


def connect(redis: Any, address: ValkeyAddress) -> Any:
    """Return a client. Of a single server it connects later, of a cluster it asks at once who its nodes are.

    Args:
        redis: The library.
        address: The server.
    """
    make_pool = partial(redis.ConnectionPool, command_packer=CommandPacker(), socket_read_size=_READ_BYTES)
    # A server that was restarted has closed the connections of before: once more, at once. Not after a
    # timeout, which would make one deadline two.
    retry = redis.retry.Retry(redis.backoff.NoBackoff(), 1, supported_errors=(redis.exceptions.ConnectionError,))
    knobs: dict[str, Any] = {
        "username": address.user,
        "password": address.password,
        "protocol": 2,
        "socket_timeout": address.timeout_seconds,
        "socket_connect_timeout": address.timeout_seconds,
        "retry": retry,
    }
    if address.is_encrypted:
        knobs["ssl_ca_certs"] = address.ca_path
    if address.is_cluster:
        # Only by URL does a cluster take a pool of our making.
        url = f"{'rediss' if address.is_encrypted else 'redis'}://{address.host}:{address.port}"
        return redis.RedisCluster(url=url, connection_pool_class=make_pool, **knobs)
    kind = redis.SSLConnection if address.is_encrypted else redis.Connection
    place = {"host": address.host, "port": address.port, "db": address.database}
    return redis.Redis(connection_pool=make_pool(connection_class=kind, **place, **knobs))


class CommandPacker:
    """Encodes commands for redis-py; a word in parts is sent from where it lies.

    redis-py's own packers copy values of megabytes, that of hiredis so that a SET takes several times as long.
    """

    def pack(self, *words: Any) -> list[bytes | memoryview]:
        """Return the pieces to send; the name of a command may consist of several words."""
        words = (*words[0].split(), *words[1:])
        pieces: list[bytes | memoryview] = []
        text = b"*%d\r\n" % len(words)
        for word in words:
            if isinstance(word, tuple):
                pieces += [text + b"$%d\r\n" % sum(map(len, word)), *word]
                text = b"\r\n"
            else:
                encoded = word if isinstance(word, bytes) else str(word).encode()
                text += b"$%d\r\n%b\r\n" % (len(encoded), encoded)
        return [*pieces, text]
