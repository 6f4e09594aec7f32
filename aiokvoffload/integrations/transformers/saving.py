"""Cuts the caches of a batch into blocks and stores those that are not stored yet."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from aiokvoffload.errors import BlocksInFlightError
from aiokvoffload.integrations.transformers.batch import Batch
from aiokvoffload.integrations.transformers.moving import BlockMover
from aiokvoffload.integrations.transformers.prefix import Request
from aiokvoffload.integrations.transformers.scratch import first_kept_column, runs
from aiokvoffload.keys import OffloadKey
from aiokvoffload.offloader import TransferHandle
from aiokvoffload.specs import LookupResult, StoreOutcome

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Piece:
    """Neighbouring blocks of one row and KV group that go through scratch blocks together."""

    row: int
    group: int
    blocks: range


class Saver(BlockMover):
    """Stores what caches hold."""

    async def save(
        self, batch: Batch, request: Request, cache: Any, token_counts: Sequence[int], branch_points: Iterable[int]
    ) -> int:
        """Store the whole blocks of all rows, and return how many were stored now; cancelled, those under way land.

        Args:
            batch: The tokens.
            request: Whose they are.
            cache: A cache that holds at least the counted tokens of each row.
            token_counts: How many tokens of each row are worth storing.
            branch_points: Positions at which windows are kept too.
        """
        keys = [request.keys(self._offloader, row, len(self._layout.groups)) for row in batch.rows]
        points = tuple(branch_points)
        handles = [
            await self._store(batch, request, keys[row][piece.group], cache, piece)
            for row, token_count in enumerate(token_counts)
            for piece in self._pieces(row, batch.padding(row), keys[row], cache, token_count, points)
        ]
        for handle in handles:
            try:
                await handle
            except BlocksInFlightError as exc:
                _logger.warning("blocks of a prefix may not have been stored: %s", exc)
        return sum(handle.outcomes.count(StoreOutcome.ACCEPTED) for handle in handles)

    def _pieces(
        self,
        row: int,
        padding: int,
        keys: list[list[OffloadKey]],
        cache: Any,
        token_count: int,
        branch_points: tuple[int, ...],
    ) -> Iterator[Piece]:
        """Return the blocks to store, no more at a time than there are scratch blocks."""
        limit = token_count // self._block_tokens if self._limit_blocks is None else self._limit_blocks
        # The same prompt again goes on one token before its end, which may be a block earlier.
        points = (token_count, token_count - 1, *branch_points)
        ends = {min(limit, min(point, token_count) // self._block_tokens) for point in points}
        kv_groups = self._layout.kv_groups(self._block_tokens)
        for group, layers in enumerate(self._layout.groups):
            kept_from = max(first_kept_column(cache.layers[layer.index]) for layer in layers)
            first_kept = -(-max(0, kept_from - padding) // self._block_tokens)
            needed = kv_groups[group].blocks_needed(self._block_tokens)
            wanted = sorted(
                {block for end in ends for block in range(0 if needed is None else max(0, end - needed), end)}
            )
            results = self._offloader.manager.lookup_nowait([keys[group][block] for block in wanted])
            missing = [
                block
                for block, result in zip(wanted, results, strict=True)
                if block >= first_kept and result is LookupResult.MISS
            ]
            yield from (Piece(row, group, run) for run in runs(missing, self._scratch.block_count))

    async def _store(
        self, batch: Batch, request: Request, keys: Sequence[OffloadKey], cache: Any, piece: Piece
    ) -> TransferHandle:
        """Start to store blocks; the cache is not needed any more when this ends."""
        blocks = await self._scratch.take(len(piece.blocks))
        try:
            column = batch.padding(piece.row) + piece.blocks.start * self._block_tokens
            await self._compute.run(self._scratch.fill, piece.group, blocks, cache, piece.row, column)
            handle = self._offloader.store_soon(
                keys[piece.blocks.start : piece.blocks.stop],
                blocks,
                request.contexts[piece.row],
                first_block=piece.blocks.start,
            )
        except BaseException:
            self._scratch.give_back(blocks)
            raise
        handle.on_idle(lambda _: self._scratch.give_back(blocks))
        return handle
