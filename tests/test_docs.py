"""Every Python block of the documentation runs, and prints what the page says."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(
    r"^```python\n(?P<code>.*?)^```\n(?:\s*^```output\n(?P<output>.*?)^```\n)?", re.MULTILINE | re.DOTALL
)
CONTINUED = "<!-- the blocks of this page continue each other -->"


def examples() -> list[object]:
    """Return the blocks that run together: one of a page, or all of a page whose blocks continue each other."""
    found: list[object] = []
    for page in PAGES:
        text = page.read_text()
        blocks = list(BLOCK.finditer(text))
        for together in [blocks] if CONTINUED in text else [[block] for block in blocks]:
            line = text[: together[0].start()].count("\n") + 1
            found.append(pytest.param(together, id=f"{page.name}:{line}"))
    return found


def run(code: str, namespace: dict[str, Any]) -> str:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, "example", "exec"), namespace)  # noqa: S102  our own documentation
    return printed.getvalue()


def defined_on(page: str) -> dict[str, Any]:
    """Return what the blocks of a page define."""
    namespace: dict[str, Any] = {"__name__": __name__}
    for match in BLOCK.finditer((ROOT / "docs" / page).read_text()):
        run(match["code"], namespace)
    return namespace


@pytest.mark.parametrize("blocks", examples())
def test_examples_print_what_the_page_says(blocks: list[re.Match[str]]) -> None:
    namespace: dict[str, Any] = {"__name__": "example"}
    for block in blocks:
        printed = run(block["code"], namespace)
        assert block["output"] is None or printed == block["output"]


def test_readme_opens_with_an_example_that_prints_64_true() -> None:
    match = BLOCK.search((ROOT / "README.md").read_text())
    assert match is not None
    assert run(match["code"], {"__name__": "example"}) == "64 True\n"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\((?!https?://)([^)#]+)", page.read_text())
    assert [target for target in targets if not (page.parent / target).exists()] == []


# What the pages on writing parts write keeps the contracts.
TestPolicyOfThePage = defined_on("writing-a-policy.md")["TestUsedTwicePolicy"]
TestTierOfThePage = defined_on("writing-a-tier.md")["TestSqliteTier"]
TestDeviceOfThePage = defined_on("writing-a-device.md")["TestPoolDevice"]
