"""Curves of the manager's speed by the blocks it holds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from aiokvoffload.cli.bench.comparison import ComparedCost
from aiokvoffload.cli.bench.manager import MEASURED, ManagerCost
from aiokvoffload.cli.bench.manager_tables import by_policy
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
        groups = by_policy(costs)
        for label, group in groups:
            speeds = [cost.operations[name].times.blocks_per_second for cost in group]
            panel.plot([cost.size.block_count for cost in group], speeds, marker=".", label=label)
        _label, group = groups[0]
        bare = [cost.operations[name].bare_blocks_per_second for cost in group]
        panel.plot([cost.size.block_count for cost in group], bare, "k--", marker=".", label="bare loop")
        for policy in dict.fromkeys(cost.policy for cost in compared):
            others = [cost for cost in compared if cost.policy == policy]
            speeds = [cost.others[name] for cost in others]
            sizes = [cost.size.block_count for cost in others]
            panel.plot(sizes, speeds, ":", marker=".", label=f"{others[0].other}, {policy}")
        panel.set(title=name, xscale="log", yscale="log", xlabel="blocks held", ylabel="blocks/s")
    for panel in panels:
        panel.axis("off")
    figure.axes[0].legend(fontsize="small")
    save_figure(figure, path)
