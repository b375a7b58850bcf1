"""`ebbtide dry-run --python`: the job runs in another environment."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import pytest

from ebbtide.profiler.trace import open_trace
from tests.cli.test_bad_input import refused
from tests.conftest import ebbtide, ebbtide_in_process

JOB = """
import importlib.util, sys, torch
print(sys.prefix, [name for name in ("ebbtide", "numpy", "msgspec", "typer") if importlib.util.find_spec(name)])
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh()).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for step in range(3):
    model(torch.randn(4, 64, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def packages_of(name: str) -> set[str]:
    """Return the names of a distribution and of all that it requires and that are
    installed."""
    names, following = set[str](), [name]
    while following:
        one = following.pop()
        if one in names:
            continue
        try:
            requires = distribution(one).requires or []
        except PackageNotFoundError:
            continue
        names.add(one)
        following += [
            re.split(r"[^\w.-]", line)[0] for line in requires if "extra ==" not in line
        ]
    return names


def environment(folder: Path) -> Path:
    """Make an environment of torch and of what it requires alone, and return its
    interpreter."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    packages = next(folder.glob("lib/python*/site-packages"))
    for name in packages_of("torch"):
        one: Any = distribution(name)
        for entry in {file.parts[0] for file in one.files} - {"..", "__pycache__"}:
            (packages / entry).symlink_to(one.locate_file(entry))
    return folder / "bin" / "python"


@pytest.mark.slow
def test_dry_run__takes_an_environment_with_torch_alone(tmp_path: Path) -> None:
    python = environment(tmp_path / "environment")
    (tmp_path / "job.py").write_text(JOB)
    words = ("dry-run", "--gpu", "h100-80gb", "--", "python", "job.py")
    own = ebbtide(*words[:1], "-o", "own.ebb", *words[1:], cwd=tmp_path)
    options = ("-o", "other.ebb", "--python", str(python))
    other = ebbtide(*words[:1], *options, *words[1:], cwd=tmp_path)
    assert other.returncode == own.returncode == 0, other.stderr
    assert f"{python.parents[1]} ['ebbtide']" in other.stdout
    # torch warns where it finds no NumPy.
    result = other.stderr[other.stderr.index("other.ebb: predicted") :]
    assert result.replace("other.ebb", "own.ebb") == own.stderr
    for table in ("kernels", "memory", "phases", "allocations"):
        # Stacks name the folder of torch.
        tables = [
            open_trace(tmp_path / f"{name}.ebb")
            .table(0, table)
            .drop(columns="stack", errors="ignore")
            for name in ("own", "other")
        ]
        assert tables[0].equals(tables[1])
    metas = [
        (tmp_path / f"{name}.ebb" / "meta.json").read_text()
        for name in ("own", "other")
    ]
    assert metas[0] == metas[1]


@pytest.mark.slow
def test_dry_run__follows_a_launcher_in_another_environment(tmp_path: Path) -> None:
    python = environment(tmp_path / "environment")
    (tmp_path / "job.py").write_text(JOB)
    words = (
        "--python",
        str(python),
        "--",
        "torchrun",
        "--nproc-per-node",
        "2",
        "job.py",
    )
    run = ebbtide("dry-run", "-o", "run.ebb", *words, cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    assert open_trace(tmp_path / "run.ebb").meta.command == ("python", "job.py")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("job", "status", "line"),
    [
        (
            "import torch\ntorch.ones(4, device='cuda').numpy()",
            2,
            "cannot dry-run .numpy()",
        ),
        ("raise SystemExit(7)", 7, "the job ended with status 7"),
    ],
)
def test_dry_run__ends_as_a_job_in_another_environment_does(
    job: str, status: int, line: str, tmp_path: Path
) -> None:
    (tmp_path / "job.py").write_text(job)
    words = ("--python", sys.executable, "-o", "run.ebb", "--", "python", "job.py")
    run = ebbtide("dry-run", *words, cwd=tmp_path)
    assert run.returncode == status
    assert line in run.stderr
    assert not (tmp_path / "run.ebb").exists()


def test_dry_run__says_what_an_environment_lacks(tmp_path: Path) -> None:
    empty = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", empty], check=True)
    for python, line in (
        (str(empty / "bin" / "python"), "has no torch: install it there"),
        (str(tmp_path / "none"), "there is no program"),
        ("true", "true is no Python"),
    ):
        words = ("dry-run", "--python", python, "--", "python", "job.py")
        assert line in refused(ebbtide_in_process(*words, cwd=tmp_path))
    words = ("dry-run", "--python", "python", "--model", "qwen3-8b")
    assert "--python is for -- CMD" in refused(ebbtide_in_process(*words, cwd=tmp_path))
