"""The copy kernel in Triton's interpreter, on a CPU, and compiled for GPUs that are not there."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton, which torch's CUDA builds bring, is not installed"
)

INTERPRETED = """
import numpy as np
import torch
from aiokvoffload.devices.cuda_kernel import WORDS_PER_STEP, copy_words

random = np.random.default_rng(0)
source = random.integers(0, 256, 1 << 18, dtype=np.uint8)
target, expected = np.zeros_like(source), np.zeros_like(source)
byte_counts = random.integers(1, 3000, 10) * 8
starts = np.cumsum(byte_counts) - byte_counts
chosen = random.permutation(len(starts))[:7]
for start, end in zip(starts[chosen], (starts + byte_counts)[chosen]):
    expected[start:end] = source[start:end]
addresses = (source.ctypes.data + starts[chosen], target.ctypes.data + starts[chosen])
descriptors = torch.from_numpy(np.concatenate((*addresses, byte_counts[chosen] // 8)))
copy_words[(3,)](descriptors, len(chosen), words_per_step=WORDS_PER_STEP)
assert np.array_equal(target, expected)
"""

COMPILED = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from aiokvoffload.devices.cuda_kernel import WORDS_PER_STEP, copy_words

signature = {"descriptors": "*i64", "copy_count": "i32", "words_per_step": "constexpr"}
source = ASTSource(fn=copy_words, signature=signature, constexprs={"words_per_step": WORDS_PER_STEP})
for capability in (80, 90, 100):
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32))
    assert compiled.asm["cubin"]
"""


@pytest.mark.parametrize(("program", "interpret"), [(INTERPRETED, "1"), (COMPILED, "0")])
def test_the_kernel_copies_whole_words(program: str, interpret: str) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": interpret}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
