"""Pipeline schedules, which interleave the forwards and backwards of micro-batches:
real ones, on two processes."""

from __future__ import annotations

import sys

import pandas as pd
import pytest

from ebbtide.profiler.trace.iterations import micro_steps
from tests.conftest import slow
from tests.profiler.agent.timed_jobs import PRELUDE, STEPS, Record, record_in_agreement

LAUNCHER = (
    sys.executable,
    "-m",
    "torch.distributed.run",
    "--standalone",
    "--nproc-per-node",
    "2",
)

TORCH = (
    PRELUDE
    + """
from torch import distributed
from torch.distributed import pipelining
distributed.init_process_group("gloo")
rank = distributed.get_rank()
class Stage(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(256, 4096), nn.ReLU(), nn.Linear(4096, 256))
    def __call__(self, x):
        if not torch.is_grad_enabled():
            return super().__call__(x)
        with timed("forward"):
            return super().__call__(x)
    def forward(self, x):
        return self.net(x)
def timed_backward(original):
    def backward(*args, **kwargs):
        with timed("backward"):
            return original(*args, **kwargs)
    return backward
torch.autograd.backward = timed_backward(torch.autograd.backward)
torch.autograd.grad = timed_backward(torch.autograd.grad)
parts = [Stage() for _ in range(PER_RANK)]
stages = [
    pipelining.PipelineStage(part, rank + 2 * number, 2 * PER_RANK, torch.device("cpu"))
    for number, part in enumerate(parts)
]
schedule = getattr(pipelining, SCHEDULE)(stages if PER_RANK > 1 else stages[0], 4, loss_fn=F.mse_loss)
optimizer = torch.optim.AdamW([p for part in parts for p in part.parameters()], lr=1e-3)
for _ in range(STEPS):
    x, y = torch.randn(256, 256), torch.randn(256, 256)
    if rank == 0:
        schedule.step(x)
    else:
        schedule.step(target=y)
    with timed("update"):
        optimizer.step()
    optimizer.zero_grad()
distributed.destroy_process_group()
"""
)

# schedule: the micro-batches of each rank's forwards and backwards, in order.
ORDERS = {
    "ScheduleGPipe": ("F0 F1 F2 F3 B0 B1 B2 B3 U3", "F0 F1 F2 F3 B0 B1 B2 B3 U3"),
    "Schedule1F1B": ("F0 F1 B0 F2 B1 F3 B2 B3 U3", "F0 B0 F1 B1 F2 B2 F3 B3 U3"),
}


def orders(phases: pd.DataFrame) -> list[str]:
    """Each iteration's phases with their micro-steps, as in ORDERS."""
    words = phases["phase"].str[0].str.upper() + phases["micro_step"].astype(str)
    return [
        " ".join(words[rows.index])
        for _, rows in phases[phases["iteration"].notna()].groupby("iteration")
    ]


@pytest.mark.parametrize("schedule", slow(ORDERS, but=[]))
def test_profile__records_each_micro_batch_of_a_pipeline(
    schedule: str, record: Record
) -> None:
    job = f"PER_RANK, SCHEDULE = 1, {schedule!r}\n{TORCH}"
    recorded = record_in_agreement(record, job, ranks=2, launcher=LAUNCHER)
    for rank in (0, 1):
        # In the first iteration a stage also runs once to find the shapes of its
        # outputs and gradients.
        assert orders(recorded.trace.phases(rank))[1:] == [ORDERS[schedule][rank]] * (
            STEPS - 1
        )


@pytest.mark.slow
def test_profile__records_each_micro_batch_of_an_interleaved_pipeline(
    record: Record,
) -> None:
    job = f"PER_RANK, SCHEDULE = 2, 'ScheduleInterleaved1F1B'\n{TORCH}"
    recorded = record_in_agreement(record, job, ranks=2, launcher=LAUNCHER)
    for rank in (0, 1):
        phases = recorded.trace.phases(rank)
        phases = phases[phases["iteration"] > 0]
        counts = (
            phases[phases["phase"] != "update"]
            .groupby(["iteration", "micro_step"])["phase"]
            .value_counts()
        )
        # Both of the rank's stages run each of the four micro-batches forward and
        # backward.
        assert len(counts) == (STEPS - 1) * 4 * 2
        assert counts.eq(2).all()


def table(phases: str, sources: str = "", micro_batches: str = "") -> pd.DataFrame:
    """An iteration's phases, written as in ORDERS; the modules that ran forward, and
    known micro-batches."""
    names = {"F": "forward", "B": "backward", "U": "update"}
    words = phases.split()
    numbers = iter(sources.split() or ["1"] * words.count("F"))
    return pd.DataFrame(
        {
            "iteration": pd.array([0] * len(words), dtype="Int64"),
            "phase": [names[word] for word in words],
            "source": [int(next(numbers)) if word == "F" else 0 for word in words],
            "micro_batch": [int(number) for number in micro_batches.split()]
            or [0] * len(words),
        }
    )


MICRO_STEPS = [
    ("F B F B U", "", "0 0 1 1 1"),
    ("F F B F B F B B U", "", "0 1 0 2 1 3 2 3 3"),  # 1F1B without known micro-batches
    ("F F F B B B U", "", "0 1 2 0 1 2 2"),
    ("F F B F F B U", "1 2 1 2", "0 0 0 1 1 1 1"),  # a loss that is a module
    ("F F B U", "", "0 0 0 0"),  # a model called twice
    # the same with a loss module and a gradient penalty
    ("F F B B U", "1 2", "0 0 0 0 0"),
    ("F B B U", "", "0 0 0 0"),
]


def test_micro_steps__follow_the_forwards_of_one_module() -> None:
    for phases, sources, expected in MICRO_STEPS:
        assert list(micro_steps(table(phases, sources))) == [
            int(number) for number in expected.split()
        ]


def test_micro_steps__follow_known_micro_batches() -> None:
    # The loss of each micro-batch, and the update, have no number of their own.
    phases = table("F F F B F F B B U", "1 2 1 1 2", "5 0 6 5 7 0 6 7 0")
    assert list(micro_steps(phases)) == [0, 0, 1, 0, 2, 2, 1, 2, 2]
