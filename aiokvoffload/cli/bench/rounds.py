"""Rounds of the same calls for several contestants, in turns, on the same random keys."""

from __future__ import annotations

import random
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Protocol, TypeVar

import numpy as np

from aiokvoffload.cli.bench.contestants import BenchRequest, Contestant, Keys, RequestServer, Seconds, batches
from aiokvoffload.cli.bench.timing import CallTimer
from aiokvoffload.errors import ConfigurationError
from aiokvoffload.keys import HASH_BYTES, OffloadKey, make_offload_key

ContestantType = TypeVar("ContestantType", bound=Contestant)

REPETITIONS = 2
"""So often the same calls are measured, each time on what is new."""
_WARM_UP_ROUNDS = 3
_ROUNDS_PER_CHOICE = 10
_BATCHES_PER_ROUND_AHEAD = 32
"""So few of the blocks are chosen ahead that no policy evicts them before their round."""
_TRIES_PER_KEY = 64
_CACHE_BYTES = 64 << 20
_BYTES_PER_BLOCK = 512
"""About what all contestants together keep of a block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchSize:
    """How much is measured.

    Attributes:
        block_count: Blocks held.
        batch_size: Keys of a call.
        call_count: Calls of each operation.
        seconds: After which no further round begins.

    Raises:
        ConfigurationError: There are less than four batches of blocks.
    """

    block_count: int
    batch_size: int = 128
    call_count: int = 300
    seconds: float = 20.0

    def __post_init__(self) -> None:
        if self.block_count < 4 * self.batch_size:
            raise ConfigurationError(
                f"{self.block_count} blocks are too few for calls of {self.batch_size} keys; "
                f"take at least four batches, {4 * self.batch_size}"
            )


class Holder(Protocol):
    """Something that stores blocks."""

    def holds(self, key: OffloadKey) -> bool:
        """Return whether a block is stored."""


class KeySource:
    """Reproducible random keys, and which of them may still be stored.

    Args:
        seed: The same seed gives the same keys.
    """

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)  # noqa: S311  reproducible, not secret
        self.perhaps_stored: list[OffloadKey] = []

    def draw(self, count: int) -> list[OffloadKey]:
        """Return keys that were never given out before, and forget them."""
        return [make_offload_key(self._random.randbytes(HASH_BYTES)) for _ in range(count)]

    def new(self, count: int) -> list[OffloadKey]:
        """Return keys that were never given out before, to be stored now."""
        keys = self.draw(count)
        self.perhaps_stored += keys
        return keys

    def stored(self, count: int, holders: Sequence[Holder]) -> list[OffloadKey]:
        """Return random keys that all holders have now; fewer if they agree on few."""
        candidates = self.perhaps_stored
        found: dict[OffloadKey, None] = {}
        for _ in range(_TRIES_PER_KEY * count):
            if not candidates or len(found) == count:
                break
            index = self._random.randrange(len(candidates))
            key = candidates[index]
            if all(holder.holds(key) for holder in holders):
                found[key] = None
            else:
                candidates[index] = candidates[-1]
                candidates.pop()
        return list(found)


async def fill(contestant: Contestant, keys: Keys, size: BenchSize, timer: CallTimer) -> list[Seconds]:
    """Store the first blocks, so that all slots are taken, and return what the last full calls took."""
    calls = [await contestant.store(batch, timer) for batch in batches(keys, size.batch_size)]
    whole = len(keys) // size.batch_size
    return calls[:whole][-size.call_count :]


async def operation_rounds(
    contestants: Sequence[Contestant], keys: KeySource, size: BenchSize, timer: CallTimer
) -> list[list[Seconds]]:
    """Let each contestant load a batch and store another, evicting; return its rounds, contestant after contestant."""

    async def run(contestant: Contestant, request: BenchRequest) -> Seconds:
        return {**await contestant.load(request.loaded, timer), **await contestant.store(request.stored, timer)}

    return await _rounds(contestants, run, keys, size)


async def request_rounds(
    servers: Sequence[RequestServer], keys: KeySource, size: BenchSize, timer: CallTimer
) -> list[list[Seconds]]:
    """Let each server serve requests that load a batch and store another; return them, server after server."""

    async def run(server: RequestServer, request: BenchRequest) -> Seconds:
        return await server.serve(request, timer)

    return await _rounds(servers, run, keys, size)


async def _rounds(
    contestants: Sequence[ContestantType],
    run: Callable[[ContestantType, BenchRequest], Awaitable[Seconds]],
    keys: KeySource,
    size: BenchSize,
) -> list[list[Seconds]]:
    found: list[list[Seconds]] = [[] for _ in contestants]
    order = list(zip(contestants, found, strict=True))
    deadline = time.perf_counter() + size.seconds
    for number, loaded in enumerate(_loads(contestants, keys, size)):
        request = BenchRequest(number, loaded, keys.new(size.batch_size))
        for contestant, rounds in order:
            seconds = await run(contestant, request)
            if number >= _WARM_UP_ROUNDS:
                rounds.append(seconds)
        order.reverse()  # whoever comes first finds the keys in no cache of the processor
        if time.perf_counter() > deadline and number >= _WARM_UP_ROUNDS:
            break
    return found


def _loads(contestants: Sequence[Contestant], keys: KeySource, size: BenchSize) -> Iterator[Keys]:
    """Return the keys to load in each round.

    They are chosen for several rounds at once, and used, so that they stay until then. As this brings all that is known
    of them into the processor's caches, these are emptied after it.
    """
    left = _WARM_UP_ROUNDS + size.call_count
    at_once = max(1, min(_ROUNDS_PER_CHOICE, size.block_count // (_BATCHES_PER_ROUND_AHEAD * size.batch_size)))
    others = np.ones(min(_CACHE_BYTES, _BYTES_PER_BLOCK * size.block_count) // 8)
    while left > 0:
        chosen = keys.stored(min(left, at_once) * size.batch_size, contestants)
        if len(chosen) < size.batch_size:
            raise ConfigurationError(f"of {size.block_count} blocks too few are still stored; take more blocks")
        for contestant in contestants:
            contestant.use(chosen)
        others.sum()
        whole = len(chosen) // size.batch_size
        yield from islice(batches(chosen, size.batch_size), whole)
        left -= whole


def shorter_calls(repetitions: Sequence[Sequence[Seconds]]) -> list[Seconds]:
    """Return, of the same call in each repetition, the shorter time: what else a machine does hits other calls.

    Nothing is told of a call that was not made in all of them.
    """
    return [
        {operation: min(call[operation] for call in same) for operation in same[0]}
        if all(call.keys() == same[0].keys() for call in same)
        else {}
        for same in zip(*repetitions, strict=False)  # one repetition may have had less time
    ]


def times_of(operation: str, rounds: Sequence[Seconds]) -> list[float]:
    """Return what an operation took in each round that got to it.

    Raises:
        ConfigurationError: None did.
    """
    times = [seconds[operation] for seconds in rounds if operation in seconds]
    if not times:
        raise ConfigurationError(f"no call of {operation} found its blocks still stored; take more blocks")
    return times
