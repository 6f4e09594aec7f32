"""Logits with a restored prefix are those of the same model that goes on from the cache it had, to the bit."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from offloader_rig import on_both_loops
from transformers_rig import (
    BLOCK_TOKENS,
    FAMILIES,
    MODELS,
    WITH_WINDOWS,
    forward,
    go_on,
    new_cache,
    open_cache,
    prompt,
    tiny_model,
    transformers,
)

pytestmark = pytest.mark.usefixtures("one_thread")

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", MODELS)
@on_both_loops
async def test_a_restored_prefix_gives_equal_logits(name: str, dtype: torch.dtype) -> None:
    model = tiny_model(name, dtype)
    tokens = prompt(45)
    kept = new_cache(model)
    forward(model, tokens[:44], kept)
    async with open_cache(model) as cache:
        assert await cache.save(tokens[:44], kept)
        prefix = await cache.restore(tokens)
        assert prefix.token_counts == (44,)
        expected = forward(model, tokens[44:], kept)
        assert torch.equal(go_on(model, prefix), expected)
        for token in prompt(20, seed=1):  # and stays equal, until every window has slid
            assert torch.equal(forward(model, [token], prefix.cache), forward(model, [token], kept))


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.asyncio
async def test_models_of_other_families_are_exact_too(name: str) -> None:
    model = tiny_model(name)
    tokens = prompt(45)
    kept = new_cache(model)
    forward(model, tokens[:44], kept)
    async with open_cache(model) as cache:
        await cache.save(tokens[:44], kept)
        prefix = await cache.restore(tokens)
        assert prefix.token_counts == (44,)
        assert torch.equal(go_on(model, prefix), forward(model, tokens[44:], kept))
        for token in prompt(14, seed=1):
            assert torch.equal(forward(model, [token], prefix.cache), forward(model, [token], kept))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.asyncio
async def test_a_cache_that_records_and_one_that_does_not_give_equal_logits(name: str) -> None:
    model = tiny_model(name)
    tokens = prompt(60)
    plain = transformers.DynamicCache(config=model.config)
    forward(model, tokens[:44], plain)
    recorded = new_cache(model)
    forward(model, tokens[:44], recorded)
    async with open_cache(model) as cache:
        await cache.save(tokens[:44], recorded)
        prefix = await cache.restore(tokens)
        assert torch.equal(go_on(model, prefix), forward(model, tokens[44:], plain))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.asyncio
async def test_a_block_of_zeros_is_noticed(name: str) -> None:
    """Shows that the comparison can fail."""
    model = tiny_model(name)
    tokens = prompt(45)
    kept = new_cache(model)
    forward(model, tokens[:44], kept)
    spoilt = copy.deepcopy(kept)
    spoilt.layers[-1].values[:, :, -BLOCK_TOKENS:] = 0
    async with open_cache(model) as cache:
        await cache.save(tokens[:44], spoilt)
        prefix = await cache.restore(tokens)
        assert prefix.token_counts == (44,)
        assert not torch.equal(go_on(model, prefix), forward(model, tokens[44:], kept))


@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.parametrize(
    ("length", "restored"), [(1, 0), (4, 0), (5, 4), (43, 40), (44, 40), (45, 44), (47, 44), (48, 44)]
)
@pytest.mark.asyncio
async def test_prompts_that_end_on_and_beside_a_block_boundary(name: str, length: int, restored: int) -> None:
    """At least one token is left to be computed."""
    model = tiny_model(name)
    tokens = prompt(length)
    kept = new_cache(model)
    expected = forward(model, tokens[:restored], kept) if restored else None
    before = copy.deepcopy(kept)
    forward(model, tokens[restored:], kept)
    async with open_cache(model) as cache:
        await cache.save(tokens, kept)
        prefix = await cache.restore(tokens)
        assert prefix.token_counts == (restored,)
        assert prefix.inputs["input_ids"].shape == (1, length - restored)
        expected = forward(model, tokens[restored:], before)
        assert torch.equal(go_on(model, prefix), expected)


@pytest.mark.parametrize("name", MODELS)
@on_both_loops
async def test_prefixes_longer_than_the_scratch_pass_in_parts(name: str) -> None:
    """With windows, what does not pass at once is not restored: the scratch limits the prefix."""
    model = tiny_model(name)
    tokens = prompt(45)
    limit = 24 if name in WITH_WINDOWS else 44
    kept = new_cache(model)
    forward(model, tokens[:limit], kept)
    before = copy.deepcopy(kept)
    forward(model, tokens[limit:], kept)
    async with open_cache(model, scratch_tokens=24) as cache:
        await cache.save(tokens, kept)
        prefix = await cache.restore(tokens)
        assert prefix.token_counts == (limit,)
        assert torch.equal(go_on(model, prefix), forward(model, tokens[limit:], before))


@pytest.mark.parametrize("name", MODELS)
@on_both_loops
async def test_a_prefix_survives_a_restart_in_a_directory(name: str, tmp_path: Path) -> None:
    tokens = prompt(45)
    tiers = [f"file://{tmp_path}/{name}?capacity=64MiB&keep_free=1MiB"]
    model = tiny_model(name, torch.bfloat16)
    kept = new_cache(model)
    forward(model, tokens[:44], kept)
    async with open_cache(model, tiers=tiers) as cache:
        await cache.save(tokens[:44], kept)
        await cache.offloader.wait_written()
    async with open_cache(tiny_model(name, torch.bfloat16), tiers=tiers) as cache:
        prefix = await cache.restore(tokens)
        assert prefix.token_counts == prefix.tier_token_counts == (44,)
        assert torch.equal(go_on(model, prefix), forward(model, tokens[44:], kept))
    async with open_cache(tiny_model(name, torch.bfloat16, seed=1), tiers=tiers) as cache:
        assert (await cache.restore(tokens)).token_counts == (0,)  # other weights, other prefixes
