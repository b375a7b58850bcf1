"""Small training jobs with one planted fault each, and without it: `python
fault_jobs.py FAULT [gpu]`.

FAULT is `none` or one of the faults of `faults.py`. With `gpu` the job trains on a GPU,
for a dry run.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

WIDTH, LAYERS, BATCH = 256, 4, 1024
GPU_WIDTH, GPU_LAYERS, GPU_BATCH = 4096, 16, 98_304
ITERATIONS = 14
LONG = 60


def make_model(width: int, layers: int) -> nn.Sequential:
    """Return layers with activations of a width."""
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(layers))
    )


def fill_control_group(share: float = 0.95) -> list[torch.Tensor]:
    """Allocate, as a job's own data, until a share of the limit of the control group
    (version 1) is in use."""
    name = next(
        line
        for line in Path("/proc/self/cgroup").read_text().splitlines()
        if ":memory:" in line
    )
    group = Path("/sys/fs/cgroup/memory", name.rpartition(":/")[2])
    limit_bytes = int((group / "memory.limit_in_bytes").read_text())
    if limit_bytes > 1 << 33:
        sys.exit("this fault needs a control group with a small limit of memory")
    pages: list[torch.Tensor] = []
    while (
        int(dict(map(str.split, (group / "memory.stat").open()))["total_rss"])
        < share * limit_bytes
    ):
        pages.append(torch.ones(1 << 24, dtype=torch.uint8))
    return pages


def train(fault: str) -> None:
    """Train on the CPU."""
    rank = int(os.environ.get("RANK", "0"))
    width, batch = (1536, 32) if fault.startswith("update") else (WIDTH, BATCH)
    model: nn.Module = make_model(width, LAYERS)
    if "WORLD_SIZE" in os.environ:
        torch.distributed.init_process_group("gloo")
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    pages = fill_control_group() if fault == "memory-limit" else []
    kept: list[torch.Tensor] = []
    for step in range(LONG if fault in ("slowdown", "none-long") else ITERATIONS):
        data = torch.randn(batch, width)
        if fault == "data-loading":
            # A loader without workers that decodes while the model waits.
            time.sleep(0.1)
        loss = model(data).square().mean()
        if (fault == "slow-rank" and rank == 1) or (
            fault == "slowdown" and step >= LONG // 2
        ):
            # Another process has taken half of the cores' time.
            time.sleep(0.04)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if fault == "leak":
            # Losses for a plot, each with its graph.
            kept.append(model(data).square().mean())
        if fault == "checkpoint-stall" and step % 3 == 0:
            with tempfile.TemporaryDirectory() as folder:
                torch.save(
                    [model.state_dict()] * 1 + [torch.ones(1 << 26)],
                    Path(folder) / "step.pt",
                )
    del pages, kept
    if "WORLD_SIZE" in os.environ:
        torch.distributed.destroy_process_group()


def train_on_gpu(fault: str) -> None:
    """Train on a GPU that a dry run stands in for."""
    model = make_model(GPU_WIDTH, GPU_LAYERS).cuda().bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batch = {
        "too-large-batch": 4 * GPU_BATCH,
        "needless-recomputation": GPU_BATCH // 2,
    }.get(fault, GPU_BATCH)
    for _ in range(4):
        hidden = torch.randn(batch, GPU_WIDTH, device="cuda", dtype=torch.bfloat16)
        for layer in model:
            if fault == "needless-recomputation":
                hidden = checkpoint(layer, hidden, use_reentrant=False)
            else:
                hidden = layer(hidden)
        hidden.float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "2")))
    (train_on_gpu if "gpu" in sys.argv[2:] else train)(sys.argv[1])
