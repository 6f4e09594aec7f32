"""Blocks in Valkey or Redis, a single server or a cluster.

Each block is one string, written by one command, so that half a block is never there. Needs the extra `valkey`.
"""

from __future__ import annotations

import errno
import os
import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any, ClassVar

from aiokvoffload.errors import ConfigurationError
from aiokvoffload.extras import import_extra
from aiokvoffload.tiers.names import DEFAULT_PREFIX, check_prefix
from aiokvoffload.tiers.outcomes import Reason
from aiokvoffload.tiers.url import OptionReader, TierUrl
from aiokvoffload.tiers.valkey_client import DEFAULT_PORT, ValkeyAddress, connect
from aiokvoffload.tiers.value_store import Filler, ValueStore
from aiokvoffload.tiers.value_tier import ValueTier

_ENCRYPTED_SCHEMES = ("valkeys", "rediss")
_NAMES_PER_CALL = 256
_WRONG_TYPE = "WRONGTYPE"


class ValkeyStore(ValueStore):
    """Strings of a Valkey or Redis server.

    Args:
        address: The server.
        prefix: What the names begin with.
        ttl_seconds: How long a value stays after its last use; None: until the server needs the room.
        scheme: For messages.
    """

    names_per_call = _NAMES_PER_CALL

    def __init__(
        self, address: ValkeyAddress, *, prefix: str, ttl_seconds: float | None = None, scheme: str = "valkey"
    ) -> None:
        self._redis = import_extra("redis", extra="valkey", needed_by=f"a {scheme}:// tier")
        self._address = address
        self._prefix = prefix
        self._ttl_ms = None if ttl_seconds is None else max(1, int(1000 * ttl_seconds))
        self._guard = threading.Lock()
        self._client: Any = None
        self._is_closed = False

    def check(self) -> None:
        """Ping."""
        exceptions = self._redis.exceptions
        place = f"{self._address.host}:{self._address.port}"
        try:
            with self._client_in_use() as client:
                client.ping()
        except OSError as exc:
            for cause in _causes(exc):
                if isinstance(cause, (exceptions.AuthenticationError, exceptions.NoPermissionError)):
                    raise ConfigurationError(
                        f"{place} refuses the user or the password ({_line(cause)}); give them as "
                        "valkey://USER:PASSWORD@HOST, or the name of an environment variable as ?password_env=NAME"
                    ) from exc
                if isinstance(cause, exceptions.ResponseError) and not isinstance(cause, exceptions.ClusterError):
                    raise ConfigurationError(f"{place} refuses to be used: {_line(cause)}") from exc
            raise

    def sizes(self, names: Sequence[str], *, is_use: bool) -> list[int | Reason]:
        """Ask for all lengths in one round trip; a use lets the time to live begin again."""
        is_renewed = is_use and self._ttl_ms is not None
        with self._client_in_use() as client:
            pipeline = client.pipeline(transaction=False)
            for name in names:
                if is_renewed:
                    pipeline.pexpire(self._name(name), self._ttl_ms)
                pipeline.strlen(self._name(name))
            answers = pipeline.execute(raise_on_error=False)
            return [self._size(answer) for answer in (answers[1::2] if is_renewed else answers)]

    def create(self, name: str, parts: Sequence[bytes | memoryview]) -> bool:
        """Set a string that is not there."""
        with self._client_in_use() as client:
            return bool(client.set(self._name(name), tuple(parts), nx=True, px=self._ttl_ms))

    def read_into(self, name: str, parts: Sequence[memoryview]) -> Reason | None:
        """Get a string, but not more than one byte too much of it."""
        byte_count = sum(part.nbytes for part in parts)
        exceptions = self._redis.exceptions
        with self._client_in_use() as client:
            try:
                value = client.getrange(self._name(name), 0, byte_count)
            except exceptions.ResponseError as exc:
                if not str(exc).startswith(_WRONG_TYPE):
                    raise
                return Reason.NOT_A_FILE
        if not value:
            return Reason.ABSENT
        if len(value) != byte_count:
            return Reason.WRONG_LENGTH
        Filler(parts).add(value)
        return None

    def remove(self, names: Sequence[str]) -> list[bool]:
        """Unlink strings; their memory is freed by another thread of the server."""
        with self._client_in_use() as client:
            pipeline = client.pipeline(transaction=False)
            for name in names:
                pipeline.unlink(self._name(name))
            return [bool(count) for count in pipeline.execute()]

    def names(self) -> Iterator[tuple[str, int]]:
        """Scan; what comes or goes meanwhile may be left out or there twice."""
        start = self._name("")
        with self._client_in_use() as client:
            found = iter(client.scan_iter(match=f"{start}*", count=_NAMES_PER_CALL))
            while some := [name.decode()[len(start) :] for name in islice(found, _NAMES_PER_CALL)]:
                for name, size in zip(some, self.sizes(some, is_use=False), strict=True):
                    if isinstance(size, int):
                        yield name, size

    def close(self) -> None:
        """Close the connections that nobody is using."""
        with self._guard:
            self._is_closed = True
            client, self._client = self._client, None
        if client is None:
            return
        clients = [node.redis_connection for node in client.get_nodes()] if self._address.is_cluster else [client]
        for each in clients:
            if each is not None:
                # Not those in use: whoever is in the middle of an answer would connect once more and ask again.
                each.connection_pool.disconnect(inuse_connections=False)

    def _name(self, name: str) -> str:
        return f"{self._prefix}/{name}"

    def _size(self, answer: Any) -> int | Reason:
        if isinstance(answer, self._redis.exceptions.ResponseError) and str(answer).startswith(_WRONG_TYPE):
            return Reason.NOT_A_FILE
        if isinstance(answer, Exception):
            raise answer
        return int(answer) or Reason.ABSENT

    @contextmanager
    def _client_in_use(self) -> Iterator[Any]:
        """Lend the client; its errors become ours.

        Whoever uses it must keep a reference to it: a client that nobody refers to closes connections also under a
        pipeline of its own.
        """
        exceptions = self._redis.exceptions
        try:
            with self._guard:
                if self._is_closed:
                    raise OSError("this store is closed")
                if self._client is None:
                    self._client = connect(self._redis, self._address)
                client = self._client
            yield client
        except (exceptions.RedisError, exceptions.RedisClusterException) as exc:
            raise self._our_error(exc) from exc

    def _our_error(self, exc: Exception) -> OSError:
        exceptions = self._redis.exceptions
        if isinstance(exc, exceptions.OutOfMemoryError):
            return OSError(errno.ENOSPC, _line(exc))
        if isinstance(exc, (exceptions.ReadOnlyError, exceptions.NoPermissionError)):
            return OSError(errno.EROFS, _line(exc))
        return OSError(f"{type(exc).__name__}: {_line(exc)}")


