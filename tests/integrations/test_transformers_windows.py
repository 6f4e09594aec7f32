"""Of a layer with a sliding window, only what the window reaches is kept and needed."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers_rig import (
    BLOCK_TOKENS,
    WINDOW,
    forward,
    go_on,
    new_cache,
    open_cache,
    prompt,
    tiny_model,
    transformers,
)

from aiokvoffload import LookupResult
from aiokvoffload.integrations.transformers import PrefixCache

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.asyncio]

TOKENS = prompt(45)


def kept_blocks(cache: PrefixCache, tokens: list[int]) -> list[list[int]]:
    """Return which blocks of each KV group are stored."""
    keys = cache.offloader.keys(tokens)
    count = len(tokens) // BLOCK_TOKENS
    results = cache.offloader.manager.lookup_nowait(keys)
    return [
        [block for block in range(count) if results[start + block] is LookupResult.HIT]
        for start in range(0, len(keys), count)
    ]


def filled(model: Any, tokens: list[int]) -> Any:
    """Return a cache that has seen some tokens, and forgot none."""
    cache = new_cache(model)
    forward(model, tokens, cache)
    return cache


async def test_a_block_outside_the_window_is_neither_stored_nor_required() -> None:
    """A window of 10 needs 4 blocks of 4 before the end; 45 tokens end after block 10, 44 tokens after 44 or 40."""
    model = tiny_model("gemma3")
    async with open_cache(model) as cache:
        await cache.save(TOKENS, filled(model, TOKENS))
        assert kept_blocks(cache, TOKENS) == [list(range(11)), [7, 8, 9, 10]]
        assert (await cache.restore(TOKENS)).token_counts == (44,)


async def test_a_model_of_one_window_keeps_nothing_else() -> None:
    model = tiny_model("mistral")
    async with open_cache(model) as cache:
        await cache.save(TOKENS[:44], filled(model, TOKENS[:44]))
        assert kept_blocks(cache, TOKENS) == [[6, 7, 8, 9, 10]]  # from 44 tokens, and from 40 for the same prompt again
        prefix = await cache.restore(TOKENS)
        assert prefix.token_counts == (44,)
        assert [layer.keys.shape[-2] for layer in prefix.cache.layers] == [WINDOW - 1] * 2


async def test_prompts_that_part_at_a_branch_point_share_what_comes_before() -> None:
    model = tiny_model("gemma3")
    other = TOKENS[:22] + prompt(10, seed=1)
    before = filled(model, TOKENS[:20])
    async with open_cache(model) as cache:
        await cache.save(TOKENS, filled(model, TOKENS))
        assert (await cache.restore(other)).token_counts == (0,)
        record = copy.deepcopy(before)
        forward(model, TOKENS[20:], record)
        await cache.save(TOKENS, record, branch_points=[22])
        assert kept_blocks(cache, TOKENS)[1] == [1, 2, 3, 4, 7, 8, 9, 10]
        prefix = await cache.restore(other)
        assert prefix.token_counts == (20,)
    async with open_cache(model) as cache:  # bytes of one run: the other cache computed the prompt in one piece
        await cache.save(TOKENS, record, branch_points=[22])
        prefix = await cache.restore(other)
        assert torch.equal(go_on(model, prefix), forward(model, other[20:], before))


async def test_what_has_slid_out_of_a_cache_cannot_be_kept() -> None:
    model = tiny_model("gemma3")
    slid = transformers.DynamicCache(config=model.config)
    forward(model, TOKENS, slid)
    async with open_cache(model) as cache:
        await cache.save(TOKENS, slid)
        assert kept_blocks(cache, TOKENS) == [list(range(11)), [9, 10]]
        assert (await cache.restore(TOKENS)).token_counts == (0,)


async def test_a_cache_without_windows_serves_a_model_that_has_some() -> None:
    """`DynamicCache()` without a configuration keeps all tokens of all layers."""
    model = tiny_model("gemma3")
    full = transformers.DynamicCache()
    forward(model, TOKENS[:44], full)
    async with open_cache(model) as cache:
        await cache.save(TOKENS[:44], full)
        prefix = await cache.restore(TOKENS)
        assert prefix.token_counts == (44,)
        assert torch.equal(go_on(model, prefix), forward(model, TOKENS[44:], filled(model, TOKENS[:44])))


async def test_the_record_of_a_restored_cache_ends_when_it_is_saved() -> None:
    model = tiny_model("gemma3")
    async with open_cache(model) as cache:
        prefix = await cache.restore(TOKENS)
        go_on(model, prefix)
        window = prefix.cache.layers[0]
        assert window.keys.shape[-2] == 45
        await cache.save(TOKENS, prefix)
        assert window.keys.shape[-2] == WINDOW - 1
        assert window.get_seq_length() == 45
        again = await cache.restore(TOKENS)
        assert again.token_counts == (44,)
