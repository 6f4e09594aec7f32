"""Several prompts at once, of different lengths."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from offloader_rig import on_both_loops
from transformers_rig import MODELS, go_on, new_cache, open_cache, prompt, tiny_model

from aiokvoffload.errors import InvalidRequestError

pytestmark = pytest.mark.usefixtures("one_thread")

LENGTHS = (45, 31, 45, 38)
ROWS = [prompt(length, seed) for seed, length in enumerate(LENGTHS)]


@torch.no_grad()
def forward_padded(model: Any, rows: Sequence[Sequence[int]], columns: range, cache: Any) -> torch.Tensor:
    """Let the model compute some columns of rows that are padded on the left, as people do it by hand."""
    width = max(map(len, rows))
    padding = [width - len(row) for row in rows]
    ids = torch.tensor([[0] * count + list(row) for count, row in zip(padding, rows, strict=True)])
    places = torch.tensor([[column - count for column in range(width)] for count in padding])
    logits: torch.Tensor = model(
        input_ids=ids[:, columns.start : columns.stop],
        attention_mask=(places >= 0).long()[:, : columns.stop],
        position_ids=places.clamp(min=0)[:, columns.start : columns.stop],
        cache=cache,
        use_cache=True,
    ).logits
    return logits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", MODELS)
@on_both_loops
async def test_a_ragged_batch_gives_equal_logits(name: str, dtype: torch.dtype) -> None:
    """The column that all can go on from is where the second row, 31 tokens after 14 of padding, has its last block."""
    model = tiny_model(name, dtype)
    column = 14 + 28
    kept = new_cache(model)
    forward_padded(model, ROWS, range(column), kept)
    before = copy.deepcopy(kept)
    forward_padded(model, ROWS, range(column, 45), kept)
    async with open_cache(model) as cache:
        await cache.save(ROWS, kept)
        prefix = await cache.restore(ROWS)
        assert prefix.column_count == column
        assert prefix.token_counts == (42, 28, 42, 35)
        expected = forward_padded(model, ROWS, range(column, 45), before)
        assert torch.equal(go_on(model, prefix)[:, -1], expected[:, -1])


@pytest.mark.asyncio
async def test_the_row_that_has_least_decides() -> None:
    model = tiny_model("gemma3")
    kept = new_cache(model)
    forward_padded(model, [ROWS[0]], range(45), kept)
    async with open_cache(model) as cache:
        await cache.save(ROWS[0], kept)
        assert (await cache.restore([ROWS[0], ROWS[2]])).column_count == 0
        short = ROWS[3][:3]  # begins in column 42, where the first row has 42 tokens
        assert (await cache.restore([ROWS[0], short])).token_counts == (42, 0)


@pytest.mark.asyncio
async def test_rows_that_share_a_prefix_store_it_once() -> None:
    model = tiny_model()
    rows = [ROWS[0], ROWS[0][:24] + ROWS[2][:21]]
    kept = new_cache(model)
    forward_padded(model, rows, range(45), kept)
    async with open_cache(model) as cache:
        assert await cache.save(rows, kept) == 11 + 5
        assert await cache.save(rows, kept) == 0


@pytest.mark.asyncio
async def test_a_tensor_of_prompts_with_its_mask_is_the_same_as_lists() -> None:
    model = tiny_model()
    ids = torch.tensor([[0] * (45 - len(row)) + row for row in ROWS])
    mask = torch.tensor([[0] * (45 - len(row)) + [1] * len(row) for row in ROWS])
    async with open_cache(model) as cache:
        await cache.generate(ids, attention_mask=mask, max_new_tokens=1)
        assert (await cache.restore(ROWS)).token_counts == (42, 28, 42, 35)
        assert (await cache.restore(torch.tensor(ROWS[0]))).token_counts == (44,)
        assert (await cache.restore(torch.tensor([ROWS[0], ROWS[2]]))).token_counts == (44, 44)


@pytest.mark.parametrize(
    ("prompts", "mask", "message"),
    [
        ([], None, "at least one prompt"),
        ([[1, 2], []], None, "at least one token in each"),
        (torch.zeros(1, 2, 3, dtype=torch.long), None, "whole numbers of shape"),
        (torch.zeros(1, 2), None, "whole numbers of shape"),
        (torch.ones(1, 3, dtype=torch.long), torch.tensor([[1, 1, 0]]), "pad prompts on the left"),
        (torch.ones(1, 3, dtype=torch.long), torch.tensor([[0, 0, 0]]), "at least one token in each"),
        (torch.ones(1, 3, dtype=torch.long), torch.tensor([[1, 1]]), "attention_mask has shape"),
        ([1, 2], torch.tensor([[1, 1]]), "belongs to a tensor"),
    ],
)
@pytest.mark.asyncio
async def test_what_is_no_batch_is_refused(prompts: Any, mask: torch.Tensor | None, message: str) -> None:
    async with open_cache(tiny_model()) as cache:
        with pytest.raises(InvalidRequestError, match=message):
            await cache.restore(prompts, attention_mask=mask)


@pytest.mark.asyncio
async def test_generating_for_a_ragged_batch_gives_each_row_the_tokens_it_gets_alone() -> None:
    model = tiny_model()
    heard: list[tuple[int | None, ...]] = []
    async with open_cache(model) as cache:
        alone = [(await cache.generate(row, max_new_tokens=6)).token_ids[0] for row in ROWS]
        ends = alone[1][2]  # ends the second row early, and whoever else has it
        together = await cache.generate(
            ROWS, max_new_tokens=6, end_tokens=[ends], on_tokens=lambda tokens: heard.append(tuple(tokens))
        )
    expected = [row[: row.index(ends) + 1] if ends in row else row for row in alone]
    assert [list(row) for row in together.token_ids] == [list(row) for row in expected]
    assert heard[0] == tuple(row[0] for row in expected)
    assert [tokens[1] for tokens in heard] == [*expected[1], *[None] * (len(heard) - len(expected[1]))]
    assert together.restored_tokens == (42, 28, 42, 35)
