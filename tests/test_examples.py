"""The examples: they run and learn."""

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
    return [float(loss) for loss in re.findall(r"loss\D{1,5}(\d+\.\d+)", text)]


@pytest.mark.slow
def test_train_gpt__losses_are_those_of_torch() -> None:
    small = [
        EXAMPLES / "train_gpt.py",
        "--device",
        "cpu",
        "--layers",
        "1",
        "--width",
        "32",
        "--steps",
        "6",
    ]
    actual, expected = (
        losses(run(*small, "--optimizer", name)) for name in ("interleaved", "adamw")
    )
    assert len(actual) == len(expected) == 6
    assert actual == pytest.approx(expected, abs=2e-3)


@pytest.mark.slow
def test_train_storage__goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    small = [
        EXAMPLES / "train_storage.py",
        "--device",
        "cpu",
        "--layers",
        "2",
        "--width",
        "256",
        "--context",
        "32",
    ]
    options = ["--batch", "2", "--host-memory", "18e6"]

    def text(folder: str, steps: int) -> str:
        return run(
            *small, *options, "--storage", tmp_path / folder, "--steps", str(steps)
        )

    interrupted = losses(text("a", 10)) + losses(text("a", 20))
    whole = text("b", 20)
    assert interrupted == losses(whole)
    assert len(interrupted) == 20
    assert int(re.findall(r"(\d+) subgroups in storage", whole)[0]) > 0


@pytest.mark.slow
def test_train_hf__the_loss_falls(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    text = run(
        EXAMPLES / "train_hf.py",
        "--steps",
        "15",
        "--output",
        tmp_path / "out",
        "--activations",
        "16e6",
    )
    assert "transformer.h.0 recompute" in text or "transformer.h.0 offload" in text
    values = losses(text)
    assert len(values) >= 5
    assert values[-1] < values[0] - 0.3


@pytest.mark.slow
def test_train_deepspeed__the_loss_falls(deepspeed_extensions: None) -> None:
    small = ["--layers", "1", "--width", "64", "--context", "64", "--steps", "12"]
    values = losses(
        run(EXAMPLES / "train_deepspeed.py", *small, "--policy", "pipelined")
    )
    assert len(values) == 12
    assert values[-1] < values[0] - 0.1


@pytest.mark.slow
def test_train_layers__losses_are_those_of_the_plain_job() -> None:
    small = [
        EXAMPLES / "train_layers.py",
        "--device",
        "cpu",
        "--layers",
        "12",
        "--share",
        "0.3",
        "--width",
        "64",
    ]
    options = ["--context", "16", "--batch", "1", "--steps", "6"]
    expected = losses(run(*small, *options, "--plain"))
    assert len(expected) == 6
    for weights, layers in (
        ("auto", "streamed"),
        ("streamed:2", "10 resident, 2 streamed"),
    ):
        text = run(*small, *options, "--weights", weights)
        assert losses(text) == expected
        assert layers in text
        assert "12 keep" not in text


@pytest.mark.slow
def test_train_lora_blocks__swapped_blocks_give_the_same_losses() -> None:
    small = ["--width", "64", "--blocks", "6", "--tokens", "32", "--steps", "12"]
    script = EXAMPLES / "train_lora_blocks.py"
    resident, swapped = (
        losses(run(script, *small, "--swap", count)) for count in ("0", "4")
    )
    assert resident == swapped
    assert resident[-1] < 0.8 * resident[0]


@pytest.mark.slow
def test_train_rl__learns_and_moves_its_state() -> None:
    printed = run(EXAMPLES / "train_rl.py", "--cycles", "4", "--offload")
    rewards = [float(reward) for reward in re.findall(r"reward (-[\d.]+)", printed)]
    assert len(rewards) == 4
    assert rewards[-1] > rewards[0]
