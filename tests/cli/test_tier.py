"""`aiokvoffload tier` and `aiokvoffload bench tier`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from aiokvoffload.cli.bench import tier as tier_bench
from aiokvoffload.cli.bench.plain_files import PlainFiles
from aiokvoffload.cli.main import run
from aiokvoffload.keys import CacheIdentity
from aiokvoffload.testing.strategies import make_keys
from aiokvoffload.tiers.calls import Operation, TierCall
from aiokvoffload.tiers.memory import MemoryTier
from aiokvoffload.tiers.opening import open_tier

ONE = CacheIdentity(model="one", dtype="bfloat16")
TWO = CacheIdentity(model="two")
BLOCK_BYTES = 5000
FILE_BYTES = 12288


@pytest.fixture
def url(tmp_path: Path) -> str:
    """A directory with three blocks of one identity and one of another."""
    url = f"file://{tmp_path}/kv?capacity=1MiB&keep_free=1"
    for identity, count in ((ONE, 3), (TWO, 1)):
        tier = open_tier(url, identity=identity, block_bytes=BLOCK_BYTES)
        tier.wait(tier.start_put(make_keys(*range(count)), [bytes([7]) * BLOCK_BYTES] * count))
        tier.close()
    return url


def block_files(url: str) -> list[Path]:
    root = Path(url.removeprefix("file://").partition("?")[0])
    return sorted(path for path in root.glob("blocks/*/??/*"))


def test_stats_say_what_is_stored_for_whom(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["tier", "stats", url]) == 0
    printed = capsys.readouterr().out
    assert "(model one, dtype bfloat16)" in printed
    assert "(model two)" in printed
    assert printed.splitlines()[-1].split() == ["4", f"{4 * FILE_BYTES:,}", "together"]
    assert run(["tier", "stats", url, "--json"]) == 0
    found = {one["description"]["model"]: one["block_count"] for one in json.loads(capsys.readouterr().out)}
    assert found == {"one": 3, "two": 1}


def test_verify_finds_bad_blocks_and_removes_them_when_told(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["tier", "verify", url]) == 0
    assert capsys.readouterr().out == "4 good, 0 bad, 0 removed\n"
    first, second, third, fourth = block_files(url)
    with first.open("r+b") as file:
        file.seek(6000)
        file.write(b"x")
    with second.open("r+b") as file:
        file.truncate(FILE_BYTES - 1)
    third.write_bytes(fourth.read_bytes())
    assert run(["tier", "verify", url]) == 1
    printed = capsys.readouterr().out
    assert printed.startswith("1 good, 3 bad, 0 removed\n")
    assert "1 wrong-checksum" in printed
    assert "1 wrong-length" in printed
    assert run(["tier", "verify", url, "--remove", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["removed_blocks"] == 3
    assert block_files(url) == [fourth]
    assert run(["tier", "verify", url]) == 0


@pytest.mark.parametrize(
    ("position", "reason"),
    [(0, "wrong-magic"), (8, "wrong-version"), (50, "wrong-identity"), (75, "wrong-key"), (3000, "wrong-padding")],
)
def test_verify_checks_the_header_too(url: str, capsys: pytest.CaptureFixture[str], position: int, reason: str) -> None:
    with block_files(url)[0].open("r+b") as file:
        file.seek(position)
        file.write(b"\xee")
    assert run(["tier", "verify", url]) == 1
    assert f"1 {reason}" in capsys.readouterr().out


def test_verify_checks_the_padding_behind_the_block(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    with block_files(url)[0].open("r+b") as file:
        file.seek(FILE_BYTES - 1)
        file.write(b"\xee")
    assert run(["tier", "verify", url]) == 1
    assert "1 wrong-padding" in capsys.readouterr().out


def test_purge_removes_all_blocks_of_all_identities(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["tier", "purge", url]) == 0
    assert capsys.readouterr().out == "4 removed\n"
    assert block_files(url) == []
    assert run(["tier", "purge", url, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"removed_blocks": 0}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["stats", "file:///nowhere/at/all"], "is no directory, or an empty one"),
        (["stats", "memory://"], "a 'memory' tier cannot be looked at from outside"),
        (["purge", "fiel:///x"], "no tier is known for fiel://; did you mean 'file'? Known: "),
        (["verify", "x"], "a tier is given as a URL such as"),
        (["purge"], "the following arguments are required: URL"),
    ],
)
def test_mistakes_are_one_sentence(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        run(["tier", *arguments])
    assert exit_info.value.code == 2
    assert message in capsys.readouterr().err


def test_somebody_elses_directory_is_never_purged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "blocks").mkdir()
    with pytest.raises(SystemExit):
        run(["tier", "purge", f"file://{tmp_path}"])
    assert "holds something else" in capsys.readouterr().err


@pytest.mark.parametrize("io", ["auto", "buffered"])
def test_the_bench_measures_each_size_beside_plain_files(
    tmp_path: Path, io: str, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"file://{tmp_path}/kv?capacity=4MiB&keep_free=1&io={io}"
    options = ["--sizes", "4KiB", "5000", "--bytes", "64KiB", "--rounds", "2", "--concurrency", "2"]
    assert run(["bench", "tier", url, *options, "--json"]) == 0
    costs = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [cost["block_bytes"] for cost in costs] == [4096, 5000]
    for cost in costs:
        assert min(value for name, value in cost.items() if name.endswith(("share", "per_second"))) > 0
        assert cost["is_direct"] is False or io == "auto"
    assert block_files(url) == []
    assert [path.name for path in tmp_path.iterdir()] == ["kv"]
    assert run(["bench", "tier", "memory://?capacity=1MiB", *options, "--plain", str(tmp_path)]) == 0
    head, first, second = capsys.readouterr().out.splitlines()
    assert head.split()[:2] == ["put", "MB/s"]
    assert (first.split()[0], second.split()[0]) == ("4KiB", "5000")


def test_plain_files_and_the_tier_go_first_in_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    class NotedFiles(PlainFiles):
        def write(self, payloads: Sequence[memoryview]) -> None:
            calls.append("write")
            super().write(payloads)

        def read(self, count: int, buffers: Sequence[memoryview]) -> None:
            calls.append("read")
            super().read(count, buffers)

    class NotedTier(MemoryTier):
        def begin(self, call: TierCall) -> None:
            if call.operation in (Operation.PUT, Operation.GET_INTO):
                calls.append(call.operation.value)
            super().begin(call)

    def open_noted(url: str, *, identity: CacheIdentity, block_bytes: int) -> MemoryTier:
        return NotedTier(identity, block_bytes=block_bytes, capacity_bytes=1 << 20)

    monkeypatch.setattr(tier_bench, "PlainFiles", NotedFiles)
    monkeypatch.setattr(tier_bench, "open_tier", open_noted)
    directory = str(tmp_path)
    tier_bench.measure_tier(
        "memory://", 8 << 10, round_bytes=64 << 10, concurrency=1, round_count=2, plain_directory=directory
    )
    assert calls == ["write", "put", "read", "get_into", "put", "write", "get_into", "read"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["memory://?capacity=64KiB", "--sizes", "8KiB"], "give the tier at least twice the capacity"),
        (["memory://", "--sizes", "8Kb1"], "is no size"),
        (["memory://", "--rounds", "0"], "--concurrency and --rounds must be at least 1"),
        (["nothing://"], "no tier is known for nothing://"),
    ],
)
def test_mistakes_of_the_bench_are_one_sentence(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_info:
        run(["bench", "tier", *arguments])
    assert exit_info.value.code == 2
    assert message in capsys.readouterr().err
