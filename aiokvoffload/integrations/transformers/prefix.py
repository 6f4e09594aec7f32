"""What a model goes on from: a cache that holds the prefix of a batch, and the tokens that are left."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from aiokvoffload.integrations.transformers.batch import Batch
from aiokvoffload.keys import OffloadKey
from aiokvoffload.offloader import Offloader
from aiokvoffload.specs import ReqContext


@dataclass(frozen=True, slots=True)
class Request:
    """Who asks for the prefixes of a batch, in one access however often.

    Attributes:
        contexts: One for each row.
        adapter: The adapter that shapes the keys and values, if any.
        salt: Whatever else must keep requests apart.
    """

    contexts: tuple[ReqContext, ...]
    adapter: str = ""
    salt: str = ""

    def keys(self, offloader: Offloader, token_ids: Sequence[int], group_count: int) -> list[list[OffloadKey]]:
        """Return the keys of all whole blocks of a row, for each KV group."""
        keys = offloader.keys(token_ids, adapter=self.adapter, salt=self.salt)
        count = len(keys) // group_count
        return [keys[group * count : (group + 1) * count] for group in range(group_count)]


@dataclass(frozen=True, slots=True, eq=False)
class RestoredPrefix:
    """A cache that holds the first columns of a batch; the first forward computes the rest.

    Attributes:
        batch: The prompts.
        cache: A `DynamicCache`, yours. Its sliding-window layers record what slides out, so that `save` finds it.
        column_count: Columns of the padded batch that it holds, fewer than there are.
        token_counts: How many tokens of each row these are.
        tier_token_counts: How many of them were not in CPU memory when they were asked for.
        inputs: What the first forward takes: `model(**prefix.inputs)`.
        request: Who asked.
    """

    batch: Batch
    cache: Any
    column_count: int
    token_counts: tuple[int, ...]
    tier_token_counts: tuple[int, ...]
    inputs: dict[str, Any]
    request: Request


def forward_inputs(
    batch: Batch, cache: Any, first_column: int, device: torch.device, padding_id: int
) -> dict[str, Any]:
    """Return what a forward over a batch takes from a column on; a mask and positions only where rows are padded."""
    inputs: dict[str, Any] = {
        "input_ids": batch.input_ids(first_column, padding_id).to(device),
        "cache": cache,
        "use_cache": True,
    }
    if batch.is_padded:
        inputs["attention_mask"] = batch.attention_mask().to(device)
        inputs["position_ids"] = batch.position_ids(first_column).to(device)
    return inputs
