"""A layer of a cache that grows in place.

`DynamicLayer` makes new tensors in each call of the model and copies all tokens into them. Here the tensors have room
behind their last token, as a list has, so that however many calls come, each token is copied a few times in all.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer

_ROOM_SHARE = 8
_LEAST_ROOM = 64
_ROOM_STEP = 16
"""So that each head begins where kernels like to have it."""


class GrowingLayer(DynamicLayer):
    """Keeps all tokens of a layer with full attention; of the same shapes, values and methods as `DynamicLayer`.

    What the model is given are views of more memory. New tokens overwrite those that were cropped, so whoever keeps
    `keys` or `values` beyond a `crop` has to clone them. While gradients are recorded it grows as `DynamicLayer` does.
    """

    def __init__(self) -> None:
        super().__init__()
        self._rooms: dict[str, torch.Tensor] = {}

    def adopt(self, keys: torch.Tensor, values: torch.Tensor, token_count: int) -> None:
        """Keep the first tokens of `(rows, heads, tokens, elements)`, whose memory belongs to this from now on."""
        self.device, self.is_initialized = keys.device, True
        self._rooms = {"keys": keys, "values": values}
        self.keys, self.values = keys[..., :token_count, :], values[..., :token_count, :]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add tokens, `(rows, heads, tokens, elements)`, and return all."""
        if torch.is_grad_enabled() and (key_states.requires_grad or value_states.requires_grad):
            grown: tuple[torch.Tensor, torch.Tensor] = super().update(key_states, value_states, *args, **kwargs)
            return grown
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.keys = self._extended("keys", self.keys, key_states)
        self.values = self._extended("values", self.values, value_states)
        return self.keys, self.values

    def _extended(self, name: str, kept: torch.Tensor, added: torch.Tensor) -> torch.Tensor:
        count = kept.shape[-2] if kept.numel() else 0
        stop = count + added.shape[-2]
        room = self._rooms.get(name)
        if room is None or room.shape[-2] < stop or not kept.is_set_to(room[..., :count, :]):
            rows, heads, _, elements = added.shape
            room = self._rooms[name] = added.new_empty(rows, heads, room_tokens(stop), elements)
            if count:
                room[..., :count, :] = kept
        room[..., count:stop, :] = added
        return room[..., :stop, :]


def new_growing_cache(config: Any) -> Any:
    """Return an empty `DynamicCache` for a model of this configuration; layers with full attention grow in place."""
    cache = DynamicCache(config=config)
    cache.layers = [GrowingLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache


def room_tokens(token_count: int) -> int:
    """Return for how many tokens memory is made when there are to be so many."""
    wanted = token_count + max(_LEAST_ROOM, token_count // _ROOM_SHARE)
    return -(-wanted // _ROOM_STEP) * _ROOM_STEP
