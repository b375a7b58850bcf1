"""Jobs with several processes, and jobs that fail, under `ebbtide run`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ebbtide, slow
from tests.features.run.rank_jobs import FAILING, RANKS

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone")
TIMEOUT_S = 200
# Half of the state of the job with ranks, and of the other.
BUDGETS = {RANKS: "33kB", FAILING: "17kB"}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with both jobs."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ranks.py").write_text(RANKS)
    (tmp_path / "failing.py").write_text(FAILING)
    return tmp_path


def rank_words(division: str, event: str = "none") -> list[str]:
    return [*TORCHRUN, "--nproc-per-node", "2", "ranks.py", division, event]


def run_both(words: list[str], budget: str) -> tuple[str, str]:
    """Run a command by itself and under `run`; return the summary and all messages.

    The exit codes and outputs must be equal, but for the order of lines.
    """
    bare = subprocess.run(
        words, capture_output=True, text=True, check=False, timeout=TIMEOUT_S
    )
    run = ebbtide("run", "--memory-budget", budget, "-o", "run.ebb", "--", *words)
    assert run.returncode == bare.returncode, run.stderr
    assert sorted(run.stdout.split("\n")) == sorted(bare.stdout.split("\n"))
    lines = [line for line in run.stderr.split("\n") if "optimizer" in line]
    return "\n".join(lines), run.stderr


@pytest.mark.parametrize(
    "kind",
    slow(
        [
            "raise",
            "exit",
            "_exit",
            "SIGTERM",
            "SIGKILL",
            "workers",
            "fork",
            "fork-steps",
            "child-spawn",
            "child-fork",
            "twice",
        ],
        but=["fork-steps"],
    ),
)
def test_job_ends_as_by_itself(kind: str) -> None:
    summary, messages = run_both([sys.executable, "failing.py", kind], BUDGETS[FAILING])
    steps = 16
    if kind in ("raise", "exit"):
        steps = 6
    if kind.startswith("SIG"):
        assert "no end" in messages
    elif kind == "_exit":
        assert "killed or left by os._exit" in summary
    else:
        assert f"optimizer 1: {steps} steps under adaptive" in summary
    if kind == "twice":
        assert "optimizer 2: 16 steps" in summary
    if kind == "fork-steps":
        assert "optimizer 1: 7 steps" in summary
    if kind == "raise":
        *_, last = [line for line in messages.split("\n") if "Error" in line]
        assert last == "RuntimeError: the data is bad"
        assert "/ebbtide/" not in messages


@pytest.mark.parametrize(
    ("division", "event"),
    [
        pytest.param("ddp", "amsgrad"),
        *(
            pytest.param(division, event, marks=pytest.mark.slow)
            for division, event in [
                ("fsdp2", "amsgrad"),
                ("fsdp2", "raise"),
                ("ddp", "raise"),
                ("ddp", "SIGKILL"),
                ("fsdp2", "checkpoint"),
                ("tp", "checkpoint"),
                ("fsdp2-late", "none"),
            ]
        ),
    ],
)
def test_ranks_end_as_by_themselves(division: str, event: str) -> None:
    summary, _ = run_both(rank_words(division, event), BUDGETS[RANKS])
    if event == "amsgrad":
        assert "rank 0, optimizer 1: left to torch: torch updates on another" in summary
        assert "rank 1, optimizer 1: left to torch: the option amsgrad" in summary
    if event == "SIGKILL":
        assert "rank 1, it was killed" in summary
    if event in ("none", "checkpoint"):
        assert "rank 1, optimizer 1: " in summary
        assert "left to torch: it had" not in summary


@pytest.mark.slow
@pytest.mark.parametrize(
    ("division", "event"),
    [
        ("ddp", "checkpoint"),
        ("fsdp2", "checkpoint"),
        ("fsdp2-late", "none"),
        ("fsdp1", "none"),
        ("fsdp1-params", "none"),
        ("tp", "checkpoint"),
    ],
)
def test_ranks_have_equal_bits_under_all_policies(division: str, event: str) -> None:
    policies = ["zero-offload", "twin-flow:0.5", "interleaved:2", "adaptive"]
    options = [word for policy in policies for word in ("--policy", policy)]
    words = rank_words(division, event)
    run = ebbtide("compare", *options, "--json", "--", *words)
    assert run.returncode == 0, run.stdout + run.stderr
    comparison = json.loads(run.stdout)
    assert comparison["equal"] == {"losses": True, "parameters": True}
    assert comparison["against_job"]["loss"] < 1e-4
