"""Policies by capacities on traces, with the clairvoyant bound beside them: hit rates without bytes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TextIO

from aiokvoffload.cli.bookkeeping import TraceClock
from aiokvoffload.cli.clairvoyant import clairvoyant_hits, next_uses
from aiokvoffload.cli.figures import check_plot, require_matplotlib, save_figure
from aiokvoffload.cli.options import ReplayOptions, SweepOptions
from aiokvoffload.cli.report import progress
from aiokvoffload.cli.requests import gpu_hashes_of, keys_of, requests_of
from aiokvoffload.cli.trace import TRACE_BLOCK_TOKENS
from aiokvoffload.clock import SystemClock
from aiokvoffload.errors import ConfigurationError
from aiokvoffload.keys import OffloadKey
from aiokvoffload.managers.cpu import CPUOffloadingManager
from aiokvoffload.managers.reuse import with_reuse_filter
from aiokvoffload.policies.base import POLICIES, Access
from aiokvoffload.policies.metadata import MetadataCache
from aiokvoffload.specs import ReqContext

CLAIRVOYANT = "clairvoyant"
_USUAL_FILTERED = "lru+2"


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepCell:
    """One policy at one capacity on one trace.

    Attributes:
        trace: Name of the trace.
        policy: Name of the policy, `clairvoyant` for the bound, or `lru+2` for `lru` behind a reuse filter of 2.
        capacity_percent: Capacity in percent of the trace's distinct blocks.
        cpu_blocks: The same in blocks.
        blocks_looked_up: Block references.
        blocks_hit: Those within a request's leading run of cached blocks.
        blocks_stored: Blocks that were stored; None for the bound.
        history_bytes: Memory for shadows and ghosts at the end; None where a policy does not say.
        seconds: How long it took.
    """

    trace: str
    policy: str
    capacity_percent: float
    cpu_blocks: int
    blocks_looked_up: int
    blocks_hit: int
    blocks_stored: int | None = None
    history_bytes: int | None = None
    seconds: float

    @property
    def hit_percent(self) -> float:
        """Share of the blocks looked up that hit, in percent."""
        return 100 * self.blocks_hit / self.blocks_looked_up if self.blocks_looked_up else 0.0


@dataclass(frozen=True, slots=True)
class SweepReport:
    """All cells of a sweep, trace after trace, policy after policy."""

    cells: tuple[SweepCell, ...]

    def to_json(self) -> str:
        """Return all cells as one JSON array on one line."""
        return json.dumps([{**asdict(cell), "hit_percent": cell.hit_percent} for cell in self.cells], allow_nan=False)

    def write_table(self, stream: TextIO) -> None:
        """Write one table per trace: a row per policy, a column per capacity, hit rates in percent."""
        for trace, cells in _grouped(self.cells, lambda cell: cell.trace).items():
            columns = list(dict.fromkeys(f"{cell.capacity_percent:g} %" for cell in cells))
            rows = [["policy", *columns]]
            for policy, row in _grouped(cells, lambda cell: cell.policy).items():
                rows.append([policy, *(f"{cell.hit_percent:.2f}" for cell in row)])
            widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
            stream.write(f"{trace}: hit rate in % by capacity in % of the distinct blocks\n")
            for name, *values in rows:
                aligned = [value.rjust(width) for value, width in zip(values, widths[1:], strict=True)]
                stream.write("  ".join([name.ljust(widths[0]), *aligned]) + "\n")

    def plot(self, path: Path) -> None:
        """Draw the curves of each trace side by side into an image file.

        Raises:
            ConfigurationError: matplotlib is not installed, or the file cannot be written.
        """
        figure_class = require_matplotlib()
        traces = _grouped(self.cells, lambda cell: cell.trace)
        figure = figure_class(figsize=(6 * len(traces), 4.5), layout="constrained")
        panels = figure.subplots(1, len(traces), squeeze=False)[0]
        for panel, (trace, cells) in zip(panels, traces.items(), strict=True):
            for policy, row in _grouped(cells, lambda cell: cell.policy).items():
                panel.plot(
                    [cell.capacity_percent for cell in row],
                    [cell.hit_percent for cell in row],
                    label=policy,
                    marker=".",
                    linestyle="--" if policy == CLAIRVOYANT else "-",
                    color="black" if policy == CLAIRVOYANT else None,
                )
            panel.set(title=trace, xscale="log", xlabel="capacity in % of distinct blocks", ylabel="hit rate in %")
            percents = sorted({cell.capacity_percent for cell in cells})
            panel.set_xticks(percents, labels=[f"{percent:g}" for percent in percents])
            panel.tick_params(axis="x", which="minor", bottom=False, labelbottom=False)
            panel.legend()
        save_figure(figure, path)


def sweep(options: ReplayOptions) -> SweepReport:
    """Replay the bookkeeping of every policy at every capacity on every trace.

    Raises:
        TraceError: A trace cannot be read.
        ConfigurationError: A policy or its reuse filter is unknown, or curves are asked for that cannot be drawn.
    """
    wanted = options.sweep or SweepOptions()
    policies = wanted.policies or (*POLICIES.names(), _USUAL_FILTERED)
    for policy in policies:
        POLICIES.resolve(_split_threshold(policy)[0])
    if wanted.plot is not None:
        check_plot(wanted.plot)
    cells: list[SweepCell] = []
    for trace in wanted.traces or (None,):
        one = _TraceSweep(replace(options, trace=trace))
        for policy in (CLAIRVOYANT, *policies):
            cells += [one.run(policy, percent) for percent in wanted.capacity_percents]
    return SweepReport(tuple(cells))


class _TraceSweep:
    """One trace, ready to be replayed often.

    Args:
        options: Which trace, and what is a block.
    """

    def __init__(self, options: ReplayOptions) -> None:
        self._clock = SystemClock()
        self._name = "built-in workload" if options.trace is None else options.trace.name
        self._factor = options.block_size_factor
        requests = requests_of(options)
        same: dict[OffloadKey, OffloadKey] = {}
        self._times = [request.timestamp_ms / 1000 for request in requests]
        self._keys: list[list[OffloadKey]] = []
        for request in requests:
            keys = dict.fromkeys(keys_of(gpu_hashes_of(request), self._factor))
            self._keys.append([same.setdefault(key, key) for key in keys])
        self._distinct_count = len(same)
        self._looked_up = sum(len(request.hash_ids) for request in requests)
        self._next_uses = next_uses(self._keys)

    def run(self, policy: str, percent: float) -> SweepCell:
        """Return the cell of one policy, or of the bound, at one capacity."""
        blocks = max(1, int(self._distinct_count * percent / 100))
        started = self._clock.now()
        stored = history = None
        with progress(len(self._keys), f"{self._name}: {policy}, {percent:g} %") as advance:
            if policy == CLAIRVOYANT:
                hits = clairvoyant_hits(self._keys, blocks, self._next_uses, advance)
            else:
                name, threshold = _split_threshold(policy)
                if threshold:
                    hits, stored = self._replay_filtered(name, threshold, blocks, advance)
                else:
                    hits, stored, history = self._replay(name, blocks, advance)
        return SweepCell(
            trace=self._name,
            policy=policy,
            capacity_percent=percent,
            cpu_blocks=blocks,
            blocks_looked_up=self._looked_up,
            blocks_hit=hits * self._factor,
            blocks_stored=stored,
            history_bytes=history,
            seconds=self._clock.now() - started,
        )

    def _replay(self, name: str, blocks: int, advance: Callable[[int], None]) -> tuple[int, int, int | None]:
        policy = POLICIES.resolve(name)(blocks)
        cache = MetadataCache(policy)
        for tick, (time, keys) in enumerate(zip(self._times, self._keys, strict=True), 1):
            cache.request(keys, Access(tick, time, depths=self._depths(keys)))
            advance(1)
        return cache.counts.blocks_hit, cache.counts.blocks_stored, getattr(policy, "history_bytes", None)

    def _replay_filtered(
        self, name: str, threshold: int, blocks: int, advance: Callable[[int], None]
    ) -> tuple[int, int]:
        clock = TraceClock()
        manager = with_reuse_filter(CPUOffloadingManager(blocks, policy=name, clock=clock), threshold)
        hits = 0
        for number, (clock.seconds, keys) in enumerate(zip(self._times, self._keys, strict=True)):
            ctx, depths = ReqContext(str(number)), self._depths(keys)
            hits += manager.lookup_prefix_nowait(keys, ctx)
            manager.touch(keys, ctx, depths=depths)
            ticket = manager.prepare_store_nowait(keys, ctx, when_full="leading", depths=depths)
            manager.complete_store_nowait(ticket)
            advance(1)
        return hits, manager.statistics().stored_blocks

    def _depths(self, keys: Sequence[OffloadKey]) -> range:
        width = TRACE_BLOCK_TOKENS * self._factor
        return range(width, width * (len(keys) + 1), width)


def _split_threshold(policy: str) -> tuple[str, int]:
    """Return the name of a policy and the threshold of its reuse filter, 0 for none: `lru` and 2 for `lru+2`."""
    name, plus, threshold = policy.rpartition("+")
    if not plus:
        return policy, 0
    if not threshold.isdecimal() or int(threshold) < 2:
        raise ConfigurationError(
            f"{policy!r} ends in no reuse filter; give after the + how many uses make a block worth storing, "
            f"at least 2, such as {name}+2"
        )
    return name, int(threshold)


def _grouped(cells: Iterable[SweepCell], key: Callable[[SweepCell], str]) -> dict[str, list[SweepCell]]:
    groups: dict[str, list[SweepCell]] = {}
    for cell in cells:
        groups.setdefault(key(cell), []).append(cell)
    return groups
