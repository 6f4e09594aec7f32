"""Ranges of bytes, compared with many others at once."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from aiokvoffload.devices.base import CopyPlan, Direction


class ByteRanges:
    """Ranges of addresses that do not overlap.

    Args:
        starts: First addresses, in any order.
        ends: The addresses behind each.
    """

    def __init__(self, starts: NDArray[np.int64], ends: NDArray[np.int64]) -> None:
        order = np.argsort(starts)
        self._starts, self._ends = starts[order], ends[order]
        edges = np.sort(np.concatenate((starts, ends)))
        self._edges = edges[np.diff(edges, prepend=-1) > 0]

    def overlap(self, starts: NDArray[np.int64], byte_counts: NDArray[np.int64]) -> bool:
        """Return whether any of some other ranges shares a byte with these."""
        # Of the ranges that begin before one ends, the last also ends last.
        index = np.searchsorted(self._starts, starts + byte_counts)
        found = index > 0
        return bool((self._ends[index[found] - 1] > starts[found]).any())

    def cover(self, starts: NDArray[np.int64], byte_counts: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return of each of some other ranges whether it lies within one of these."""
        index = np.searchsorted(self._starts, starts, side="right") - 1
        if not len(self._ends):
            return np.zeros(len(starts), np.bool_)
        return (index >= 0) & (self._ends[index] >= starts + byte_counts)

    def cut(self, plan: CopyPlan) -> CopyPlan:
        """Return `plan` with every copy cut where its host side crosses the edge of a range."""
        host = host_side(plan)
        ends = host + plan.byte_counts
        if not len(host) or not self._edges_between(host.min(), ends.max()):  # as when all slots lie in one range
            return plan
        first = np.searchsorted(self._edges, host, side="right")
        piece_counts = np.searchsorted(self._edges, ends) - first + 1
        owner = np.repeat(np.arange(len(host)), piece_counts)
        position = np.arange(len(owner)) - np.repeat(np.cumsum(piece_counts) - piece_counts, piece_counts)
        edges = np.append(self._edges, 0)  # what stands beyond the last edge is not used
        cut_before = np.where(position == 0, host[owner], edges[first[owner] + position - 1])
        is_last = position == piece_counts[owner] - 1
        cut_after = np.where(is_last, ends[owner], edges[first[owner] + position])
        offset = cut_before - host[owner]
        return replace(
            plan,
            sources=plan.sources[owner] + offset,
            destinations=plan.destinations[owner] + offset,
            byte_counts=cut_after - cut_before,
        )

    def _edges_between(self, start: np.int64, end: np.int64) -> int:
        return int(np.searchsorted(self._edges, end) - np.searchsorted(self._edges, start, side="right"))


def host_side(plan: CopyPlan) -> NDArray[np.int64]:
    """Return the addresses of a plan that lie in host memory."""
    return plan.destinations if plan.direction is Direction.STORE else plan.sources


def some_of(plan: CopyPlan, is_chosen: NDArray[np.bool_]) -> CopyPlan:
    """Return the chosen copies of a plan."""
    columns = (plan.sources, plan.destinations, plan.byte_counts)
    sources, destinations, byte_counts = (column[is_chosen] for column in columns)
    return replace(plan, sources=sources, destinations=destinations, byte_counts=byte_counts)
