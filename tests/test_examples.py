"""The examples, as a newcomer runs them."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.conftest import run_process

EXAMPLES = Path(__file__).parents[1] / "examples"


def run(*command: str | Path) -> str:
    done = run_process([sys.executable, *command])
    assert done.returncode == 0, done.stderr
    return done.stdout


def losses(text: str) -> list[float]:
    return [float(found) for found in re.findall(r"loss\D{1,5}(\d+\.\d+)", text)]


@pytest.mark.slow
def test_the_gpt_trains_with_interleaved_state_as_with_torchs() -> None:
    small = [EXAMPLES / "train_gpt.py", "--device", "cpu", "--layers", "1", "--width", "32", "--steps", "6"]
    found, expected = (losses(run(*small, "--optimizer", name)) for name in ("interleaved", "adamw"))
    assert len(found) == len(expected) == 6
    assert found == pytest.approx(expected, abs=2e-3)


@pytest.mark.slow
def test_the_trainer_learns_with_interleaved_state(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    text = run(EXAMPLES / "train_hf.py", "--steps", "15", "--output", tmp_path / "out")
    found = losses(text)
    assert len(found) >= 5
    assert found[-1] < found[0] - 0.3


@pytest.mark.slow
def test_the_deepspeed_example_learns_under_a_policy(deepspeed_extensions: None) -> None:
    small = ["--layers", "1", "--width", "64", "--context", "64", "--steps", "12"]
    found = losses(run(EXAMPLES / "train_deepspeed.py", *small, "--policy", "pipelined"))
    assert len(found) == 12
    assert found[-1] < found[0] - 0.1
