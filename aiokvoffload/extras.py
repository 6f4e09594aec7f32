"""Libraries that only one part needs are optional; this names what installs them."""

from __future__ import annotations

import importlib
from types import ModuleType

from aiokvoffload.errors import ConfigurationError


def import_extra(module: str, *, extra: str, needed_by: str) -> ModuleType:
    """Import what an optional part needs.

    Args:
        module: What to import.
        extra: The extra of this package that installs it.
        needed_by: The part, for the message, such as "a valkey:// tier".

    Raises:
        ConfigurationError: It is not installed; the message is the command that installs it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as exc:
        raise ConfigurationError(
            f"{needed_by} needs the module {module!r}, which cannot be imported ({exc}); "
            f"run: pip install 'aiokvoffload[{extra}]'"
        ) from exc
