"""Blocks in a Mooncake Store, through its Python package.

Each block is one object. The memory that holds them is contributed by processes: dedicated ones, or, with `segment=`,
this one. Needs the extra `mooncake`.
"""

from __future__ import annotations

import errno
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

from aiokvoffload.errors import ConfigurationError
from aiokvoffload.extras import import_extra
from aiokvoffload.tiers.names import DEFAULT_PREFIX, check_prefix
from aiokvoffload.tiers.outcomes import Reason
from aiokvoffload.tiers.url import OptionReader, TierUrl
from aiokvoffload.tiers.value_store import Filler, ValueStore
from aiokvoffload.tiers.value_tier import ValueTier

DEFAULT_PORT = 50051
_NAMES_PER_CALL = 256
_SMALLEST_BUFFER_BYTES = 64 << 20
_DONE = 0
_NO_ROOM = -200
_ABSENT = -704
"""Codes of Mooncake's answers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MooncakeSettings:
    """How a process takes part in a Mooncake Store.

    Attributes:
        master_host: Host of the master.
        master_port: Port of the master.
        metadata: Where processes find each other.
        host: Name under which others find this process.
        protocol: `tcp` or `rdma`.
        devices: RDMA devices, separated by commas.
        segment_bytes: Memory that this process contributes.
        buffer_bytes: Memory through which blocks come and go.
    """

    master_host: str
    master_port: int = DEFAULT_PORT
    metadata: str = "P2PHANDSHAKE"
    host: str
    protocol: str = "tcp"
    devices: str = ""
    segment_bytes: int = 0
    buffer_bytes: int = _SMALLEST_BUFFER_BYTES


class MooncakeStore(ValueStore):
    """Objects of a Mooncake Store.

    Args:
        settings: How this process takes part.
        prefix: What the names begin with.
        timeout_seconds: Longest that the master may take to be reached.
    """

    names_per_call = _NAMES_PER_CALL

    def __init__(self, settings: MooncakeSettings, *, prefix: str, timeout_seconds: float) -> None:
        self._mooncake = import_extra("mooncake.store", extra="mooncake", needed_by="a mooncake:// tier")
        self._settings = settings
        self._prefix = prefix
        self._timeout_seconds = timeout_seconds
        self._guard = threading.Lock()
        self._client: Any = None
        self._user_count = 0
        self._is_closing = False

    def check(self) -> None:
        """Ask for a name."""
        self.sizes([""], is_use=False)

    def sizes(self, names: Sequence[str], *, is_use: bool) -> list[int | Reason]:
        """Ask for all names in one request, and for the lengths of those that are there; that is a use."""
        full_names = [self._name(name) for name in names]
        with self._client_in_use() as client:
            answers = client.batch_is_exist(full_names)
            found = zip(full_names, answers, strict=True)
            return [self._size(client, name) if self._is_there(answer) else Reason.ABSENT for name, answer in found]

    def create(self, name: str, parts: Sequence[bytes | memoryview]) -> bool:
        """Put an object; where there is one, it stays, and Mooncake says the same."""
        with self._client_in_use() as client:
            code = client.put_parts(self._name(name), *parts)
        if code == _NO_ROOM:
            raise OSError(errno.ENOSPC, "no process contributes memory that has room; give some more, or segment=4GiB")
        _expect_done(code, "put")
        return True

    def read_into(self, name: str, parts: Sequence[memoryview]) -> Reason | None:
        """Get an object, unless it is of another length."""
        full_name, byte_count = self._name(name), sum(part.nbytes for part in parts)
        with self._client_in_use() as client:
            size = self._size(client, full_name)
            if size != byte_count:
                return size if isinstance(size, Reason) else Reason.WRONG_LENGTH
            found = client.get_buffer(full_name)
            if found is None:
                if self._size(client, full_name) is Reason.ABSENT:
                    return Reason.ABSENT  # somebody has removed it meanwhile
                raise OSError(f"Mooncake knows {byte_count} bytes of a block and does not send them")
            filler = Filler(parts)
            with memoryview(found) as view:
                is_fitting = filler.add(view.cast("B")) and filler.is_full
        return None if is_fitting else Reason.WRONG_LENGTH

    def remove(self, names: Sequence[str]) -> list[bool]:
        """Remove objects, also those that were asked for a moment ago."""
        with self._client_in_use() as client:
            codes = [client.remove(self._name(name), True) for name in names]
        for code in codes:
            if code != _ABSENT:
                _expect_done(code, "remove")
        return [code == _DONE for code in codes]

    def names(self) -> Iterator[tuple[str, int]]:
        """Mooncake does not list.

        Raises:
            ConfigurationError: Always.
        """
        raise ConfigurationError("a mooncake:// tier cannot be looked at from outside: Mooncake does not list names")

    def close(self) -> None:
        """Leave, once the last call has come back: Mooncake's client does not survive to be left during one."""
        with self._guard:
            self._is_closing = True
            self._leave_if_unused()

    @contextmanager
    def _client_in_use(self) -> Iterator[Any]:
        client = self._enter()
        try:
            yield client
        finally:
            with self._guard:
                self._user_count -= 1
                self._leave_if_unused()

    def _enter(self) -> Any:
        with self._guard:
            if self._is_closing:
                raise OSError("this store is closed")
            if self._client is None:
                self._client = self._connect()
            self._user_count += 1
            return self._client

    def _leave_if_unused(self) -> None:
        if self._is_closing and not self._user_count and self._client is not None:
            client, self._client = self._client, None
            client.close()

    def _connect(self) -> Any:
        settings = self._settings
        # Mooncake's setup waits a minute and more for a master that is not there.
        socket.create_connection((settings.master_host, settings.master_port), self._timeout_seconds).close()
        client = self._mooncake.MooncakeDistributedStore()
        code = client.setup(
            settings.host,
            settings.metadata,
            settings.segment_bytes,
            settings.buffer_bytes,
            settings.protocol,
            settings.devices,
            f"{settings.master_host}:{settings.master_port}",
        )
        _expect_done(code, "request to join")
        return client

    def _size(self, client: Any, full_name: str) -> int | Reason:
        size = int(client.get_size(full_name))
        if size == _ABSENT:
            return Reason.ABSENT
        if size < 0:
            _expect_done(size, "request for a length")
        return size

    def _is_there(self, answer: int) -> bool:
        if answer not in (0, 1):
            _expect_done(answer, "request for names")
        return answer == 1

    def _name(self, name: str) -> str:
        return f"{self._prefix}/{name}"


