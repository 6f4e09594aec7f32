"""Runs the command line."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext

from aiokvoffload.cli.arguments import PROGRAM, exit_with_mistake, parse_arguments
from aiokvoffload.cli.interrupts import answer_interrupt, interrupts_raised, is_interrupt
from aiokvoffload.cli.options import ReplayOptions
from aiokvoffload.cli.report import ReplayReport, write_report
from aiokvoffload.errors import ConfigurationError, OffloadError, TraceError


def run(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status.

    0 well, 1 a wrong byte or order, or an error of the library, which is one sentence; 2 a mistake, 130 Ctrl-C.
    """
    try:
        return _run(sys.argv[1:] if arguments is None else arguments)
    except (KeyboardInterrupt, BaseExceptionGroup) as exc:
        if not is_interrupt(exc):
            raise
        return answer_interrupt()


def _run(arguments: Sequence[str]) -> int:
    try:
        if arguments[:1] == ["bench"]:
            from aiokvoffload.cli.bench.command import run_bench

            return run_bench(arguments[1:])
        if arguments[:1] == ["tier"]:
            from aiokvoffload.cli.tier import run_tier

            return run_tier(arguments[1:])
        if arguments[:1] == ["demo"]:
            from aiokvoffload.cli.demo.command import run_demo

            return run_demo(arguments[1:])
        options = parse_arguments(arguments)
        if options.sweep is not None:
            return _sweep(options)
        replay = _replay_of(options)
        with interrupts_raised() if options.with_data else nullcontext():
            report = replay(options)
    except (ConfigurationError, TraceError) as exc:
        exit_with_mistake(str(exc))
    except OffloadError as exc:
        print(f"{PROGRAM}: {exc}", file=sys.stderr)
        return 1
    if options.json_output:
        print(report.to_json())
    else:
        write_report(report)
    return 0 if report.is_faultless else 1


def _replay_of(options: ReplayOptions) -> Callable[[ReplayOptions], ReplayReport]:
    """Return what replays in the way that was asked for, imported."""
    if options.workers is not None:
        from aiokvoffload.cli.replay_workers import replay_workers

        return replay_workers
    if options.with_data:
        from aiokvoffload.cli.replay import replay

        return replay
    from aiokvoffload.cli.bookkeeping import simulate

    return simulate


def _sweep(options: ReplayOptions) -> int:
    from aiokvoffload.cli.sweep import sweep

    found = sweep(options)
    if options.json_output:
        print(found.to_json())
    else:
        found.write_table(sys.stdout)
    if options.sweep is not None and options.sweep.plot is not None:
        found.plot(options.sweep.plot)
    return 0