class ValkeyTier(ValueTier):
    """Blocks in Valkey or Redis."""

    extra: ClassVar[str | None] = "valkey"

    @classmethod
    def open_store(
        cls, url: TierUrl, options: OptionReader, *, timeout_seconds: float, bytes_in_work: int
    ) -> ValkeyStore:
        """Open `valkey://host:6379/0?ttl=1d`; the options are in docs/tiers.md."""
        database = url.path.strip("/") or "0"
        is_cluster = options.text("cluster", "no", choices=("yes", "no")) == "yes"
        if not url.host or not re.fullmatch("[0-9]{1,6}", database):
            raise ConfigurationError(
                f"{url.redacted} must name a host and the number of a database; write {url.scheme}://HOST:{DEFAULT_PORT}/0"
            )
        if is_cluster and int(database):
            raise ConfigurationError(f"{url.redacted}: a cluster has only the database 0")
        address = ValkeyAddress(
            host=url.host,
            port=url.port or DEFAULT_PORT,
            database=int(database),
            user=url.user or None,
            password=_password_of(url, options),
            is_encrypted=url.scheme in _ENCRYPTED_SCHEMES,
            ca_path=options.text("ca", "") or None,
            is_cluster=is_cluster,
            timeout_seconds=timeout_seconds,
        )
        return ValkeyStore(
            address,
            prefix=check_prefix(url, options.text("prefix", DEFAULT_PREFIX)),
            ttl_seconds=options.seconds("ttl", 0.0) or None,
            scheme=url.scheme,
        )


def _password_of(url: TierUrl, options: OptionReader) -> str | None:
    variable = options.text("password_env", "")
    if not variable:
        return url.password or None
    if url.password:
        raise ConfigurationError(f"{url.redacted}: a password and password_env are given; give one of them")
    password = os.environ.get(variable)
    if not password:
        raise ConfigurationError(f"{url.redacted}: password_env names the variable {variable!r}, which is not set")
    return password


def _causes(exc: BaseException) -> Iterator[BaseException]:
    """Yield what an error came from, and what that came from."""
    cause = exc.__cause__ or exc.__context__
    while cause is not None:
        yield cause
        cause = cause.__cause__ or cause.__context__


def _line(exc: BaseException) -> str:
    return str(exc).split("\n", maxsplit=1)[0][:200]
