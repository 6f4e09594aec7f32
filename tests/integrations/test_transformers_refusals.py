"""What cannot be cut into blocks is refused, with what to do instead."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers_rig import SIZES, forward, new_cache, open_cache, prompt, tiny_model, transformers

from aiokvoffload import CacheIdentity
from aiokvoffload.errors import ConfigurationError, InvalidRequestError
from aiokvoffload.integrations.transformers import PrefixCache

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.asyncio]

TOKENS = prompt(20)
BERT = {"vocab_size": 97, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}


def encoder_decoder() -> Any:
    config = transformers.T5Config(vocab_size=97, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2)
    return transformers.T5ForConditionalGeneration(config).eval()


def recurrent() -> Any:
    config = transformers.MambaConfig(vocab_size=97, hidden_size=16, num_hidden_layers=2, state_size=4)
    return transformers.MambaForCausalLM(config).eval()


def recurrent_and_attention() -> Any:
    config = transformers.JambaConfig(**SIZES | {"num_hidden_layers": 4, "num_experts": 2, "use_mamba_kernels": False})
    return transformers.JambaForCausalLM(config).eval()


def linear_attention() -> Any:
    config = transformers.Qwen3NextConfig(
        **SIZES
        | {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
        | {
            "num_experts": 2,
            "num_experts_per_tok": 1,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
        }
        | {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
    )
    return transformers.Qwen3NextForCausalLM(config).eval()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (encoder_decoder, "has an encoder, .* give a decoder-only model"),
        (recurrent, "is a LinearAttentionLayer, .* use a model whose layers all keep plain keys and values"),
        (recurrent_and_attention, "layer 0 is a LinearAttentionLayer"),
        (linear_attention, "layer 0 is a LinearAttentionLayer, .* or serve this one without a PrefixCache"),
        (
            lambda: torch.nn.Linear(2, 2),
            "Linear is no causal language model of Transformers; give one, such as AutoModelForCausalLM",
        ),
        (lambda: tiny_model().train(), r"training mode, .* call model.eval\(\)"),
        (
            lambda: transformers.BertModel(transformers.BertConfig(**BERT)).eval(),
            "BertModel is no causal language model",
        ),
    ],
)
async def test_a_model_that_cannot_be_cut_is_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        async with PrefixCache(make(), cpu_bytes=1 << 20):
            pass


def static_cache(model: Any) -> Any:
    return transformers.StaticCache(config=model.config, max_cache_len=32)


def encoder_decoder_cache(model: Any) -> Any:
    return transformers.EncoderDecoderCache(transformers.DynamicCache(), transformers.DynamicCache())


def quantized_layer(model: Any) -> Any:
    """Return a cache with a layer that quantizes; how does not matter, as it is never asked to."""
    cache = new_cache(model)
    utilities = transformers.cache_utils
    quantized = type("Quantized", (utilities.BaseQuantizedLayer,), {"_quantize": None, "_dequantize": None})
    forward(model, TOKENS, cache)
    cache.layers[1] = quantized()
    return cache


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (static_cache, r"StaticCache cannot be cut into blocks; use DynamicCache\(config=model.config\)"),
        (encoder_decoder_cache, "EncoderDecoderCache cannot be cut into blocks"),
        (lambda _: None, "NoneType cannot be cut into blocks"),
        (quantized_layer, "layer 1 is a Quantized, which cannot be cut into blocks of tokens"),
        (new_cache, "layer 0 holds nothing; let the model fill all layers"),
    ],
)
async def test_a_cache_that_cannot_be_cut_is_refused(make: Callable[[Any], Any], message: str) -> None:
    model = tiny_model()
    async with open_cache(model) as cache:
        with pytest.raises(InvalidRequestError, match=message):
            await cache.save(TOKENS, make(model))


async def test_a_cache_that_is_offloaded_layer_by_layer_is_refused() -> None:
    model = tiny_model()
    offloading = new_cache(model)
    forward(model, TOKENS, offloading)
    offloading.offloading = True
    async with open_cache(model) as cache:
        with pytest.raises(InvalidRequestError, match="an offloading DynamicCache cannot be cut into blocks"):
            await cache.save(TOKENS, offloading)


async def test_a_cache_that_does_not_fit_model_or_tokens_is_refused() -> None:
    model = tiny_model()
    kept = new_cache(model)
    forward(model, TOKENS, kept)
    shallow, wide, half = tiny_model(num_hidden_layers=1), tiny_model(head_dim=16), tiny_model(dtype=torch.bfloat16)
    async with open_cache(model) as cache:
        with pytest.raises(InvalidRequestError, match="holds 20 tokens, but the longest row has 19"):
            await cache.save(TOKENS[:19], kept)
        with pytest.raises(InvalidRequestError, match="but the tokens and the model have"):
            await cache.save([TOKENS, TOKENS], kept)
        for other, message in ((shallow, "a cache of 1 layers"), (wide, "2, 16"), (half, "bfloat16")):
            foreign = new_cache(other)
            forward(other, TOKENS, foreign)
            with pytest.raises(InvalidRequestError, match=message):
                await cache.save(TOKENS, foreign)
        uneven = new_cache(model)
        forward(model, TOKENS, uneven)
        uneven.layers[0].crop(-1)
        with pytest.raises(InvalidRequestError, match=r"hold \[19, 20\] tokens"):
            await cache.save(TOKENS, uneven)
        assert cache.offloader.statistics().manager.stored_blocks == 0


async def test_without_transformers_the_message_is_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = tiny_model()
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ConfigurationError, match=r"run: pip install 'aiokvoffload\[transformers\]'"):
        PrefixCache(model, cpu_bytes=1 << 20)


async def test_weights_that_are_not_in_memory_need_a_name() -> None:
    model = tiny_model()
    model.register_parameter("elsewhere", torch.nn.Parameter(torch.empty(32, device="meta")))
    with pytest.raises(ConfigurationError, match="the weights of elsewhere are not in memory; name the model"):
        async with PrefixCache(model, cpu_bytes=1 << 20):
            pass
    async with PrefixCache(model, cpu_bytes=1 << 20, identity=CacheIdentity(model="named")) as cache:
        assert cache.offloader.identity.model == "named"
