"""Training jobs of every kind that time their own phases, to compare a recording
with."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from textwrap import dedent

import numpy as np
import pandas as pd

from tests.conftest import Recorded

Record = Callable[..., Recorded]

# A phase agrees if it is as long as the job's own timer says, to within the larger of
# these. The job's timer includes what the recorder does at an edge of a phase: up to
# 0.3 ms where it writes the iteration to its file.
RELATIVE, ABSOLUTE_NS = 0.03, 500_000

STEPS = 8
# Other processes on the machine may stop a job between its own timer and the
# recorder's: they can only move the two apart. So of each kind of phase the best
# quarter counts, and of several runs the best one.
BEST, RUNS = 0.25, 3

PRELUDE = f"""
import atexit, contextlib, json, os, time
import torch
from torch import nn
from torch.nn import functional as F
torch.manual_seed(0)
STEPS = {STEPS}
ROWS = []
@contextlib.contextmanager
def timed(phase):
    started_ns = time.monotonic_ns()
    try:
        yield
    finally:
        ROWS.append([phase, started_ns, time.monotonic_ns()])
def write():
    with open(f"timers-{{os.environ.get('RANK', 0)}}.json", "w") as file:
        json.dump(ROWS, file)
atexit.register(write)
def batch(size=64):
    return torch.randn(size, 256), torch.randn(size, 8)
def mlp():
    return nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 8))
model = mlp()
"""

_SAM = """
class SAM(torch.optim.Optimizer):
    def __init__(self, params, base, rho=0.05, **options):
        super().__init__(params, {"rho": rho, **options})
        self.base = base(self.param_groups, **options)
    @torch.no_grad()
    def first_step(self):
        norm = torch.stack([p.grad.norm() for g in self.param_groups for p in g["params"]]).norm()
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["old"] = p.data.clone()
                p.add_(p.grad, alpha=float(group["rho"] / (norm + 1e-12)))
        self.zero_grad()
    @torch.no_grad()
    def second_step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.data = self.state[p]["old"]
        self.base.step()
        self.zero_grad()
    @torch.no_grad()
    def step(self, closure):
        closure = torch.enable_grad()(closure)
        with timed("update"):
            self.first_step()
        closure()
        with timed("update"):
            self.second_step()
optimizer = SAM(model.parameters(), torch.optim.AdamW, lr=1e-3)
for _ in range(STEPS):
    batches = [batch() for _ in range(ACCUMULATION)]
    def closure():
        for x, y in batches:
            with timed("forward"):
                out = model(x)
            loss = F.mse_loss(out, y) / ACCUMULATION
            with timed("backward"):
                loss.backward()
    closure()
    optimizer.step(closure)
"""

_LIGHTNING = """
import logging, warnings
warnings.simplefilter("ignore")
logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
import pytorch_lightning
class Net(pytorch_lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = mlp()
        self.automatic_optimization = AUTOMATIC
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)
    def training_step(self, items, number):
        x, y = items
        with timed("forward"):
            out = self.net(x)
        loss = F.mse_loss(out, y)
        if AUTOMATIC:
            return loss
        with timed("backward"):
            self.manual_backward(loss / ACCUMULATION)
        if (number + 1) % ACCUMULATION == 0:
            optimizer = self.optimizers()
            with timed("update"):
                optimizer.step()
            optimizer.zero_grad()
    def backward(self, loss, *args, **kwargs):
        if not AUTOMATIC:
            return super().backward(loss, *args, **kwargs)
        with timed("backward"):
            loss.backward()
    def optimizer_step(self, epoch, number, optimizer, closure=None):
        def ending():
            result = closure()
            self.closed_ns = time.monotonic_ns()
            return result
        if not AUTOMATIC:
            return super().optimizer_step(epoch, number, optimizer, closure)
        optimizer.step(closure=ending)
        ROWS.append(["update", self.closed_ns, time.monotonic_ns()])
data = torch.utils.data.TensorDataset(*batch(STEPS * ACCUMULATION * 64))
trainer = pytorch_lightning.Trainer(
    max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
    enable_model_summary=False, **({"accumulate_grad_batches": ACCUMULATION} if AUTOMATIC else {}),
)
trainer.fit(Net(), torch.utils.data.DataLoader(data, batch_size=64))
"""

_TIMED_PARTS = """
class TimedNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = mlp()
    def __call__(self, *args, **kwargs):
        if not torch.is_grad_enabled():
            return super().__call__(*args, **kwargs)
        with timed("forward"):
            return super().__call__(*args, **kwargs)
    def forward(self, x, labels=None):
        out = self.net(x)
        return {"loss": F.mse_loss(out, labels), "logits": out}
class TimedAdamW(torch.optim.AdamW):
    pass
step, backward = TimedAdamW.step, torch.Tensor.backward
def timed_step(self, *args, **kwargs):
    with timed("update"):
        return step(self, *args, **kwargs)
def timed_backward(self, *args, **kwargs):
    with timed("backward"):
        return backward(self, *args, **kwargs)
