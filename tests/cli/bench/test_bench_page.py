"""All benches at once, and the page they write."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from aiokvoffload.cli.bench.command import DEFAULT_POLICIES, SECTIONS
from aiokvoffload.cli.bench.page import begin_mark, check_page, end_mark, write_sections
from aiokvoffload.cli.main import run
from aiokvoffload.errors import ConfigurationError

PERFORMANCE = Path(__file__).parents[3] / "docs" / "performance.md"
MARKS = "".join(f"{begin_mark(name)}\nold\n{end_mark(name)}\nkept\n" for name in SECTIONS)


def test_all_benches_fill_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"# Title\n{MARKS}")
    assert run(["bench", "all", "--quick", "--no-compare", "--json", "--write", str(page)]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["bench"] for line in lines] == ["manager"] * 2 * len(DEFAULT_POLICIES) + ["transfer", "path"]
    text = page.read_text()
    assert text.startswith("# Title\n")
    assert text.count("kept") == len(SECTIONS)
    assert "old" not in text
    for expected in (
        "One run on",
        "| prepare_store, with room |",
        "Not compared with vLLM in this run: it was not asked for.",
        "polls per transfer",
        "requests at once",
    ):
        assert expected in text


def test_writing_twice_changes_nothing_else(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{MARKS}after\n")
    write_sections(page, {"path": "one\n"})
    once = page.read_text()
    write_sections(page, {"path": "one"})
    assert page.read_text() == once
    assert once == f"before\n{MARKS}after\n".replace(f"{begin_mark('path')}\nold\n", f"{begin_mark('path')}\n\none\n\n")


def test_the_performance_page_has_a_place_for_every_section() -> None:
    check_page(PERFORMANCE, SECTIONS)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot be read"),
        ("no marks", "has no place for machine: add the lines"),
        (f"{end_mark('machine')} {begin_mark('machine')}", "has no place for machine"),
    ],
)
def test_a_page_without_a_place_is_named_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | None, message: str
) -> None:
    page = tmp_path / "page.md"
    if text is not None:
        page.write_text(text)
    with pytest.raises(SystemExit) as caught:
        run(["bench", "all", "--quick", "--write", str(page)])
    assert caught.value.code == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert not printed.out


def test_a_page_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "page.md"
    page.write_text(MARKS)

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError("read only")

    monkeypatch.setattr(Path, "write_text", refuse)
    with pytest.raises(ConfigurationError, match="cannot be written: read only"):
        write_sections(page, {"path": "one"})


@pytest.mark.parametrize("what", [[], ["everything"]])
def test_what_to_measure_must_be_named(capsys: pytest.CaptureFixture[str], what: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        run(["bench", *what])
    assert caught.value.code == 2
    assert "WHAT" in capsys.readouterr().err
