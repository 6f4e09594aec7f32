"""The manager and another implementation of the same, asked for the same in turns."""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass
from typing import Any

import anyio

from aiokvoffload.cli.bench.contestants import OPERATIONS, OwnManager, Seconds
from aiokvoffload.cli.bench.manager import WITH_ROOM
from aiokvoffload.cli.bench.rounds import (
    REPETITIONS,
    BenchSize,
    KeySource,
    fill,
    operation_rounds,
    request_rounds,
    shorter_calls,
    times_of,
)
from aiokvoffload.cli.bench.timing import CallTimer, CallTimes
from aiokvoffload.cli.bench.vllm_manager import VLLMManager, vllm_name


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedCost:
    """The manager beside another implementation, at one size under one policy.

    Attributes:
        other: Name and version of the other one.
        policy: Name of the policy of both.
        size: How much was asked for.
        request_count: Whole requests that the time was enough for.
        own: Blocks per second, by operation.
        others: The same of the other one.
        own_request_ms: All calls of a request, on average.
        others_request_ms: The same of the other one.
    """

    other: str
    policy: str
    size: BenchSize
    request_count: int
    own: dict[str, float]
    others: dict[str, float]
    own_request_ms: float
    others_request_ms: float

    @property
    def ratios(self) -> dict[str, float]:
        """How many times as fast the manager is, by operation."""
        return {name: speed / self.others[name] for name, speed in self.own.items()}

    @property
    def request_ratio(self) -> float:
        """How many times as fast the manager is over all calls of a request."""
        return self.others_request_ms / self.own_request_ms

    def to_dict(self) -> dict[str, Any]:
        """Return the figures as plain values."""
        return {"bench": "comparison", **asdict(self), "ratios": self.ratios, "request_ratio": self.request_ratio}


def compare_managers(policy: str, size: BenchSize) -> ComparedCost:
    """Measure both managers, full, operation for operation and over whole requests.

    Raises:
        ConfigurationError: The other implementation cannot be used here.
    """
    return anyio.run(_compare_managers, policy, size)


async def _compare_managers(policy: str, size: BenchSize) -> ComparedCost:
    repetitions = [await _calls_of_both(policy, size) for _ in range(REPETITIONS)]
    fills, operations, requests = (
        [shorter_calls([each[kind][manager] for each in repetitions]) for manager in (0, 1)] for kind in (0, 1, 2)
    )
    own, others = (_speeds(*calls, size.batch_size) for calls in zip(fills, operations, strict=True))
    whole = [pair for pair in zip(*requests, strict=True) if all(pair)]
    own_ms, others_ms = (1e3 * statistics.fmean(sum(pair[index].values()) for pair in whole) for index in (0, 1))
    return ComparedCost(
        other=vllm_name(),
        policy=policy,
        size=size,
        request_count=len(whole),
        own=own,
        others=others,
        own_request_ms=own_ms,
        others_request_ms=others_ms,
    )


async def _calls_of_both(policy: str, size: BenchSize) -> tuple[list[list[Seconds]], ...]:
    """Return what each of two new managers took to be filled, for each operation, and for whole requests."""
    keys = KeySource(size.block_count)
    first_keys = keys.new(size.block_count)
    managers = (OwnManager(size.block_count, policy), VLLMManager(size.block_count, policy))
    with CallTimer() as timer:
        fills = [await fill(manager, first_keys, size, timer) for manager in managers]
        operations = await operation_rounds(managers, keys, size, timer)
        requests = await request_rounds(managers, keys, size, timer)
    return fills, operations, requests


def _speeds(fill_calls: list[Seconds], calls: list[Seconds], batch_size: int) -> dict[str, float]:
    seconds = {WITH_ROOM: times_of("prepare_store", fill_calls)}
    seconds |= {name: times_of(name, calls) for name in OPERATIONS}
    return {name: CallTimes.of(found, batch_size).blocks_per_second for name, found in seconds.items()}
