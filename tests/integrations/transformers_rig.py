"""Tiny models with random weights, and how they compute without us."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest
import torch

from aiokvoffload.integrations.transformers import PrefixCache, RestoredPrefix

transformers: Any = pytest.importorskip("transformers")

VOCABULARY = 97
BLOCK_TOKENS = 4
WINDOW = 10
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "eos_token_id": None,
    "bos_token_id": None,
}
HYBRID = ["sliding_attention", "full_attention"]

MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", {"num_hidden_layers": 2}),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {"num_hidden_layers": 2}),
    "mistral": ("MistralForCausalLM", "MistralConfig", {"num_hidden_layers": 2, "sliding_window": WINDOW}),
    "gemma2": (
        "Gemma2ForCausalLM",
        "Gemma2Config",
        {"num_hidden_layers": 2, "sliding_window": WINDOW, "layer_types": HYBRID},
    ),
    "gemma3": (
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        {"num_hidden_layers": 4, "sliding_window": WINDOW, "layer_types": HYBRID * 2},
    ),
}
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "positions in the attention": ("BloomForCausalLM", "BloomConfig", {"n_layer": 2, "n_head": 4}),
    "keys and values of different sizes": (
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        {"num_hidden_layers": 2, "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 8, "v_head_dim": 8}
        | {"qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2}
        | {"head_dim": 4, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 16, "first_k_dense_replace": 1},
    ),
    "attention sinks": (
        "GptOssForCausalLM",
        "GptOssConfig",
        {"num_hidden_layers": 2, "sliding_window": WINDOW, "num_local_experts": 2, "num_experts_per_tok": 1},
    ),
    "layers that use the cache of others, heads of different sizes": (
        "Gemma4ForCausalLM",
        "Gemma4TextConfig",
        {"num_hidden_layers": 4, "sliding_window": WINDOW, "layer_types": HYBRID * 2, "num_kv_shared_layers": 2}
        | {"vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 8, "global_head_dim": 16},
    ),
    "chunks": (
        "Llama4ForCausalLM",
        "Llama4TextConfig",
        {"num_hidden_layers": 4, "attention_chunk_size": 12, "intermediate_size_mlp": 48, "num_local_experts": 2},
    ),
}
"""What models of other families do differently."""
WITH_WINDOWS = ("mistral", "gemma2", "gemma3")


def tiny_model(name: str = "llama", dtype: torch.dtype = torch.float32, *, seed: int = 0, **changes: Any) -> Any:
    """Return a model whose logits depend on its whole cache."""
    model_class, config_class, options = (MODELS | FAMILIES)[name]
    torch.manual_seed(seed)
    config = getattr(transformers, config_class)(**SIZES | {"initializer_range": 0.5} | options | changes)
    return getattr(transformers, model_class)(config).to(dtype).eval()


def prompt(length: int, seed: int = 0) -> list[int]:
    """Return token ids."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, VOCABULARY, (length,), generator=generator).tolist()


def new_cache(model: Any) -> Any:
    """Return an empty cache that forgets nothing until it is saved."""
    cache = transformers.DynamicCache(config=model.config)
    cache.activate_past_recording()
    return cache


@torch.no_grad()
def forward(model: Any, token_ids: Sequence[int], cache: Any) -> torch.Tensor:
    """Let the model go on with one row, and return its logits."""
    logits: torch.Tensor = model(input_ids=torch.tensor([token_ids]), cache=cache, use_cache=True).logits
    return logits


@torch.no_grad()
def go_on(model: Any, prefix: RestoredPrefix) -> torch.Tensor:
    """Let the model compute what is left of restored prompts, and return its logits."""
    logits: torch.Tensor = model(**prefix.inputs).logits
    return logits


def open_cache(model: Any, **options: Any) -> AbstractAsyncContextManager[PrefixCache]:
    """Return a prefix cache of small blocks."""
    return PrefixCache(model, **{"cpu_bytes": 1 << 20, "block_tokens": BLOCK_TOKENS} | options)
