"""Prefix offloading for the causal language models of Transformers; needs the extra `transformers`.

Open `prefix_cache.py` first: it is the front door. `batch` says where the tokens of several prompts lie, `layout` what
of a model's cache is cut, `scratch` holds the blocks in between, `compute` runs the model off the event loop.
"""

from __future__ import annotations

from aiokvoffload.integrations.transformers.generation import Generation
from aiokvoffload.integrations.transformers.prefix import RestoredPrefix
from aiokvoffload.integrations.transformers.prefix_cache import PrefixCache

__all__ = ["Generation", "PrefixCache", "RestoredPrefix"]
