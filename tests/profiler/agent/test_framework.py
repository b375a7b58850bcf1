"""The framework that trains, found by what is loaded."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from ebbtide.profiler.agent.job_info import batch_of, describe_framework
from ebbtide.profiler.trace import Trace, open_trace
from tests.conftest import ebbtide

ROOT = Path(__file__).parents[3]
TRAINER = """
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

data = [{"input_ids": torch.arange(32), "labels": torch.arange(32)} for _ in range(24)]
model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=64, n_head=2, vocab_size=128, n_positions=32))
settings = {"max_steps": 3, "per_device_train_batch_size": 3, "save_strategy": "no", "report_to": []}
Trainer(model, TrainingArguments("out", disable_tqdm=True, **settings), train_dataset=data).train()
"""


def test_describe_framework__is_the_outermost_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in (
        "trl.trainer.sft_trainer",
        "transformers.trainer",
        "torchtune.training",
        "llamafactory.train",
    ):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.delitem(sys.modules, "pytorch_lightning.trainer", raising=False)
    model = torch.nn.Linear(2, 2)
    assert describe_framework([model], {"micro_batch": 5, "tokens": 80}) == {
        "name": "torch",
        "version": torch.__version__,
        "micro_batch": 5,
        "tokens": 80,
    }
    for name in ("transformers.trainer", "trl.trainer.sft_trainer"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
        assert describe_framework([model], {})["name"] == name.partition(".")[0]


def test_batch_of__is_that_of_the_first_tensor() -> None:
    tokens = torch.zeros(4, 16, dtype=torch.long)
    assert batch_of(
        ((), {"inputs": {"scale": 2.0, "tokens": [tokens]}}), torch.Tensor
    ) == {
        "micro_batch": 4,
        "tokens": 64,
    }
    assert batch_of(((torch.zeros(()), tokens.half()), {}), torch.Tensor) == {
        "micro_batch": 4
    }
    assert batch_of((("text",), {}), torch.Tensor) == {}


LOOP = [
    *(sys.executable, str(ROOT / "examples" / "train_gpt.py")),
    *(
        "--steps",
        "3",
        "--layers",
        "2",
        "--width",
        "64",
        "--context",
        "64",
        "--batch",
        "4",
    ),
]
DRY_RUN = ("dry-run", "--gpu", "a10")


def test_tracer__records_the_framework_of_the_job(traced: dict[str, Trace]) -> None:
    framework = traced["a plain loop"].meta.ranks[0].framework
    assert (framework.name, framework.micro_batch, framework.tokens) == (
        "torch",
        8,
        None,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "job", "expected"),
    [
        (("profile",), LOOP, ("torch", 4, 256)),
        (DRY_RUN, LOOP, ("torch", 4, 256)),
        (DRY_RUN, [sys.executable, "trainer.py"], ("transformers", 3, 96)),
    ],
    ids=["recorded", "dry", "trainer"],
)
def test_record__has_the_framework_of_the_job(
    words: tuple[str, ...],
    job: list[str],
    expected: tuple[str, int, int],
    tmp_path: Path,
) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "trainer.py").write_text(TRAINER)
    done = ebbtide(*words, "-o", "run.ebb", "--", *job, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    framework = open_trace(tmp_path / "run.ebb").meta.ranks[0].framework
    assert (framework.name, framework.micro_batch, framework.tokens) == expected
