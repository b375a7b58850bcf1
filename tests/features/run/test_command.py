"""`ebbtide run` and `ebbtide compare` on scripts that know nothing of them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from ebbtide.profiler.trace import open_trace
from tests.conftest import ebbtide, running_process
from tests.features.run.jobs import NO_OPTIMIZER, PLAIN, WAITING

# The state of the plain job is 50,304 B: half of it.
BUDGET = ("--memory-budget", "25kB")


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The plain job, in the current folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    path = tmp_path / "train.py"
    path.write_text(PLAIN)
    return path


def result(path: Path) -> list[torch.Tensor]:
    params: list[torch.Tensor] = torch.load(path)
    return params


def are_equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def run_job(*words: str, policy: str = "adaptive", **environment: str) -> Any:
    os.environ.update(environment)
    try:
        return ebbtide(
            "run",
            "--policy",
            policy,
            *BUDGET,
            "-o",
            "run.ebb",
            "--force",
            *words,
            "--",
            sys.executable,
            "train.py",
        )
    finally:
        for name in environment:
            del os.environ[name]


def test_run_is_recorded_and_told(job: Path) -> None:
    run = run_job()
    assert run.returncode == 0, run.stderr
    assert "begins at 0" in run.stdout
    assert "optimizer 1: 12 steps under adaptive" in run.stderr
    assert "predicted" in run.stderr
    trace = open_trace(job.parent / "run.ebb")
    notes = " ".join(trace.notes)
    assert "policy adaptive with" in notes
    assert "plan:" in notes
    assert are_close(result(job.parent / "result.pt"), bare_result(job))


def bare_result(job: Path) -> list[torch.Tensor]:
    (job.parent / "checkpoint.pt").unlink(missing_ok=True)
    environment = {**os.environ, "RESULT": "bare.pt"}
    subprocess.run([sys.executable, "train.py"], env=environment, check=True)
    return result(job.parent / "bare.pt")


def are_close(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    pairs = zip(one, other, strict=True)
    return all(torch.allclose(a, b, atol=2e-5) for a, b in pairs)


def test_checkpoints_go_both_ways(job: Path) -> None:
    run_job(policy="zero-offload", RESULT="whole.pt")
    whole = result(job.parent / "whole.pt")
    # Saved by the run, and resumed by the run.
    assert "begins at 6" in run_job(policy="adaptive", RESULT="resumed.pt").stdout
    assert are_equal(result(job.parent / "resumed.pt"), whole)
    # The same checkpoint in the bare job.
    words = [sys.executable, "train.py"]
    bare = subprocess.run(words, capture_output=True, text=True, check=True)
    assert "begins at 6" in bare.stdout
    assert are_close(result(job.parent / "result.pt"), whole)
    # And one of the bare job in the run.
    (job.parent / "checkpoint.pt").unlink()
    subprocess.run(words, env={**os.environ, "JOB": "stop"}, check=True)
    assert "begins at 6" in run_job(policy="adaptive", RESULT="mixed.pt").stdout
    assert are_close(result(job.parent / "mixed.pt"), whole)


def test_run_ends_after_its_steps(job: Path) -> None:
    run = run_job("--steps", "4")
    assert run.returncode == 0, run.stderr
    assert "4 steps under" in run.stderr
    assert not (job.parent / "result.pt").exists()


def test_exit_code_is_that_of_the_job(job: Path) -> None:
    run = run_job(JOB="fail")
    assert run.returncode == 1
    assert "the job fails here" in run.stderr
    assert "12 steps under" in run.stderr


def test_interrupt_reaches_the_job(job: Path) -> None:
    job.write_text(WAITING)
    words = ["run", "-o", "run.ebb", "--", sys.executable, "train.py"]
    with running_process([sys.executable, "-m", "ebbtide", *words]) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "stepped\n"
        process.send_signal(signal.SIGINT)
        rest = process.stdout.read()
        assert process.wait() == 7
    assert "interrupted" in rest


def test_nothing_driven_is_told(job: Path) -> None:
    job.write_text(NO_OPTIMIZER)
    run = run_job()
    assert run.returncode == 0
    assert "nothing was driven" in run.stderr


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ((), "name the command"),
        (("--policy", "nonsense", "--", "true"), "nonsense"),
        (("--steps", "0", "--", "true"), "at least 1"),
        (("--memory-budget", "much", "--", "true"), "much"),
        (("--", "no-such-program"), "no-such-program"),
    ],
)
def test_bad_input_is_refused_in_a_line(
    job: Path, words: tuple[str, ...], text: str
) -> None:
    run = ebbtide("run", *words)
    assert run.returncode == 2
    assert text in run.stderr
    assert "Traceback" not in run.stderr
    assert "nothing was driven" not in run.stderr
    assert not list(job.parent.glob("*.ebb"))


def test_trace_that_exists_stays_and_nothing_is_run(job: Path) -> None:
    (job.parent / "run.ebb").mkdir()
    run = ebbtide("run", "-o", "run.ebb", "--", sys.executable, "train.py")
    assert run.returncode == 2
    assert run.stderr.count("\n") == 1
    assert "exists already" in run.stderr
    assert not (job.parent / "result.pt").exists()


def test_comparison_is_equal_and_kept(job: Path) -> None:
    (job.parent / "log.txt").write_text("mine")
    run = ebbtide(
        "compare",
        *BUDGET,
        "--json",
        "-o",
        "kept",
        "--plot",
        "kept.png",
        "--",
        sys.executable,
        "train.py",
    )
    assert run.returncode == 0, run.stderr + run.stdout
    comparison = json.loads(run.stdout)
    assert comparison["equal"] == {"losses": True, "parameters": True}
    assert comparison["deterministic"] is True
    assert comparison["job"]["steps"] == 12
    assert comparison["job"]["params"] == 6288
    assert comparison["emulated"] is True
    names = [one["name"] for one in comparison["runs"]]
    assert names == ["as it is", "zero-offload", "static", "adaptive"]
    static, adaptive = comparison["runs"][2:]
    assert static["policy"].startswith("twin-flow:0.")
    (figures,) = adaptive["optimizers"]
    assert 0 < figures["device_bytes"] <= 25_000
    assert figures["predicted_ms"]["iteration"] > 0
    assert comparison["against_job"]["loss"] < 1e-4
    assert comparison["against_job"]["max_ulp"] < 1000
    for one in comparison["runs"]:
        assert len(one["losses"]) == 24
        assert one["iteration_ms"] > one["phases_ms"]["update"] > 0
    assert adaptive["device_bytes"] == figures["device_bytes"]
    assert adaptive["predicted_ms"] > 0
    assert adaptive["exposed_ms"] > 0
    assert len({one["parameters_digest"] for one in comparison["runs"][1:]}) == 1
    # Each run has begun anew, in a folder of its own.
    assert sorted(path.name for path in job.parent.iterdir()) == [
        "kept",
        "kept.png",
        "log.txt",
        "train.py",
    ]
    kept = job.parent / "kept"
    assert "begins at 0" in (kept / "adaptive.log").read_text()
    assert len(open_trace(kept / "adaptive.ebb").ranks) == 1
    assert "<img" in (kept / "comparison.html").read_text()


@pytest.mark.slow
def test_job_that_differs_from_itself_is_told(
    job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JOB", "no seed")
    run = ebbtide("compare", *BUDGET, "--steps", "7", "--", sys.executable, "train.py")
    assert run.returncode == 2
    assert "differs from itself" in run.stdout
    assert "the weights before the first step" in run.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "text"),
    [("fail", "the job failed under as it is"), ("adagrad", "nothing was compared")],
)
def test_comparing_nothing_fails(
    job: Path, monkeypatch: pytest.MonkeyPatch, kind: str, text: str
) -> None:
    monkeypatch.setenv("JOB", kind)
    if kind == "adagrad":
        job.write_text(NO_OPTIMIZER)
    run = ebbtide("compare", "--steps", "20", "--", sys.executable, "train.py")
    assert run.returncode == 2
    assert text in run.stderr


@pytest.mark.slow
def test_same_plans_show_nothing(job: Path) -> None:
    run = ebbtide(
        "compare",
        "--policy",
        "zero-offload",
        "--policy",
        "twin-flow:1",
        "--steps",
        "7",
        "--",
        sys.executable,
        "train.py",
    )
    assert run.returncode == 2
    assert "all policies had the same plan" in run.stdout


def test_options_of_the_small_model_are_refused(job: Path) -> None:
    run = ebbtide("compare", "--params", "1e6", "--", sys.executable, "train.py")
    assert run.returncode == 2
    assert "--params is not for a command" in run.stderr
