"""`aiokvoffload bench tier`: putting and getting blocks beside plain files with the same bytes."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import mmap
import os
import secrets
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import anyio

from aiokvoffload.cli.bench.plain_files import PlainFiles
from aiokvoffload.errors import ConfigurationError
from aiokvoffload.keys import CacheIdentity, make_offload_key
from aiokvoffload.tiers.base import Tier
from aiokvoffload.tiers.envelope import checksum_of
from aiokvoffload.tiers.fs.tier import FileTier
from aiokvoffload.tiers.opening import open_tier
from aiokvoffload.tiers.outcomes import BlockResult
from aiokvoffload.units import parse_byte_size

BatchCall = Callable[[range, int], Awaitable[Sequence[BlockResult]]]
"""Puts or gets the blocks of a range, for one of the workers."""

DEFAULT_SIZES = ("64KiB", "256KiB", "1MiB", "4MiB", "16MiB")
TABLE_HEAD = (
    f"{'':<10}{'put MB/s':>10}{'of plain':>10}{'get MB/s':>10}{'of plain':>10}"
    f"{'checksum MB/s':>15}{'of put':>8}{'of get':>8}"
)
DEFAULT_BYTES = "128MiB"
DEFAULT_CONCURRENCY = 4
DEFAULT_ROUNDS = 6
"""An even number: in half of them the plain files go first."""
_BATCH_BYTES = 16 << 20
_BATCH_BLOCKS = 16
_MIN_BLOCKS = 8
_CONTENTS = 4
_LISTING_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class TierCost:
    """What one size of block costs; speeds and shares are medians over the rounds.

    Attributes:
        url: The tier.
        block_bytes: Bytes of a block.
        block_count: Blocks of a round.
        concurrency: Threads of the plain files, and batches in the hands of the tier.
        is_direct: The plain files went past the page cache, as the tier's did.
        put_bytes_per_second: Through the tier, checksum included.
        get_bytes_per_second: Through the tier, checksum included.
        write_bytes_per_second: Plain files.
        read_bytes_per_second: Plain files.
        put_share: Of the plain speed of the same round.
        get_share: Of the plain speed of the same round.
        checksum_bytes_per_second: The checksum alone, in one thread.
        checksum_share_of_put: Time of the checksums over the time of the puts.
        checksum_share_of_get: Time of the checksums over the time of the gets.
    """

    url: str
    block_bytes: int
    block_count: int
    concurrency: int
    is_direct: bool
    put_bytes_per_second: float
    get_bytes_per_second: float
    write_bytes_per_second: float
    read_bytes_per_second: float
    put_share: float
    get_share: float
    checksum_bytes_per_second: float
    checksum_share_of_put: float
    checksum_share_of_get: float


@dataclass(frozen=True, slots=True)
class _Round:
    put: float
    get: float
    write: float
    read: float
    checksum: float


def add_tier_bench(parser: argparse.ArgumentParser) -> None:
    """Add the options of `aiokvoffload bench tier`."""
    parser.add_argument("url", metavar="URL", help="the tier, such as file:///var/cache/kv-bench?capacity=2GiB")
    parser.add_argument(
        "--sizes", metavar="SIZE", nargs="+", default=list(DEFAULT_SIZES), help=f"default {' '.join(DEFAULT_SIZES)}"
    )
    parser.add_argument("--bytes", metavar="SIZE", default=DEFAULT_BYTES, help=f"of a round (default {DEFAULT_BYTES})")
    parser.add_argument("--concurrency", metavar="N", type=int, default=DEFAULT_CONCURRENCY, help="default %(default)s")
    parser.add_argument("--rounds", metavar="N", type=int, default=DEFAULT_ROUNDS, help="default %(default)s")
    parser.add_argument(
        "--plain", metavar="DIR", help="where the plain files go; by default beside the tier's directory, else in /tmp"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object per size")


def run_tier_bench(options: argparse.Namespace) -> None:
    """Measure each size and print it.

    Raises:
        ConfigurationError: An option or the URL cannot work, or the tier does not keep what it is given.
    """
    if options.concurrency < 1 or options.rounds < 1:
        raise ConfigurationError("--concurrency and --rounds must be at least 1")
    if not options.json:
        print(TABLE_HEAD)
    for size in options.sizes:
        cost = measure_tier(
            options.url,
            parse_byte_size(size),
            round_bytes=parse_byte_size(options.bytes),
            concurrency=options.concurrency,
            round_count=options.rounds,
            plain_directory=options.plain,
        )
        print(json.dumps(dataclasses.asdict(cost)) if options.json else tier_line(size, cost), flush=True)


def tier_line(size: str, cost: TierCost) -> str:
    """Return the figures of one size as a line of the table."""
    return (
        f"{size:<10}{cost.put_bytes_per_second / 1e6:>10,.0f}{cost.put_share:>10.2f}"
        f"{cost.get_bytes_per_second / 1e6:>10,.0f}{cost.get_share:>10.2f}"
        f"{cost.checksum_bytes_per_second / 1e6:>15,.0f}"
        f"{cost.checksum_share_of_put:>8.2f}{cost.checksum_share_of_get:>8.2f}"
        f"  plain files {'past' if cost.is_direct else 'through'} the page cache"
    )


def measure_tier(
    url: str,
    block_bytes: int,
    *,
    round_bytes: int,
    concurrency: int,
    round_count: int,
    plain_directory: str | None = None,
) -> TierCost:
    """Put and get blocks of one size, and write and read plain files with the same bytes, in turns."""
    identity = CacheIdentity(model="aiokvoffload bench", revision=secrets.token_hex(8))
    block_count = max(_MIN_BLOCKS, round_bytes // block_bytes)
    contents = [_aligned(block_bytes) for _ in range(_CONTENTS)]
    for content in contents:
        content[:] = os.urandom(block_bytes)
    payloads = [contents[number % _CONTENTS] for number in range(block_count)]
    tier = open_tier(url, identity=identity, block_bytes=block_bytes)
    try:
        if isinstance(tier, FileTier) and not tier.wait_until_known(_LISTING_SECONDS):
            raise ConfigurationError(f"{tier.url} has too many blocks to be listed soon; give a directory of its own")
        capacity_bytes = tier.statistics().holdings.capacity_bytes
        if capacity_bytes is not None and 2 * block_count * block_bytes > capacity_bytes:
            raise ConfigurationError(
                f"a round is {block_count} blocks of {block_bytes} bytes; give the tier at least twice the capacity"
            )
        beside = plain_directory or (os.path.dirname(tier.directory) if isinstance(tier, FileTier) else None)
        is_direct = isinstance(tier, FileTier) and tier.is_direct
        with tempfile.TemporaryDirectory(prefix="aiokvoffload-bench-", dir=beside) as directory:
            plain = PlainFiles(directory, thread_count=concurrency, is_direct=is_direct and block_bytes % 4096 == 0)
            rounds = [_measure_round(tier, plain, payloads, concurrency, number) for number in range(round_count)]
    finally:
        tier.close()
    total_bytes = block_count * block_bytes

    def speed(seconds: Callable[[_Round], float]) -> float:
        return total_bytes / statistics.median(seconds(one) for one in rounds)

    def share(part: Callable[[_Round], float], whole: Callable[[_Round], float]) -> float:
        return statistics.median(part(one) / whole(one) for one in rounds)

    return TierCost(
        url=tier.url,
        block_bytes=block_bytes,
        block_count=block_count,
        concurrency=concurrency,
        is_direct=is_direct,
        put_bytes_per_second=speed(lambda one: one.put),
        get_bytes_per_second=speed(lambda one: one.get),
        write_bytes_per_second=speed(lambda one: one.write),
        read_bytes_per_second=speed(lambda one: one.read),
        put_share=share(lambda one: one.write, lambda one: one.put),
        get_share=share(lambda one: one.read, lambda one: one.get),
        checksum_bytes_per_second=speed(lambda one: one.checksum),
        checksum_share_of_put=share(lambda one: one.checksum, lambda one: one.put),
        checksum_share_of_get=share(lambda one: one.checksum, lambda one: one.get),
    )


def _measure_round(
    tier: Tier, plain: PlainFiles, payloads: Sequence[memoryview], concurrency: int, number: int
) -> _Round:
    block_bytes = payloads[0].nbytes
    keys = [make_offload_key(b"%16d" % (number * len(payloads) + index)) for index in range(len(payloads))]
    batch_blocks = max(1, min(_BATCH_BLOCKS, _BATCH_BYTES // block_bytes))
    buffers = [[_aligned(block_bytes) for _ in range(batch_blocks)] for _ in range(concurrency)]
    first_buffers = [own[0] for own in buffers]

    async def put(batch: range, _worker: int) -> Sequence[BlockResult]:
        return await tier.put([keys[index] for index in batch], [payloads[index] for index in batch])

    async def get(batch: range, worker: int) -> Sequence[BlockResult]:
        return await tier.get_into([keys[index] for index in batch], buffers[worker][: len(batch)])

    def in_tier(call: BatchCall) -> float:
        return anyio.run(_time_batches, call, len(payloads), batch_blocks, concurrency)

    # In turns, so that none of them has the machine in a better mood, nor always finds the disk as the other left it.
    is_plain_first = number % 2 == 0
    write_seconds, put_seconds = _both(
        lambda: _time(lambda: plain.write(payloads)), lambda: in_tier(put), is_one_first=is_plain_first
    )
    read_seconds, get_seconds = _both(
        lambda: _time(lambda: plain.read(len(payloads), first_buffers)),
        lambda: in_tier(get),
        is_one_first=is_plain_first,
    )
    checksum_seconds = _time(lambda: [checksum_of(payload) for payload in payloads])
    plain.remove(len(payloads))
    tier.wait(tier.start_delete(keys))
    return _Round(put_seconds, get_seconds, write_seconds, read_seconds, checksum_seconds)


async def _time_batches(call: BatchCall, block_count: int, batch_blocks: int, worker_count: int) -> float:
    """Call for each batch, several batches at a time, and return the seconds."""
    batches = (range(at, min(at + batch_blocks, block_count)) for at in range(0, block_count, batch_blocks))

    async def work(worker: int) -> None:
        for batch in batches:
            for result in await call(batch, worker):
                if not result.is_good:
                    raise ConfigurationError(f"the tier does not keep what it is given: {result}")

    started = time.perf_counter()
    await asyncio.gather(*(work(worker) for worker in range(worker_count)))
    return time.perf_counter() - started


def _both(one: Callable[[], float], other: Callable[[], float], *, is_one_first: bool) -> tuple[float, float]:
    """Call both, and return what they return."""
    if is_one_first:
        return one(), other()
    found = other()
    return one(), found


def _time(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _aligned(byte_count: int) -> memoryview:
    """Return memory that begins at a page, as the slots of CPU memory do."""
    return memoryview(mmap.mmap(-1, byte_count))
