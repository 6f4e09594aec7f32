"""`aiokvoffload bench`: what the library costs, measured beside a yardstick in the same run."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

import anyio

from aiokvoffload.cli.bench_manager import ManagerCost, measure_manager
from aiokvoffload.cli.bench_tier import add_tier_bench, run_tier_bench
from aiokvoffload.errors import ConfigurationError

DEFAULT_SIZES = (10_000, 100_000, 1_000_000)
DEFAULT_POLICIES = ("lru", "arc")


def run_bench(arguments: Sequence[str]) -> int:
    """Run `aiokvoffload bench` and return its exit status."""
    parser = argparse.ArgumentParser(prog="aiokvoffload bench", allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True, metavar="WHAT")
    manager = commands.add_parser("manager", help="the manager's bookkeeping beside a bare loop", allow_abbrev=False)
    manager.add_argument("--blocks", metavar="N", type=_positive, nargs="+", default=list(DEFAULT_SIZES))
    manager.add_argument("--policy", metavar="NAME", nargs="+", default=list(DEFAULT_POLICIES))
    manager.add_argument("--batch", metavar="N", type=_positive, default=128, help="keys of a call (default 128)")
    manager.add_argument("--calls", metavar="N", type=_positive, default=300, help="calls of each (default 300)")
    manager.add_argument("--json", action="store_true", help="print one JSON object per policy and size")
    add_tier_bench(commands.add_parser("tier", help="a tier beside plain files", allow_abbrev=False))
    options = parser.parse_args(arguments)
    if options.command == "tier":
        try:
            return run_tier_bench(options)
        except (ConfigurationError, OSError) as exc:
            parser.error(str(exc))
    if min(options.blocks) < 4 * options.batch:
        parser.error(f"--blocks must be at least four batches, {4 * options.batch}")
    try:
        for block_count in options.blocks:
            for policy in options.policy:
                cost = anyio.run(measure_manager, policy, block_count, options.batch, options.calls)
                print(json.dumps(cost.to_dict()) if options.json else manager_table(cost), flush=True)
    except ConfigurationError as exc:
        parser.error(str(exc))
    return 0


def manager_table(cost: ManagerCost) -> str:
    """Return the figures of one policy and size as aligned lines."""
    lines = [
        f"{cost.policy}, {cost.block_count:,} blocks, {cost.batch_size} keys a call",
        f"{'':<36}{'blocks/s':>12}{'of bare loop':>14}{'p50 ms':>9}{'p99 ms':>9}{'max ms':>9}",
    ]
    for name, operation in cost.operations.items():
        lines.append(
            f"  {name:<34}{operation.blocks_per_second:>12,.0f}{operation.share_of_bare_loop:>14.2f}"
            f"{operation.p50_ms:>9.3f}{operation.p99_ms:>9.3f}{operation.max_ms:>9.3f}"
        )
    lines += [f"  {name:<34}{'':>44}{milliseconds:>9.3f}" for name, milliseconds in cost.hostile_max_ms.items()]
    lines.append(f"  bytes per block besides the key   {cost.bytes_per_block:>12.0f}")
    lines.append(f"  full garbage collection, more ms  {cost.collector_pause_ms:>12.2f}\n")
    return "\n".join(lines)


def _positive(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number, at least 1")
    return value
