"""A store of values by name, such as a distributed cache: what a tier needs of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

from aiokvoffload.tiers.outcomes import Reason


class ValueStore(ABC):
    """Values by name, each created in one step and never changed. All of it blocks, and is called from any thread.

    Whatever goes wrong is an `OSError` whose text shows no credentials: `ENOSPC` where there is no room for a value,
    `EROFS` where values may be read only.

    Attributes:
        names_per_call: Names that are worth asking for together.
    """

    names_per_call: int = 1

    @abstractmethod
    def check(self) -> None:
        """Ask for a sign of life.

        Raises:
            ConfigurationError: The store has answered that it will not serve us, such as for a wrong password.
            OSError: It has not answered.
        """

    @abstractmethod
    def sizes(self, names: Sequence[str], *, is_use: bool) -> list[int | Reason]:
        """Return how long values are, or why they are none of ours.

        Args:
            names: Of the values.
            is_use: They are used, and should stay longer.
        """

    @abstractmethod
    def create(self, name: str, parts: Sequence[bytes | memoryview]) -> bool:
        """Store a value that consists of some parts; return False, and store nothing, if there is one."""

    @abstractmethod
    def read_into(self, name: str, parts: Sequence[memoryview]) -> Reason | None:
        """Read a value into some parts of exactly its length together, or return why not.

        What the store sends is bounded before it is read: a longer value is not read to its end.
        """

    @abstractmethod
    def remove(self, names: Sequence[str]) -> list[bool]:
        """Remove values; return for each whether it was there."""

    @abstractmethod
    def names(self) -> Iterator[tuple[str, int]]:
        """Yield the name and the length of every value.

        Raises:
            ConfigurationError: The store does not list its values.
        """

    @abstractmethod
    def close(self) -> None:
        """Give back what the store holds; calls that have not come back may go on."""


class Filler:
    """Fills buffers one after the other with pieces of any length.

    Args:
        parts: The buffers.
    """

    def __init__(self, parts: Sequence[memoryview]) -> None:
        self._empty = [part for part in parts if part.nbytes]

    @property
    def is_full(self) -> bool:
        """Nothing is missing."""
        return not self._empty

    def add(self, piece: bytes | memoryview) -> bool:
        """Add a piece; return False if there is no room for all of it."""
        rest = memoryview(piece)
        while rest and self._empty:
            part = self._empty[0]
            byte_count = min(part.nbytes, rest.nbytes)
            part[:byte_count] = rest[:byte_count]
            rest = rest[byte_count:]
            if byte_count == part.nbytes:
                del self._empty[0]
            else:
                self._empty[0] = part[byte_count:]
        return not rest
