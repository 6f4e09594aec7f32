"""Which number, such as a slot, belongs to which key, in steps that do not grow with what is held.

A dict of a million entries is rebuilt as a whole now and then, which takes tens of milliseconds, and it waits for
memory several times for each key, one key after the other. So a large index is a table that is set-associative, as the
caches of processors are: the hash of a key chooses a set of cells and a tag, and only cells of that set with that tag
are looked at. A call handles all its keys in one pass over arrays, so that the waits for memory overlap, and nothing is
ever rebuilt. A small index is a dict: with all of it in the processor's caches, that is faster.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from itertools import compress, repeat
from typing import Any

import numpy as np
import numpy.typing as npt

from aiokvoffload.keys import OffloadKey

NumberArray = npt.NDArray[np.int64]
Places = tuple[NumberArray, npt.NDArray[np.uint32]]
"""The set and the tag of each key."""

NOT_FOUND = -1
"""The number of a key that is not there."""

DICT_KEYS = 32_768
"""Up to so many keys, a dict is rebuilt, or freed, in less than a millisecond."""

_SET_CELLS = 16
"""With four bytes of a tag for each, a set fits into one line of a processor's cache."""

_NUMBERS_PER_SET = 8
"""With half of the cells in use, one key in a thousand finds its set full."""

_EMPTY = 0
_IN_DICT = -1
_TAG_SHIFT = 32

_FEW_KEYS = 4
"""Up to so many keys are faster handled one by one."""

_CLEANED_AT_ONCE = 65_536
"""So many tags from before a reset are overwritten by each call that puts keys."""

_REMEMBERED_KEYS = 1024
"""So many keys of a call are remembered; to let go of a million would take milliseconds."""

_RECENT_KEYS = 8_192
"""So many keys that were asked for one by one are remembered, for engines that ask for the same ones in every step."""


class KeyIndex(ABC):
    """Keys and their numbers, both ways.

    Args:
        number_count: Numbers are below this.

    Attributes:
        number_of: Returns the number of one key, or None; for those who ask key by key, without a detour.
    """

    number_of: Callable[[OffloadKey], int | None]

    def __init__(self, number_count: int) -> None:
        self._key_of: npt.NDArray[np.object_] = np.empty(number_count, dtype=object)

    @abstractmethod
    def find(self, keys: Sequence[OffloadKey]) -> NumberArray:
        """Return the number of each key, `NOT_FOUND` for unknown ones."""

    @abstractmethod
    def get(self, key: OffloadKey) -> int:
        """Return the number of one key, or `NOT_FOUND`."""

    def keys_of(self, numbers: NumberArray) -> list[OffloadKey]:
        """Return the keys of numbers, also of those dropped since they were put."""
        keys: list[OffloadKey] = self._key_of[numbers].tolist()
        return keys

    @abstractmethod
    def put(self, keys: Sequence[OffloadKey], numbers: NumberArray) -> None:
        """Note the numbers of unknown keys; a number that has a key must be dropped before."""

    @abstractmethod
    def drop(self, numbers: NumberArray) -> None:
        """Forget the keys of numbers, each of which must have one."""

    @abstractmethod
    def take(self, numbers: NumberArray) -> list[OffloadKey]:
        """Forget the keys of numbers, and return them."""

    @abstractmethod
    def clear(self) -> None:
        """Forget all keys, at once."""


class SmallKeyIndex(KeyIndex):
    """An index in a dict."""

    def __init__(self, number_count: int) -> None:
        super().__init__(number_count)
        self._number_of: dict[OffloadKey, int] = {}
        self.number_of = self._number_of.get

    def find(self, keys: Sequence[OffloadKey]) -> NumberArray:
        """Return the number of each key, `NOT_FOUND` for unknown ones."""
        if self._number_of.keys().isdisjoint(keys):
            return _none_found(len(keys))
        return np.fromiter(map(self._number_of.get, keys, repeat(NOT_FOUND)), np.int64, len(keys))

    def get(self, key: OffloadKey) -> int:
        """Return the number of one key."""
        return self._number_of.get(key, NOT_FOUND)

    def put(self, keys: Sequence[OffloadKey], numbers: NumberArray) -> None:
        """Note the numbers of unknown keys."""
        self._key_of[numbers] = keys
        self._number_of.update(zip(keys, numbers.tolist(), strict=True))

    def drop(self, numbers: NumberArray) -> None:
        """Forget the keys of numbers."""
        self.take(numbers)

    def take(self, numbers: NumberArray) -> list[OffloadKey]:
        """Forget the keys of numbers, and return them."""
        number_of, keys = self._number_of, self.keys_of(numbers)
        for key in keys:
            del number_of[key]
        return keys

    def clear(self) -> None:
        """Forget all keys."""
        self._number_of.clear()


