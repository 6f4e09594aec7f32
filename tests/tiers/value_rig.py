"""A tier over values in a directory, and ways to hold up its store or to let it fail."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from aiokvoffload.keys import CacheIdentity
from aiokvoffload.testing.strategies import make_keys
from aiokvoffload.testing.tier_contract import BLOCK_BYTES, IDENTITY, payload
from aiokvoffload.tiers.names import block_id, block_name, identity_name
from aiokvoffload.tiers.object import ObjectStore, ObjectTier
from aiokvoffload.tiers.outcomes import BlockResult, Reason
from aiokvoffload.tiers.value_store import ValueStore

obstore: Any = pytest.importorskip("obstore", reason="needs the extra s3")


def directory_store(path: Path) -> ObjectStore:
    return ObjectStore(obstore, obstore.store.LocalStore(path), prefix="aiokvoffload")


class Rig:
    """A tier over a directory, and the file of each of its blocks."""

    def __init__(self, path: Path, store: ValueStore | None = None) -> None:
        self.path = path
        self.tier = ObjectTier(store or directory_store(path), IDENTITY, url="object+file:///test")

    def file(self, number: int, identity: CacheIdentity = IDENTITY) -> Path:
        place = block_id(identity_name(identity), block_name(make_keys(number)[0]))
        return self.path / "aiokvoffload" / place

    def put(self, *numbers: int) -> tuple[BlockResult, ...]:
        return self.tier.wait(self.tier.start_put(make_keys(*numbers), [payload(number) for number in numbers]))

    def get(self, number: int) -> BlockResult:
        buffer = bytearray(BLOCK_BYTES)
        result = self.tier.wait(self.tier.start_get_into(make_keys(number), [buffer]))[0]
        assert not result.is_good or buffer == payload(number)
        return result

    def contains(self, number: int) -> BlockResult:
        return self.tier.wait(self.tier.start_contains(make_keys(number)))[0]


class GatedStore(ValueStore):
    """Passes everything on to another store, while its gate is open.

    Args:
        store: The other one.
    """

    def __init__(self, store: ValueStore) -> None:
        self._store = store
        self.names_per_call = store.names_per_call
        self.gate = threading.Event()
        self.gate.set()
        self.reached = threading.Event()

    def check(self) -> None:
        self._pass("check").check()

    def sizes(self, names: Sequence[str], *, is_use: bool) -> list[int | Reason]:
        return self._pass("sizes").sizes(names, is_use=is_use)

    def create(self, name: str, parts: Sequence[bytes | memoryview]) -> bool:
        return self._pass("create").create(name, parts)

    def read_into(self, name: str, parts: Sequence[memoryview]) -> Reason | None:
        return self._pass("read_into").read_into(name, parts)

    def remove(self, names: Sequence[str]) -> list[bool]:
        return self._pass("remove").remove(names)

    def names(self) -> Iterator[tuple[str, int]]:
        return self._pass("names").names()

    def close(self) -> None:
        self._store.close()

    def _pass(self, operation: str) -> ValueStore:
        if not self.gate.is_set():
            self.reached.set()
            self.gate.wait()
        return self._store


class FaultyStore(GatedStore):
    """Answers with an error where it is told to."""

    def __init__(self, store: ValueStore) -> None:
        super().__init__(store)
        self.error: Exception | None = None
        self.faulty: set[str] | None = None
        """The operations that fail; None for all."""

    def _pass(self, operation: str) -> ValueStore:
        if self.error is not None and (self.faulty is None or operation in self.faulty):
            raise self.error
        return super()._pass(operation)


def flip(stored: bytearray, position: int) -> bytearray:
    stored[position] ^= 1
    return stored
