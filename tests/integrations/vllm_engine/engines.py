"""Real engines of vLLM, small enough for a CPU, and what they generate."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM
from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown
from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

BLOCK_TOKENS = 32  # on a CPU, a multiple of 32
PROMPT_TOKENS = 200
MODULE = "aiokvoffload.integrations.vllm"


@dataclass(frozen=True)
class Generated:
    """What came of one prompt.

    Attributes:
        tokens: Its tokens.
        logprobs: Theirs, exactly.
        cached_tokens: Prompt tokens that were not computed.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    cached_tokens: int = field(compare=False)


def save_models(folder: Path) -> tuple[Path, Path]:
    """Save a model with full attention, and one that mixes it with windows of 64 tokens.

    Weights are large enough for the tokens to depend on every layer's KV.
    """
    common: dict[str, Any] = {
        "vocab_size": 512,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 8192,
        "initializer_range": 0.2,
        "tie_word_embeddings": False,
    }
    torch.manual_seed(0)
    full = folder / "full"
    LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, **common)).save_pretrained(full)
    mixed = folder / "mixed"
    layers = ["sliding_attention", "full_attention"] * 2
    config = Gemma3TextConfig(
        num_hidden_layers=4, sliding_window=64, layer_types=layers, query_pre_attn_scalar=32, **common
    )
    Gemma3ForCausalLM(config).save_pretrained(mixed)
    return full, mixed


def prompt(number: int, token_count: int = PROMPT_TOKENS) -> list[int]:
    """Return the tokens of a prompt that shares no prefix with those of other numbers."""
    return [(7 * position * (number + 1) + number) % 500 + 1 for position in range(token_count)]


class Engine:
    """A running engine.

    Attributes:
        llm: vLLM's.
    """

    def __init__(self, llm: LLM) -> None:
        self.llm = llm

    def generate(self, numbers: Sequence[int], *, max_tokens: int = 4) -> list[Generated]:
        """Generate for several prompts at once, greedily."""
        return self.generate_for([prompt(number) for number in numbers], max_tokens=max_tokens)

    def generate_for(self, prompts: Sequence[Sequence[int]], *, max_tokens: int = 4) -> list[Generated]:
        """Generate for prompts given as tokens."""
        outputs = self.llm.generate(
            [{"prompt_token_ids": list(tokens)} for tokens in prompts], sampling(max_tokens), use_tqdm=False
        )
        return [generated(output) for output in outputs]

    def one_by_one(self, numbers: Sequence[int], *, max_tokens: int = 4) -> list[Generated]:
        """Generate for one prompt after the other."""
        return [self.generate([number], max_tokens=max_tokens)[0] for number in numbers]

    def metric(self, name: str, **labels: str) -> float:
        """Return the value of one of vLLM's counters."""
        return float(
            sum(
                getattr(one, "value", 0)
                for one in self.llm.get_metrics()
                if one.name == name and labels.items() <= one.labels.items()
            )
        )

    @property
    def core(self) -> Any:
        """The engine core, of an engine in this process."""
        return self.llm.llm_engine.engine_core.engine_core

    @property
    def manager(self) -> Any:
        """The manager, of an engine in this process."""
        return self.core.scheduler.connector.scheduler.manager


def sampling(max_tokens: int) -> SamplingParams:
    """Return greedy sampling."""
    return SamplingParams(max_tokens=max_tokens, temperature=0, logprobs=1, detokenize=False, ignore_eos=True)


def generated(output: Any) -> Generated:
    """Return what vLLM's output says."""
    best = output.outputs[0]
    logprobs = tuple(step[token].logprob for token, step in zip(best.token_ids, best.logprobs, strict=True))
    return Generated(tuple(best.token_ids), logprobs, output.num_cached_tokens)


@contextmanager
def engine(
    model: Path,
    settings: dict[str, Any] | None = None,
    *,
    blocks: int = 20,
    connector: str = "AioKVOffloadConnector",
    spec: str = "FaultySpec",
    spec_module: str = "faulty_spec",
    max_model_len: int = 512,
    **options: Any,
) -> Iterator[Engine]:
    """Run an engine.

    Args:
        model: What `save_models` has saved.
        settings: Of the spec; None for an engine that offloads nothing.
        blocks: GPU blocks; 20 hold three prompts.
        connector: Ours, or vLLM's `OffloadingConnector`.
        spec: Name of the spec.
        spec_module: Where it is.
        max_model_len: Longest request.
        options: Further ones of vLLM's.
    """
    transfer = None
    if settings is not None:
        is_ours = connector != "OffloadingConnector"
        transfer = KVTransferConfig(
            kv_connector=connector,
            kv_connector_module_path=MODULE if is_ours else None,
            kv_role="kv_both",
            kv_load_failure_policy="recompute" if is_ours else "fail",
            kv_connector_extra_config={
                "spec_name": spec,
                "spec_module_path": spec_module,
                "cpu_bytes_to_use": 1 << 24,
                **settings,
            },
        )
    llm = LLM(
        str(model),
        skip_tokenizer_init=True,
        enforce_eager=True,
        block_size=BLOCK_TOKENS,
        num_gpu_blocks_override=blocks,
        max_model_len=max_model_len,
        dtype="float32",
        kv_transfer_config=transfer,
        disable_log_stats=False,
        **options,
    )
    try:
        yield Engine(llm)
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        if os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0":
            ensure_kv_transfer_shutdown()
            cleanup_dist_env_and_memory()
        gc.collect()
