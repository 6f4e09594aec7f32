"""Bytes that follow from a block's key, so that a loaded block can be checked without a copy of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aiokvoffload.errors import ConfigurationError, InvalidRequestError

Words = NDArray[np.uint64]
Rows = Sequence[int] | NDArray[np.integer]

WORD_BYTES = 8
WORD_DTYPE = np.dtype("<u8")
CHUNK_BYTES = 256 * 1024
"""Working memory of one step, so that it stays in the processor's cache."""


def seed_of(key: bytes) -> int:
    """Return the 64 bits from which all bytes of the block with this key follow."""
    return int.from_bytes(blake2b(key, digest_size=WORD_BYTES).digest(), "little")


def seeds_of(keys: Iterable[bytes]) -> Words:
    """Return `seed_of` of each key as an array."""
    return np.fromiter(map(seed_of, keys), dtype=np.uint64)


class BlockPattern:
    """Writes and checks the pages of blocks.

    Word `w` of layer `l` of the block with seed `s` is `mix(s ^ mix(2**63 + l)) ^ mix(w)`. `mix` is a permutation of
    64 bits, so no two words of a page are equal, and words of different pages are equal only by chance (1 in 2**64): a
    swapped, shifted or stale page, a swapped layer, a swapped word and a zeroed page all show.
    An object holds no changing state and may be used by several threads at once.

    Args:
        page_bytes: Bytes of one block in one layer, a multiple of 8.
        layer_count: Layers, each with a page per block.

    Raises:
        ConfigurationError: `page_bytes` is not a positive multiple of 8, or `layer_count` is not positive.
    """

    def __init__(self, page_bytes: int, layer_count: int) -> None:
        if page_bytes < 1 or page_bytes % WORD_BYTES:
            raise ConfigurationError(f"page_bytes is {page_bytes}, it must be a positive multiple of {WORD_BYTES}")
        if layer_count < 1:
            raise ConfigurationError(f"layer_count is {layer_count}, it must be at least 1")
        self.page_bytes = page_bytes
        self.layer_count = layer_count
        # Layers and positions are mixed from ranges that do not overlap, so they cannot cancel each other out.
        self._layers = _mix(np.arange(1 << 63, (1 << 63) + layer_count, dtype=np.uint64))
        self._positions = _mix(np.arange(page_bytes // WORD_BYTES, dtype=np.uint64)).astype(WORD_DTYPE)

    def fill(self, seeds: Words, layer: int, pages: NDArray[Any], rows: Rows | None = None) -> None:
        """Write one layer's pages of several blocks in place.

        Args:
            seeds: The blocks' seeds, shape (n,).
            layer: Index of the layer.
            pages: Array of single bytes, shape (n, page_bytes); rows may be apart, the bytes of a row may not.
            rows: Where each block's page is: the block with `seeds[i]` at `pages[rows[i]]`. `pages` may then have
                any number of rows. None: block `i` at `pages[i]`.

        Raises:
            InvalidRequestError: Shapes do not fit each other, or layer or row do not exist.
        """
        words, bases, where = self._prepare(seeds, layer, pages, rows)
        if where is None:
            np.bitwise_xor(bases, self._positions, out=words)
            return
        for part in self._chunks(len(bases)):
            words[where[part]] = bases[part] ^ self._positions

    def mismatches(self, seeds: Words, layer: int, pages: NDArray[Any], rows: Rows | None = None) -> NDArray[np.bool_]:
        """Return for each block whether its page differs anywhere from what `fill` writes; arguments as there."""
        words, bases, where = self._prepare(seeds, layer, pages, rows)
        differs = np.zeros(len(bases), dtype=np.bool_)
        for part in self._chunks(len(bases)):
            found = words[part if where is None else where[part]] ^ self._positions
            differs[part] = (found != bases[part]).any(axis=1)
        return differs

    def _prepare(
        self, seeds: Words, layer: int, pages: NDArray[Any], rows: Rows | None
    ) -> tuple[Words, Words, NDArray[np.intp] | None]:
        """Return the pages as words, the first factor of each block as a column, and the rows as an array."""
        if not 0 <= layer < self.layer_count:
            raise InvalidRequestError(f"layer {layer} does not exist, there are {self.layer_count}")
        if seeds.ndim != 1 or seeds.dtype != np.uint64:
            raise InvalidRequestError(f"seeds must be one row of uint64, they are {seeds.dtype} of shape {seeds.shape}")
        if (
            pages.ndim != 2
            or pages.itemsize != 1
            or pages.shape[1] != self.page_bytes
            or (pages.size and pages.strides[1] != 1)
        ):
            raise InvalidRequestError(
                f"pages must be rows of {self.page_bytes} adjacent bytes, they are {pages.dtype} of shape "
                f"{pages.shape} with strides {pages.strides}"
            )
        where = None if rows is None else np.asarray(rows, dtype=np.intp)
        row_count = len(pages) if where is None else len(where)
        if row_count != len(seeds):
            raise InvalidRequestError(f"there are {len(seeds)} seeds but {row_count} pages")
        if where is not None and where.size and not 0 <= where.min() <= where.max() < len(pages):
            raise InvalidRequestError(f"rows must be between 0 and {len(pages) - 1}")
        bases = _mix(seeds ^ self._layers[layer]).astype(WORD_DTYPE)[:, np.newaxis]
        return pages.view(WORD_DTYPE), bases, where

    def _chunks(self, block_count: int) -> Iterator[slice]:
        step = max(1, CHUNK_BYTES // self.page_bytes)
        for start in range(0, block_count, step):
            yield slice(start, start + step)


def _mix(values: Words) -> Words:
    """Permute 64 bits: the generator step and finalizer of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014)."""
    mixed = values + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))
