"""Attention of few queries over the heads of a group at once."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

_NAME = "aiokvoffload-demo"
_FEW_QUERIES = 64
_UNKNOWN_OPTIONS = ("softcap", "position_bias")


def group_queries(model: Any) -> bool:
    """Let a model whose heads share keys compute the attention of few queries group by group; return whether it does.

    Transformers makes a copy of the keys and values for each head as soon as there are two queries. A forward of the
    demo's model over 8 tokens after 512 took a twentieth less time without them.
    """
    if model.config._attn_implementation != "sdpa":
        return False
    AttentionInterface.register(_NAME, attend_in_groups)
    AttentionMaskInterface.register(_NAME, sdpa_mask)
    model.set_attn_implementation(_NAME)
    return True


def attend_in_groups(
    module: Any,
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Attend as PyTorch does for Transformers, with the few queries of all heads of a group in one row of queries.

    Args:
        module: The attention layer.
        queries: `(rows, heads, queries, elements)`.
        keys: `(rows, groups, keys, elements)`.
        values: The same.
        attention_mask: `(rows, 1, queries, keys)`, True for what a query sees; None if that is a triangle, or all.
        scaling: Of the products.
        options: Of Transformers.

    Returns:
        `(rows, queries, heads, elements)`.
    """
    row_count, head_count, query_count, _ = queries.shape
    group_count = keys.shape[1]
    has_few = attention_mask is not None and query_count <= _FEW_QUERIES and group_count < head_count
    if attention_mask is None or not has_few or any(options.get(name) is not None for name in _UNKNOWN_OPTIONS):
        made: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module, queries, keys, values, attention_mask, scaling=scaling, **options
        )
        return made
    heads = head_count // group_count
    attended = torch.nn.functional.scaled_dot_product_attention(
        queries.reshape(row_count, group_count, heads * query_count, -1),
        keys,
        values,
        attn_mask=attention_mask.repeat(1, 1, heads, 1),
        scale=scaling,
    )
    return attended.reshape(row_count, head_count, query_count, -1).transpose(1, 2).contiguous(), None
