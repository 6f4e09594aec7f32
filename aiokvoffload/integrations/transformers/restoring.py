"""Brings the prefixes of a batch back: matches and pins them, and loads them into a cache through scratch blocks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

import torch

from aiokvoffload.errors import BlocksInFlightError
from aiokvoffload.integrations.transformers.batch import Batch
from aiokvoffload.integrations.transformers.moving import BlockMover
from aiokvoffload.integrations.transformers.prefix import Request
from aiokvoffload.integrations.transformers.scratch import LayerBlocks
from aiokvoffload.keys import OffloadKey
from aiokvoffload.offloader import LoadTicket, TransferHandle
from aiokvoffload.specs import LookupResult

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Found:
    """What a batch can go on from.

    Attributes:
        cache: Holds that.
        column_count: Columns of the padded batch.
        tier_token_counts: For each row, tokens of them that were not in CPU memory.
    """

    cache: Any
    column_count: int
    tier_token_counts: tuple[int, ...]


class Restorer(BlockMover):
    """Fills caches with prefixes that are stored."""

    async def restore(self, batch: Batch, request: Request, new_cache: Callable[[], Any]) -> Found:
        """Fill a new cache with what all rows have; with nothing if a block is lost on the way."""
        keys = [request.keys(self._offloader, row, len(self._layout.groups)) for row in batch.rows]
        with ExitStack() as pins:
            in_memory = [self._tokens_in_memory(row_keys[0]) for row_keys in keys]
            tickets, column_count = await self._match(batch, request, keys, pins)
            filling = Filling(new_cache(), column_count)
            for row, ticket in enumerate(tickets):
                if column_count > batch.padding(row) and not await self._load_row(
                    batch, request, row, keys[row], ticket, filling
                ):
                    return Found(new_cache(), 0, (0,) * len(batch.rows))
        restored = (max(0, column_count - batch.padding(row)) for row in range(len(batch.rows)))
        from_tiers = tuple(max(0, tokens - found) for tokens, found in zip(restored, in_memory, strict=True))
        return Found(filling.cache, column_count, from_tiers)

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
        filling: Filling,
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
                await self._compute.run(self._copy, filling, batch, row, blocks, sizes, firsts)
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

    def _copy(
        self,
        filling: Filling,
        batch: Batch,
        row: int,
        blocks: Sequence[int],
        sizes: Sequence[int],
        firsts: Sequence[int],
    ) -> None:
        """Copy what was loaded into the columns of a row that the layers keep; the first call gives them memory."""
        if not filling.tensors:
            self._give_memory(filling, batch)
        padding = batch.padding(row)
        for group, (size, first) in enumerate(zip(sizes, firsts, strict=True)):
            kept_from = self._layout.groups[group][0].first_column(filling.column_count)
            loaded = range(padding + first * self._block_tokens, padding + (first + size) * self._block_tokens)
            columns = range(max(loaded.start, kept_from), min(loaded.stop, filling.column_count))
            source = range(columns.start - loaded.start, columns.stop - loaded.start)
            for part in self._scratch.parts(group) if columns else ():
                keys, values = (tensor[:, row] for tensor in filling.tensors[part])
                self._scratch.empty(part, blocks[:size], keys, values, source, columns.start - kept_from)

    def _give_memory(self, filling: Filling, batch: Batch) -> None:
        """Give the layers of a cache memory, with room behind the last column where all are kept; padding is zero."""
        from aiokvoffload.integrations.transformers.growing import room_tokens  # imports Transformers

        device, row_count, column_count = self._layout.device, len(batch.rows), filling.column_count
        new = torch.zeros if batch.is_padded else torch.empty  # all columns of a row without padding are copied
        for part in chain.from_iterable(map(self._scratch.parts, range(len(self._layout.groups)))):
            first = part.layers[0]
            kept = column_count - first.first_column(column_count)
            columns = room_tokens(kept) if first.window_tokens is None else kept
            shapes = ((heads, columns, elements) for heads, elements in (first.key_shape, first.value_shape))
            keys_of, values_of = (
                new(len(part.layers), row_count, *shape, dtype=first.dtype, device=device) for shape in shapes
            )
            filling.tensors[part] = keys_of, values_of
            for cut, keys, values in zip(part.layers, keys_of, values_of, strict=True):
                layer = filling.cache.layers[cut.index]
                if layer.is_sliding:
                    layer.lazy_initialization(keys, values)
                    layer.keys, layer.values = keys, values
                    layer.cumulative_length = column_count
                else:
                    layer.adopt(keys, values, column_count)


@dataclass(frozen=True, slots=True)
class Filling:
    """A cache that is being filled.

    Attributes:
        cache: The cache.
        column_count: Columns of the padded batch that it will hold.
        tensors: Memory of the layers' keys and values, `(layers, rows, heads, columns, elements)`, once they have some.
    """

    cache: Any
    column_count: int
    tensors: dict[LayerBlocks, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
