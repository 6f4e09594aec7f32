"""What `aiokvoffload demo` is asked to do."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from aiokvoffload.cli.options import Backend
from aiokvoffload.errors import ConfigurationError


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    """The options of one demo, each checked when it is made.

    Attributes:
        model: A directory, a GGUF file or a name that Transformers knows; None is the model of the extra `demo`.
        tiers: URLs of tiers below CPU memory, the fastest first; without any, a directory that is removed at the end.
        with_restart: Whether a second process goes on with the conversation.
        cpu_bytes: CPU memory for prefixes.
        new_tokens: Tokens of an answer, at most.
        json_output: Whether the report is JSON.
        picture: SVG file for the report.
        backend: The event loop.

    Raises:
        ConfigurationError: A value cannot work.
    """

    model: str | None = None
    tiers: tuple[str, ...] = ()
    with_restart: bool = False
    cpu_bytes: int = 256 << 20
    new_tokens: int = 16
    json_output: bool = False
    picture: Path | None = None
    backend: Backend = "asyncio"

    def __post_init__(self) -> None:
        if self.new_tokens < 1:
            raise ConfigurationError(f"new_tokens is {self.new_tokens}, it must be at least 1")
        if self.picture is not None and self.picture.suffix != ".svg":
            raise ConfigurationError(f"the picture is an SVG; name it {self.picture.with_suffix('.svg').name}")
