"""The public names, and what importing them costs."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

import aiokvoffload
from aiokvoffload import errors


@pytest.mark.parametrize("name", aiokvoffload.__all__)
def test_every_public_name_resolves(name: str) -> None:
    assert getattr(aiokvoffload, name) is not None


def test_lazy_names_and_public_names_are_the_same() -> None:
    assert sorted(aiokvoffload._HOME_OF) == sorted(aiokvoffload.__all__)
    assert set(aiokvoffload.__all__) <= set(dir(aiokvoffload))


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = aiokvoffload.nothing


def test_every_error_is_public_and_drawn_in_the_tree() -> None:
    classes = [
        name
        for name, found in vars(errors).items()
        if inspect.isclass(found) and issubclass(found, errors.OffloadError)
    ]
    tree = inspect.getdoc(errors) or ""
    assert [name for name in classes if name not in tree] == []
    assert [name for name in classes if name not in aiokvoffload.__all__] == []


@pytest.mark.parametrize(
    "statement",
    [
        "import aiokvoffload; aiokvoffload.CPUOffloadingManager(4)",
        "import aiokvoffload; aiokvoffload.KVGroup(block_tokens=16, layers=[0])",
        "from aiokvoffload.cli.main import run; run(['replay', '--no-data', '--limit', '5'])",
    ],
)
def test_bookkeeping_needs_no_torch(statement: str) -> None:
    check = "import sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", f"{statement}\n{check}"], check=True, capture_output=True)


def test_importing_the_package_imports_nothing_heavy() -> None:
    heavy = "{'torch', 'numpy', 'anyio'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", f"import sys, aiokvoffload\nassert not {heavy}, {heavy}"], check=True)
