"""Figures drawn with matplotlib, which nothing else needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from aiokvoffload.errors import ConfigurationError


def require_matplotlib() -> Any:
    """Return matplotlib's `Figure`.

    Raises:
        ConfigurationError: It is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as exc:
        raise ConfigurationError("--plot needs matplotlib; install it with: pip install aiokvoffload[plot]") from exc
    return Figure


def check_plot(path: Path) -> None:
    """See before anything is measured whether a plot can be drawn.

    Raises:
        ConfigurationError: matplotlib is not installed, or there is no such folder.
    """
    require_matplotlib()
    if not path.absolute().parent.is_dir():
        raise ConfigurationError(f"the plot cannot be written to {path}: there is no folder {path.absolute().parent}")


def save_figure(figure: Any, path: Path) -> None:
    """Write a figure into an image file, whose name says of which kind.

    Raises:
        ConfigurationError: That cannot be done.
    """
    try:
        figure.savefig(path)
    except (OSError, ValueError) as exc:
        raise ConfigurationError(f"the plot cannot be written to {path}: {exc}") from exc
