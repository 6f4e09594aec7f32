import io
import json
import math
import sys
from dataclasses import replace

import pytest

from aiokvoffload.cli.report import ReplayReport, progress, write_report

REPORT = ReplayReport(
    policy="lru",
    cpu_blocks=1_024,
    requests=12_031,
    blocks_looked_up=288_500,
    blocks_hit=80_463,
    bytes_stored=1_234_567_890,
    bytes_loaded=45_678,
    store_gigabytes_per_second=3.456,
    load_gigabytes_per_second=0.5,
    blocks_verified=80_463,
    mismatches=0,
    order_violations=0,
    evictions=7,
    refused_stores=0,
    max_loop_stall_ms=12.345,
    load_wait_p50_ms=0.4,
    load_wait_p99_ms=9.876,
    left_pinned=0,
    left_leased=0,
    seconds=42.1,
)
BOOKKEEPING = ReplayReport(
    policy="arc",
    cpu_blocks=4,
    requests=0,
    blocks_looked_up=0,
    blocks_hit=0,
    evictions=0,
    refused_stores=0,
    left_pinned=0,
    left_leased=0,
    seconds=0.5,
)
NEEDED = [
    "requests",
    "blocks_looked_up",
    "blocks_hit",
    "hit_rate",
    "bytes_stored",
    "bytes_loaded",
    "store_gigabytes_per_second",
    "load_gigabytes_per_second",
    "blocks_verified",
    "mismatches",
    "order_violations",
    "evictions",
    "refused_stores",
    "max_loop_stall_ms",
    "load_wait_p50_ms",
    "load_wait_p99_ms",
    "seconds",
    "policy",
    "cpu_blocks",
    "left_pinned",
    "left_leased",
]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_json_is_one_line_with_every_figure() -> None:
    text = REPORT.to_json()
    assert "\n" not in text
    figures = json.loads(text)
    assert sorted(figures) == sorted(NEEDED)
    assert figures["hit_rate"] == pytest.approx(0.2789, abs=1e-4)
    assert figures["bytes_stored"] == 1_234_567_890


def test_what_does_not_apply_is_null_in_json_and_left_out_of_the_table() -> None:
    figures = json.loads(BOOKKEEPING.to_json())
    assert sorted(figures) == sorted(NEEDED)
    assert figures["bytes_stored"] is None
    assert figures["hit_rate"] == 0.0
    labels = [label for label, _ in BOOKKEEPING.table_rows()]
    assert labels == [
        "policy",
        "CPU blocks",
        "requests",
        "blocks looked up",
        "blocks hit",
        "hit rate",
        "evictions",
        "refused stores",
        "left pinned",
        "left leased",
        "time",
    ]


def test_a_figure_that_is_not_finite_is_no_json() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        replace(REPORT, seconds=math.inf).to_json()


def test_a_low_bandwidth_is_not_rounded_away() -> None:
    rows = dict(replace(REPORT, load_gigabytes_per_second=0.00123).table_rows())
    assert rows["load bandwidth"] == "1.23 MB/s"


def test_figures_are_worded_for_people() -> None:
    assert REPORT.table_rows() == [
        ("policy", "lru"),
        ("CPU blocks", "1,024"),
        ("requests", "12,031"),
        ("blocks looked up", "288,500"),
        ("blocks hit", "80,463"),
        ("hit rate", "27.89 %"),
        ("bytes stored", "1.23 GB"),
        ("bytes loaded", "45.68 kB"),
        ("store bandwidth", "3.46 GB/s"),
        ("load bandwidth", "0.50 GB/s"),
        ("blocks verified", "80,463"),
        ("mismatches", "0"),
        ("order violations", "0"),
        ("evictions", "7"),
        ("refused stores", "0"),
        ("longest event-loop stall", "12.35 ms"),
        ("load wait, p50", "0.40 ms"),
        ("load wait, p99", "9.88 ms"),
        ("left pinned", "0"),
        ("left leased", "0"),
        ("time", "42.10 s"),
    ]
    assert dict(replace(REPORT, bytes_stored=5 * 10**15).table_rows())["bytes stored"] == "5,000.00 TB"


@pytest.mark.parametrize("fault", ["mismatches", "order_violations", "left_pinned", "left_leased"])
def test_any_fault_shows(fault: str) -> None:
    assert REPORT.is_faultless
    assert BOOKKEEPING.is_faultless
    assert not ReplayReport(**{**fields_of(REPORT), fault: 1}).is_faultless  # type: ignore[arg-type]


def fields_of(report: ReplayReport) -> dict[str, object]:
    return {name: value for name, value in report.figures().items() if name != "hit_rate"}


def test_plain_lines_are_aligned() -> None:
    stream = io.StringIO()
    write_report(REPORT, stream)
    lines = stream.getvalue().splitlines()
    assert "blocks looked up          288,500" in lines
    assert "hit rate                  27.89 %" in lines
    assert len(lines) == len(REPORT.table_rows())


def test_standard_output_is_the_default(capsys: pytest.CaptureFixture[str]) -> None:
    write_report(BOOKKEEPING)
    assert "hit rate          0.00 %\n" in capsys.readouterr().out


def test_a_terminal_gets_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    write_report(replace(REPORT, policy="[red]x", mismatches=3), stream)
    text = stream.getvalue()
    assert "│" in text
    assert "[red]x" in text
    assert "27.89 %" in text


def test_a_terminal_without_rich_gets_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    hide_rich(monkeypatch)
    stream, plain = Terminal(), io.StringIO()
    write_report(REPORT, stream)
    write_report(REPORT, plain)
    assert stream.getvalue() == plain.getvalue() != ""


def hide_rich(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("rich", "rich.console", "rich.progress", "rich.table", "rich.text"):
        monkeypatch.setitem(sys.modules, name, None)


def test_progress_shows_a_bar_on_a_terminal_and_takes_it_away(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    with progress(10, "replaying", stream=stream) as advance:
        advance()
        advance(9)
        print("from the body")
    assert "replaying" in stream.getvalue()
    assert "10/10" in stream.getvalue()
    assert stream.getvalue().endswith("\x1b[2K")
    assert capsys.readouterr().out == "from the body\n"


def test_progress_shows_nothing_elsewhere(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with progress(10, "replaying") as advance:
        advance()
        advance(9)
    hide_rich(monkeypatch)
    stream = Terminal()
    with progress(10, "replaying", stream=stream) as advance:
        advance(10)
    assert stream.getvalue() == ""
    assert capsys.readouterr() == ("", "")


def test_progress_goes_to_standard_error(monkeypatch: pytest.MonkeyPatch) -> None:
    output, errors = Terminal(), Terminal()
    monkeypatch.setattr(sys, "stdout", output)
    monkeypatch.setattr(sys, "stderr", errors)
    monkeypatch.setenv("TERM", "xterm")
    with progress(10, "replaying") as advance:
        advance(10)
    assert "10/10" in errors.getvalue()
    assert output.getvalue() == ""


def test_progress_passes_the_exception_of_its_body() -> None:
    with pytest.raises(KeyError), progress(1, "replaying", stream=Terminal()):
        raise KeyError
