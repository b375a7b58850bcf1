"""`ebbtide dry-run --model` and `--config`: what they refuse, and the memory of jobs
that they make."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ebbtide.profiler.trace import open_trace
from tests.cli.test_bad_input import refused
from tests.conftest import ebbtide, ebbtide_in_process


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "a dry run needs one of --model NAME, --config RECIPE and -- CMD"),
        (["--model", "qwen3-8b", "--config", "x.yaml"], "a dry run needs one of"),
        (["--model", "qwen3-8b", "--", "python", "x.py"], "a dry run needs one of"),
        (["--method", "lora", "--", "python", "x.py"], "--method is for --model"),
        (["--batch", "2", "--config", "x.yaml"], "--batch is for --model"),
        (["--model", "qwen3-8b", "--method", "dora"], "'full', 'lora', 'qlora'"),
        (
            ["--model", "qwen3-8b", "--strategy", "fsdp"],
            "--strategy fsdp is for several ranks",
        ),
        (
            ["--model", "qwen3-8b", "--sequence", "100000"],
            "longer than the 40,960 positions",
        ),
        (["--model", "./nowhere"], "there is no ./nowhere"),
        (["--config", "nowhere.yaml"], "nowhere.yaml cannot be read"),
    ],
)
def test_dry_run__refuses_in_a_line(
    words: list[str], message: str, tmp_path: Path
) -> None:
    assert message in refused(ebbtide_in_process("dry-run", *words, cwd=tmp_path))
    assert list(tmp_path.iterdir()) == []


# 4 layers, and an embedding that is the head, too.
CONFIG = {
    "model_type": "qwen3", "vocab_size": 2000, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "tie_word_embeddings": True,
}  # fmt: skip
ATTENTION_AND_NORMS = 256 * (2 * 256 + 2 * 128) + 2 * 256 + 2 * 64
PARAMETERS = 2000 * 256 + 4 * (ATTENTION_AND_NORMS + 3 * 256 * 512) + 256
# DeepSpeed's stage 3 also keeps tensors below 100,000 elements whole.
WHOLE = 4 * ATTENTION_AND_NORMS + 256


def dry_run(folder: Path, *words: str) -> dict[str, Any]:
    """Return the bytes by category at the end of a dry run of the model above, and the
    verdict."""
    (folder / "config.json").write_text(json.dumps(CONFIG))
    process = ebbtide(
        "dry-run",
        "--model",
        ".",
        "--capacity",
        "8GB",
        "-o",
        "run.ebb",
        *words,
        cwd=folder,
    )
    assert process.returncode == 0, process.stderr
    assert "memory  fits" in process.stderr
    blocks = open_trace(folder / "run.ebb").allocations(0)
    alive = blocks[blocks["end_ns"].isna()]
    return alive.groupby("category", observed=True)["bytes"].sum().to_dict()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "parameter_bytes", "state_bytes"),
    [
        (
            ["--checkpointing", "--batch", "2", "--sequence", "128"],
            2 * PARAMETERS,
            4 * PARAMETERS,
        ),
        (["--precision", "bf16-mixed", "--ranks", "2"], 4 * PARAMETERS, 8 * PARAMETERS),
        (
            ["--strategy", "fsdp", "--ranks", "4"],
            2 * PARAMETERS // 4,
            4 * PARAMETERS // 4,
        ),
        (["--strategy", "zero2", "--ranks", "4"], 2 * PARAMETERS, 12 * PARAMETERS // 4),
        (
            ["--strategy", "zero3", "--ranks", "4"],
            2 * (PARAMETERS // 4 + WHOLE),
            12 * PARAMETERS // 4,
        ),
        (["--strategy", "offload"], 2 * PARAMETERS, 0),
    ],
)
def test_dry_run_of_a_model__holds_the_bytes_of_its_settings(
    words: list[str], parameter_bytes: int, state_bytes: int, tmp_path: Path
) -> None:
    held_bytes = dry_run(tmp_path, *words)
    assert held_bytes["parameter"] == pytest.approx(parameter_bytes, rel=0.01)
    assert held_bytes.get("optimizer_state", 0) == pytest.approx(state_bytes, rel=0.01)
