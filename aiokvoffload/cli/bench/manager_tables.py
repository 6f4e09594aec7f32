"""The figures of managers as tables: in full for a terminal, in short for a page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby

from aiokvoffload.cli.bench.comparison import ComparedCost
from aiokvoffload.cli.bench.hostile import HOSTILE_CASES, HostileCall
from aiokvoffload.cli.bench.manager import MEASURED, ManagerCost
from aiokvoffload.cli.bench.tables import Table, blocks_label

_USUAL_BATCH_SIZE = 128
_NOT_MEASURED = "-"
Group = tuple[str, list[ManagerCost]]
"""A name, and the costs of one policy and batch size, fewest blocks first."""


def detailed_tables(costs: Sequence[ManagerCost]) -> list[Table]:
    """Return every operation at every size, one table for each policy, and all else."""
    return [*(_detailed_table(*group) for group in by_policy(costs)), *_further_tables(costs)]


def short_tables(costs: Sequence[ManagerCost]) -> list[Table]:
    """Return the share of the bare loop, one table for each policy, and all else."""
    return [*(_short_table(*group) for group in by_policy(costs)), *_further_tables(costs)]


def comparison_tables(costs: Sequence[ComparedCost]) -> list[Table]:
    """Return how many times as fast the manager is as the other implementation."""
    if not costs:
        return []
    columns = ("", *(f"{cost.policy}, {blocks_label(cost.size.block_count)}" for cost in costs))
    rows = [(name, *(_compared(cost, name) for cost in costs)) for name in MEASURED]
    rows.append(("all calls of a request", *map(_compared_request, costs)))
    return [Table(f"Times as fast as {costs[0].other} (thousand blocks/s of both)", columns, rows)]


def by_policy(costs: Sequence[ManagerCost]) -> list[Group]:
    """Return the costs in groups."""
    return [(label, list(group)) for label, group in groupby(costs, _label)]


def _label(cost: ManagerCost) -> str:
    batch = cost.size.batch_size
    return cost.policy if batch == _USUAL_BATCH_SIZE else f"{cost.policy}, {batch} keys a call"


def _detailed_table(label: str, costs: Sequence[ManagerCost]) -> Table:
    rows = []
    for name in MEASURED:
        for cost in costs:
            operation = cost.operations[name]
            times = operation.times
            speeds = (f"{times.blocks_per_second:,.0f}", f"{operation.share_of_bare_loop:.2f}")
            milliseconds = (f"{value:.3f}" for value in (times.p50_ms, times.p99_ms, times.max_ms))
            rows.append((name, blocks_label(cost.size.block_count), *speeds, *milliseconds))
    return Table(label, ("", "blocks", "blocks/s", "of bare loop", "p50 ms", "p99 ms", "max ms"), rows)


def _short_table(label: str, costs: Sequence[ManagerCost]) -> Table:
    rows = []
    for name in MEASURED:
        found = [cost.operations[name] for cost in costs]
        cells = (f"{each.share_of_bare_loop:.2f} ({each.times.blocks_per_second / 1e3:,.0f})" for each in found)
        rows.append((name, *cells))
    sizes = (blocks_label(cost.size.block_count) for cost in costs)
    return Table(f"`{label}`: share of the bare loop (thousand blocks/s)", ("", *sizes), rows)


def _further_tables(costs: Sequence[ManagerCost]) -> list[Table]:
    groups = by_policy(costs)
    several = [group for group in groups if len(group[1]) > 1]
    growth = [_growth_table(several)] if several else []
    return [*growth, _longest_calls_table(groups), _memory_table(costs)]


def _growth_table(groups: Sequence[Group]) -> Table:
    rows = []
    for name in MEASURED:
        shares = ([cost.operations[name].share_of_bare_loop for cost in costs] for _, costs in groups)
        rows.append((name, *(f"{few / many:.2f}" for few, *_, many in shares)))
    few, many = (blocks_label(groups[0][1][end].size.block_count) for end in (0, -1))
    title = f"Time per block at {many} over that at {few}, in units of the same of the bare loop"
    return Table(title, ("", *(label for label, _ in groups)), rows)


def _longest_calls_table(groups: Sequence[Group]) -> Table:
    largest = [costs[-1] for _, costs in groups]
    rows = [("any operation above", *map(_longest_usual_call, largest))]
    rows += [(name, *(_hostile_call(cost, cost.hostile[name]) for cost in largest)) for name in HOSTILE_CASES]
    blocks = blocks_label(largest[0].size.block_count)
    title = f"Longest call in ms at {blocks}, the collector's pauses taken out"
    return Table(title, ("", *(label for label, _ in groups)), rows)


def _longest_usual_call(cost: ManagerCost) -> str:
    return f"{max(operation.times.max_ms for operation in cost.operations.values()):.2f}"


def _hostile_call(cost: ManagerCost, call: HostileCall) -> str:
    """Return what a call took, and for one of very many keys what as many as usual of them did."""
    batch = cost.size.batch_size
    if call.key_count <= batch:
        return f"{call.max_ms:.2f}"
    return f"{call.max_ms * batch / call.key_count:.2f} per {batch} keys"


def _memory_table(costs: Sequence[ManagerCost]) -> Table:
    figures: dict[str, Callable[[ManagerCost], float | None]] = {
        "bytes per block besides the key": lambda cost: cost.footprint.own_bytes,
        "once turned over, more": lambda cost: cost.footprint.history_bytes,
        "full collection ms": lambda cost: cost.collector_pause_ms,
        "of the bare loop": lambda cost: cost.bare_collector_pause_ms,
    }
    rows = []
    for cost in costs:
        found = [figure(cost) for figure in figures.values()]
        cells = (_NOT_MEASURED if value is None else f"{value:.0f}" for value in found)
        rows.append((f"{_label(cost)}, {blocks_label(cost.size.block_count)}", *cells))
    return Table("Memory, and what the garbage collector takes for it", ("", *figures), rows)


def _compared(cost: ComparedCost, name: str) -> str:
    return f"{cost.ratios[name]:.2f} ({cost.own[name] / 1e3:,.0f} : {cost.others[name] / 1e3:,.0f})"


def _compared_request(cost: ComparedCost) -> str:
    return f"{cost.request_ratio:.2f} ({cost.own_request_ms:.2f} : {cost.others_request_ms:.2f} ms)"
