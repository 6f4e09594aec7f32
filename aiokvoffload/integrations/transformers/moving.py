"""What restoring and saving have in common."""

from __future__ import annotations

from aiokvoffload.integrations.transformers.compute import ComputeThread
from aiokvoffload.integrations.transformers.layout import CacheLayout
from aiokvoffload.integrations.transformers.scratch import ScratchBlocks
from aiokvoffload.offloader import Offloader


class BlockMover:
    """Moves blocks between caches of a model and an offloader.

    Args:
        offloader: Where they are stored.
        layout: What is cut of a cache.
        scratch: Blocks in between.
        compute: Copies between those and caches.
        limit_blocks: The most blocks of a row that are moved; None for any number.
    """

    def __init__(
        self,
        offloader: Offloader,
        layout: CacheLayout,
        scratch: ScratchBlocks,
        compute: ComputeThread,
        limit_blocks: int | None,
    ) -> None:
        self._offloader = offloader
        self._layout = layout
        self._scratch = scratch
        self._compute = compute
        self._limit_blocks = limit_blocks
        self._block_tokens = scratch.block_tokens
