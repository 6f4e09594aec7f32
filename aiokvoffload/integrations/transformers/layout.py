"""What of a model's cache is cut into blocks, found out by asking the model.

A full-attention layer keeps every token. A sliding-window layer keeps what its window reaches, window - 1 tokens; all
layers of one window form a KV group. A layer that uses the cache of another has nothing of its own. Whatever else a
layer may keep (a recurrent state, quantized tokens, a fixed buffer) cannot be cut at a token, and is refused.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from functools import cached_property
from types import ModuleType
from typing import Any, Protocol

import torch

from aiokvoffload.errors import ConfigurationError, InvalidRequestError
from aiokvoffload.extras import import_extra
from aiokvoffload.kv_caches import KVGroup, KVGroupKind

EXTRA = "transformers"
NEEDED_BY = "offloading for Transformers"


class CausalModel(Protocol):
    """What is used of a causal language model of Transformers."""

    config: Any
    training: bool

    @property
    def dtype(self) -> torch.dtype:
        """Of its weights."""

    @property
    def device(self) -> torch.device:
        """Where it is."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Compute logits, and fill the cache."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute logits, and fill the cache."""

    def named_parameters(self) -> Any:
        """Iterate over names and parameters."""


@dataclass(frozen=True, slots=True)
class CutLayer:
    """A layer whose tokens are cut into blocks.

    Attributes:
        index: Its position in the model's cache.
        window_tokens: Tokens of its attention window; None if it attends to all.
        key_shape: Heads, and elements of each, of a token's keys.
        value_shape: The same of its values.
        dtype: Of both.
    """

    index: int
    window_tokens: int | None
    key_shape: tuple[int, int]
    value_shape: tuple[int, int]
    dtype: torch.dtype

    def first_column(self, column_count: int) -> int:
        """Return the first of `column_count` columns that the layer still keeps."""
        return 0 if self.window_tokens is None else max(0, column_count - (self.window_tokens - 1))


@dataclass(frozen=True)
class CacheLayout:
    """All that is cut of a model's cache.

    Attributes:
        layers: The layers that are cut, those of one KV group next to each other.
        layer_count: Layers of the cache, with those that have nothing of their own.
        device: Where the cache is.
    """

    layers: tuple[CutLayer, ...]
    layer_count: int
    device: torch.device

    @cached_property
    def groups(self) -> tuple[tuple[CutLayer, ...], ...]:
        """The layers of each KV group: full attention first, then window by window."""
        windows = sorted({layer.window_tokens or 0 for layer in self.layers})
        return tuple(
            tuple(layer for layer in self.layers if (layer.window_tokens or 0) == window) for window in windows
        )

    @property
    def has_windows(self) -> bool:
        """Whether some layers forget tokens."""
        return any(layer.window_tokens is not None for layer in self.layers)

    def column_count(self, cache: Any, row_count: int) -> int:
        """Return how many columns a cache holds.

        Raises:
            InvalidRequestError: It is not of this model, or of another number of rows.
        """
        if len(cache.layers) != self.layer_count:
            raise InvalidRequestError(
                f"a cache of {len(cache.layers)} layers is not of this model, which has {self.layer_count}"
            )
        counts = set()
        for layer in self.layers:
            kept = cache.layers[layer.index]
            shapes = ((row_count, *layer.key_shape), (row_count, *layer.value_shape))
            found = tuple((tensor.shape[0], tensor.shape[1], tensor.shape[3]) for tensor in (kept.keys, kept.values))
            if found != shapes or kept.keys.dtype != layer.dtype:
                raise InvalidRequestError(
                    f"layer {layer.index} of the cache holds rows, heads and elements {found} in {kept.keys.dtype}, "
                    f"but the tokens and the model have {shapes} in {layer.dtype}"
                )
            counts.add(int(kept.get_seq_length()))
        if len(counts) != 1:
            raise InvalidRequestError(f"the layers of the cache hold {sorted(counts)} tokens; they must agree")
        return counts.pop()

    def kv_groups(self, block_tokens: int) -> list[KVGroup]:
        """Describe the groups over one tensor for each, in the order of `groups`."""
        described = []
        for index, group in enumerate(self.groups):
            window = group[0].window_tokens
            kind: KVGroupKind = "full" if window is None else "window"
            described.append(KVGroup(block_tokens=block_tokens, layers=[index], kind=kind, window_tokens=window))
        return described


def transformers_module() -> ModuleType:
    """Import Transformers.

    Raises:
        ConfigurationError: It is not installed; the message is the command that installs it.
    """
    return import_extra("transformers", extra=EXTRA, needed_by=NEEDED_BY)


def check_model(model: Any) -> None:
    """Refuse what is no causal language model in evaluation mode.

    Raises:
        ConfigurationError: It is not.
    """
    if not isinstance(model, transformers_module().PreTrainedModel) or not model.can_generate():
        raise ConfigurationError(
            f"{type(model).__name__} is no causal language model of Transformers; "
            "give one, such as AutoModelForCausalLM.from_pretrained(...)"
        )
    if model.config.is_encoder_decoder:
        raise ConfigurationError(
            f"{type(model).__name__} has an encoder, whose cache is no prefix of tokens; give a decoder-only model"
        )
    if "cache" not in inspect.signature(model.forward).parameters:
        raise ConfigurationError(
            f"{type(model).__name__}.forward takes no `cache`; "
            "give a causal language model that is written for Transformers 5.24 or later"
        )
    if model.training:
        raise ConfigurationError("the model is in training mode, where dropout spoils its cache; call model.eval()")


def probe_layout(model: CausalModel) -> CacheLayout:
    """Let the model compute one token, and return how its cache is cut.

    Raises:
        ConfigurationError: It cannot be cut.
    """
    cache = transformers_module().DynamicCache(config=model.config)
    try:
        check_kinds(cache)
        with torch.no_grad():
            model(input_ids=torch.zeros(1, 1, dtype=torch.long, device=model.device), cache=cache, use_cache=True)
        check_layers(cache)
    except InvalidRequestError as exc:
        raise ConfigurationError(f"the cache of {type(model).__name__} cannot be kept: {exc}") from exc
    layers = tuple(
        CutLayer(
            index=index,
            window_tokens=getattr(layer, "sliding_window", None),
            key_shape=(layer.keys.shape[1], layer.keys.shape[3]),
            value_shape=(layer.values.shape[1], layer.values.shape[3]),
            dtype=layer.keys.dtype,
        )
        for index, layer in enumerate(cache.layers)
        if layer.keys is not None
    )
    devices = sorted({str(cache.layers[layer.index].keys.device) for layer in layers})
    if len(devices) != 1:
        raise ConfigurationError(
            f"the cache of this {type(model).__name__} lies on {' and '.join(devices) or 'no device'}; "
            "put the model on one device"
        )
    return CacheLayout(layers, len(cache.layers), torch.device(devices[0]))


def check_layers(cache: Any) -> None:
    """Refuse a cache that cannot be cut, or holds nothing yet.

    Raises:
        InvalidRequestError: It is none of the kind that grows, or a layer keeps something else than tokens, or nothing.
    """
    check_kinds(cache)
    for index, layer in enumerate(cache.layers):
        if layer.keys is None and type(layer) is not transformers_module().cache_utils.DummyLayer:
            raise InvalidRequestError(f"layer {index} holds nothing; let the model fill all layers of the cache first")


def check_kinds(cache: Any) -> None:
    """Refuse a cache that cannot be cut, whatever it holds.

    Raises:
        InvalidRequestError: It is none of the kind that grows, or one of its layers keeps something else than tokens.
    """
    transformers = transformers_module()
    if not isinstance(cache, transformers.DynamicCache) or cache.offloading:
        kind = "an offloading " if getattr(cache, "offloading", False) else ""
        raise InvalidRequestError(
            f"{kind}{type(cache).__name__} cannot be cut into blocks; "
            "use DynamicCache(config=model.config), or the cache that restore() returns"
        )
    from aiokvoffload.integrations.transformers.growing import GrowingLayer  # imports Transformers

    utilities = transformers.cache_utils
    # A subclass may keep more than keys and values, as a quantized layer does.
    cuttable = (utilities.DynamicLayer, GrowingLayer, utilities.DynamicSlidingWindowLayer, utilities.DummyLayer)
    for index, layer in enumerate(cache.layers):
        if type(layer) not in cuttable:
            raise InvalidRequestError(
                f"layer {index} is a {type(layer).__name__}, which cannot be cut into blocks of tokens; "
                "use a model whose layers all keep plain keys and values, or serve this one without a PrefixCache"
            )
