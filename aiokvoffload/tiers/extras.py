"""Libraries that only one tier needs are optional; this names what installs them."""

from __future__ import annotations

import importlib
from types import ModuleType

from aiokvoffload.errors import ConfigurationError


def import_extra(module: str, *, extra: str, scheme: str) -> ModuleType:
    """Import what a tier needs.

    Args:
        module: What to import.
        extra: The extra of this package that installs it.
        scheme: The tier, for the message.

    Raises:
        ConfigurationError: It is not installed; the message is the command that installs it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as exc:
        raise ConfigurationError(
            f"a {scheme}:// tier needs the module {module!r}, which cannot be imported ({exc}); "
            f"run: pip install 'aiokvoffload[{extra}]'"
        ) from exc
