"""Callbacks in real jobs of Hugging Face's Trainer and of Lightning: the figures reach
their loggers."""

from __future__ import annotations

import csv
import json
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from ebbtide.analysis.metrics.iterations import durations_ms, intervals
from ebbtide.profiler import open_trace
from ebbtide.profiler.trace import Trace
from tests.conftest import run_process
from tests.profiler.agent.timed_jobs import Record

pytestmark = pytest.mark.slow

# Six steps, of which the last ones are not recorded.
STEPS, RECORDED = 6, 4
OPTIONS = ("--iterations", f"0:{RECORDED}")

HUGGING_FACE = f"""
import json, warnings
from types import SimpleNamespace
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments
from ebbtide.profiler.callbacks import HuggingFaceCallback
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(16, 4)
    def forward(self, x, labels=None):
        out = self.net(x)
        return {{"loss": (out - labels).square().mean(), "logits": out}}
class Logger(TrainerCallback):
    rows = []
    def on_log(self, args, state, control, logs=None, **others):
        self.rows.append(dict(logs))
data = [{{"x": torch.ones(16), "labels": torch.ones(4)}}] * 64
arguments = TrainingArguments(
    "out", use_cpu=True, max_steps={STEPS}, logging_steps=1, eval_strategy="steps", eval_steps={RECORDED},
    per_device_train_batch_size=4, report_to=[], save_strategy="no", disable_tqdm=True,
)
trainer = Trainer(Net(), arguments, train_dataset=data, eval_dataset=data, callbacks=[Logger()])
HuggingFaceCallback.add_to(trainer)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    trainer.train()
    HuggingFaceCallback().on_train_begin(SimpleNamespace(report_to=["wandb"]), None, None)
assert ["use HuggingFaceCallback.add_to" in str(w.message) for w in caught if "ebbtide" in str(w.message)] == [True]
assert [{{**row, "step": 0}} for row in Logger.rows] == [{{**row, "step": 0}} for row in trainer.state.log_history]
json.dump(Logger.rows, open("rows.json", "w"))
"""

LIGHTNING = f"""
import torch, pytorch_lightning
from pytorch_lightning.loggers import CSVLogger
from ebbtide.profiler.callbacks import LightningCallback
class Net(pytorch_lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(16, 4)
    def training_step(self, batch, number):
        loss = (self.net(batch[0]) - batch[1]).square().mean()
        self.log("loss", loss)
        return loss
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-3)
data = torch.utils.data.TensorDataset(torch.ones(64, 16), torch.ones(64, 4))
pytorch_lightning.Trainer(
    max_steps={STEPS}, accelerator="cpu", logger=CSVLogger(".", name="csv", version=0), log_every_n_steps=1,
    callbacks=[LightningCallback()], enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
).fit(Net(), torch.utils.data.DataLoader(data, batch_size=4))
"""


def check_rows(rows: list[dict[str, float]], trace: Trace, relative: float) -> None:
    """Compare the logs of steps with the trace: each has the figures of its iteration,
    as long as there are any."""
    seconds = durations_ms(intervals(trace, 0)).frame / 1e3
    assert [row.get("ebbtide/iteration") for row in rows] == [
        *range(RECORDED),
        *[None] * (STEPS - RECORDED),
    ]
    for number, row in enumerate(rows):
        figures = {key for key in row if key.startswith("ebbtide/")}
        assert bool(figures) == (number < RECORDED)
        for phase in ("forward", "backward", "update") if figures else ():
            expected = pytest.approx(seconds.loc[number, phase], rel=relative)
            assert row[f"ebbtide/phase_seconds/{phase}"] == expected


def test_hugging_face_callback__adds_the_figures_to_the_logs_of_steps(
    record: Record,
) -> None:
    recorded = record(HUGGING_FACE, options=OPTIONS)
    assert recorded.run.returncode == 0, recorded.run.stderr
    rows = json.loads(recorded.path.with_name("rows.json").read_text())
    check_rows([row for row in rows if "loss" in row], recorded.trace, 1e-9)
    results = [row for row in rows if "loss" not in row]
    assert len(results) == 3  # two evaluations, and the whole training
    assert not any(key.startswith("ebbtide/") for row in results for key in row)


def test_lightning_callback__logs_the_figures_of_steps(record: Record) -> None:
    recorded = record(LIGHTNING, options=OPTIONS)
    assert recorded.run.returncode == 0, recorded.run.stderr
    rows: dict[float, dict[str, float]] = defaultdict(dict)
    with open(recorded.path.parent / "csv" / "version_0" / "metrics.csv") as file:
        for row in csv.DictReader(file):
            rows[float(row["step"])] |= {
                key: float(value) for key, value in row.items() if value
            }
    assert all("loss" in row for row in rows.values())
    check_rows([rows[step] for step in sorted(rows)], recorded.trace, 1e-9)


@pytest.mark.parametrize(
    ("script", "added", "phase"),
    [
        (
            HUGGING_FACE,
            "HuggingFaceCallback.add_to(trainer, out_of_memory='oom.ebb')",
            "forward",
        ),
        # Lightning runs forward and backward in a closure of the optimizer.
        (LIGHTNING, "LightningCallback(out_of_memory='oom.ebb')", "update"),
    ],
)
def test_callbacks__record_an_out_of_memory_error(
    tmp_path: Path, script: str, added: str, phase: str
) -> None:
    plain = added.partition("(")[0] + ("(trainer)" if "trainer" in added else "()")
    job = script.replace(plain, added).replace(
        "self.net = ", "self.calls = 0\n        self.net = "
    )
    failing = (
        "self.calls += 1\n        if self.calls == 3: torch.empty(1 << 50)\n        "
    )
    for line in ("out = self.net(x)", "loss = (self.net"):
        job = job.replace(line, failing + line)
    (tmp_path / "job.py").write_text(job)
    run = run_process([sys.executable, "job.py"], cwd=tmp_path)
    assert run.returncode == 1
    assert "DefaultCPUAllocator" in run.stderr
    (error,) = open_trace(tmp_path / "oom.ebb").rank(0).out_of_memory
    assert (error.phase, error.iteration, error.requested_bytes) == (phase, 2, 4 << 50)
    assert open_trace(tmp_path / "oom.ebb").rank(0).inventories
