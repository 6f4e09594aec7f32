"""Ranges of bytes against a model that looks at every byte."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from aiokvoffload.devices.base import CopyPlan, Direction
from aiokvoffload.devices.ranges import ByteRanges

BYTES = 60


@st.composite
def disjoint(draw: st.DrawFn) -> list[tuple[int, int]]:
    """Draw ranges that may touch and do not overlap, in any order."""
    edges = sorted(draw(st.sets(st.integers(1, BYTES), max_size=12)))
    ranges = [pair for pair in itertools.pairwise(edges) if draw(st.booleans())]
    return draw(st.permutations(ranges))


@st.composite
def several(draw: st.DrawFn) -> list[tuple[int, int]]:
    """Draw starts and byte counts of other ranges."""
    return draw(st.lists(st.tuples(st.integers(1, BYTES), st.integers(1, 20)), max_size=8))


def made_of(ranges: list[tuple[int, int]]) -> ByteRanges:
    columns = np.array(ranges, np.int64).reshape(-1, 2)
    return ByteRanges(columns[:, 0], columns[:, 1])


@given(disjoint(), several())
def test_overlap_and_cover_agree_with_every_byte(ranges: list[tuple[int, int]], others: list[tuple[int, int]]) -> None:
    found = made_of(ranges)
    columns = np.array(others, np.int64).reshape(-1, 2)
    expected_cover = [any(start <= a and a + n <= end for start, end in ranges) for a, n in others]
    inside = {byte for start, end in ranges for byte in range(start, end)}
    touched = any(not inside.isdisjoint(range(a, a + n)) for a, n in others)
    assert found.cover(columns[:, 0], columns[:, 1]).tolist() == expected_cover
    assert found.overlap(columns[:, 0], columns[:, 1]) is touched


@given(disjoint(), several(), st.sampled_from(Direction))
def test_cutting_keeps_every_byte_and_crosses_no_edge(
    ranges: list[tuple[int, int]], others: list[tuple[int, int]], direction: Direction
) -> None:
    columns = np.array(others, np.int64).reshape(-1, 2)
    host, byte_counts = columns[:, 0].copy(), columns[:, 1].copy()
    gpu = 1000 + np.arange(len(host), dtype=np.int64) * 100
    sources, destinations = (gpu, host) if direction is Direction.STORE else (host, gpu)
    plan = CopyPlan(sources, destinations, byte_counts, direction)
    cut = made_of(ranges).cut(plan)
    cut.validate()
    host_side = cut.destinations if direction is Direction.STORE else cut.sources
    edges = {edge for pair in ranges for edge in pair}
    for address, count in zip(host_side.tolist(), cut.byte_counts.tolist(), strict=True):
        assert edges.isdisjoint(range(address + 1, address + count))
    assert pairs_of(cut) == pairs_of(plan)


def pairs_of(plan: CopyPlan) -> list[tuple[int, int]]:
    columns = (plan.sources.tolist(), plan.destinations.tolist(), plan.byte_counts.tolist())
    copies = zip(*columns, strict=True)
    return [(source + byte, destination + byte) for source, destination, count in copies for byte in range(count)]
