"""The command line: its options, and what it says when one is wrong."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn, get_args

from aiokvoffload.cli.options import (
    DEFAULT_CONCURRENCY,
    DEFAULT_CPU_BLOCKS,
    DEFAULT_SWEEP_PERCENTS,
    WORD_BYTES,
    CascadeWait,
    ReplayOptions,
    SweepOptions,
    block_bytes,
)
from aiokvoffload.errors import ConfigurationError
from aiokvoffload.specs import Placement
from aiokvoffload.units import parse_byte_size

PROGRAM = "aiokvoffload"
USAGE = f"{PROGRAM} replay [options]"
_DEFAULTS = ReplayOptions()


def parse_arguments(arguments: Sequence[str] | None = None) -> ReplayOptions:
    """Return the options of `aiokvoffload replay`.

    A mistake is printed as one sentence and ends the process with exit status 2, `--help` and `--version` with 0.

    Args:
        arguments: What follows the program's name; that of this process by default.
    """
    program = argparse.ArgumentParser(
        prog=PROGRAM, description="Async offloading of LLM KV-cache blocks.", allow_abbrev=False
    )
    program.add_argument("--version", action="version", version=f"{PROGRAM} {_installed_version()}")
    commands = program.add_subparsers(dest="command", required=True, metavar="COMMAND")
    replay = commands.add_parser(
        "replay",
        help="replay a request trace and check every byte",
        usage=USAGE,
        description=(
            "Replays requests as an async serving loop would: loads what hits, computes and stores the rest, and "
            "checks every loaded byte. Exit status 1 if anything was wrong, 2 for a mistake on the command line."
        ),
        allow_abbrev=False,
    )
    _add_replay_options(replay)
    commands.add_parser("demo", help="a chat model with and without offloading; see demo --help", add_help=False)
    commands.add_parser("bench", help="measure what the library costs; see bench --help", add_help=False)
    commands.add_parser("tier", help="look at the storage of a tier; see tier --help", add_help=False)
    return _replay_options(replay, program.parse_args(arguments))


def exit_with_mistake(message: str) -> NoReturn:
    """End the process as a mistake on the command line does, for one that only shows later, such as a bad trace."""
    argparse.ArgumentParser(prog=f"{PROGRAM} replay", usage=USAGE).error(message)


def _add_replay_options(parser: argparse.ArgumentParser) -> None:
    requests = parser.add_argument_group("requests")
    requests.add_argument(
        "--trace",
        metavar="FILE",
        type=Path,
        action="append",
        help="JSON lines with timestamp, input_length, output_length and hash_ids (512 tokens each), plain or gzip; "
        "without it, a built-in workload of conversations; with --sweep it may be given several times",
    )
    requests.add_argument("--limit", metavar="N", type=_integer(1), help="replay only the first N requests")
    requests.add_argument(
        "--concurrency",
        metavar="N",
        type=_integer(1),
        help=f"requests in work at a time (default {DEFAULT_CONCURRENCY}; always 1 with --no-data)",
    )
    requests.add_argument(
        "--seed",
        metavar="N",
        type=_integer(0),
        default=_DEFAULTS.seed,
        help="seed of the built-in workload and of --corrupt (default %(default)s)",
    )
    cache = parser.add_argument_group("cache")
    cache.add_argument(
        "--policy",
        metavar="NAME",
        default=_DEFAULTS.policy,
        help="eviction policy: lru, arc, adaptive, another known one, a plug-in or module:Class (default %(default)s)",
    )
    capacity = cache.add_mutually_exclusive_group()
    capacity.add_argument(
        "--cpu-blocks",
        metavar="N",
        type=_integer(1),
        help=f"offloaded blocks that CPU memory holds (default {DEFAULT_CPU_BLOCKS})",
    )
    capacity.add_argument(
        "--cpu-bytes", metavar="SIZE", type=_size, help="the same in bytes, such as 64MiB, 1GB or 1048576"
    )
    cache.add_argument(
        "--gpu-blocks",
        metavar="N",
        type=_integer(1),
        help="blocks of a GPU with prefix caching above CPU memory (default: each request finds the GPU empty)",
    )
    cache.add_argument(
        "--placement",
        choices=get_args(Placement),
        default=_DEFAULTS.placement,
        help="inclusive: computed blocks are stored at once; exclusive: blocks are stored when the GPU gives them up, "
        "and loading takes them along; needs --gpu-blocks (default %(default)s)",
    )
    cache.add_argument(
        "--tier",
        metavar="URL",
        action="append",
        help="a tier below CPU memory, such as file:///var/cache/kv?capacity=10GiB; may be given several times, the "
        "fastest first",
    )
    cache.add_argument(
        "--cascade",
        choices=get_args(CascadeWait),
        default=_DEFAULTS.cascade,
        help="whether a request waits until its blocks are written to the tiers (default %(default)s)",
    )
    cache.add_argument(
        "--page-bytes",
        metavar="N",
        type=_integer(WORD_BYTES, multiple_of=WORD_BYTES),
        default=_DEFAULTS.page_bytes,
        help="bytes of a GPU block in one layer (default %(default)s)",
    )
    cache.add_argument(
        "--layers", metavar="N", type=_integer(1), default=_DEFAULTS.layers, help="layers (default %(default)s)"
    )
    cache.add_argument(
        "--block-size-factor",
        metavar="N",
        type=_integer(1),
        default=_DEFAULTS.block_size_factor,
        help="GPU blocks per offloaded block (default %(default)s)",
    )
    cache.add_argument(
        "--store-threshold",
        metavar="N",
        type=_integer(0),
        default=_DEFAULTS.store_threshold,
        help="store a block only once N requests have asked for it (default: store every block)",
    )
    sweep = parser.add_argument_group("sweep")
    sweep.add_argument(
        "--sweep",
        action="store_true",
        help="hit rates of policies by capacities, the clairvoyant bound beside them; needs --no-data",
    )
    sweep.add_argument(
        "--policies",
        metavar="NAME,...",
        type=_names,
        help="policies of the sweep; lru+2 is lru behind a reuse filter of 2 (default: all that are known, and lru+2)",
    )
    sweep.add_argument(
        "--capacities",
        metavar="PERCENT,...",
        type=_percentages,
        help="capacities of the sweep in %% of the distinct blocks (default "
        f"{','.join(f'{percent:g}' for percent in DEFAULT_SWEEP_PERCENTS)})",
    )
    sweep.add_argument(
        "--plot", metavar="FILE", type=Path, help="draw the curves of the sweep, such as into curves.png"
    )
    run = parser.add_argument_group("run")
    run.add_argument(
        "--restart-after", metavar="N", type=_integer(1), help="close everything after N requests, and open it again"
    )
    run.add_argument(
        "--engines",
        metavar="N",
        type=_integer(1),
        default=_DEFAULTS.engines,
        help="engines in processes of their own that share the requests and the tiers (default %(default)s)",
    )
    run.add_argument(
        "--corrupt",
        metavar="N",
        type=_integer(0),
        default=_DEFAULTS.corrupt,
        help="flip N stored bytes on purpose, which must be found (default %(default)s)",
    )
    run.add_argument(
        "--no-data", action="store_true", help="bookkeeping only: a hit-rate simulator that moves no bytes"
    )
    run.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    run.add_argument(
        "--backend", choices=("asyncio", "trio"), default=_DEFAULTS.backend, help="event loop (default %(default)s)"
    )
    run.add_argument(
        "--check-order",
        action=argparse.BooleanOptionalAction,
        default=_DEFAULTS.check_order,
        help="look for reads and overwrites that come too early (on unless switched off)",
    )

    run.add_argument(
        "--workers",
        metavar="N",
        type=_integer(1),
        help="N worker processes over one shared memory, each with a slice of every block; needs msgspec",
    )


def _replay_options(parser: argparse.ArgumentParser, found: argparse.Namespace) -> ReplayOptions:
    if found.no_data and found.corrupt:
        parser.error("--corrupt needs bytes, so it cannot be used with --no-data")
    if found.no_data and found.concurrency not in (None, 1):
        parser.error("--no-data replays one request after the other, so --concurrency must be 1 or left out")
    if found.no_data and found.workers:
        parser.error("--workers moves bytes, so it cannot be used with --no-data")
    if found.workers and find_spec("msgspec") is None:
        parser.error("--workers needs the package msgspec; install it: pip install 'aiokvoffload[cluster]'")
    if found.backend == "trio" and find_spec("trio") is None:
        parser.error("--backend trio needs the package trio; install it, or use --backend asyncio")
    traces = tuple(found.trace or ())
    if not found.sweep:
        for option in ("policies", "capacities", "plot"):
            if getattr(found, option) is not None:
                parser.error(f"--{option} is for --sweep")
        if len(traces) > 1:
            parser.error("--trace can be given several times only with --sweep")
    elif not found.no_data:
        parser.error("--sweep moves no bytes; give --no-data too")
    elif found.store_threshold:
        parser.error("--store-threshold cannot be used with --sweep; give --policies lru+2")
    cpu_blocks = found.cpu_blocks or DEFAULT_CPU_BLOCKS
    if found.cpu_bytes is not None:
        needed_bytes = block_bytes(found.page_bytes, found.layers, found.block_size_factor) * (found.workers or 1)
        cpu_blocks = found.cpu_bytes // needed_bytes
        if cpu_blocks < 1:
            parser.error(
                f"--cpu-bytes {found.cpu_bytes} is too little for one offloaded block, which needs {needed_bytes} bytes"
            )
    try:
        return ReplayOptions(
            trace=traces[0] if traces else None,
            limit=found.limit,
            policy=found.policy,
            cpu_blocks=cpu_blocks,
            gpu_blocks=found.gpu_blocks,
            placement=found.placement,
            tiers=tuple(found.tier or ()),
            cascade=found.cascade,
            restart_after=found.restart_after,
            engines=found.engines,
            page_bytes=found.page_bytes,
            layers=found.layers,
            block_size_factor=found.block_size_factor,
            store_threshold=found.store_threshold,
            concurrency=found.concurrency or (1 if found.no_data else DEFAULT_CONCURRENCY),
            seed=found.seed,
            corrupt=found.corrupt,
            with_data=not found.no_data,
            json_output=found.json,
            backend=found.backend,
            check_order=found.check_order,
            workers=found.workers,
            sweep=None
            if not found.sweep
            else SweepOptions(
                traces=traces,
                policies=found.policies or (),
                capacity_percents=found.capacities or DEFAULT_SWEEP_PERCENTS,
                plot=found.plot,
            ),
        )
    except ConfigurationError as exc:
        parser.error(str(exc))


def _integer(at_least: int, *, multiple_of: int = 1) -> Callable[[str], int]:
    expected = f"a multiple of {multiple_of}" if multiple_of > 1 else "a whole number"

    def convert(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = at_least - 1
        if value < at_least or value % multiple_of:
            raise argparse.ArgumentTypeError(f"{text!r} must be {expected}, at least {at_least}")
        return value

    return convert


def _names(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    if not all(names):
        raise argparse.ArgumentTypeError(f"{text!r} must be names with commas between them")
    return names


def _percentages(text: str) -> tuple[float, ...]:
    try:
        return SweepOptions(capacity_percents=tuple(float(part) for part in text.split(","))).capacity_percents
    except (ValueError, ConfigurationError):
        raise argparse.ArgumentTypeError(f"{text!r} must be percentages above 0 with commas between them") from None


def _size(text: str) -> int:
    try:
        return parse_byte_size(text)
    except ConfigurationError as exc:
        raise argparse.ArgumentTypeError(str(exc)) from exc


def _installed_version() -> str:
    try:
        return version(PROGRAM)
    except PackageNotFoundError:  # run from a checkout that was not installed
        return "(not installed)"
