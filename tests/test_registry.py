from __future__ import annotations

import subprocess
import sys
from collections import OrderedDict, UserDict
from pathlib import Path

import pytest

import aiokvoffload
from aiokvoffload.errors import ConfigurationError
from aiokvoffload.registry import Registry, import_object, nearest_name

GROUP = "aiokvoffload.test_mappings"

PLUGIN = """
class Plugged(dict):
    class Inner(dict):
        pass

number = 7
"""


@pytest.fixture
def registry() -> Registry[dict[str, int]]:
    builtin = {"ordered": "collections:OrderedDict", "counter": "collections:Counter", "user": "collections:UserDict"}
    return Registry("mapping", dict, builtin, GROUP)


@pytest.fixture
def installed_plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on the import path that looks like an installed distribution."""
    distribution = tmp_path / "kv_plugin-1.0.dist-info"
    distribution.mkdir()
    (distribution / "METADATA").write_text("Metadata-Version: 2.1\nName: kv-plugin\nVersion: 1.0\n")
    (distribution / "entry_points.txt").write_text(
        f"[{GROUP}]\n"
        "plugged = kv_plugin_module:Plugged\n"
        "nested = kv_plugin_module:Plugged.Inner\n"
        "ordered = kv_plugin_module:Plugged\n"
        "number = kv_plugin_module:number\n"
        "gone = kv_plugin_module:Gone\n"
        "missing = kv_plugin_missing:Plugged\n"
        "broken = kv_plugin_broken:Plugged\n"
        "[aiokvoffload.test_others]\n"
        "other = kv_plugin_module:Plugged\n"
    )
    (tmp_path / "kv_plugin_module.py").write_text(PLUGIN)
    (tmp_path / "kv_plugin_broken.py").write_text("raise RuntimeError('no licence')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for module in ("kv_plugin_module", "kv_plugin_broken"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    return tmp_path


def test_builtin_names_resolve(registry: Registry[dict[str, int]]) -> None:
    assert registry.resolve("ordered") is OrderedDict


def test_a_class_is_its_own_name(registry: Registry[dict[str, int]]) -> None:
    class Own(dict[str, int]):
        pass

    assert registry.resolve(Own) is Own


def test_a_class_can_be_named_by_its_module(registry: Registry[dict[str, int]]) -> None:
    assert registry.resolve("collections:OrderedDict") is OrderedDict


def test_names_are_sorted(registry: Registry[dict[str, int]]) -> None:
    assert registry.names() == ["counter", "ordered", "user"]


def test_an_unknown_name_is_answered_with_the_nearest(registry: Registry[dict[str, int]]) -> None:
    with pytest.raises(ConfigurationError) as caught:
        registry.resolve("orderd")
    assert str(caught.value) == (
        "unknown mapping 'orderd'; did you mean 'ordered'? Known: counter, ordered, user; or give 'module:Class'"
    )


def test_a_far_name_is_answered_with_all(registry: Registry[dict[str, int]]) -> None:
    with pytest.raises(ConfigurationError) as caught:
        registry.resolve("xyz")
    assert str(caught.value) == "unknown mapping 'xyz'. Known: counter, ordered, user; or give 'module:Class'"


@pytest.mark.parametrize("name", ["collections:UserDict", "user", "math:pi", UserDict, int, None, 7, ["ordered"]])
def test_what_is_no_such_part_is_refused(registry: Registry[dict[str, int]], name: object) -> None:
    with pytest.raises(ConfigurationError, match="is no mapping: it must be a subclass of dict"):
        registry.resolve(name)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "target",
    ["no_such_module_at_all:Class", "collections:Missing", "collections:", ":Class", ".relative:Class", "a b:Class"],
)
def test_what_cannot_be_imported_is_refused(registry: Registry[dict[str, int]], target: str) -> None:
    with pytest.raises(ConfigurationError, match="cannot be imported") as caught:
        registry.resolve(target)
    assert target in str(caught.value)
    assert caught.value.__cause__ is not None


@pytest.mark.usefixtures("installed_plugins")
def test_entry_points_resolve(registry: Registry[dict[str, int]]) -> None:
    assert registry.resolve("plugged").__name__ == "Plugged"
    assert registry.resolve("nested").__name__ == "Inner"


@pytest.mark.usefixtures("installed_plugins")
def test_a_builtin_name_cannot_be_taken_over(registry: Registry[dict[str, int]]) -> None:
    assert registry.resolve("ordered") is OrderedDict


@pytest.mark.usefixtures("installed_plugins")
def test_names_include_plugins_of_the_group_only(registry: Registry[dict[str, int]]) -> None:
    names = registry.names()
    assert {"plugged", "ordered", "counter"} <= set(names)
    assert "other" not in names
    assert names.count("ordered") == 1


@pytest.mark.usefixtures("installed_plugins")
def test_a_misspelt_plugin_is_suggested(registry: Registry[dict[str, int]]) -> None:
    with pytest.raises(ConfigurationError, match="did you mean 'plugged'"):
        registry.resolve("plugde")


@pytest.mark.usefixtures("installed_plugins")
@pytest.mark.parametrize(
    ("name", "reason"),
    [("gone", "Gone"), ("missing", "kv_plugin_missing"), ("broken", "no licence"), ("number", "is no mapping")],
)
def test_a_broken_plugin_is_named(registry: Registry[dict[str, int]], name: str, reason: str) -> None:
    with pytest.raises(ConfigurationError, match=reason):
        registry.resolve(name)


def test_nothing_is_imported_before_it_is_asked_for(installed_plugins: Path) -> None:
    program = (
        "import sys\n"
        "from aiokvoffload.registry import Registry\n"
        f"registry = Registry('mapping', dict, {{'plain': 'kv_plugin_module:Plugged'}}, {GROUP!r})\n"
        "assert 'broken' in registry.names()\n"
        "assert 'kv_plugin_module' not in sys.modules\n"
        "registry.resolve('plain')\n"
        "assert 'kv_plugin_module' in sys.modules\n"
    )
    package_home = str(Path(aiokvoffload.__file__).parents[1])
    environment = {"PYTHONPATH": f"{package_home}:{installed_plugins}"}
    ran = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr


def test_import_object_says_what_kind_was_wanted() -> None:
    assert import_object("collections:OrderedDict", "mapping") is OrderedDict
    with pytest.raises(ConfigurationError, match="tier 'nowhere_at_all:Tier' cannot be imported"):
        import_object("nowhere_at_all:Tier", "tier")


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("lur", "; did you mean 'lru'?"),
        ("LRU", "; did you mean 'lru'?"),
        ("arcc", "; did you mean 'ARC'?"),
        ("something else", ""),
        ("", ""),
    ],
)
def test_nearest_name(name: str, answer: str) -> None:
    assert nearest_name(name, iter(["lru", "ARC"])) == answer
