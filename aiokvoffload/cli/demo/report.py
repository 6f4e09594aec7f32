"""What the demo found, as a table, as JSON and as a picture."""

from __future__ import annotations

import io
import json
import re
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, Self, TextIO

from aiokvoffload.cli.report import TierReport
from aiokvoffload.extras import import_extra

_PICTURE_COLUMNS = 116
_HEADINGS = ("request", "prompt", "restored", "from", "first token without", "with offloading", "sooner", "same answer")


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestReport:
    """One prompt, answered without offloading and with it.

    Attributes:
        name: Which one.
        prompt_tokens: Tokens of the prompt.
        restored_tokens: Those that were not computed.
        restored_from: Where they were, such as "CPU memory" or "disk"; empty if there were none.
        first_token_seconds_without: From the call to the first token, of Transformers by itself.
        first_token_seconds: The same with offloading.
        are_tokens_equal: Whether both generated the same tokens.
    """

    name: str
    prompt_tokens: int
    restored_tokens: int
    restored_from: str
    first_token_seconds_without: float
    first_token_seconds: float
    are_tokens_equal: bool

    @property
    def speedup(self) -> float:
        """How many times sooner the first token was there."""
        return self.first_token_seconds_without / self.first_token_seconds

    def describe(self) -> str:
        """Say it in one line."""
        restored = f"{self.restored_tokens} from {self.restored_from}" if self.restored_tokens else "none"
        return (
            f"{self.name}: {self.prompt_tokens} tokens, restored {restored}; first token after "
            f"{self.first_token_seconds:.2f} s, without offloading {self.first_token_seconds_without:.2f} s"
        )

    def cells(self) -> tuple[str, ...]:
        """Return the request as a row of the table."""
        return (
            self.name,
            f"{self.prompt_tokens:,}",
            f"{self.restored_tokens:,}",
            self.restored_from,
            f"{self.first_token_seconds_without:.2f} s",
            f"{self.first_token_seconds:.2f} s",
            f"{self.speedup:.1f} x",
            "yes" if self.are_tokens_equal else "NO",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Median:
    """What several prompts of about the same length, restored from the same place, have in common.

    Attributes:
        prompt_tokens: Tokens of a prompt, in hundreds.
        restored_from: As in `RequestReport`.
        request_count: How many prompts.
        speedup: How many times sooner the first token was there, the median of all.
    """

    prompt_tokens: int
    restored_from: str
    request_count: int
    speedup: float

    def describe(self) -> str:
        """Say it in one line."""
        return (
            f"about {self.prompt_tokens:,} tokens, restored from {self.restored_from}: first token {self.speedup:.1f} "
            f"times sooner, the median of {self.request_count} prompts"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoReport:
    """All that a demo found.

    Attributes:
        model: Which model chatted.
        requests: In the order in which they were served.
        p99_loop_stall_ms: What the event loop kept 99 % of ready tasks waiting at most; of two processes, the longer.
        max_loop_stall_ms: The longest that it kept one waiting.
        tiers: What each tier has done.
    """

    model: str
    requests: tuple[RequestReport, ...]
    p99_loop_stall_ms: float
    max_loop_stall_ms: float
    tiers: tuple[TierReport, ...]

    @property
    def is_faultless(self) -> bool:
        """Whether offloading has changed no answer."""
        return all(request.are_tokens_equal for request in self.requests)

    @property
    def medians(self) -> list[Median]:
        """Of each place and length of which there is more than one prompt."""
        groups: dict[tuple[int, str], list[float]] = {}
        for request in self.requests:
            if request.restored_tokens:
                alike = round(request.prompt_tokens, -2), request.restored_from
                groups.setdefault(alike, []).append(request.speedup)
        return [
            Median(prompt_tokens=tokens, restored_from=place, request_count=len(speedups), speedup=median(speedups))
            for (tokens, place), speedups in groups.items()
            if len(speedups) > 1
        ]

    def joined(self, other: Self) -> Self:
        """Return what this one and a later process have found together."""
        return replace(
            self,
            requests=self.requests + other.requests,
            p99_loop_stall_ms=max(self.p99_loop_stall_ms, other.p99_loop_stall_ms),
            max_loop_stall_ms=max(self.max_loop_stall_ms, other.max_loop_stall_ms),
            tiers=tuple(mine.joined(theirs) for mine, theirs in zip(self.tiers, other.tiers, strict=True)),
        )

    def to_json(self) -> str:
        """Return everything as one JSON object on one line."""
        requests: list[dict[str, Any]] = [asdict(one) | {"speedup": one.speedup} for one in self.requests]
        figures = {
            "model": self.model,
            "requests": requests,
            "medians": [asdict(one) for one in self.medians],
            "p99_loop_stall_ms": self.p99_loop_stall_ms,
            "max_loop_stall_ms": self.max_loop_stall_ms,
            "tiers": [asdict(tier) for tier in self.tiers],
        }
        return json.dumps(figures, allow_nan=False)

    def write_table(self, stream: TextIO | None = None) -> None:
        """Write the table: with rich on a terminal, in plain aligned lines elsewhere and without rich."""
        stream = sys.stdout if stream is None else stream
        if stream.isatty():
            try:
                from rich.console import Console
            except ImportError:
                pass
            else:
                self._print_rich(Console(file=stream))
                return
        rows = [_HEADINGS, *(request.cells() for request in self.requests)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for row in rows:
            stream.write("  ".join(map(str.ljust, row, widths)).rstrip() + "\n")
        stream.writelines(f"{line}\n" for line in self._notes())

    def draw(self, picture: Path) -> None:
        """Draw the table into an SVG file.

        Raises:
            ConfigurationError: rich is not installed; the message is the command that installs it.
        """
        console_class = import_extra("rich.console", extra="cli", needed_by="a picture").Console
        console = console_class(record=True, width=_PICTURE_COLUMNS, file=io.StringIO(), force_terminal=True)
        self._print_rich(console)
        drawn = console.export_svg(title="aiokvoffload demo")
        # Without fonts from elsewhere: the reader's own will do.
        picture.write_text(re.sub(r"@font-face \{[^}]*\}", "", drawn))

    def _print_rich(self, console: Any) -> None:
        from rich.table import Table
        from rich.text import Text

        table = Table(title=f"{self.model} on a CPU: time to the first token")
        for place, heading in enumerate(_HEADINGS):
            table.add_column(heading, justify="left" if place in (0, 3, 7) else "right")
        for request in self.requests:
            cells = [Text(cell) for cell in request.cells()]
            if request.restored_tokens:
                cells[6].stylize("bold green")
            if not request.are_tokens_equal:
                cells[7].stylize("bold red")
            table.add_row(*cells)
        console.print(table)
        for line in self._notes():
            console.print(Text(line))

    def _notes(self) -> list[str]:
        stall = f"event-loop stall: p99 {self.p99_loop_stall_ms:.0f} ms, longest {self.max_loop_stall_ms:.0f} ms"
        tiers = (f"{medium_of(tier.url)}: {tier.describe()}" for tier in self.tiers)
        return [*(one.describe() for one in self.medians), *tiers, stall]


def medium_of(url: str) -> str:
    """Return what to call a tier: a disk, or the name of its scheme."""
    scheme = url.partition("://")[0]
    return {"file": "disk"}.get(scheme, scheme)
