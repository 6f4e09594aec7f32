"""Every Python block of the documentation runs, and prints what the page says."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(
    r"^```python\n(?P<code>.*?)^```\n(?:\s*^```output\n(?P<output>.*?)^```\n)?", re.MULTILINE | re.DOTALL
)


def examples() -> list[object]:
    return [
        pytest.param(match["code"], match["output"], id=f"{page.name}:{text[: match.start()].count(chr(10)) + 1}")
        for page in PAGES
        for text in [page.read_text()]
        for match in BLOCK.finditer(text)
    ]


def run(code: str) -> str:
    if "from transformers import" in code:
        pytest.importorskip("transformers")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, "example", "exec"), {"__name__": "example"})  # noqa: S102  our own documentation
    return printed.getvalue()


@pytest.mark.parametrize(("code", "output"), examples())
def test_example_prints_what_the_page_says(code: str, output: str | None) -> None:
    printed = run(code)
    assert output is None or printed == output


def test_readme_opens_with_an_example_that_prints_64_true() -> None:
    match = BLOCK.search((ROOT / "README.md").read_text())
    assert match is not None
    assert run(match["code"]) == "64 True\n"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\((?!https?://)([^)#]+)", page.read_text())
    assert [target for target in targets if not (page.parent / target).exists()] == []
