"""What a metric is: its name, what it means, and how it is read from an offloader's statistics."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from aiokvoffload.managers.tier_plan import TierUseStatistics
from aiokvoffload.offloader.statistics import OffloaderStatistics, StatisticsSnapshot

PREFIX = "aiokvoffload_"

Sample = tuple[tuple[str, ...], float]
"""Values of a metric's labels, and its value."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric.

    Attributes:
        name: With its unit.
        kind: Whether it only grows.
        help: What it counts.
        labels: Names of its labels.
        read: Returns its samples.
    """

    name: str
    kind: Literal["counter", "gauge"]
    help: str
    labels: tuple[str, ...]
    read: Callable[[StatisticsSnapshot], Iterable[Sample]]


def tier_label(number: int, url: str) -> str:
    """Return what a tier is called in labels: its place, the fastest first, and its kind."""
    return f"{number}-{url.partition(':')[0] or 'tier'}"


def value_of(read: Callable[[OffloaderStatistics], float]) -> Callable[[StatisticsSnapshot], Iterable[Sample]]:
    """Read a metric without labels."""
    return lambda snapshot: [((), read(snapshot.statistics))]


def values_of(
    read: Callable[[OffloaderStatistics], Mapping[str, float]],
) -> Callable[[StatisticsSnapshot], Iterable[Sample]]:
    """Read a metric with one label."""
    return lambda snapshot: [((value,), number) for value, number in read(snapshot.statistics).items()]


def of_each_tier(read: Callable[[TierUseStatistics], float | None]) -> Callable[[StatisticsSnapshot], Iterable[Sample]]:
    """Read a metric of each tier, where it knows."""

    def samples(snapshot: StatisticsSnapshot) -> Iterator[Sample]:
        for number, use in enumerate(snapshot.statistics.tiers):
            value = read(use)
            if value is not None:
                yield (tier_label(number, use.tier.url),), value

    return samples


def of_each_tier_by(
    read: Callable[[TierUseStatistics], Mapping[str, float]],
) -> Callable[[StatisticsSnapshot], Iterable[Sample]]:
    """Read a metric of each tier that has one more label."""

    def samples(snapshot: StatisticsSnapshot) -> Iterator[Sample]:
        for number, use in enumerate(snapshot.statistics.tiers):
            tier = tier_label(number, use.tier.url)
            for value, amount in read(use).items():
                yield (tier, value), amount

    return samples


def gauge(name: str, text: str, labels: str, read: Callable[[StatisticsSnapshot], Iterable[Sample]]) -> Metric:
    """Return a metric that goes up and down; `labels` are separated by spaces."""
    return Metric(PREFIX + name, "gauge", text, tuple(labels.split()), read)


def counter(name: str, text: str, labels: str, read: Callable[[StatisticsSnapshot], Iterable[Sample]]) -> Metric:
    """Return a metric that only grows."""
    return Metric(f"{PREFIX}{name}_total", "counter", text, tuple(labels.split()), read)
