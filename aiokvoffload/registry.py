"""Names of interchangeable parts: built in, `module:Class`, or the name of an entry point."""

from __future__ import annotations

import difflib
import importlib
import operator
from collections.abc import Iterable, Mapping
from importlib.metadata import entry_points
from typing import Generic, TypeVar

from aiokvoffload.errors import ConfigurationError

Part = TypeVar("Part")


def nearest_name(name: str, known: Iterable[str]) -> str:
    """Return `"; did you mean 'lru'?"` for a near miss in any case, else an empty string."""
    folded = {candidate.casefold(): candidate for candidate in known}
    near = difflib.get_close_matches(name.casefold(), folded, n=1)
    return f"; did you mean {folded[near[0]]!r}?" if near else ""


class Registry(Generic[Part]):
    """Finds the class behind a name and imports it only then.

    Args:
        kind: What the parts are, for messages: "eviction policy".
        base: The class that every part derives from.
        builtin: Name to `"module:Class"`.
        entry_point_group: Where installed plug-ins announce themselves.
    """

    def __init__(self, kind: str, base: type[Part], builtin: Mapping[str, str], entry_point_group: str) -> None:
        self._kind = kind
        self._base = base
        self._builtin = dict(builtin)
        self._entry_point_group = entry_point_group

    def names(self) -> list[str]:
        """Return the names that resolve now, installed plug-ins included."""
        plugins = (point.name for point in entry_points(group=self._entry_point_group))
        return sorted({*self._builtin, *plugins})

    def resolve(self, name: str | type[Part]) -> type[Part]:
        """Return the class for a class, a known name, a `"module:Class"` or an entry point's name.

        Raises:
            ConfigurationError: The name is unknown, cannot be imported or is not such a part.
        """
        found = self._load(name) if isinstance(name, str) else name
        if not (isinstance(found, type) and issubclass(found, self._base)):
            raise ConfigurationError(f"{name!r} is no {self._kind}: it must be a subclass of {self._base.__name__}")
        return found

    def _load(self, name: str) -> object:
        target = self._builtin.get(name, name)
        if ":" in target:
            return import_object(target, self._kind)
        for point in entry_points(group=self._entry_point_group, name=name):
            return import_object(f"{point.module}:{point.attr}", self._kind)
        known = self.names()
        raise ConfigurationError(
            f"unknown {self._kind} {name!r}{nearest_name(name, known) or '.'} Known: {', '.join(known)}; "
            "or give 'module:Class'"
        )


def import_object(target: str, kind: str) -> object:
    """Import `"module:Class"`, or `"module:Outer.Inner"`.

    Raises:
        ConfigurationError: The module cannot be imported, for whatever reason, or has no such attribute.
    """
    module_name, _, attribute = target.partition(":")
    try:
        found: object = operator.attrgetter(attribute)(importlib.import_module(module_name))
    except Exception as exc:
        raise ConfigurationError(f"{kind} {target!r} cannot be imported: {exc}") from exc
    return found
