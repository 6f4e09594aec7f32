"""How `nox -s docs` builds the site: pages in Markdown, the reference from the docstrings."""

from __future__ import annotations

import inspect
import re
from enum import Enum
from importlib.metadata import version as version_of
from importlib.util import find_spec
from typing import Any

from sphinx.application import Sphinx

project = "aiokvoffload"
author = "the aiokvoffload authors"
project_copyright = author
version = release = version_of(project)

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"{project} {version}"
html_static_path: list[str] = []

highlight_language = "text"

# Pages are read on GitHub too, so they link to headings as GitHub names them.
myst_heading_anchors = 3

# Modules that documented ones import and that the environment of the docs need not have.
_OPTIONAL = ("mooncake", "prometheus_client", "transformers", "triton", "vllm", "zmq")
autodoc_mock_imports = [name for name in _OPTIONAL if find_spec(name) is None]
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True}
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 100
add_module_names = False

# In a docstring, `name` is a link where it names something that is documented, and code otherwise.
default_role = "py:obj"
nitpicky = True
nitpick_ignore_regex = [
    ("py:obj", ".*"),
    # Of types and errors, those of this package must be documented; the others would need inventories from elsewhere.
    ("py:.*", r"(?!aiokvoffload\.).*"),
    # But for type variables, and for inner parts that constructors name which nobody else calls.
    ("py:class", r"aiokvoffload\.(registry\.Part|offloader\.machine\.Result|managers\.base\.TicketType)"),
    (
        "py:class",
        r"aiokvoffload\.offloader\.(machine\.OffloaderMachine|parts\.Parts|opening\.Gathering|subscriptions\.EventHub)",
    ),
    ("py:class", r"aiokvoffload\.(integrations\.transformers\.(layout\.CausalModel|prefix\.Request))"),
    ("py:class", r"aiokvoffload\.(integrations\.vllm\.connector\.StepMetadata|managers\.tier_lookups\.TierSearch)"),
    ("py:class", r"aiokvoffload\.(cluster\.peer|devices\.cuda_\w+|devices\.ranges|tiers\.valkey_client)\..*"),
]


def keep_enum_members(
    _app: Sphinx, _what: str, name: str, member: object, _skip: bool, _options: object
) -> bool | None:
    """Document members of enums that need no words of their own."""
    return False if isinstance(member, Enum) and not name.startswith("_") else None


def leave_parameters_unlinked(
    _app: Sphinx, _what: str, _name: str, documented: Any, _options: object, lines: list[str]
) -> None:
    """Show a parameter's name as code, whatever else has the same name."""
    try:
        parameters = "|".join(inspect.signature(documented).parameters)
    except (TypeError, ValueError):
        return
    if parameters:
        lines[:] = [re.sub(rf"(?<!`)`({parameters})`(?!`)", r"``\1``", line) for line in lines]


def setup(app: Sphinx) -> None:
    """Listen to what autodoc finds; called by Sphinx."""
    app.connect("autodoc-skip-member", keep_enum_members)
    app.connect("autodoc-process-docstring", leave_parameters_unlinked, priority=400)  # before napoleon
