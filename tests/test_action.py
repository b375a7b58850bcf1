"""The GitHub Action: its steps run here, as the runner would run them, with a stand-in
for `gh`."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest
import yaml

from tests.conftest import needs_all_features, run_process

ACTION = yaml.safe_load((Path(__file__).parents[1] / "action.yml").read_text())
JOB = """
import sys, torch
model = torch.nn.Linear(512, int(sys.argv[1]), device="cuda")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    model(torch.ones(8, 512, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
GH = '#!/bin/sh\necho "$@" >> gh.txt\n'


def filled(text: str, values: dict[str, str]) -> str:
    """Return a text with the values of its expressions."""
    return re.sub(r"\$\{\{ (\S+) \}\}", lambda match: values[match[1]], text)


def run_action(folder: Path, **inputs: str) -> list[int]:
    """Run the steps of the action but the installation, and return their exit codes up
    to the first that fails."""
    given = {
        name: entry.get("default", "") for name, entry in ACTION["inputs"].items()
    } | inputs
    values = {f"inputs.{name}": value for name, value in given.items()} | {
        "github.repository": "owner/name",
        "github.event.number": "7",
    }
    environment = os.environ | {
        "PATH": f"{folder}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "GITHUB_OUTPUT": str(folder / "outputs"),
        "GITHUB_STEP_SUMMARY": str(folder / "step-summary.md"),
    }
    codes = []
    for step in ACTION["runs"]["steps"][1:]:
        if (outputs := folder / "outputs").exists():
            named = (line.split("=", 1) for line in outputs.read_text().splitlines())
            values |= {f"steps.compare.outputs.{name}": value for name, value in named}
        own = {name: filled(text, values) for name, text in step["env"].items()}
        command = [
            "bash",
            "--noprofile",
            "--norc",
            "-e",
            "-o",
            "pipefail",
            "-c",
            step["run"],
        ]
        codes.append(run_process(command, cwd=folder, env=environment | own).returncode)
        if codes[-1]:
            break
    return codes


@pytest.mark.slow
def test_action__passes_an_equal_job_and_fails_a_larger_one(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(JOB)
    (tmp_path / "gh").write_text(GH)
    (tmp_path / "gh").chmod(0o755)
    options = {
        "base": "base.json",
        "options": "--gpu rtx4090",
        "limits": "peak_allocated>1%\n\niteration > 10 %\n",
    }
    assert run_action(tmp_path, command="python 'job.py' 512", **options) == [
        0,
        0,
        0,
        0,
    ]
    output = tmp_path / "ebbtide-gate"
    assert "There is no base yet" in (output / "comment.md").read_text()
    (output / "new.json").rename(tmp_path / "base.json")
    assert run_action(tmp_path, command="python job.py 512", **options) == [0, 0, 0, 0]
    assert (output / "comment.md").read_text().startswith("**PASS")
    assert run_action(tmp_path, command="python job.py 1536", **options) == [0, 0, 0, 1]
    comment = (output / "comment.md").read_text()
    assert comment.startswith("**FAIL: peak\\_allocated")
    assert comment in (tmp_path / "step-summary.md").read_text()
    posted = (
        "pr comment 7 --body-file ebbtide-gate/comment.md --edit-last "
        "--create-if-none\n"
    )
    assert (tmp_path / "gh.txt").read_text() == 3 * posted


def test_action__takes_texts_of_users_from_the_environment_alone() -> None:
    for step in ACTION["runs"]["steps"]:
        assert "${{" not in step["run"]
    names = {
        name
        for step in ACTION["runs"]["steps"]
        for name in re.findall(r"inputs\.([\w-]+)", str(step))
    }
    assert names == set(ACTION["inputs"])


@needs_all_features
def test_action__does_not_compare_with_a_base_that_is_no_trace(tmp_path: Path) -> None:
    (tmp_path / "base.json").write_text("{}")
    compare = ACTION["runs"]["steps"][2]
    values = {
        "BASE": "base.json",
        "LIMITS": "iteration>5%",
        "OUTPUT": ".",
        "GITHUB_STEP_SUMMARY": "summary.md",
    }
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "GITHUB_OUTPUT": "out",
    }
    run = run_process(
        ["bash", "-e", "-c", compare["run"]], cwd=tmp_path, env=environment | values
    )
    assert (run.returncode, (tmp_path / "out").read_text()) == (0, "code=2\n")
    assert "has no iterations" in run.stderr
