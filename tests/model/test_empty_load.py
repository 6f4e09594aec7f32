"""A load that finds nothing beyond what the GPU has."""

from __future__ import annotations

import torch

from aiokvoffload import LookupResult, open_offloader
from aiokvoffload.testing.device import ManualDevice


def test_a_load_of_nothing_ends_with_the_tokens_that_are_there() -> None:
    layer = torch.zeros((4, 8), dtype=torch.int8)
    with open_offloader([layer], cpu_bytes=64, block_tokens=4, device=ManualDevice()) as offloader:
        ticket = offloader.prepare_load(offloader.keys(range(8)), resident_tokens=4)
        assert (ticket.result, ticket.token_count) == (LookupResult.MISS, 4)
        result = ticket.start([]).result
        assert result is not None
        assert result.success
        assert result.token_count == ticket.token_count
        assert result.transfer_type == ("CPU", "GPU")
