"""`aiokvoffload demo`: its options, and what it prints."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory

import anyio

from aiokvoffload.cli.demo.chat_model import ChatModel, Turn
from aiokvoffload.cli.demo.options import DemoOptions
from aiokvoffload.cli.demo.report import DemoReport
from aiokvoffload.clock import SystemClock
from aiokvoffload.errors import ConfigurationError
from aiokvoffload.units import parse_byte_size

_DEFAULTS = DemoOptions()


def run_demo(arguments: Sequence[str]) -> int:
    """Run `aiokvoffload demo` and return its exit status: 0 well, 1 if an answer changed; a mistake ends with 2."""
    parser = _parser()
    try:
        options = _options(parser, parser.parse_args(arguments))
        report = demo(options)
        if options.picture is not None:
            report.draw(options.picture)
    except ConfigurationError as exc:
        parser.error(str(exc))
    if options.json_output:
        print(report.to_json())
    else:
        report.write_table()
    return 0 if report.is_faultless else 1


def demo(options: DemoOptions) -> DemoReport:
    """Serve conversations, in this process and, if asked for, in a second one that goes on from the tiers.

    Raises:
        ConfigurationError: The model or a tier cannot be opened.
    """
    with ExitStack() as stack:
        tiers = options.tiers
        if not tiers:
            directory = stack.enter_context(TemporaryDirectory(prefix="aiokvoffload_demo_"))
            tiers = (f"file://{directory}/kv?capacity=2GiB&keep_free=64MiB",)
        report, turns = _serve(options, tiers)
        if options.with_restart:
            _say("a new process goes on with the conversation")
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as processes:
                report = report.joined(processes.submit(_serve_after_restart, options, tiers, turns).result())
        return report


def _serve(options: DemoOptions, tiers: Sequence[str]) -> tuple[DemoReport, list[Turn]]:
    from aiokvoffload.cli.demo.serving import serve_conversations

    with ThreadPoolExecutor(1) as executor:
        chat = _load(options, executor)
        return anyio.run(partial(serve_conversations, options, chat, executor, tiers, _say), backend=options.backend)


def _serve_after_restart(options: DemoOptions, tiers: Sequence[str], turns: Sequence[Turn]) -> DemoReport:
    from aiokvoffload.cli.demo.serving import go_on_after_restart

    with ThreadPoolExecutor(1) as executor:
        chat = _load(options, executor)
        serve = partial(go_on_after_restart, options, chat, executor, tiers, turns, _say)
        return anyio.run(serve, backend=options.backend)


def _load(options: DemoOptions, executor: Executor) -> ChatModel:
    """Load the model in the thread that it runs in: elsewhere, that would leave a team of idle threads behind."""
    clock = SystemClock()
    started = clock.now()
    chat = executor.submit(ChatModel.load, options.model).result()
    _say(f"{chat.name} was loaded in {clock.now() - started:.1f} s")
    return chat


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="aiokvoffload demo",
        description=(
            "A small chat model answers a conversation of several turns, and several guests at once that share a long "
            "system prompt. Each prompt is answered without offloading and with it, and both must say the same. "
            "It runs on a CPU and takes a few minutes. Exit status 1 if an answer changed, 2 for a mistake."
        ),
        allow_abbrev=False,
    )
    parser.add_argument(
        "--tier",
        metavar="URL",
        action="append",
        help="a tier below CPU memory, such as file:///var/cache/kv?capacity=10GiB; may be given several times, the "
        "fastest first (default: a directory that is removed at the end)",
    )
    parser.add_argument(
        "--restart", action="store_true", help="let a second process go on with the conversation, from the tiers"
    )
    parser.add_argument(
        "--model",
        metavar="MODEL",
        help="a directory, a GGUF file or a name that Transformers knows (default: the one of the extra demo)",
    )
    parser.add_argument(
        "--cpu-bytes", metavar="SIZE", type=_size, default=_DEFAULTS.cpu_bytes, help="CPU memory (default 256MiB)"
    )
    parser.add_argument(
        "--new-tokens",
        metavar="N",
        type=int,
        default=_DEFAULTS.new_tokens,
        help="tokens of an answer (default %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--picture", metavar="FILE", type=Path, help="draw the table, such as into demo.svg")
    parser.add_argument(
        "--backend", choices=("asyncio", "trio"), default=_DEFAULTS.backend, help="event loop (default %(default)s)"
    )
    return parser


def _options(parser: argparse.ArgumentParser, found: argparse.Namespace) -> DemoOptions:
    if found.backend == "trio" and find_spec("trio") is None:
        parser.error("--backend trio needs the package trio; install it, or use --backend asyncio")
    return DemoOptions(
        model=found.model,
        tiers=tuple(found.tier or ()),
        with_restart=found.restart,
        cpu_bytes=found.cpu_bytes,
        new_tokens=found.new_tokens,
        json_output=found.json,
        picture=found.picture,
        backend=found.backend,
    )


def _size(text: str) -> int:
    try:
        return parse_byte_size(text)
    except ConfigurationError as exc:
        raise argparse.ArgumentTypeError(str(exc)) from exc
