"""The agent in isolation: any Python that runs torch can load it, without the rest of
ebbtide."""

from __future__ import annotations

import ast
import os
import sys
from pathlib import Path

import pytest

from ebbtide import phases
from ebbtide.profiler.agent import spool
from tests.conftest import run_process

PROFILER = Path(__file__).parents[3] / "profiler"
FILES = sorted(
    [*(PROFILER / "agent").rglob("*.py"), *(PROFILER / "inject").glob("*.py")]
)


def test_agent__is_python_3_9_and_imports_only_the_standard_library() -> None:
    for file in FILES:
        tree = ast.parse(file.read_text(), feature_version=(3, 9))
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                names = {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names = {(node.module or "").partition(".")[0]}
            else:
                continue
            assert names <= sys.stdlib_module_names, file


def test_spool__has_the_phases_of_ebbtide() -> None:
    assert spool.PHASES == phases.PHASES


def test_inject__changes_nothing_in_a_python_that_never_imports_torch(
    tmp_path: Path,
) -> None:
    program = (
        "import sys; print(sorted(m for m in sys.modules if 'ebbtide' in m), sys.path, "
        "'torch' in sys.modules)"
    )
    environment = {
        **os.environ,
        "EBBTIDE_SPOOL": str(tmp_path),
        "PYTHONPATH": str(PROFILER / "inject"),
    }
    run = run_process([sys.executable, "-c", program], env=environment, cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    assert "recorder" not in run.stdout
    assert "inject" not in run.stdout
    assert run.stderr == ""
    assert [path.name.partition("-")[0] for path in tmp_path.iterdir()] == ["python"]


def test_agent_pth__loads_the_agent_without_ebbtide_itself(tmp_path: Path) -> None:
    line = (PROFILER / "inject" / "ebbtide-agent.pth").read_text()
    program = (
        f"import os, sys; os.environ['EBBTIDE_SPOOL'] = {str(tmp_path)!r}\n{line}"
        "print('ebbtide.profiler.agent.start' in sys.modules, 'ebbtide' in "
        "sys.modules)\n"
    )
    run = run_process([sys.executable, "-W", "error", "-c", program], cwd=tmp_path)
    assert (run.returncode, run.stdout, run.stderr) == (0, "True False\n", "")


def test_from_environment__notes_that_the_import_of_torch_begins(
    tmp_path: Path,
) -> None:
    (tmp_path / "torch.py").write_text(
        "import glob, os; print(len(glob.glob(os.environ['EBBTIDE_SPOOL'] + "
        "'/torch-*')))"
    )
    environment = {
        **os.environ,
        "EBBTIDE_SPOOL": str(tmp_path),
        "PYTHONPATH": str(PROFILER / "inject"),
    }
    run = run_process(
        [sys.executable, "-c", "import torch"], env=environment, cwd=tmp_path
    )
    assert (run.returncode, run.stdout, run.stderr) == (0, "1\n", "")


@pytest.mark.slow
def test_when_imported__survives_a_search_for_torch_without_import(
    tmp_path: Path,
) -> None:
    program = (
        "import importlib.util; assert importlib.util.find_spec('torch')\n"
        "import torch; assert torch.__spec__.loader.__dict__.get('exec_module') is "
        "None\n"
        "model = torch.nn.Linear(2, 2); optimizer = "
        "torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "model(torch.ones(1, 2)).sum().backward(); optimizer.step()\n"
    )
    environment = {
        **os.environ,
        "EBBTIDE_SPOOL": str(tmp_path),
        "PYTHONPATH": str(PROFILER / "inject"),
    }
    run = run_process([sys.executable, "-c", program], env=environment, cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    assert len(list(tmp_path.glob("agent-*.spool"))) == 1


@pytest.mark.slow
def test_agent__does_not_disturb_a_job_without_a_spool_folder(tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "EBBTIDE_SPOOL": str(tmp_path / "missing"),
        "PYTHONPATH": str(PROFILER / "inject"),
    }
    program = (
        "import torch; torch.nn.Linear(1, 1)(torch.ones(1)).backward(); print('done')"
    )
    run = run_process([sys.executable, "-c", program], env=environment, cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    assert (run.stdout, run.stderr) == ("done\n", "")
