import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from aiokvoffload.cli.arguments import exit_with_mistake, parse_arguments
from aiokvoffload.cli.options import ReplayOptions
from aiokvoffload.errors import ConfigurationError
from aiokvoffload.units import parse_byte_size


def parsed(command_line: str) -> ReplayOptions:
    return parse_arguments(command_line.split())


def test_no_options_are_the_defaults() -> None:
    assert parsed("replay") == ReplayOptions()


def test_every_option_arrives() -> None:
    options = parsed(
        "replay --trace some/file.gz --limit 10 --policy arc --cpu-blocks 20 --gpu-blocks 30 --page-bytes 40 "
        "--layers 5 --block-size-factor 6 --store-threshold 7 --concurrency 8 --seed 9 --corrupt 1 --json "
        "--backend trio --no-check-order"
    )
    assert options == ReplayOptions(
        trace=Path("some/file.gz"),
        limit=10,
        policy="arc",
        cpu_blocks=20,
        gpu_blocks=30,
        page_bytes=40,
        layers=5,
        block_size_factor=6,
        store_threshold=7,
        concurrency=8,
        seed=9,
        corrupt=1,
        json_output=True,
        backend="trio",
        check_order=False,
    )
    assert options.block_bytes == 40 * 5 * 6
    assert options.cpu_bytes == 20 * 40 * 5 * 6


def test_cpu_bytes_are_turned_into_whole_blocks() -> None:
    options = parsed("replay --cpu-bytes 1MiB --page-bytes 1000 --layers 3 --block-size-factor 2")
    assert options.cpu_blocks == 2**20 // 6000
    assert parsed("replay --cpu-bytes 4096").cpu_blocks == 1


def test_no_data_is_sequential() -> None:
    assert parsed("replay --no-data") == replace(ReplayOptions(), with_data=False, concurrency=1)
    assert parsed("replay --no-data --concurrency 1 --gpu-blocks 5").concurrency == 1


@pytest.mark.parametrize(
    ("command_line", "message"),
    [
        ("", "required: COMMAND"),
        ("repaly", "invalid choice: 'repaly'"),
        ("replay extra", "unrecognized arguments: extra"),
        ("replay --lim 5", "unrecognized arguments: --lim 5"),
        ("replay --limit", "argument --limit: expected one argument"),
        ("replay --limit 0", "argument --limit: '0' must be a whole number, at least 1"),
        ("replay --limit x", "argument --limit: 'x' must be a whole number"),
        ("replay --limit 1.5", "argument --limit: '1.5' must be a whole number"),
        ("replay --cpu-blocks -3", "argument --cpu-blocks: '-3' must be"),
        ("replay --gpu-blocks 0", "argument --gpu-blocks: '0' must be"),
        ("replay --page-bytes 12", "argument --page-bytes: '12' must be a multiple of 8, at least 8"),
        ("replay --page-bytes 0", "argument --page-bytes: '0' must be a multiple of 8, at least 8"),
        ("replay --layers 0", "argument --layers: '0' must be"),
        ("replay --block-size-factor 0", "argument --block-size-factor: '0' must be"),
        ("replay --store-threshold -1", "argument --store-threshold: '-1' must be"),
        ("replay --concurrency 0", "argument --concurrency: '0' must be"),
        ("replay --seed -1", "argument --seed: '-1' must be a whole number, at least 0"),
        ("replay --corrupt -1", "argument --corrupt: '-1' must be"),
        ("replay --backend uvloop", "argument --backend: invalid choice: 'uvloop'"),
        ("replay --cpu-bytes much", "argument --cpu-bytes: 'much' is no size; give bytes or a number with kB"),
        ("replay --cpu-bytes 4095", "--cpu-bytes 4095 is too little for one offloaded block, which needs 4096 bytes"),
        ("replay --cpu-bytes 1GB --cpu-blocks 5", "--cpu-blocks: not allowed with argument --cpu-bytes"),
        ("replay --gpu-blocks 1 --block-size-factor 2", "one offloaded block is 2 GPU blocks"),
        ("replay --no-data --corrupt 1", "--corrupt needs bytes"),
        ("replay --no-data --concurrency 2", "--concurrency must be 1 or left out"),
        ("replay --policy=", "policy is empty"),
    ],
)
def test_a_mistake_is_one_sentence_and_status_2(
    capsys: pytest.CaptureFixture[str], command_line: str, message: str
) -> None:
    with pytest.raises(SystemExit) as caught:
        parsed(command_line)
    assert caught.value.code == 2
    output, errors = capsys.readouterr()
    assert output == ""
    usage, mistake = errors.splitlines()
    assert usage.startswith("usage: aiokvoffload")
    assert message in mistake


def test_a_later_mistake_looks_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        exit_with_mistake("100 % of this is wrong")
    assert caught.value.code == 2
    assert capsys.readouterr().err == (
        "usage: aiokvoffload replay [options]\naiokvoffload replay: error: 100 % of this is wrong\n"
    )


@pytest.mark.parametrize("command_line", ["--help", "replay --help", "--version"])
def test_help_and_version_are_printed(capsys: pytest.CaptureFixture[str], command_line: str) -> None:
    with pytest.raises(SystemExit) as caught:
        parsed(command_line)
    assert caught.value.code == 0
    assert "aiokvoffload" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1048576", 1048576),
        ("1b", 1),
        ("64MiB", 64 * 2**20),
        ("64 mib", 64 * 2**20),
        ("1GB", 10**9),
        ("1kB", 1000),
        ("1.5KiB", 1536),
        ("0.1GB", 10**8),
        (" 2TiB ", 2**41),
        ("3TB", 3 * 10**12),
        ("9007199254740993", 9007199254740993),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_byte_size(text) == size


@pytest.mark.parametrize(
    "text", ["", "MiB", "-1", "-1MiB", "1M", "1e9", "nan", "1.MiB", "1 2", "1MiB!", "\u0661", "9" * 99]
)
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(repr(text)) + " is no size"):
        parse_byte_size(text)


@pytest.mark.parametrize("text", ["0", "0MiB", "0.1", "0.0001KiB"])
def test_less_than_a_byte_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match="less than one byte"):
        parse_byte_size(text)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"limit": 0}, "limit is 0"),
        ({"cpu_blocks": 0}, "cpu_blocks is 0"),
        ({"seed": -1}, "seed is -1"),
        ({"page_bytes": 12}, "page_bytes is 12"),
        ({"policy": " "}, "policy is empty"),
        ({"with_data": False, "corrupt": 1}, "no bytes to corrupt"),
    ],
)
def test_options_check_themselves(change: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        ReplayOptions(**change)  # type: ignore[arg-type]


def test_no_module_of_the_command_line_imports_torch_or_rich() -> None:
    script = (
        "import sys, aiokvoffload.cli\n"
        "from aiokvoffload.cli import arguments, options, pattern, report, stall, trace, workload\n"
        "print(sorted({name.partition('.')[0] for name in sys.modules} & {'torch', 'rich', 'trio'}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2]
    )
    assert done.stdout == "[]\n"
