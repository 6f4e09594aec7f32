"""`aiokvoffload bench`: its commands, their options, and what they print.

What moves bytes is imported only where it is asked for: bookkeeping needs no torch.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from aiokvoffload.cli.bench.machine import describe_machine
from aiokvoffload.cli.bench.manager_plot import plot_managers
from aiokvoffload.cli.bench.managers import ManagerFindings, measure_managers
from aiokvoffload.cli.bench.page import check_page, write_sections
from aiokvoffload.cli.bench.rounds import BenchSize
from aiokvoffload.cli.bench.tables import to_markdown, to_text
from aiokvoffload.cli.bench.tier import add_tier_bench, run_tier_bench
from aiokvoffload.cli.figures import check_plot
from aiokvoffload.cli.interrupts import interrupts_raised
from aiokvoffload.errors import ConfigurationError

DEFAULT_POLICIES = ("lru", "arc")
ALL_POLICIES = ("lru", "arc", "lru2", "lrfu", "s3fifo", "adaptive")
SECTIONS = ("machine", "manager", "comparison", "transfer", "path")
"""Places for tables in the page that `bench all` writes."""

_SIZES = tuple(BenchSize(block_count=count) for count in (10_000, 100_000, 1_000_000))
_QUICK_SIZES = tuple(BenchSize(block_count=count, batch_size=16, call_count=5) for count in (256, 1024))


def run_bench(arguments: Sequence[str]) -> int:
    """Run `aiokvoffload bench` and return its exit status."""
    parser = _parser()
    options = parser.parse_args(arguments)
    run: Callable[[argparse.Namespace], None] = options.run
    try:
        run(options)
    except ConfigurationError as exc:
        parser.error(str(exc))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="aiokvoffload bench", allow_abbrev=False)
    commands = parser.add_subparsers(required=True, metavar="WHAT")

    def add(name: str, run: Callable[[argparse.Namespace], None], summary: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=summary, description=summary, allow_abbrev=False)
        command.set_defaults(run=run)
        command.add_argument("--json", action="store_true", help="print JSON objects, one a line, in place of tables")
        command.add_argument("--quick", action="store_true", help="sizes too small to tell anything, to try it out")
        return command

    manager = add("manager", _run_manager, "the manager's bookkeeping beside a bare loop")
    manager.add_argument("--blocks", metavar="N", type=_positive, nargs="+", help="default: 10000 100000 1000000")
    manager.add_argument("--policy", metavar="NAME", nargs="+", default=DEFAULT_POLICIES, help="default: lru arc")
    manager.add_argument("--batch", metavar="N", type=_positive, nargs="+", help="keys of a call (default 128)")
    manager.add_argument("--calls", metavar="N", type=_positive, help="calls of each operation (default 300)")
    transfer = add("transfer", _run_transfer, "copies on the host device, and how soon whoever waits for one goes on")
    path = add("path", _run_path, "the whole path with bytes, and 1,000 requests at once")
    path.add_argument("--blocks", metavar="N", type=_positive, nargs="+", help="CPU blocks (default 10000 1000000)")
    path.add_argument("--policy", metavar="NAME", help="default: lru")
    tier = commands.add_parser("tier", help="a tier beside plain files", allow_abbrev=False)
    tier.set_defaults(run=_run_tier)
    add_tier_bench(tier)
    everything = add("all", _run_all, "managers, transfers and path, for the tables of a page")
    everything.add_argument(
        "--write", metavar="PAGE", type=Path, help="put the tables into a page that has marks for them"
    )
    for command in (manager, transfer, everything):
        command.add_argument("--plot", metavar="FILE", type=Path, help="draw the speeds, such as into speeds.png")
    for command in (manager, everything):
        command.add_argument(
            "--compare",
            action=argparse.BooleanOptionalAction,
            help="measure vLLM's manager in the same run (by default where it is installed)",
        )
    return parser


def _run_manager(options: argparse.Namespace) -> None:
    usual = _QUICK_SIZES if options.quick else _SIZES
    sizes = [
        replace(
            usual[0],
            block_count=block_count,
            batch_size=batch_size,
            call_count=options.calls or usual[0].call_count,
        )
        for batch_size in options.batch or [usual[0].batch_size]
        for block_count in sorted(options.blocks or [size.block_count for size in usual])
    ]
    if options.plot is not None:
        check_plot(options.plot)
    findings = measure_managers(options.policy, sizes, is_compared=options.compare)
    _show(options, findings.to_text(), *findings.to_dicts())
    _plot(options, findings)


def _run_transfer(options: argparse.Namespace) -> None:
    from aiokvoffload.cli.bench.transfer import QUICK, USUAL, measure_transfers

    if options.plot is not None:
        check_plot(options.plot)
    with interrupts_raised():
        cost = measure_transfers(QUICK if options.quick else USUAL)
    _show(options, to_text(cost.tables()), cost.to_dict())
    if options.plot is not None:
        cost.plot(options.plot)


def _run_path(options: argparse.Namespace) -> None:
    from aiokvoffload.cli.bench.path import QUICK, USUAL, measure_path

    size = QUICK if options.quick else USUAL
    if options.blocks:
        size = replace(size, block_counts=tuple(sorted(options.blocks)))
    with interrupts_raised():
        cost = measure_path(replace(size, policy=options.policy) if options.policy else size)
    _show(options, to_text(cost.tables()), cost.to_dict())


def _run_tier(options: argparse.Namespace) -> None:
    try:
        with interrupts_raised():
            run_tier_bench(options)
    except OSError as exc:
        raise ConfigurationError(str(exc)) from exc


def _run_all(options: argparse.Namespace) -> None:
    from aiokvoffload.cli.bench import path as whole_path
    from aiokvoffload.cli.bench import transfer as copies

    if options.write is not None:
        check_page(options.write, SECTIONS)
    if options.plot is not None:
        check_plot(options.plot)
    policies, sizes = (DEFAULT_POLICIES, _QUICK_SIZES) if options.quick else (ALL_POLICIES, _SIZES)
    with interrupts_raised():
        # First, because memory that others have freed would hide what it takes.
        path = whole_path.measure_path(whole_path.QUICK if options.quick else whole_path.USUAL)
    managers = measure_managers(policies, sizes, is_compared=options.compare)
    with interrupts_raised():
        transfers = copies.measure_transfers(copies.QUICK if options.quick else copies.USUAL)
    text = "\n".join([managers.to_text(), to_text(transfers.tables()), to_text(path.tables())])
    _show(options, text, *managers.to_dicts(), transfers.to_dict(), path.to_dict())
    _plot(options, managers)
    if options.write is not None:
        texts = (
            f"One run on {describe_machine()}.",
            managers.costs_to_markdown(),
            managers.compared_to_markdown(),
            to_markdown(transfers.tables()),
            to_markdown(path.tables()),
        )
        write_sections(options.write, dict(zip(SECTIONS, texts, strict=True)))


def _show(options: argparse.Namespace, text: str, *figures: dict[str, Any]) -> None:
    if options.json:
        for each in figures:
            print(json.dumps(each, allow_nan=False))
    else:
        print(describe_machine(), text, sep="\n\n")


def _plot(options: argparse.Namespace, findings: ManagerFindings) -> None:
    if options.plot is not None:
        plot_managers(findings.costs, findings.compared, options.plot)


def _positive(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number, at least 1")
    return value
