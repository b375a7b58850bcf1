"""Jobs of frameworks under `ebbtide run`, and resumed by it and by themselves."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.conftest import ebbtide
from tests.features.run.framework_jobs import (
    ACCELERATE,
    GENERATION,
    LIGHTNING,
    TRAINER,
)

JOBS = {
    "transformers": TRAINER,
    "accelerate": ACCELERATE,
    "pytorch_lightning": LIGHTNING,
    "torch": GENERATION,
}
# Half of the state: the rest stays on the host.
BUDGETS = {
    "transformers": "110kB",
    "accelerate": "9kB",
    "pytorch_lightning": "9kB",
    "torch": "25kB",
}
QUICK = ("accelerate", "torch")
# Losses of the Trainer depend on the order of sums in attention.
TOLERANCE = 1e-3

all_jobs = pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow])
        for name in JOBS
    ],
)


class FrameworkJob:
    """A job of a framework in the current folder."""

    def __init__(self, name: str, folder: Path) -> None:
        pytest.importorskip(name)
        self._folder = folder
        self._budget = BUDGETS[name]
        (folder / "train.py").write_text(JOBS[name])

    def run(self, policy: str | None, steps: int = 10) -> list[torch.Tensor]:
        """Run the job under a policy, or by itself if it is None; return its weights.

        It resumes from the checkpoint in the folder, if there is one.
        """
        words = [sys.executable, "train.py"]
        settings = {"STEPS": str(steps), "RESULT": "result.pt", "OMP_NUM_THREADS": "1"}
        if policy is None:
            bare = subprocess.run(
                words,
                env={**os.environ, **settings},
                capture_output=True,
                text=True,
                check=True,
            )
            output = bare.stdout
        else:
            options = ("--policy", policy, "--memory-budget", self._budget)
            out = ("-o", "run.ebb", "--force")
            run = ebbtide("run", *options, *out, "--", *words, env=settings)
            assert run.returncode == 0, run.stderr
            assert f"steps under {policy}" in run.stderr
            output = run.stdout
        assert f"ended at {steps}" in output
        weights: list[torch.Tensor] = torch.load(self._folder / "result.pt")
        return weights

    def remove_checkpoint(self) -> None:
        for name in ("checkpoints", "checkpoint"):
            shutil.rmtree(self._folder / name, ignore_errors=True)
        (self._folder / "checkpoint.ckpt").unlink(missing_ok=True)


@pytest.fixture
def framework_job(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> FrameworkJob:
    monkeypatch.chdir(tmp_path)
    return FrameworkJob(name, tmp_path)


def assert_close(one: list[torch.Tensor], other: list[torch.Tensor]) -> None:
    for a, b in zip(one, other, strict=True):
        assert torch.allclose(a, b, atol=TOLERANCE), float((a - b).abs().max())


@all_jobs
def test_weights_are_those_of_the_job_itself(framework_job: FrameworkJob) -> None:
    bare = framework_job.run(None)
    framework_job.remove_checkpoint()
    assert_close(framework_job.run("adaptive"), bare)


@pytest.mark.slow
@pytest.mark.parametrize("name", JOBS)
def test_checkpoints_go_both_ways(framework_job: FrameworkJob) -> None:
    whole = framework_job.run("zero-offload")
    for first, second in (
        ("zero-offload", "adaptive"),
        (None, "adaptive"),
        ("adaptive", None),
    ):
        framework_job.remove_checkpoint()
        framework_job.run(first, steps=5)
        resumed = framework_job.run(second)
        assert_close(resumed, whole)
        if first and second:
            pairs = zip(resumed, whole, strict=True)
            assert all(torch.equal(a, b) for a, b in pairs)
