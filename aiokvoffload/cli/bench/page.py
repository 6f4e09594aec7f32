"""Writes tables into a page, between the marks that it has for them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from aiokvoffload.errors import ConfigurationError


def begin_mark(name: str) -> str:
    """Return what stands before a section in a page."""
    return f"<!-- bench:{name} -->"


def end_mark(name: str) -> str:
    """Return what stands behind a section in a page."""
    return f"<!-- end of bench:{name} -->"


def check_page(path: Path, names: Iterable[str]) -> str:
    """Return the text of a page that has marks for all sections.

    Raises:
        ConfigurationError: It cannot be read, or has no such marks.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigurationError(f"the page {path} cannot be read: {exc}") from exc
    for name in names:
        begin, end = text.find(begin_mark(name)), text.find(end_mark(name))
        if not 0 <= begin < end:
            raise ConfigurationError(
                f"the page {path} has no place for {name}: add the lines {begin_mark(name)} and {end_mark(name)}"
            )
    return text


def write_sections(path: Path, sections: Mapping[str, str]) -> None:
    """Put each section between its marks, in place of what is there.

    Raises:
        ConfigurationError: The page cannot be read or written, or has no such marks.
    """
    text = check_page(path, sections)
    for name, section in sections.items():
        before, _, rest = text.partition(begin_mark(name))
        _, _, after = rest.partition(end_mark(name))
        text = f"{before}{begin_mark(name)}\n\n{section.strip()}\n\n{end_mark(name)}{after}"
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as exc:
        raise ConfigurationError(f"the page {path} cannot be written: {exc}") from exc
