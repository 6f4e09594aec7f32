"""Brings the prefixes of a batch back: matches and pins them, and loads them into a cache through scratch blocks."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from aiokvoffload.errors import BlocksInFlightError
from aiokvoffload.integrations.transformers.batch import Batch
from aiokvoffload.integrations.transformers.moving import BlockMover
from aiokvoffload.integrations.transformers.prefix import Request
from aiokvoffload.keys import OffloadKey
from aiokvoffload.offloader import LoadTicket, TransferHandle
from aiokvoffload.specs import LookupResult

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Found:
    """What a batch can go on from.

    Attributes:
        column_count: Columns of the padded batch.
        tier_token_counts: For each row, tokens of them that were not in CPU memory.
    """

    column_count: int
    tier_token_counts: tuple[int, ...]


class Restorer(BlockMover):
    """Fills caches with prefixes that are stored."""

    async def restore(self, batch: Batch, request: Request, cache: Any) -> Found:
        """Fill an empty cache with what all rows have; with nothing if a block is lost on the way."""
        nothing = Found(0, (0,) * len(batch.rows))
        keys = [request.keys(self._offloader, row, len(self._layout.groups)) for row in batch.rows]
        with ExitStack() as pins:
            in_memory = [self._tokens_in_memory(row_keys[0]) for row_keys in keys]
            tickets, column_count = await self._match(batch, request, keys, pins)
            if not column_count:
                return nothing
            tensors: Tensors = {}
            for row, ticket in enumerate(tickets):
                if column_count > batch.padding(row) and not await self._load_row(
                    batch, request, row, keys[row], ticket, column_count, tensors
                ):
                    return nothing
        await self._compute.run(self._install, cache, tensors, column_count)
        restored = (max(0, column_count - batch.padding(row)) for row in range(len(batch.rows)))
        return Found(
            column_count, tuple(max(0, tokens - found) for tokens, found in zip(restored, in_memory, strict=True))
        )

    async def _match(
        self, batch: Batch, request: Request, keys: Sequence[list[list[OffloadKey]]], pins: ExitStack
    ) -> tuple[list[LoadTicket], int]:
        """Pin what the rows can go on from, all up to the same column, and return it with that column.

        A row that has more than another gives up what lies behind that column. Layers with a window need the last
        blocks before the end, so what such a row has is matched again, up to the block that the column lies in.
        """
        counts = [self._most_blocks(row) for row in batch.rows]
        tickets: dict[int, LoadTicket] = {}
        while True:
            for row, count in enumerate(counts):
                if row not in tickets:
                    tickets[row] = pins.enter_context(self._prepare(request, row, keys[row], count))
            for ticket in tickets.values():
                await ticket.ready()
            column_count = min(batch.padding(row) + ticket.token_count for row, ticket in tickets.items())
            for row, ticket in list(tickets.items()):
                wanted = -(-max(0, column_count - batch.padding(row)) // self._block_tokens)
                if wanted * self._block_tokens < ticket.token_count:
                    tickets.pop(row).abort()
                    counts[row] = wanted
            if len(tickets) == len(counts):
                return [tickets[row] for row in range(len(counts))], column_count

    async def _load_row(
        self,
        batch: Batch,
        request: Request,
        row: int,
        keys: list[list[OffloadKey]],
        ticket: LoadTicket,
        column_count: int,
        tensors: Tensors,
    ) -> bool:
        """Load the pinned blocks of a row, as many at a time as there are scratch blocks; return whether they came."""
        block_count, most = ticket.token_count // self._block_tokens, self._scratch.block_count
        for start in range(0, block_count, most):
            end = min(block_count, start + most)
            with ticket if block_count <= most else self._prepare(request, row, keys, end, start) as piece:
                await piece.ready()
                if piece.result is not LookupResult.HIT or piece.token_count != end * self._block_tokens:
                    return False  # a reset came between
                blocks = await self._scratch.take(max(piece.group_sizes))
                sizes, firsts = piece.group_sizes, piece.block_indices
                try:
                    handle = piece.start([block for size in sizes for block in blocks[:size]])
                except BaseException:
                    self._scratch.give_back(blocks)
                    raise
            try:
                if not (await handle).success:
                    return False
                await self._compute.run(self._copy, tensors, batch, row, blocks, sizes, firsts, column_count)
            except BlocksInFlightError as exc:
                _logger.warning("a prefix is computed again: %s", exc)
                return False
            finally:
                handle.cancel()
                handle.on_idle(partial(self._give_back, blocks))
        return True

    def _give_back(self, blocks: Sequence[int], handle: TransferHandle) -> None:
        self._scratch.give_back(blocks)

    def _prepare(
        self, request: Request, row: int, keys: list[list[OffloadKey]], end: int, start: int = 0
    ) -> LoadTicket:
        return self._offloader.prepare_load(
            [key for group in keys for key in group[:end]],
            request.contexts[row],
            resident_tokens=start * self._block_tokens,
        )

    def _most_blocks(self, row: Sequence[int]) -> int:
        """Return how many blocks of a row may be restored: at least one token is left to be computed."""
        count = (len(row) - 1) // self._block_tokens
        return count if self._limit_blocks is None else min(count, self._limit_blocks)

    def _tokens_in_memory(self, keys: Sequence[OffloadKey]) -> int:
        results = self._offloader.manager.lookup_nowait(keys)
        count = next((place for place, result in enumerate(results) if result is not LookupResult.HIT), len(keys))
        return count * self._block_tokens

    def _new_tensors(self, batch: Batch, column_count: int) -> Tensors:
        """Return memory for each layer, with room behind the last column where all are kept; padding is zero."""
        from aiokvoffload.integrations.transformers.growing import room_tokens  # imports Transformers

        device, row_count = self._layout.device, len(batch.rows)
        new = torch.zeros if batch.is_padded else torch.empty  # all columns of a row without padding are copied
        tensors = {}
        for layer in self._layout.layers:
            first = layer.first_column(column_count)
            columns = room_tokens(column_count) if layer.window_tokens is None else column_count - first
            shapes = ((heads, columns, elements) for heads, elements in (layer.key_shape, layer.value_shape))
            keys, values = (new(row_count, *shape, dtype=layer.dtype, device=device) for shape in shapes)
            tensors[layer.index] = keys, values
        return tensors

    def _copy(
        self,
        tensors: Tensors,
        batch: Batch,
        row: int,
        blocks: Sequence[int],
        sizes: Sequence[int],
        firsts: Sequence[int],
        column_count: int,
    ) -> None:
        """Copy what was loaded into the columns of a row that the layers keep; the first call makes the tensors."""
        if not tensors:
            tensors.update(self._new_tensors(batch, column_count))
        padding = batch.padding(row)
        for group, size, first in zip(self._layout.groups, sizes, firsts, strict=True):
            kept_from = group[0].first_column(column_count)
            loaded = range(padding + first * self._block_tokens, padding + (first + size) * self._block_tokens)
            columns = range(max(loaded.start, kept_from), min(loaded.stop, column_count))
            source = range(columns.start - loaded.start, columns.stop - loaded.start)
            for layer in group if columns else ():
                keys, values = (tensor[row] for tensor in tensors[layer.index])
                self._scratch.empty(layer, blocks[:size], keys, values, source, columns.start - kept_from)

    def _install(self, cache: Any, tensors: Tensors, column_count: int) -> None:
        """Make tensors those of a cache's layers, as if the model had filled them."""
        for index, (keys, values) in tensors.items():
            layer = cache.layers[index]
            if layer.is_sliding:
                layer.lazy_initialization(keys, values)
                layer.keys, layer.values = keys, values
                layer.cumulative_length = column_count
            else:
                layer.adopt(keys, values, column_count)


Tensors = dict[int, tuple[torch.Tensor, torch.Tensor]]
"""Memory of the keys and values of each layer, `(rows, heads, columns, elements)`."""