torch.Tensor.backward = timed_backward
model = TimedNet()
"""

# name: (the job, the phases of an iteration)
TIMED_JOBS: dict[str, tuple[str, str]] = {}


def _add(name: str, job: str, phases: str, **values: object) -> None:
    settings = "".join(f"{key} = {value!r}\n" for key, value in values.items())
    TIMED_JOBS[name] = (PRELUDE + settings + dedent(job), phases)


for _accumulation in (1, 4):
    _rounds = " ".join(["forward backward"] * _accumulation)
    _add(
        f"SAM, {_accumulation}",
        _SAM,
        f"{_rounds} update {_rounds} update",
        ACCUMULATION=_accumulation,
    )
    for _automatic in (True, False):
        _kind = "automatic" if _automatic else "manual"
        _add(
            f"Lightning, {_kind}, {_accumulation}",
            _LIGHTNING,
            f"{_rounds} update",
            ACCUMULATION=_accumulation,
            AUTOMATIC=_automatic,
        )
_add(
    "GAN",
    """
    generator, critic = mlp(), nn.Sequential(nn.Linear(8, 2048), nn.ReLU(), nn.Linear(2048, 1))
    optimizers = [torch.optim.AdamW(net.parameters(), lr=1e-4) for net in (critic, generator)]
    for _ in range(STEPS):
        x, y = batch()
        with torch.no_grad():
            fake = generator(x)
        with timed("forward"):
            real_score = critic(y)
        with timed("forward"):
            fake_score = critic(fake)
        loss = real_score.mean() - fake_score.mean()
        with timed("backward"):
            loss.backward()
        with timed("update"):
            optimizers[0].step()
        optimizers[0].zero_grad()
        with timed("forward"):
            fake = generator(x)
        with timed("forward"):
            score = critic(fake)
        loss = -score.mean()
        with timed("backward"):
            loss.backward()
        with timed("update"):
            optimizers[1].step()
        for optimizer in optimizers:
            optimizer.zero_grad()
    """,
    "forward forward backward update forward forward backward update",
)
_add(
    "manual updates",
    """
    for _ in range(STEPS):
        x, y = batch()
        with timed("forward"):
            out = model(x)
        loss = F.mse_loss(out, y)
        with timed("backward"):
            loss.backward()
        with torch.no_grad():
            for p in model.parameters():
                p.data -= 1e-3 * p.grad
                p.grad = None
    """,
    "forward backward",
)
_add(
    "accelerate",
    _TIMED_PARTS
    + dedent(
        """
        from accelerate import Accelerator
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        optimizer = TimedAdamW(model.parameters(), lr=1e-3)
        data = torch.utils.data.TensorDataset(*batch(STEPS * 2 * 64))
        net, optimizer, loader = accelerator.prepare(model, optimizer, torch.utils.data.DataLoader(data, batch_size=64))
        for x, y in loader:
            with accelerator.accumulate(net):
                loss = net(x, y)["loss"]
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    with timed("update"):
                        optimizer.step()
                    optimizer.zero_grad()
        """
    ),
    "forward backward forward backward update",
)
_add(
    "Hugging Face Trainer",
    _TIMED_PARTS
    + dedent(
        """
        from transformers import Trainer, TrainingArguments
        class Timed(torch.optim.AdamW):
            pass
        class Data(torch.utils.data.Dataset):
            def __len__(self):
                return STEPS * 2 * 64
            def __getitem__(self, number):
                generator = torch.Generator().manual_seed(number)
                return {"x": torch.randn(256, generator=generator), "labels": torch.randn(8, generator=generator)}
        optimizer = TimedAdamW(model.parameters(), lr=1e-3)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
        inner = optimizer.step
        def outer(*args, **kwargs):
            with timed("update"):
                return inner(*args, **kwargs)
        optimizer.step = outer
        arguments = TrainingArguments(
            output_dir="out", use_cpu=True, max_steps=STEPS, per_device_train_batch_size=64,
            gradient_accumulation_steps=2, report_to=[], save_strategy="no", disable_tqdm=True, logging_strategy="no",
        )
        Trainer(model=model, args=arguments, train_dataset=Data(), optimizers=(optimizer, schedule)).train()
        """
    ),
    "forward backward forward backward update",
)


def record_in_agreement(
    record: Record, job: str, ranks: int = 1, launcher: Sequence[str] = ()
) -> Recorded:
    """Return a recording of `job` whose phases are those that the job timed, one by
    one, and as long."""
    for run in range(1, RUNS + 1):
        recorded = record(
            job, options=("--force",), **({"launcher": launcher} if launcher else {})
        )
        assert recorded.run.returncode == 0, recorded.run.stderr
        disagreements = [
            line for rank in range(ranks) for line in _disagreements(recorded, rank)
        ]
        if not disagreements:
            break
        assert run < RUNS, disagreements
    return recorded


def _disagreements(recorded: Recorded, rank: int) -> list[str]:
    timers = json.loads(Path(recorded.path.parent, f"timers-{rank}.json").read_text())
    timed = pd.DataFrame(timers, columns=["phase", "start_ns", "end_ns"]).sort_values(
        "start_ns", ignore_index=True
    )
    phases = recorded.trace.phases(rank).sort_values("start_ns", ignore_index=True)
    assert list(phases["phase"]) == list(timed["phase"])
    limits = np.maximum(
        RELATIVE * (timed["end_ns"] - timed["start_ns"]).to_numpy(), ABSOLUTE_NS
    )
    return [
        f"rank {rank}, {phase}: {side} is off by {share:.2f} of the limit"
        for side in ("start_ns", "end_ns")
        for phase, share in ((phases[side] - timed[side]).abs() / limits)
        .groupby(timed["phase"])
        .quantile(BEST)
        .items()
        if share > 1
    ]
