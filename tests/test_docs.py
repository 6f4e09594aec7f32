"""Every Python block of the documentation runs, and prints what the page says."""

from __future__ import annotations

import contextlib
import io
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
import torch

import aiokvoffload
from aiokvoffload import LookupResult, open_offloader

ROOT = Path(__file__).parents[1]
LAYOUT = ROOT / "docs" / "layout.md"
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
    if "from transformers import" in code:
        pytest.importorskip("transformers")
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


def test_every_public_name_is_in_the_reference() -> None:
    pages = [page.read_text() for page in (ROOT / "docs" / "reference").glob("*.md")]
    documented = {name for page in pages for name in re.findall(r"^\.\. auto\w+:: (\S+)$", page, re.MULTILINE)}
    assert [
        name
        for name in aiokvoffload.__all__
        if not {f"aiokvoffload.{name}", getattr(aiokvoffload, name).__module__} & documented
    ] == []


def test_the_layout_page_names_every_folder_and_module() -> None:
    drawn = re.search(r"^aiokvoffload/\n(.*?)^```", LAYOUT.read_text(), re.MULTILINE | re.DOTALL)
    assert drawn is not None
    named = re.findall(r"^  (\S+)", drawn[1], re.MULTILINE)
    package = ROOT / "aiokvoffload"
    folders = {f"{path.parent.name}/" for path in package.glob("*/__init__.py")}
    assert sorted(named) == sorted(folders | {path.name for path in package.glob("*.py")})


@pytest.fixture(scope="module")
def walks() -> dict[str, list[str]]:
    """The functions that a store and a load enter, in the order of their first calls."""
    entered: dict[str, list[str]] = {"A store": [], "A load": []}
    with open_offloader([torch.randn(4, 64)], cpu_bytes=1024, policy="lru", tiers=["memory://"]) as offloader:
        keys = offloader.keys(range(32))

        def store() -> None:
            offloader.store_soon(keys, [0, 1]).wait(timeout_seconds=60)
            while not offloader.manager.is_at_rest:
                offloader.poll()

        def load() -> None:
            ticket = offloader.prepare_load(keys)
            while ticket.result is LookupResult.PENDING:
                offloader.poll()
            assert ticket.start([2, 3]).wait(timeout_seconds=60).token_count == 32

        for name, work in (("A store", store), ("A load", load)):
            entered[name] = functions_entered(work)
            offloader.reset()
    return entered


def functions_entered(work: Callable[[], None]) -> list[str]:
    places: dict[str, None] = {}

    def note(frame: FrameType, _event: str, _argument: object) -> None:
        places.setdefault(_place(frame.f_code))

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(before)
    return list(places)


def _place(code: CodeType) -> str:
    return f"{code.co_filename.rpartition('/aiokvoffload/')[2]} {code.co_name}"


@pytest.mark.parametrize("name", ["A store", "A load"])
def test_the_walks_of_the_layout_page_are_those_of_the_code(walks: dict[str, list[str]], name: str) -> None:
    section = LAYOUT.read_text().partition(f"\n## {name}\n")[2].partition("\n## ")[0]
    steps = [f"{file} {function}" for file, function in re.findall(r"^\d+\. `(\S+)` `(\w+)`", section, re.MULTILINE)]
    assert len(steps) > 10
    assert [step for step in walks[name] if step in steps] == steps


# What the pages on writing parts write keeps the contracts.
TestPolicyOfThePage = defined_on("writing-a-policy.md")["TestUsedTwicePolicy"]
TestTierOfThePage = defined_on("writing-a-tier.md")["TestSqliteTier"]
TestDeviceOfThePage = defined_on("writing-a-device.md")["TestPoolDevice"]
