"""What tells the cache of one model from that of another."""

from __future__ import annotations

import json
from hashlib import blake2b

import torch

from aiokvoffload.errors import ConfigurationError
from aiokvoffload.integrations.transformers.layout import CausalModel
from aiokvoffload.keys import CacheIdentity, encode_value

_SAMPLES = 64


def identity_of(model: CausalModel) -> CacheIdentity:
    """Return the identity of a model: its class, and a digest of its configuration and of a sample of its weights.

    So two models share no blocks in a directory, whatever they are called, and neither do one model before and after it
    was trained on. Where its files lie does not matter. The sample is 64 elements of each parameter, evenly spread.

    Raises:
        ConfigurationError: Its weights are not in memory.
    """
    config = {name: value for name, value in model.config.to_dict().items() if name != "_name_or_path"}
    digest = blake2b(json.dumps(config, sort_keys=True, default=str).encode(), digest_size=16)
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            raise ConfigurationError(f"the weights of {name} are not in memory; name the model with identity=")
        flat = parameter.detach().reshape(-1)
        # In double precision, for a position is to be exact.
        last, count = max(0, flat.numel() - 1), min(_SAMPLES, flat.numel())
        positions = torch.linspace(0, last, count, dtype=torch.float64).long()
        sample = flat[positions.to(flat.device)].cpu().view(torch.uint8).numpy().tobytes()
        digest.update(encode_value((name, str(parameter.dtype), tuple(parameter.shape), sample)))
    return CacheIdentity(model=type(model).__name__, revision=digest.hexdigest(), dtype=str(model.dtype))
