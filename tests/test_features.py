"""Features plug into seams of the core: those of this repository, and those of other
distributions."""

from __future__ import annotations

import ast
import os
import sys
import tomllib
from pathlib import Path

import pytest

from ebbtide import seams
from ebbtide.cli.command import find_commands
from ebbtide.errors import UserError
from ebbtide.seams import SEAMS, Feature
from tests.conftest import WITHOUT_FEATURES, run_process

ROOT = Path(__file__).parents[1]
FEATURES = sorted(
    path for path in (ROOT / "features").iterdir() if (path / "__init__.py").exists()
)

COMMAND = '''
from ebbtide.cli.command import command
from ebbtide.cli.printing import echo

@command("Files")
def hello() -> None:
    """Print a line."""
    echo("hello")
'''
RULES = """
from ebbtide.analysis.findings.rule import rule

@rule("hello")
def hello(job):
    return None
"""
PLUG = (
    'Feature("hello", {"commands": {"hello": "command"}, "findings": {"hello": '
    '"rules"}})'
)
PROGRAM = (
    "from ebbtide.analysis.findings.rule import all_rules; print(*{r.name for r in "
    "all_rules()} & {'hello'})"
)


def test_contract__has_no_exception_but_for_type_checkers() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"][
        "importlinter"
    ]["contracts"]
    (layers,) = [contract for contract in contracts if contract["type"] == "layers"]
    public = (
        "ebbtide",
        "ebbtide.profiler",
        "ebbtide.interleave",
        "ebbtide.interleave.deepspeed",
    )
    public = (*public, "ebbtide.profiler.importers.load")
    exceptions = [
        line for line in layers["ignore_imports"] if line.split(" -> ")[0] not in public
    ]
    assert exceptions == []


@pytest.mark.parametrize("folder", FEATURES, ids=lambda path: path.name)
def test_feature__holds_strings_alone(folder: Path) -> None:
    docstring, imported, feature = ast.parse((folder / "__init__.py").read_text()).body
    assert isinstance(docstring, ast.Expr)
    assert ast.unparse(imported) == "from ebbtide.seams import Feature"
    assert isinstance(feature, ast.Assign)
    assert ast.unparse(feature.targets[0]) == "FEATURE"
    assert seams.features()[f"ebbtide.features.{folder.name}"].name == folder.name


@pytest.mark.parametrize("seam", SEAMS)
def test_seam__has_objects_that_can_be_imported(seam: str) -> None:
    if WITHOUT_FEATURES in os.environ:
        pytest.skip("objects of a feature may need another one")
    assert len(seams.load_all(seam)) == len(seams.plugs(seam)) > 0


def test_seam__refuses_two_objects_of_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    both = {
        name: Feature(name, {"plots": {"ranks": "module"}})
        for name in ("first", "second")
    }
    monkeypatch.setattr(seams, "features", lambda: both)
    with pytest.raises(UserError, match="first and second both have 'ranks'"):
        seams.plugs("plots")


def test_feature__refuses_an_unknown_seam() -> None:
    with pytest.raises(UserError, match="'panel' is no seam"):
        Feature("hello", {"panel": {}})


def test_with_needs__leaves_out_features_that_lack_one_and_those_that_need_these() -> (
    None
):
    present = {
        "a": Feature("a"),
        "b": Feature("b", needs=("a",)),
        "c": Feature("c", needs=("a", "missing")),
        "d": Feature("d", needs=("c",)),
    }
    assert list(seams.with_needs(present)) == ["a", "b"]


def test_service__that_is_not_there_is_a_line() -> None:
    with pytest.raises(UserError, match="'nothing', which is not installed"):
        seams.service("nothing")


def test_feature__of_another_distribution_plugs_in(tmp_path: Path) -> None:
    package, metadata = (
        tmp_path / "hello_feature",
        tmp_path / "hello_feature-1.0.dist-info",
    )
    package.mkdir()
    metadata.mkdir()
    (package / "__init__.py").write_text(
        f"from ebbtide.seams import Feature\n\nFEATURE = {PLUG}\n"
    )
    (package / "command.py").write_text(COMMAND)
    (package / "rules.py").write_text(RULES)
    (metadata / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: hello-feature\nVersion: 1.0\n"
    )
    (metadata / "entry_points.txt").write_text(
        "[ebbtide.features]\nhello = hello_feature\n"
    )
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    for words, expected in (
        (["-m", "ebbtide", "hello"], "hello\n"),
        (["-c", PROGRAM], "hello\n"),
    ):
        run = run_process([sys.executable, *words], env=environment, cwd=tmp_path)
        assert (run.returncode, run.stdout) == (0, expected), run.stderr


def test_find_commands__refuses_a_key_that_is_not_the_name_of_its_function(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    other = Feature("other", {"commands": {"difference": "command"}})
    monkeypatch.setitem(seams.features(), "ebbtide.features.diff", other)
    with pytest.raises(UserError, match="function of another name"):
        find_commands("difference")
