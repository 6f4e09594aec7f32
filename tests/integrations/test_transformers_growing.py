"""Layers that grow in place hold what Transformers' own would."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers_rig import forward, new_cache, prompt, tiny_model, transformers

from aiokvoffload.integrations.transformers.growing import GrowingLayer, new_growing_cache, room_tokens

ROWS, HEADS, KEY_ELEMENTS, VALUE_ELEMENTS = 2, 3, 4, 5

STEPS = st.one_of(
    st.tuples(st.just("update"), st.integers(1, 90)),
    st.tuples(st.just("crop"), st.integers(1, 20)),
    st.tuples(st.just("reorder"), st.permutations(range(ROWS))),
    st.tuples(st.just("reset"), st.none()),
)


def tokens(count: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    keys = torch.rand(ROWS, HEADS, count, KEY_ELEMENTS, generator=generator)
    return keys, torch.rand(ROWS, HEADS, count, VALUE_ELEMENTS, generator=generator)


def adopting(count: int) -> GrowingLayer:
    """Return a layer that was given so many tokens with room behind them."""
    layer = GrowingLayer()
    keys, values = (
        torch.full((ROWS, HEADS, room_tokens(count), size), torch.nan) for size in (KEY_ELEMENTS, VALUE_ELEMENTS)
    )
    keys[:, :, :count], values[:, :, :count] = tokens(count)
    layer.adopt(keys, values, count)
    return layer


def equal(one: Any, other: Any) -> bool:
    return torch.equal(one.keys, other.keys) and torch.equal(one.values, other.values)


@given(steps=st.lists(STEPS, max_size=12), adopted_count=st.integers(0, 100))
def test_whatever_is_done_the_tokens_are_those_of_a_dynamic_layer(
    steps: list[tuple[str, Any]], adopted_count: int
) -> None:
    growing, plain = adopting(adopted_count) if adopted_count else GrowingLayer(), transformers.DynamicLayer()
    if adopted_count:
        plain.update(*tokens(adopted_count))
    for seed, (step, amount) in enumerate(steps):
        if step == "update":
            added = tokens(amount, seed)
            for found, expected in zip(growing.update(*added), plain.update(*added), strict=True):
                assert torch.equal(found, expected)
        elif plain.get_seq_length() and step == "crop":
            for layer in (growing, plain):
                layer.crop(-min(amount, plain.get_seq_length() - 1))
        elif plain.get_seq_length() and step == "reorder":
            for layer in (growing, plain):
                layer.reorder_cache(torch.tensor(amount))
        elif step == "reset":
            for layer in (growing, plain):
                layer.reset()
        assert growing.get_seq_length() == plain.get_seq_length()
        assert not plain.get_seq_length() or equal(growing, plain)


def test_tokens_stay_where_they_are_while_there_is_room() -> None:
    layer = adopting(100)
    places = {layer.keys.data_ptr(), layer.values.data_ptr()}
    for seed in range(room_tokens(100) - 100):
        layer.update(*tokens(1, seed))
    assert {layer.keys.data_ptr(), layer.values.data_ptr()} == places
    layer.update(*tokens(1))
    assert {layer.keys.data_ptr(), layer.values.data_ptr()}.isdisjoint(places)


def test_growing_copies_each_token_a_bounded_number_of_times() -> None:
    layer, moved_tokens = GrowingLayer(), 0
    place = 0
    for seed in range(2000):
        layer.update(*tokens(1, seed))
        if layer.keys.data_ptr() != place:
            place, moved_tokens = layer.keys.data_ptr(), moved_tokens + seed
    assert moved_tokens < 10 * 2000


def test_a_deep_copy_grows_by_itself() -> None:
    layer = adopting(10)
    other = copy.deepcopy(layer)
    layer.update(*tokens(5, 1))
    other.update(*tokens(5, 2))
    plain = transformers.DynamicLayer()
    plain.update(*tokens(10))
    plain.update(*tokens(5, 1))
    assert equal(layer, plain)
    assert not equal(other, plain)


def test_gradients_flow_as_with_a_dynamic_layer() -> None:
    layer = GrowingLayer()
    parts = [tokens(3, seed)[0].requires_grad_() for seed in range(2)]
    squares = [layer.update(keys, tokens(3)[1])[0].square().sum() for keys in parts]
    for keys, gradient, times in zip(parts, torch.autograd.grad(squares[0] + squares[1], parts), (4, 2), strict=True):
        assert torch.equal(gradient, times * keys)


def test_layers_with_a_window_stay_as_they_are() -> None:
    model = tiny_model("gemma3")
    kinds = [type(layer).__name__ for layer in new_growing_cache(model.config).layers]
    assert kinds == ["DynamicSlidingWindowLayer", "GrowingLayer"] * 2


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_logits_are_those_with_a_dynamic_cache(dtype: torch.dtype) -> None:
    model = tiny_model("llama", dtype)
    growing, plain = new_growing_cache(model.config), new_cache(model)
    for part in (prompt(40), prompt(7, 1), *([token] for token in prompt(90, 2))):
        assert torch.equal(forward(model, part, growing), forward(model, part, plain))
