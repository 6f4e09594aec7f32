"""The requests of a replay and the keys of their blocks."""

from __future__ import annotations

from collections.abc import Sequence

from aiokvoffload.cli.options import ReplayOptions
from aiokvoffload.cli.trace import TraceRequest, read_trace
from aiokvoffload.cli.workload import generate_workload
from aiokvoffload.keys import MIN_ENGINE_HASH_BYTES, OffloadKey, offload_keys


def requests_of(options: ReplayOptions) -> list[TraceRequest]:
    """Return the requests to replay, in the order of their arrival.

    Raises:
        TraceError: The trace cannot be read.
    """
    if options.trace is None:
        return generate_workload(options.seed, limit=options.limit)
    return read_trace(options.trace, limit=options.limit)


def gpu_hashes_of(request: TraceRequest) -> list[bytes]:
    """Return the hash of each GPU block; a trace's ids are as good as chained hashes, for each has one predecessor."""
    return [hash_id.to_bytes(MIN_ENGINE_HASH_BYTES, "big") for hash_id in request.hash_ids]


def keys_of(gpu_hashes: Sequence[bytes], block_size_factor: int) -> list[OffloadKey]:
    """Return the keys of the offloaded blocks; GPU blocks that fill none have no key."""
    return offload_keys(gpu_hashes, block_size_factor=block_size_factor)
