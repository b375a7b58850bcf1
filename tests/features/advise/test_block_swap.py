"""Block swap in `plan`: the fewest frozen layers, beside dry runs of jobs that swap."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ebbtide.analysis.metrics.devices import memory_timeline
from ebbtide.cli import run
from ebbtide.features.advise.block_swap import BlockSwap, plan_block_swap
from ebbtide.features.advise.job.sources import BatchSettings, job_of_trace
from ebbtide.features.advise.machine_plan import plan_for_machine
from ebbtide.features.advise.whole_job import layers_of_job
from ebbtide.interleave.replay.inputs import resolve_machine
from ebbtide.machines.catalog import find_machine
from ebbtide.machines.machine import Machine
from ebbtide.profiler import DryRun, DryRunOptions, trace_of_run
from ebbtide.profiler.trace import Trace
from ebbtide.profiler.trace.builder import TraceBuilder

BLOCKS, WIDTH = 12, 4096
CAPACITY = 280 * 2**20


class Block(nn.Module):
    """A frozen layer of 32 MiB with an adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(False)
        self.down = nn.Linear(WIDTH, 4, bias=False)
        self.up = nn.Linear(4, WIDTH, bias=False)

    def forward(self, x: Any) -> Any:
        return self.base(x) + self.up(self.down(x))


class Swapped(nn.Module):
    """Checkpointed blocks, of which the first have their weights on the host: they are
    copied up for each use."""

    def __init__(self, swapped: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.swapped = swapped

    def to_device(self) -> None:
        self.to(torch.bfloat16)
        for number, block in enumerate(self.blocks):
            weight = block.base.weight
            block.base.weight = None
            block.to("cuda")
            on_device = weight.data.to("cuda") if number >= self.swapped else weight
            block.base.weight = nn.Parameter(on_device.data, requires_grad=False)

    def forward(self, x: Any) -> Any:
        for number, block in enumerate(self.blocks):
            step = self._streamed if number < self.swapped else Block.__call__
            x = checkpoint(step, block, x, use_reentrant=False)
        return x

    def _streamed(self, block: Any, x: Any) -> Any:
        weight = block.base.weight.to("cuda", non_blocking=True)
        return nn.functional.linear(x, weight) + block.up(block.down(x))


def _trace(swapped: int = 0, capacity: int = CAPACITY) -> TraceBuilder:
    machine = replace(find_machine("rtx3060"), gpu_memory_bytes=float(capacity))
    options = DryRunOptions(iterations=3, capacity_bytes=capacity, machine=machine)
    with DryRun(options) as dry_run:
        model = Swapped(swapped)
        model.to_device()
        trained = [one for one in model.parameters() if one.requires_grad]
        optimizer = torch.optim.AdamW(trained)
        while True:
            x = torch.zeros(64, WIDTH, device="cuda", dtype=torch.bfloat16)
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return trace_of_run(dry_run)


def _swap_of(trace: Trace) -> BlockSwap:
    plan = plan_for_machine(job_of_trace(trace, BatchSettings()), _machine_of(trace))
    assert not plan.fits
    layered = layers_of_job(plan.placed.job, trace, plan.placed.machine)
    swap = plan_block_swap(layered, plan.placed.shared, plan.placed.recorded)
    assert swap is not None
    return swap


def _machine_of(trace: Trace) -> Machine:
    return resolve_machine(None, trace)


def _reserved_bytes(trace: Trace) -> int:
    return int(memory_timeline(trace, 0, "reserved")[1].max())


def test_plan_block_swap__has_the_memory_of_a_job_that_swaps() -> None:
    swap = _swap_of(_trace().build("run.ebb"))
    for one, buffers in ((swap.both_ways, 0), (swap.up_only, 2)):
        assert one.fits
        assert one.factor >= 1 - 1e-9
        # The job has a buffer for the weights that are used.
        same = _trace(one.layers - buffers + 1).build("run.ebb")
        assert one.device_bytes == pytest.approx(_reserved_bytes(same), rel=0.03)
    assert swap.up_only.layers == swap.both_ways.layers + 2
    assert swap.up_only.factor <= swap.both_ways.factor
    # One block less does not fit.
    fewer = _trace(swap.both_ways.layers).build("run.ebb")
    assert _reserved_bytes(fewer) > 0.97 * CAPACITY


def test_plan__says_how_many_blocks_to_swap(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    machine = replace(find_machine("rtx3060"), gpu_memory_bytes=float(CAPACITY))
    machine.save(tmp_path / "short.json")
    _trace().write(tmp_path / "run.ebb")
    swap = _swap_of(_trace().build("run.ebb"))
    assert run(["plan", str(tmp_path / "run.ebb")]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert f" swap {swap.both_ways.layers} of {BLOCKS} blocks: " in printed
    assert run(["plan", str(tmp_path / "run.ebb"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["block_swap"] == swap.as_json()
    short = str(tmp_path / "short.json")
    assert run(["plan", str(tmp_path / "run.ebb"), "--code", short]) == 0
    printed = capsys.readouterr().out
    assert f"--blocks_to_swap {swap.up_only.layers} --block_swap_h2d_only" in printed
    assert f"blocks_to_swap = {swap.both_ways.layers}" in printed


def test_plan_block_swap__says_which_memory_is_too_small() -> None:
    no_host = {"host_memory_bytes": 2.0**26}
    for capacity, change, reason in (
        (20 << 20, {}, "of device memory"),
        (CAPACITY, no_host, "of host memory"),
    ):
        trace = _trace(capacity=capacity).build("run.ebb")
        plan = plan_for_machine(
            job_of_trace(trace, BatchSettings()), _machine_of(trace)
        )
        placed = plan.placed
        layered = layers_of_job(placed.job, trace, placed.machine)
        machine = replace(placed.shared, **change)
        swap = plan_block_swap(layered, machine, placed.recorded)
        assert swap is not None
        assert not swap.fits
        assert "does not suffice" in swap.text
        assert reason in swap.text
