"""Small copies by a kernel that reads and writes pinned host memory itself, instead of by the copy engines.

A copy engine spends about as long on a copy of 4 KiB as on one of 64 KiB; a few dozen programs on the GPU's own
processors keep the link busy with small ones, at the price of the processors. Needs Triton, which comes with torch's
CUDA builds.
"""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl

from aiokvoffload.devices.base import CopyPlan
from aiokvoffload.devices.cuda_copy import Copier, SourceOrder

WORDS_PER_STEP = 1024
MOST_PROGRAMS = 64


# One compiled form for all counts: another one would be compiled while an event loop waits.
@triton.jit(do_not_specialize=["copy_count"])  # type: ignore[untyped-decorator] # triton has no types
def copy_words(descriptors, copy_count, words_per_step: tl.constexpr):  # type: ignore[no-untyped-def] # compiled from its source
    """Copy `copy_count` ranges of 8-byte words; descriptors are all sources, all destinations, all word counts."""
    for index in range(tl.program_id(0), copy_count, tl.num_programs(0)):
        source = tl.load(descriptors + index).to(tl.pointer_type(tl.int64))
        destination = tl.load(descriptors + copy_count + index).to(tl.pointer_type(tl.int64))
        word_count = tl.load(descriptors + 2 * copy_count + index)
        for first in range(0, word_count, words_per_step):
            word = first + tl.arange(0, words_per_step)
            is_inside = word < word_count
            tl.store(destination + word, tl.load(source + word, mask=is_inside), mask=is_inside)


class KernelCopier(Copier):
    """Copies by `copy_words`; addresses and sizes must be multiples of 8, the host side pinned.

    Args:
        ordinal: The GPU, as torch numbers it.
    """

    def __init__(self, ordinal: int) -> None:
        self._device = torch.device("cuda", ordinal)

    def submit(self, plan: CopyPlan, order: SourceOrder, stream: int) -> None:
        """Launch the kernel; it always reads in stream order."""
        descriptors = torch.from_numpy(np.concatenate((plan.sources, plan.destinations, plan.byte_counts // 8)))
        copy_count = len(plan.sources)
        # Inside, torch takes memory for the descriptors that is free again only after the kernel on this stream.
        with torch.cuda.stream(torch.cuda.ExternalStream(stream, device=self._device)):  # type: ignore[no-untyped-call]
            on_device = descriptors.pin_memory().to(self._device, non_blocking=True)
            copy_words[(min(copy_count, MOST_PROGRAMS),)](on_device, copy_count, words_per_step=WORDS_PER_STEP)