class _TagTables:
    """Two tables of tags: one in use, and one that will be all zeros when that has to be cleared.

    A new table in its place would be one whose memory is met for the first time: as numpy asks the system for huge
    pages, each of which takes a millisecond and more, the first call after a reset would wait for all of them.

    Args:
        tag_count: Tags in a table.
    """

    def __init__(self, tag_count: int) -> None:
        self.used, self._spare = (_aligned_zeros(tag_count) for _ in range(2))
        self._stale_count = 0

    def swap(self) -> None:
        """Put the other table into use."""
        while self._stale_count:
            self.clean_some()
        self.used, self._spare = self._spare, self.used
        self._stale_count = len(self._spare)

    def clean_some(self) -> None:
        """Overwrite a part of what was in use before the swap, if any is left."""
        if self._stale_count:
            first = max(0, self._stale_count - _CLEANED_AT_ONCE)
            self._spare[first : self._stale_count] = _EMPTY
            self._stale_count = first


class LargeKeyIndex(KeyIndex):
    """An index in a set-associative table; the few keys whose set is full are in a dict beside it."""

    def __init__(self, number_count: int) -> None:
        super().__init__(number_count)
        self._set_count = number_count // _NUMBERS_PER_SET + 1
        self._number_in: npt.NDArray[np.int32] = np.zeros(self._set_count * _SET_CELLS, dtype=np.int32)
        self._cell_of: npt.NDArray[np.int32] = np.zeros(number_count, dtype=np.int32)
        self._tables = _TagTables(self._set_count * _SET_CELLS)
        self._placed: list[OffloadKey] = []
        self._places: Places = (_none_found(0), np.empty(0, dtype=np.uint32))
        self._recent: dict[OffloadKey, int] = {}
        self.number_of = self._recent_or_stored
        self._start()

    def clear(self) -> None:
        """Forget all keys, at once."""
        # Keys and numbers stay behind in the arrays; no tag leads to them before they are overwritten.
        self._tables.swap()
        self._start()

    def _start(self) -> None:
        self._tag_in = self._tables.used
        self._tags = self._tag_in.reshape(self._set_count, _SET_CELLS)
        self._excess_of: npt.NDArray[np.uint16] = np.zeros(self._set_count, dtype=np.uint16)
        self._excess: dict[OffloadKey, int] = {}
        self._recent.clear()

    # Looking

    def find(self, keys: Sequence[OffloadKey]) -> NumberArray:
        """Return the number of each key, `NOT_FOUND` for unknown ones."""
        if len(keys) <= _FEW_KEYS:
            return np.fromiter(map(self.get, keys), np.int64, len(keys))
        sets, tags = self._places_of(keys)
        is_alike = self._tags.take(sets, axis=0) == tags[:, None]
        if not np.count_nonzero(is_alike):
            none = _none_found(len(keys))
            self._find_aside(keys, sets, none)
            return none
        cells = sets * _SET_CELLS + is_alike.argmax(axis=1)
        is_tagged = self._tag_in[cells] == tags
        numbers: NumberArray = self._number_in[cells].astype(np.int64)
        if np.count_nonzero(is_tagged) < len(keys):
            numbers[~is_tagged] = NOT_FOUND
            self._find_aside(keys, sets, numbers)
            keys = list(compress(keys, is_tagged))
        tagged: list[OffloadKey] = self._key_of[numbers[is_tagged]].tolist()
        if tagged != (keys if isinstance(keys, list) else list(keys)):
            positions = np.flatnonzero(is_tagged).tolist()
            for position, key, other in zip(positions, keys, tagged, strict=True):
                if key != other:  # two keys with the same tag in one set
                    numbers[position] = self.get(key)
        return numbers

    def _find_aside(self, keys: Sequence[OffloadKey], sets: NumberArray, numbers: NumberArray) -> None:
        """Look beside the table for keys without a number whose sets were full once."""
        if self._excess:
            for position in self._excess_of[sets].nonzero()[0].tolist():
                if numbers[position] == NOT_FOUND:
                    numbers[position] = self._excess.get(keys[position], NOT_FOUND)

    def get(self, key: OffloadKey) -> int:
        """Return the number of one key."""
        home, tag = self._place_of(key)
        tags: list[int] = self._tags[home].tolist()
        if tag in tags:
            for place in range(tags.index(tag), _SET_CELLS):
                if tags[place] == tag:
                    number = self._number_in.item(home * _SET_CELLS + place)
                    if self._key_of[number] == key:
                        return number
        return self._excess.get(key, NOT_FOUND) if self._excess else NOT_FOUND

    def _recent_or_stored(self, key: OffloadKey) -> int | None:
        """Return the number of one key, and remember it until it is dropped."""
        number = self._recent.get(key)
        if number is None:
            number = self.get(key)
            if number == NOT_FOUND:
                return None
            if len(self._recent) >= _RECENT_KEYS:
                self._recent.clear()
            self._recent[key] = number
        return number

    # Changing

    def put(self, keys: Sequence[OffloadKey], numbers: NumberArray) -> None:
        """Note the numbers of unknown keys; a number that has a key must be dropped before."""
        self._tables.clean_some()
        self._key_of[numbers] = keys
        sets, tags = self._places_of(keys)
        while len(numbers) > _FEW_KEYS:
            cells = sets * _SET_CELLS + (self._tags.take(sets, axis=0) == _EMPTY).argmax(axis=1)
            is_empty = self._tag_in[cells] == _EMPTY
            if np.count_nonzero(is_empty) < len(cells):
                self._put_aside(numbers[~is_empty], sets[~is_empty])
                numbers, sets, tags, cells = numbers[is_empty], sets[is_empty], tags[is_empty], cells[is_empty]
            self._number_in[cells] = numbers
            is_settled = self._number_in[cells] == numbers  # of several keys for one cell, the last one has it
            if np.count_nonzero(is_settled) == len(cells):
                self._tag_in[cells] = tags
                self._cell_of[numbers] = cells
                return
            self._tag_in[cells[is_settled]] = tags[is_settled]
            self._cell_of[numbers[is_settled]] = cells[is_settled]
            numbers, sets, tags = numbers[~is_settled], sets[~is_settled], tags[~is_settled]
        for number, home, tag in zip(numbers.tolist(), sets.tolist(), tags.tolist(), strict=True):
            self._put_one(number, home, tag)

    def take(self, numbers: NumberArray) -> list[OffloadKey]:
        """Forget the keys of numbers, and return them."""
        self.drop(numbers)
        return self.keys_of(numbers)

    def drop(self, numbers: NumberArray) -> None:
        """Forget the keys of numbers, each of which must have one."""
        cells = self._cell_of[numbers]
        if self._recent:
            for key in self.keys_of(numbers):
                self._recent.pop(key, None)
        if self._excess and cells.min(initial=0) == _IN_DICT:
            for number in numbers[cells == _IN_DICT].tolist():
                key = self._key_of[number]
                del self._excess[key]
                self._excess_of[self._place_of(key)[0]] -= 1
            cells = cells[cells != _IN_DICT]
        self._tag_in[cells] = _EMPTY

    def _put_one(self, number: int, home: int, tag: int) -> None:
        """Note one number, whose key belongs into a set."""
        tags: list[int] = self._tags[home].tolist()
        if _EMPTY not in tags:
            self._put_aside(np.array([number]), np.array([home]))
            return
        cell = home * _SET_CELLS + tags.index(_EMPTY)
        self._number_in[cell], self._tag_in[cell], self._cell_of[number] = number, tag, cell

    def _put_aside(self, numbers: NumberArray, sets: NumberArray) -> None:
        """Note numbers whose keys find their sets full."""
        for number, home in zip(numbers.tolist(), sets.tolist(), strict=True):
            self._excess[self._key_of[number]] = number
            self._excess_of[home] += 1
            self._cell_of[number] = _IN_DICT

    # Hashes

    def _places_of(self, keys: Sequence[OffloadKey]) -> Places:
        """Return the set and the tag of each key; keys are mostly looked for before they are put."""
        if keys == self._placed[-len(keys) :]:
            return self._places[0][-len(keys) :], self._places[1][-len(keys) :]
        hashes: NumberArray = np.fromiter(map(hash, keys), np.int64, len(keys))
        tags: npt.NDArray[Any] = hashes >> _TAG_SHIFT
        places = hashes % self._set_count, tags.astype(np.uint32) | np.uint32(1)
        if len(keys) <= _REMEMBERED_KEYS:
            self._placed, self._places = list(keys), places
        return places

    def _place_of(self, key: OffloadKey) -> tuple[int, int]:
        hashed = hash(key)
        return hashed % self._set_count, hashed >> _TAG_SHIFT & 0xFFFFFFFF | 1


def _none_found(count: int) -> NumberArray:
    numbers = np.empty(count, dtype=np.int64)
    numbers.fill(NOT_FOUND)
    return numbers


def _aligned_zeros(count: int) -> npt.NDArray[np.uint32]:
    """Return zeros that begin where a line of the processor's cache does, so that no set needs two."""
    zeros = np.empty(count + _SET_CELLS, dtype=np.uint32)
    zeros.fill(0)  # unlike `zeros` of numpy, this meets the memory now
    first = -zeros.ctypes.data // zeros.itemsize % _SET_CELLS
    return zeros[first : first + count]


def make_index(number_count: int) -> KeyIndex:
    """Return an index for that many numbers."""
    return SmallKeyIndex(number_count) if number_count <= DICT_KEYS else LargeKeyIndex(number_count)
