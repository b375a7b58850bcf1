"""The same jobs recorded on the CPU and dry-run for a GPU: the bytes of tensors at the
ends of phases."""

from __future__ import annotations

import io
import runpy
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ebbtide.analysis.metrics.holders.holders import memory_by_category
from ebbtide.features.dryrun.session import DryRun, DryRunOptions
from ebbtide.features.dryrun.trace_of_run import trace_of_run
from ebbtide.profiler.recording.tracer import Tracer
from ebbtide.profiler.trace.trace import Trace
from tests.conftest import slow
from tests.features.dryrun.forked import run_forked

EXAMPLE = Path(__file__).parents[3] / "examples" / "train_gpt.py"
# Allocations are recorded from the third iteration on. The one after it holds nothing
# that is older than the record.
FIRST_RECORDED, COMPARED, STEPS = 2, 3, 5
CATEGORIES = ("parameter", "gradient", "optimizer_state", "activation")
# The phases of an iteration, and the bytes of each category at their ends.
PhaseSizes = list[tuple[str, dict[str, int]]]


class Attending(nn.Module):
    """A block of a decoder, whose attention runs by its parts."""

    def __init__(self, width: int, recompute: bool) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = (
            nn.LayerNorm(width),
            nn.Linear(width, 3 * width),
            nn.Linear(width, width),
        )
        self.up, self.down, self.recompute = (
            nn.Linear(width, 4 * width),
            nn.Linear(4 * width, width),
            recompute,
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.recompute:
            return self.run(x)
        # The state of a device's random numbers would lie in the memory of the CPU.
        return checkpoint(self.run, x, use_reentrant=False, preserve_rng_state=False)

    def run(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            self.qkv(self.norm(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        )
        with nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH):
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(x)))


def decoder(recompute: bool = False) -> nn.Module:
    return nn.Sequential(
        nn.Embedding(64, 128),
        *(Attending(128, recompute) for _ in range(2)),
        nn.Linear(128, 64),
    )


def train(
    device: str,
    make_model: Callable[[], nn.Module],
    make_inputs: Callable[[str], torch.Tensor],
    make_optimizer: Callable[[Any], torch.optim.Optimizer],
    accumulate: int = 1,
) -> int:
    """Train, and return the bytes of the counters of steps, which an optimizer that is
    not fused keeps on the host."""
    torch.manual_seed(0)
    model = make_model().to(device)
    optimizer = make_optimizer(model.parameters())
    for _ in range(STEPS):
        for _ in range(accumulate):
            model(make_inputs(device)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    states = () if optimizer.defaults.get("fused") else optimizer.state.values()
    return sum(state["step"].nbytes for state in states if "step" in state)


def train_example(device: str) -> int:
    """Run the example as it is, with the attention that both devices have."""
    words = (
        "train_gpt.py --layers 2 --width 64 --heads 4 --context 32 --batch 2 --steps "
        f"{STEPS} --device {device}"
    )
    attention = nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH)
    with (
        mock.patch.object(sys, "argv", words.split()),
        redirect_stdout(io.StringIO()),
        attention,
    ):
        names = runpy.run_path(str(EXAMPLE), run_name="__main__")
    with torch.device("meta"):
        return 4 * len(list(names["GPT"](1, 1, 2, 64, 4).parameters()))


def tokens(device: str) -> torch.Tensor:
    return torch.zeros(4, 32, dtype=torch.int64, device=device)


def images(device: str) -> torch.Tensor:
    return torch.ones(4, 3, 16, 16, device=device)


def rows(device: str) -> torch.Tensor:
    return torch.ones(32, 96, device=device)


def layers() -> nn.Module:
    return nn.Sequential(
        nn.Linear(96, 256), nn.GELU(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 8)
    )


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3),
        nn.ReLU(),
        nn.Conv2d(16, 8, 3, stride=2),
        nn.Sigmoid(),
        nn.Flatten(),
        nn.Linear(288, 8),
    )


ADAMW: Callable[..., Any] = torch.optim.AdamW
JOBS: dict[str, Callable[[str], int]] = {
    "example": train_example,
    "decoder": lambda device: train(device, decoder, tokens, ADAMW),
    "checkpointing": lambda device: train(device, lambda: decoder(True), tokens, ADAMW),
    "accumulation": lambda device: train(device, layers, rows, ADAMW, accumulate=3),
    "convolutions": lambda device: train(
        device, convolutions, images, lambda p: torch.optim.SGD(p, 0.1, 0.9)
    ),
    "foreach": lambda device: train(
        device, layers, rows, lambda p: torch.optim.Adam(p, foreach=True)
    ),
    "fused": lambda device: train(
        device, layers, rows, lambda p: torch.optim.AdamW(p, fused=True)
    ),
    "one by one": lambda device: train(
        device, layers, rows, lambda p: torch.optim.RMSprop(p, foreach=False)
    ),
}


def sizes_at_phase_ends(trace: Trace, device: str) -> PhaseSizes:
    """Return the phases of the compared iteration, and the bytes of each category at
    their ends."""
    lines = memory_by_category(trace, 0, device)
    phases = trace.phases(0)
    sizes = []
    for row in (
        phases[phases["iteration"] == COMPARED].sort_values("start_ns").itertuples()
    ):
        by_category = {}
        for category in CATEGORIES:
            times, values = lines[category]
            position = int(np.searchsorted(times, row.end_ns, side="right"))
            by_category[category] = int(values[position - 1]) if position else 0
        sizes.append((str(row.phase), by_category))
    return sizes


def record_on_cpu(job: Callable[[str], int], path: Path) -> tuple[PhaseSizes, int]:
    with Tracer(path, allocator_iterations=STEPS - FIRST_RECORDED, poll_ms=0) as tracer:
        counters = job("cpu")
    assert tracer.trace is not None
    return sizes_at_phase_ends(tracer.trace, "cpu"), counters


def predict_for_gpu(job: Callable[[str], int], path: Path) -> PhaseSizes:
    with DryRun(DryRunOptions(iterations=STEPS, device_name="h100-80gb")) as run:
        job("cuda")
    return sizes_at_phase_ends(trace_of_run(run).write(path), "cuda:0")


@pytest.mark.parametrize("name", slow(JOBS, but={"accumulation"}))
def test_dry_run__holds_the_bytes_of_the_same_job_on_the_cpu(
    name: str, tmp_path: Path
) -> None:
    recorded, counters = run_forked(
        lambda: record_on_cpu(JOBS[name], tmp_path / "recorded.ebb")
    )
    predicted = run_forked(
        lambda: predict_for_gpu(JOBS[name], tmp_path / "predicted.ebb")
    )
    assert [phase for phase, _ in recorded][-1] == "update"
    assert all(
        by_category["parameter"] and by_category["optimizer_state"] > counters
        for _, by_category in recorded
    )
    for _, by_category in recorded:
        by_category["optimizer_state"] -= counters
    assert predicted == recorded
