"""A tier is one URL: where it is, and its options."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self, TypeVar
from urllib.parse import parse_qsl, quote, unquote, urlsplit

from aiokvoffload.errors import ConfigurationError
from aiokvoffload.registry import nearest_name
from aiokvoffload.units import parse_byte_size, parse_duration_seconds

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True, repr=False)
class TierUrl:
    """A parsed URL; what it shows of itself contains no credentials and no values of options.

    Attributes:
        scheme: Which tier.
        user: User name, empty for none.
        password: Password, empty for none.
        host: Host, or bucket, as written.
        port: Port, None for the usual one.
        path: Path, percent signs decoded.
        options: What follows the question mark.
    """

    scheme: str
    user: str = ""
    password: str = ""
    host: str = ""
    port: int | None = None
    path: str = ""
    options: tuple[tuple[str, str], ...] = ()

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read a URL.

        Raises:
            ConfigurationError: It is no URL; the message shows no more than its scheme.
        """
        try:
            parts = urlsplit(text)
            port = parts.port
            options = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
        except ValueError:
            parts, port, options = urlsplit(""), None, []
        if not parts.scheme or "://" not in text or parts.fragment:
            raise ConfigurationError(
                "a tier is given as a URL such as file:///var/cache/kv?capacity=200GiB or memory://?capacity=8GiB; "
                f"this one{f', of scheme {parts.scheme!r},' if parts.scheme else ''} cannot be read"
            )
        return cls(
            parts.scheme,
            unquote(parts.username or ""),
            unquote(parts.password or ""),
            (parts.hostname or "") if parts.scheme != "file" else parts.netloc,
            port,
            unquote(parts.path),
            tuple(options),
        )

    @property
    def redacted(self) -> str:
        """The URL without user, password and options."""
        port = "" if self.port is None else f":{self.port}"
        return f"{self.scheme}://{self.host}{port}{quote(self.path)}"

    def __repr__(self) -> str:
        return f"<TierUrl {self.redacted}>"

    def read_options(self) -> OptionReader:
        """Return what reads the options."""
        return OptionReader(self)


class OptionReader:
    """Hands out the options of a URL one by one, and refuses those that nobody has asked for.

    Args:
        url: The URL.
    """

    def __init__(self, url: TierUrl) -> None:
        self._url = url
        self._values: dict[str, str] = {}
        self._known: list[str] = []
        for name, value in url.options:
            if name in self._values:
                raise ConfigurationError(f"{url.redacted}: option {name!r} is given twice")
            self._values[name] = value

    def text(self, name: str, default: str, *, choices: tuple[str, ...] = ()) -> str:
        """Return an option as it is written."""
        value = self._read(name, default, str)
        if choices and value not in choices:
            raise ConfigurationError(f"{self._url.redacted}: {name} is {value!r}, it must be {' or '.join(choices)}")
        return value

    def size(self, name: str, default: int) -> int:
        """Return an option such as `capacity=200GiB`, in bytes."""
        return self._read(name, default, parse_byte_size)

    def seconds(self, name: str, default: float) -> float:
        """Return an option such as `timeout=10s`."""
        return self._read(name, default, parse_duration_seconds)

    def integer(self, name: str, default: int) -> int:
        """Return an option that is a whole number of at least 1."""
        return self._read(name, default, _positive)

    def finish(self) -> None:
        """Refuse what is left.

        Raises:
            ConfigurationError: An option is unknown.
        """
        for name in self._values:
            if name not in self._known:
                raise ConfigurationError(
                    f"{self._url.redacted}: unknown option {name!r}{nearest_name(name, self._known) or '.'} "
                    f"Known: {', '.join(sorted(self._known))}"
                )

    def _read(self, name: str, default: Value, convert: Callable[[str], Value]) -> Value:
        self._known.append(name)
        if name not in self._values:
            return default
        try:
            return convert(self._values[name])
        except ConfigurationError as exc:
            raise ConfigurationError(f"{self._url.redacted}: {name}: {exc}") from exc


def _positive(text: str) -> int:
    if not text.isascii() or not text.isdecimal() or int(text) < 1:
        raise ConfigurationError(f"{text!r} must be a whole number of at least 1")
    return int(text)
