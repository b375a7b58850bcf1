"""Jobs with frameworks, unmodified: Trainer of transformers, Lightning, accelerate, and
convolutions with offload."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from ebbtide.features.dryrun import child
from ebbtide.features.dryrun.torch_2_13 import backend
from ebbtide.features.dryrun.torch_2_13.operations import shadow_values
from ebbtide.profiler.trace import open_trace
from tests.conftest import slow_case
from tests.features.dryrun.forked import run_forked

assert backend  # imported here, so that forked processes have it

TRAINER = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        tokens = torch.randint(0, 1000, (128,))
        return {"input_ids": tokens, "labels": tokens, "attention_mask": torch.ones_like(tokens)}

config = LlamaConfig(vocab_size=1000, hidden_size=64, intermediate_size=172, num_hidden_layers=2, num_attention_heads=4)
arguments = TrainingArguments("out", per_device_train_batch_size=2, max_steps=5, bf16=True, report_to=[])
Trainer(model=LlamaForCausalLM(config), args=arguments, train_dataset=Data()).train()
"""
LIGHTNING = """
import pytorch_lightning as pl
import torch

class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(512, 10)

    def training_step(self, batch, index):
        loss = torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())

data = torch.utils.data.TensorDataset(torch.randn(256, 512), torch.randint(10, (256,)))
loader = torch.utils.data.DataLoader(data, 32, num_workers=2)
trainer = pl.Trainer(accelerator="gpu", devices=1, precision="bf16-mixed", max_steps=6, logger=False)
trainer.fit(Module(), loader)
"""
ACCELERATE = """
import torch
from accelerate import Accelerator

accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=2)
model = torch.nn.Linear(512, 10)
data = torch.utils.data.TensorDataset(torch.randn(256, 512), torch.randint(10, (256,)))
loader = torch.utils.data.DataLoader(data, 32, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters()), loader)
for inputs, labels in loader:
    with accelerator.accumulate(model):
        loss = torch.nn.functional.cross_entropy(model(inputs), labels)
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    print(accelerator.gather(loss).mean().item())
"""
CONVOLUTIONS = """
import torch
from torch import nn

net = nn.Sequential(nn.Conv2d(3, 64, 7, 2, 3), nn.BatchNorm2d(64), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
net = net.cuda().to(memory_format=torch.channels_last)
rnn = nn.LSTM(64, 64, num_layers=2, batch_first=True).cuda()
optimizer = torch.optim.SGD([*net.parameters(), *rnn.parameters()], lr=0.1, momentum=0.9)
generator = torch.Generator(device="cuda").manual_seed(1)
start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
while True:
    start.record(torch.cuda.current_stream())
    with torch.autograd.graph.save_on_cpu(pin_memory=True):
        features = net(torch.randn(8, 3, 64, 64, device="cuda", generator=generator))
    loss = torch.compile(rnn)(features.unsqueeze(1))[0].mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    end.record()
    print(start.elapsed_time(end) > 0, torch.cuda.max_memory_allocated(), features.argmax(1).cpu().numpy())
"""


EXAMPLES = Path(__file__).parents[3] / "examples" / "dry_run"
LOOP_WITHOUT_OPTIMIZER = """
import torch

x = torch.randn(300, 300, device="cuda")
while (x - x @ x).norm() > 0.5:
    x = x @ x / x.norm()
"""
BATCH_SEARCH = """
import torch
from accelerate.utils import find_executable_batch_size

@find_executable_batch_size(starting_batch_size=1024)
def train(batch_size):
    torch.cuda.empty_cache()
    model = torch.nn.Linear(1024, 1024, device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=1)
    print("batch size", batch_size)
    while True:
        model(torch.randn(1024 * batch_size, 1024, device="cuda")).sum().backward()
        optimizer.step()

train()
"""
BATCH_TRIALS = """
import pytorch_lightning as pl
import torch
from pytorch_lightning.tuner import Tuner

class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.batch_size, self.net = 2, torch.nn.Linear(1024, 1024)

    def training_step(self, batch, index):
        return self.net(batch.repeat(1024, 1)).sum()

    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.randn(64, 1024), self.batch_size)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1)

trainer = pl.Trainer(accelerator="gpu", devices=1, logger=False, max_steps=6)
module = Module()
Tuner(trainer).scale_batch_size(module)
print("batch size", module.batch_size)
trainer.fit(module)
"""
INTERRUPTED = """
import torch

net = torch.nn.Linear(300, 300).cuda()
net(torch.randn(2, 300, device="cuda")).sum().backward()
raise KeyboardInterrupt
"""


