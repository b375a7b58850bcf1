"""The core without features, and the whole without each of them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import WITHOUT_FEATURES, run_process
from tests.test_features import FEATURES, ROOT

TRACE = "traces/a100-13b-async.ebb"
SMOKE = (
    ["--help"],
    ["summary", TRACE],
    ["findings", TRACE],
    ["windows", TRACE],
    ["machines"],
)
# Tests of files that name features: docs, examples, benchmarks, the distribution.
NOT_OF_THE_CORE = ("features", "docs", "benchmarks", "recipes", "cuda_runtime")
TIMEOUT_S = 1500.0
PYTHON = (sys.executable, "-m")


NAMES = [folder.name for folder in FEATURES]


def copy_without(names: list[str], folder: Path) -> Path:
    """Copy the files of the repository without some features."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True
    ).stdout
    left_out = tuple(
        f"{top}/{name}/" for name in names for top in ("features", "tests/features")
    )
    for name in filter(None, listed.decode().split("\0")):
        if not name.startswith(left_out) and (ROOT / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name, follow_symlinks=False)
    return folder


def run_in(folder: Path, *words: str | Path) -> str:
    """Run a command in a copy and return what it printed."""
    environment = {**os.environ, "PYTHONPATH": str(folder), WITHOUT_FEATURES: "1"}
    run = run_process(words, cwd=folder, env=environment, timeout_s=TIMEOUT_S)
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    return run.stdout


@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT_S)
def test_core__passes_its_tests_without_features(tmp_path: Path) -> None:
    folder = copy_without(NAMES, tmp_path)
    ignored = [f"--ignore=tests/{name}" for name in NOT_OF_THE_CORE]
    run_in(
        folder,
        *PYTHON,
        "pytest",
        "-q",
        "-n",
        "2",
        "--dist",
        "worksteal",
        "-m",
        "not slow",
        "tests",
        *ignored,
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_feature__can_be_deleted_alone(name: str, tmp_path: Path) -> None:
    folder = copy_without([name], tmp_path)
    project = folder / "pyproject.toml"
    # Its exceptions match nothing then.
    contracts = re.sub(
        r"unmatched_ignore_imports_alerting = .*\n", "", project.read_text()
    )
    project.write_text(
        re.sub(
            r"(\nignore_imports = \[)",
            r'\nunmatched_ignore_imports_alerting = "none"\1',
            contracts,
        )
    )
    run_in(folder, Path(sys.executable).with_name("lint-imports"), "--no-cache")
    run_in(folder, *PYTHON, "pytest", "--collect-only", "-q", "-p", "no:cacheprovider")
    for words in SMOKE:
        assert run_in(folder, *PYTHON, "ebbtide", *words)
