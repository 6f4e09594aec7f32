"""Curves of the manager's speed by the blocks it holds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from aiokvoffload.cli.bench.comparison import ComparedCost
from aiokvoffload.cli.bench.manager import MEASURED, ManagerCost
from aiokvoffload.cli.bench.manager_tables import by_policy
from aiokvoffload.cli.bench.tables import blocks_label
from aiokvoffload.cli.figures import require_matplotlib, save_figure

_COLUMNS = 4


def plot_managers(costs: Sequence[ManagerCost], compared: Sequence[ComparedCost], path: Path) -> None:
    """Draw a panel for each operation: blocks per second of each policy, of the bare loop, and of what is compared.

    Raises:
        ConfigurationError: matplotlib is not installed, or the file cannot be written.
    """
    row_count = -(-len(MEASURED) // _COLUMNS)
    figure = require_matplotlib()(figsize=(4 * _COLUMNS, 3.5 * row_count), layout="constrained")
    panels = figure.subplots(row_count, _COLUMNS, squeeze=False).flat
    for name, panel in zip(MEASURED, panels, strict=False):
        _draw_panel(panel, name, costs, compared)
    for panel in panels:
        panel.axis("off")
    figure.axes[0].legend(fontsize="small")
    save_figure(figure, path)


def _draw_panel(panel: Any, name: str, costs: Sequence[ManagerCost], compared: Sequence[ComparedCost]) -> None:
    groups = by_policy(costs)
    for label, group in groups:
        speeds = [cost.operations[name].times.blocks_per_second for cost in group]
        panel.plot([cost.size.block_count for cost in group], speeds, marker=".", label=label)
    _, group = groups[0]
    bare_speeds = [cost.operations[name].bare_blocks_per_second for cost in group]
    panel.plot([cost.size.block_count for cost in group], bare_speeds, "k--", marker=".", label="bare loop")
    for policy in dict.fromkeys(cost.policy for cost in compared):
        others = [cost for cost in compared if cost.policy == policy]
        block_counts = [cost.size.block_count for cost in others]
        label = f"{others[0].other}, {policy}"
        panel.plot(block_counts, [cost.others[name] for cost in others], ":", marker=".", label=label)
    panel.set(title=name, xscale="log", yscale="log", xlabel="blocks held", ylabel="blocks/s")
    ticks = sorted({cost.size.block_count for cost in costs})
    panel.set_xticks(ticks, labels=list(map(blocks_label, ticks)))
    panel.tick_params(axis="x", which="minor", bottom=False, labelbottom=False)
