"""Tables of figures, as people read them in a terminal and as pages show them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of text under a title; the first column names the row.

    Attributes:
        title: What the figures are.
        columns: Heads, the first of which is that of the row names.
        rows: As many cells each as there are columns.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

    def to_text(self) -> str:
        """Return aligned lines."""
        lines = [self.columns, *self.rows]
        widths = [max(len(line[column]) for line in lines) for column in range(len(self.columns))]
        aligned = (
            "  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]).rstrip() for line in lines
        )
        return "\n".join([self.title, *(f"  {line}" for line in aligned), ""])

    def to_markdown(self) -> str:
        """Return a Markdown table under its title."""
        rule = ["---"] + ["---:"] * (len(self.columns) - 1)
        lines = (f"| {' | '.join(line)} |" for line in (self.columns, rule, *self.rows))
        return "\n".join([f"{self.title}:", "", *lines, ""])


def to_text(tables: Iterable[Table]) -> str:
    """Return all tables as lines for a terminal."""
    return "\n".join(table.to_text() for table in tables)


def to_markdown(tables: Iterable[Table]) -> str:
    """Return all tables as Markdown for a page."""
    return "\n".join(table.to_markdown() for table in tables)


def blocks_label(count: int) -> str:
    """Return 10,000 as 10k and 1,000,000 as 1M."""
    for unit, letter in ((1_000_000, "M"), (1_000, "k")):
        if count >= unit and not count % unit:
            return f"{count // unit}{letter}"
    return f"{count:,}"
