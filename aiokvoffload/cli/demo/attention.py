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

    Transformers copies keys and values for each head as soon as there are two queries, and PyTorch turns the mask into
    numbers in each layer.
    """
    if model.config._attn_implementation != "sdpa":
        return False
    AttentionInterface.register(_NAME, attend_in_groups)
    AttentionMaskInterface.register(_NAME, mask_for_groups)
    model.set_attn_implementation(_NAME)
    return True


def mask_for_groups(*, q_length: int, config: Any, dtype: torch.dtype, **options: Any) -> torch.Tensor | None:
    """Return Transformers' mask; that of few queries as numbers to add, once for each head that shares keys."""
    mask: torch.Tensor | None = sdpa_mask(q_length=q_length, config=config, dtype=dtype, **options)
    if mask is None or q_length > _FEW_QUERIES:
        return mask
    heads = config.num_attention_heads // (getattr(config, "num_key_value_heads", None) or config.num_attention_heads)
    hidden = torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -torch.inf)
    return hidden.repeat(1, 1, heads, 1)


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
        attention_mask: Of `mask_for_groups`.
        scaling: Of the products.
        options: Of Transformers.

    Returns:
        `(rows, queries, heads, elements)`.
    """
    row_count, head_count, query_count, _ = queries.shape
    group_count = keys.shape[1]
    heads = head_count // group_count
    is_known = not any(options.get(name) is not None for name in _UNKNOWN_OPTIONS)
    if attention_mask is None or attention_mask.shape[2] != heads * query_count or heads == 1 or not is_known:
        mask = None if attention_mask is None else attention_mask[:, :, :query_count]
        made: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module, queries, keys, values, mask, scaling=scaling, **options
        )
        return made
    attended = torch.nn.functional.scaled_dot_product_attention(
        queries.reshape(row_count, group_count, heads * query_count, -1),
        keys,
        values,
        attn_mask=attention_mask,
        scale=scaling,
    )
    return attended.reshape(row_count, head_count, query_count, -1).transpose(1, 2).contiguous(), None
