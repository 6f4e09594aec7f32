"""Blocks in an object store: S3 and what speaks like it, Google Cloud Storage, Azure; or a directory, for tests.

Each block is one object. obstore's calls block in the tier's own threads, so that this works in every event loop.
A block is always wanted whole, so ranges of it are not asked for. Needs the extra `s3`.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, ClassVar

from aiokvoffload.errors import ConfigurationError
from aiokvoffload.extras import import_extra
from aiokvoffload.tiers.names import DEFAULT_PREFIX, check_prefix
from aiokvoffload.tiers.outcomes import Reason
from aiokvoffload.tiers.url import OptionReader, TierUrl
from aiokvoffload.tiers.value_store import Filler, ValueStore
from aiokvoffload.tiers.value_tier import ValueTier

EXTRA = "s3"
_PIECE_BYTES = 1 << 20
_FOREVER = ("NoSuchBucket", "The specified container does not exist", "The specified bucket does not exist")
_DIRECTORY_SCHEME = "object+file"


class ObjectStore(ValueStore):
    """Objects of one bucket.

    Args:
        obstore: The library.
        client: Its store.
        prefix: What the names begin with.
        creates_only: The store is told to create objects, and to refuse where there is one; not all can.
    """

    def __init__(self, obstore: Any, client: Any, *, prefix: str, creates_only: bool = True) -> None:
        self._obstore = obstore
        self._client = client
        self._prefix = prefix
        self._creates_only = creates_only

    def check(self) -> None:
        """List a little."""
        exceptions = self._obstore.exceptions
        try:
            next(iter(self._obstore.list(self._client, prefix=self._prefix, chunk_size=1)), None)
        except (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError) as exc:
            raise ConfigurationError(
                f"{self._client!r} refuses to be listed ({_line(exc)}); "
                "give credentials in the environment, such as AWS_ACCESS_KEY_ID, that may list, read and write"
            ) from exc
        except (exceptions.BaseError, FileNotFoundError) as exc:
            if any(words in str(exc) for words in _FOREVER):
                raise ConfigurationError(f"{self._client!r} does not exist; create it, or name another") from exc
            raise OSError(_line(exc)) from exc

    def sizes(self, names: Sequence[str], *, is_use: bool) -> list[int | Reason]:
        """Ask for the head of each object; how long objects stay is a rule of the bucket."""
        return [self._size(name) for name in names]

    def create(self, name: str, parts: Sequence[bytes | memoryview]) -> bool:
        """Put an object in one request."""
        mode = "create" if self._creates_only else "overwrite"
        try:
            with self._errors_are_ours():
                self._obstore.put(self._client, self._path(name), list(parts), mode=mode, use_multipart=False)
        except FileExistsError:
            return False
        return True

    def read_into(self, name: str, parts: Sequence[memoryview]) -> Reason | None:
        """Get an object piece by piece, unless it is of another length."""
        filler = Filler(parts)
        with self._errors_are_ours():
            try:
                found = self._obstore.get(self._client, self._path(name))
            except FileNotFoundError:
                return Reason.ABSENT
            if found.meta["size"] != sum(part.nbytes for part in parts):
                return Reason.WRONG_LENGTH
            for piece in found.stream(min_chunk_size=_PIECE_BYTES):
                if not filler.add(memoryview(piece)):
                    return Reason.WRONG_LENGTH
        return None if filler.is_full else Reason.WRONG_LENGTH

    def remove(self, names: Sequence[str]) -> list[bool]:
        """Delete objects; whether they were there is asked before, as the answers do not say it."""
        return [self._remove(name) for name in names]

    def names(self) -> Iterator[tuple[str, int]]:
        """List all objects."""
        start = self._path("")
        with self._errors_are_ours():
            for page in self._obstore.list(self._client, prefix=self._prefix):
                yield from ((found["path"].removeprefix(start), found["size"]) for found in page)

    def close(self) -> None:
        """Nothing to do: connections close when nobody uses them any more."""

    def _size(self, name: str) -> int | Reason:
        with self._errors_are_ours():
            try:
                return int(self._obstore.head(self._client, self._path(name))["size"])
            except FileNotFoundError:
                return Reason.ABSENT

    def _remove(self, name: str) -> bool:
        if self._size(name) is Reason.ABSENT:
            return False
        with self._errors_are_ours():
            try:
                self._obstore.delete(self._client, self._path(name))
            except FileNotFoundError:
                return False
        return True

    def _path(self, name: str) -> str:
        return f"{self._prefix}/{name}"

    @contextmanager
    def _errors_are_ours(self) -> Iterator[None]:
        exceptions = self._obstore.exceptions
        try:
            yield
        except (exceptions.AlreadyExistsError, exceptions.PreconditionError) as exc:
            raise FileExistsError(errno.EEXIST, _line(exc)) from exc
        except (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError) as exc:
            raise OSError(errno.EROFS, _line(exc)) from exc
        except (exceptions.BaseError, FileNotFoundError) as exc:
            raise OSError(_line(exc)) from exc


class ObjectTier(ValueTier):
    """Blocks in an object store."""

    extra: ClassVar[str | None] = EXTRA

    default_thread_count = 16
    """An object store answers late, but to many at a time."""

    @classmethod
    def open_store(
        cls, url: TierUrl, options: OptionReader, *, timeout_seconds: float, bytes_in_work: int
    ) -> ObjectStore:
        """Open `s3://bucket/prefix?region=eu-central-1`; the options are in docs/tiers.md."""
        obstore = import_extra("obstore", extra=EXTRA, needed_by=f"a {url.scheme}:// tier")
        if url.user or url.password:
            raise ConfigurationError(
                f"{url.redacted}: credentials do not belong into this URL; give them in the environment, such as "
                "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
            )
        creates_only = options.text("create", "conditional", choices=("conditional", "plain")) == "conditional"
        if url.scheme == _DIRECTORY_SCHEME:
            if url.host or not url.path.strip("/"):
                raise ConfigurationError(
                    f"{url.redacted} names no directory; write {_DIRECTORY_SCHEME}:///path, with three slashes"
                )
            client = obstore.store.LocalStore(url.path.rstrip("/"), mkdir=True)
            return ObjectStore(obstore, client, prefix=DEFAULT_PREFIX, creates_only=creates_only)
        if not url.host:
            raise ConfigurationError(f"{url.redacted} names no bucket; write {url.scheme}://BUCKET/PREFIX")
        prefix = check_prefix(url, url.path.strip("/") or DEFAULT_PREFIX)
        try:
            client = _connect(obstore, url, options, timeout_seconds)
        except obstore.exceptions.BaseError as exc:
            raise ConfigurationError(f"{url.redacted} cannot be used: {_line(exc)}") from exc
        return ObjectStore(obstore, client, prefix=prefix, creates_only=creates_only)


def _connect(obstore: Any, url: TierUrl, options: OptionReader, timeout_seconds: float) -> Any:
    """Return a client; what the URL does not say, it takes from the environment."""
    timeout = timedelta(seconds=timeout_seconds)
    client_options: dict[str, Any] = {"timeout": timeout, "connect_timeout": timeout}
    # One try more, for connections that the server has closed; whoever waits has a deadline.
    retry_config = {"max_retries": 1, "retry_timeout": timeout}
    config: dict[str, str] = {}
    if endpoint := options.text("endpoint", ""):
        config["base_url" if url.scheme == "gs" else "endpoint"] = endpoint
        client_options["allow_http"] = endpoint.startswith("http://")
    if url.scheme == "s3" and (region := options.text("region", "")):
        config["region"] = region
    if url.scheme == "az" and (account := options.text("account", "")):
        config["account_name"] = account
    stores = {"s3": obstore.store.S3Store, "gs": obstore.store.GCSStore, "az": obstore.store.AzureStore}
    return stores[url.scheme](url.host, client_options=client_options, retry_config=retry_config, **config)


def _line(exc: Exception) -> str:
    """Return what an error says, without the query of any URL: a signature may be in it."""
    line = str(exc).split("\n", maxsplit=1)[0]
    return re.sub(r"(://[^\s?]*)\?\S*", r"\1", line)[:300]
