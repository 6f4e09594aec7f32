"""The attention of the demo's model."""

from __future__ import annotations

from typing import Any

import pytest
import torch

transformers: Any = pytest.importorskip("transformers")

from transformers.integrations.sdpa_attention import sdpa_attention_forward  # noqa: E402  after the skip

from aiokvoffload.cli.demo.attention import attend_in_groups, group_queries  # noqa: E402  imports Transformers

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("counts", [(20, 7), (20, 1), (0, 20), (3, 70)])
@pytest.mark.parametrize("padding", [0, 2])
def test_attention_in_groups_computes_what_transformers_does(
    groups: int, counts: tuple[int, int], padding: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    grouped = 0

    def attend(queries: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
        nonlocal grouped
        grouped += queries.shape[1] == groups < 4
        return genuine(queries, *arguments, **options)

    genuine = torch.nn.functional.scaled_dot_product_attention
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=groups,
        initializer_range=0.5,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    tokens = torch.randint(0, 50, (2, sum(counts)))
    mask = torch.ones_like(tokens)
    mask[1, :padding] = 0

    def logits() -> torch.Tensor:
        cache, found = transformers.DynamicCache(config=config), []
        for start, count in zip((0, counts[0]), counts, strict=True):
            if count:
                seen = {"attention_mask": mask[:, : start + count]} if padding else {}
                made = model(tokens[:, start : start + count], cache=cache, use_cache=True, **seen).logits
                found.append(made[:, padding if start == 0 else 0 :])
        return torch.cat(found, dim=1)

    with torch.no_grad():
        expected = logits()
        assert group_queries(model)
        monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", attend)
        torch.testing.assert_close(logits(), expected, rtol=1e-4, atol=1e-4)
    few = [count for start, count in zip((0, counts[0]), counts, strict=True) if 1 < count <= 64 and (start or padding)]
    assert grouped >= 2 * len(few) * (groups < 4)
    model.set_attn_implementation("eager")
    assert not group_queries(model)


def test_attention_that_knows_more_than_a_mask_is_left_to_transformers() -> None:
    torch.manual_seed(0)
    queries, keys, values = torch.randn(1, 4, 3, 8), torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 8)
    bias = torch.randn(1, 4, 3, 5)
    layer = torch.nn.Module()
    layer.num_key_value_groups = 2  # type: ignore[assignment]  # a plain number, as Transformers' layers have
    mask = torch.randn(1, 1, 3, 5)
    expected, _ = sdpa_attention_forward(layer, queries, keys, values, mask, position_bias=bias)
    made, _ = attend_in_groups(layer, queries, keys, values, mask.repeat(1, 1, 2, 1), position_bias=bias)
    torch.testing.assert_close(made, expected)
