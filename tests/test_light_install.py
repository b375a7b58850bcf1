"""The base install: what reads traces, without torch, numba, HiGHS, SciPy and Bokeh."""

from __future__ import annotations

import os
import tomllib
import venv
from collections.abc import Iterator
from importlib.metadata import Distribution, distribution
from itertools import chain
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.conftest import Run, run_process, skip_without_feature

ROOT = Path(__file__).parents[1]
TRACE = "traces/a100-13b-async.ebb"
LOG = "tests/features/importers/data/deepspeed-0.19.8-zero3-torchrun.log"
READING = (
    f"summary {TRACE}",
    f"windows {TRACE}",
    f"findings {TRACE}",
    f"plot {TRACE} -o FOLDER/run.png",
    f"diff {TRACE} {TRACE}",
    f"import {LOG} -o FOLDER/run.ebb",
    f"export {TRACE} -o FOLDER/run.json",
    "machines",
)
# Command -> the extra that it needs.
EXTRAS = {
    f"report {TRACE} -o FOLDER/run.html": "report",
    f"plan {TRACE} --machine rtx4090": "plan",
    f"replay {TRACE} --policy adaptive": "plan",
    "calibrate -o FOLDER/machine.json": "calibrate",
    "dry-run -o FOLDER/run.ebb -- python train.py": "dry-run",
    "compare --params 1e6": "run",
}
# Hides what only Linux has, and the driver of NVIDIA.
LAPTOP = """
import builtins, io, os, sys
for name in ("fcntl", "resource", "pynvml"):
    sys.modules[name] = None
open_file, open_descriptor = io.open, os.open
def refuse(path):
    if str(path).startswith(("/proc", "/sys")):
        raise FileNotFoundError(path)
def hide(path, *arguments, **keywords):
    refuse(path)
    return open_file(path, *arguments, **keywords)
builtins.open = io.open = hide
del os.sched_getaffinity
from ebbtide.cli import run
sys.exit(run(sys.argv[1:]))
"""
STARTS = """
import sys
from ebbtide.cli import run
run(sys.argv[1:])
print(*(name for name in ("pandas", "matplotlib", "torch", "numba") if name in sys.modules), file=sys.stderr)
"""


def requirements(name: str) -> Iterator[Distribution]:
    """Yield a distribution and all that it requires without extras."""
    one = distribution(name)
    yield one
    for text in one.requires or ():
        requirement = Requirement(text)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            yield from requirements(requirement.name)


def roots(one: Distribution) -> set[Path]:
    """Return the folders and modules of a distribution in site-packages."""
    names = {file.parts[0] for file in one.files or ()}
    return {Path(str(one.locate_file(name))) for name in names - {"..", "__pycache__"}}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Python of an environment with links to the packages of the base install alone."""
    root = tmp_path_factory.mktemp("base")
    venv.create(root, symlinks=True)
    (folder,) = root.glob("lib/python*/site-packages")
    (folder / "ebbtide").symlink_to(ROOT / "ebbtide")
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "dependencies"
    ]
    dependency_closure = chain.from_iterable(
        requirements(Requirement(text).name) for text in dependencies
    )
    listed = {one.metadata["Name"]: one for one in dependency_closure}
    for path in set[Path]().union(*map(roots, listed.values())):
        (folder / path.name).symlink_to(path)
    return root / "bin" / "python"


def run_in(base: Path, words: list[str], cwd: Path) -> Run:
    environment = {**os.environ, "MPLCONFIGDIR": str(cwd)}
    environment.pop("PYTHONPATH", None)
    run = run_process([str(base), *words], env=environment, cwd=ROOT)
    skip_without_feature(run)
    return run


def filled(command_line: str, folder: Path) -> list[str]:
    return command_line.replace("FOLDER", str(folder)).split()


@pytest.mark.parametrize("command_line", READING, ids=lambda text: text.split()[0])
def test_base__reads_traces(base: Path, tmp_path: Path, command_line: str) -> None:
    run = run_in(base, ["-m", "ebbtide", *filled(command_line, tmp_path)], tmp_path)
    assert run.returncode == 0, run.stderr
    assert run.stdout or list(tmp_path.iterdir())


@pytest.mark.parametrize("command_line", EXTRAS, ids=lambda text: text.split()[0])
def test_base__names_the_extra_that_a_command_needs(
    base: Path, tmp_path: Path, command_line: str
) -> None:
    run = run_in(base, ["-m", "ebbtide", *filled(command_line, tmp_path)], tmp_path)
    assert (run.returncode, run.stdout) == (2, "")
    (message,) = run.stderr.splitlines()
    assert f"ebbtide[{EXTRAS[command_line]}]" in message
    assert not [
        path for path in tmp_path.iterdir() if path.name.startswith(("run", "machine"))
    ]


@pytest.mark.parametrize("command_line", READING[:3], ids=lambda text: text.split()[0])
def test_base__reads_traces_on_a_laptop(
    base: Path, tmp_path: Path, command_line: str
) -> None:
    run = run_in(base, ["-c", LAPTOP, *filled(command_line, tmp_path)], tmp_path)
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize(
    ("command_line", "imported"),
    [*zip(READING, ([], ["pandas"], ["pandas"]), strict=False)],
)
def test_commands__import_what_they_need_alone(
    base: Path, tmp_path: Path, command_line: str, imported: list[str]
) -> None:
    run = run_in(
        base, ["-c", STARTS, *filled(command_line, tmp_path), "--json"], tmp_path
    )
    assert run.stderr.split() == imported, run.stderr