def dry_run(
    folder: Path,
    script: str,
    *arguments: str,
    status: int = 0,
    capacity_bytes: int | None = None,
) -> Path:
    """Return the trace of a script that ends after two iterations, run in a fork."""
    (folder / "job.py").write_text(script)
    settings = {
        "iterations": 2, "capacity_bytes": capacity_bytes, "device_name": "h100", "machine": None, "force": False
    }  # fmt: skip

    def start() -> int:
        os.chdir(folder)
        with open("log", "w", encoding="utf-8") as file:
            sys.stdout = sys.stderr = file
            return child.main(
                [str(folder / "run.ebb"), json.dumps(settings), "job.py", *arguments]
            )

    assert run_forked(start) == status, (folder / "log").read_text(encoding="utf-8")
    return folder / "run.ebb"


@pytest.mark.parametrize(
    ("script", "forwards", "backwards", "note"),
    [
        slow_case(TRAINER, 1, 1, "flash (4)"),
        slow_case(LIGHTNING, 1, 1, ""),
        slow_case(ACCELERATE, 2, 2, ""),
        (CONVOLUTIONS, 2, 1, "torch.compile was left out"),
    ],
)
def test_dry_run__runs_frameworks_unmodified(
    tmp_path: Path, script: str, forwards: int, backwards: int, note: str
) -> None:
    trace = open_trace(dry_run(tmp_path, script))
    phases = trace.phases(0)
    finished = phases[phases["iteration"].notna()]
    assert finished.groupby("iteration")["phase"].value_counts().unstack().to_dict(
        "index"
    ) == {
        iteration: {"forward": forwards, "backward": backwards, "update": 1}
        for iteration in (0, 1)
    }
    assert any(note in line for line in trace.notes)
    assert (trace.allocations(0)["category"] == "optimizer_state").any()


def contents(folder: Path) -> dict[str, bytes | None]:
    """Return every path below a folder with its content."""
    return {
        str(path): path.read_bytes() if path.is_file() else None
        for path in folder.rglob("*")
    }


@pytest.mark.slow
def test_dry_run__leaves_checkpoints_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "tokens.bin").write_bytes(bytes(4000))
    output = tmp_path / "output"
    output.mkdir()
    (output / "best.pt").write_bytes(b"the best of last week")
    before = contents(output)
    arguments = (
        "--data tokens.bin --output output --layers 2 --width 64 --heads 2 --context "
        "64 --vocabulary 512"
    )
    training = (
        "--batch 2 --accumulation 2 --evaluate-every 1 --evaluation-batches 2 --dtype "
        "float16"
    )
    script = (EXAMPLES / "pretrain.py").read_text(encoding="utf-8")
    trace = open_trace(dry_run(tmp_path, script, *arguments.split(), *training.split()))
    assert contents(output) == before
    log = (tmp_path / "log").read_text(encoding="utf-8")
    assert "the job saved 2 times" in log
    assert "are as they were: output/best.pt" in log
    assert "step 0  evaluation loss 1.0000" in log
    assert any("torch.compile was left out" in note for note in trace.notes)
    phases = trace.phases(0)
    counts = phases[phases["iteration"] == 1]["phase"].value_counts()
    assert (counts["backward"], counts["update"]) == (2, 1)


def test_dry_run__ends_a_loop_that_waits_for_a_value(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shadow_values, "MAX_READS", 10)
    assert not dry_run(tmp_path, LOOP_WITHOUT_OPTIMIZER, status=2).exists()
    lines = (tmp_path / "log").read_text(encoding="utf-8").splitlines()
    assert len(lines) == 1
    assert lines[0].startswith(
        "ebbtide: incomplete: the job read 10 values that a dry run does not have"
    )
    assert lines[0].endswith("no trace is written (job.py:5)")


@pytest.mark.parametrize(
    ("script", "batch"),
    [
        pytest.param(BATCH_SEARCH, 19, id="accelerate"),
        slow_case(BATCH_TRIALS, 16, id="Lightning"),
    ],
)
def test_dry_run__lets_a_search_for_the_batch_size_run_out_of_memory(
    script: str, batch: int, tmp_path: Path
) -> None:
    trace = open_trace(dry_run(tmp_path, script, capacity_bytes=600 << 20))
    # 4 MiB for each unit of the batch and for its result, beside weights and
    # workspaces: 21 and 32 do not fit.
    assert (tmp_path / "log").read_text(encoding="utf-8").rsplit("batch size ", 1)[
        1
    ].split()[0] == str(batch)
    reserved = trace.memory(0)
    peak = reserved[reserved["pool"] == "reserved"]["bytes"].max()
    assert 128 << 20 < peak < 300 << 20


def test_dry_run__writes_its_trace_when_it_is_interrupted(tmp_path: Path) -> None:
    trace = open_trace(dry_run(tmp_path, INTERRUPTED, status=130))
    assert trace.phases(0)["phase"].tolist() == ["forward", "backward"]
    assert trace.meta.exit.code == 130