class MooncakeTier(ValueTier):
    """Blocks in a Mooncake Store."""

    extra: ClassVar[str | None] = "mooncake"

    @classmethod
    def open_store(
        cls, url: TierUrl, options: OptionReader, *, timeout_seconds: float, bytes_in_work: int
    ) -> MooncakeStore:
        """Open `mooncake://master:50051`; the options are in docs/tiers.md."""
        if not url.host or url.user or url.password:
            raise ConfigurationError(
                f"{url.redacted} must name a master, and nothing else; write mooncake://HOST:{DEFAULT_PORT}/PREFIX"
            )
        port = url.port or DEFAULT_PORT
        settings = MooncakeSettings(
            master_host=url.host,
            master_port=port,
            metadata=options.text("metadata", "P2PHANDSHAKE"),
            host=options.text("host", "") or _own_address(url.host, port),
            protocol=options.text("protocol", "tcp", choices=("tcp", "rdma")),
            devices=options.text("devices", ""),
            segment_bytes=options.size("segment", 0),
            buffer_bytes=options.size("buffer", max(_SMALLEST_BUFFER_BYTES, 2 * bytes_in_work)),
        )
        prefix = check_prefix(url, url.path.strip("/") or DEFAULT_PREFIX)
        return MooncakeStore(settings, prefix=prefix, timeout_seconds=timeout_seconds)


def _own_address(host: str, port: int) -> str:
    """Return the address of this machine that a connection to the master would come from; sends nothing."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, port))
            return str(probe.getsockname()[0])
    except OSError as exc:
        raise ConfigurationError(f"the Mooncake master's host {host!r} cannot be found: {exc}") from exc


def _expect_done(code: int, what: str) -> None:
    if code != _DONE:
        raise OSError(f"Mooncake's answer to a {what} is the error {code}")
