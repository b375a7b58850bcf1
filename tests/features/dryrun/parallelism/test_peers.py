"""Ranks that send tensors to one another: each is run, and waits for the others."""

from __future__ import annotations

import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
import torch.distributed as dist

from ebbtide.features.dryrun.peers import MOST_PEERS, Peers, PeersNeeded
from ebbtide.features.dryrun.record import RunRecord
from ebbtide.features.dryrun.session import DryRun, DryRunOptions
from ebbtide.features.dryrun.trace_of_run import case_times_ns, trace_of_run
from ebbtide.machines.kernels.time_priors import TYPICAL
from ebbtide.profiler.trace import open_trace
from tests.conftest import ebbtide, run_process
from tests.features.dryrun.forked import run_forked

WIDTH = 2048


def run_ranks(job: Callable[[int], Any], ranks: int = 2) -> RunRecord:
    """Return the record of rank 0 of a job whose ranks are run by processes."""

    def run() -> RunRecord:
        with tempfile.TemporaryDirectory() as folder:
            peers = Peers(0, range(ranks), folder)
            peers.start()
            status = 0
            try:
                with DryRun(DryRunOptions(ranks=ranks, peers=peers)) as dry:
                    dist.init_process_group("nccl")
                    job(dist.get_rank())
                return peers.finish(dry.record(), ["job.py"])
            except BaseException as error:
                status = error.code if isinstance(error, SystemExit) else 1
                if peers.rank:
                    traceback.print_exc()
                raise
            finally:
                if peers.rank:
                    os._exit(int(status or 0))

    return run_forked(run)  # type: ignore[no-any-return]


def train_stages(rank: int, last_layers: int = 1) -> None:
    """Train a stage on each of two ranks, one batch after another."""
    layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(last_layers if rank else 1)]
    stage = torch.nn.Sequential(*layers).cuda()
    optimizer = torch.optim.SGD(stage.parameters())
    other = 1 - rank
    for _ in range(2):
        inputs = torch.randn(WIDTH, WIDTH, device="cuda", requires_grad=True)
        if rank:
            dist.recv(inputs.data, src=other)
        outputs = stage(inputs)
        if rank:
            outputs.sum().backward()
            dist.send(inputs.grad, dst=other)
        else:
            dist.send(outputs.detach(), dst=other)
            gradient = torch.empty_like(outputs)
            dist.recv(gradient, src=other)
            outputs.backward(gradient)
        optimizer.step()
        optimizer.zero_grad()


def step_ns(record: RunRecord) -> int:
    """Return the time of the last iteration."""
    return case_times_ns(record.phases, TYPICAL)[1]["iteration"]


def test_rank__waits_for_what_another_sends(tmp_path: Path) -> None:
    alike = run_ranks(train_stages)
    longer = run_ranks(lambda rank: train_stages(rank, last_layers=5))
    parts = case_times_ns(alike.phases, TYPICAL)[1]
    busy = parts["forward"] + parts["backward"] + parts["update"]
    # The other rank has as much to do while this one waits.
    assert parts["iteration"] > 1.8 * busy
    assert step_ns(longer) - step_ns(alike) > 4 * 0.8 * (busy - parts["update"])
    trace = trace_of_run(alike).write(tmp_path / "run.ebb")
    assert trace.ranks == [0, 1]


def exchange_values_and_objects() -> None:
    def job(rank: int) -> None:
        number = torch.tensor([7 * (1 - rank)], device="cuda")
        objects: list[Any] = [None] if rank else [{"shape": (3, 4)}]
        if rank:
            dist.recv(number, src=0)
            dist.recv_object_list(objects, src=0)
        else:
            dist.send(number, dst=1)
            dist.send_object_list(objects, dst=1)
        assert (number.item(), objects) == (7, [{"shape": (3, 4)}])

    run_ranks(job)


def test_rank__gets_values_and_objects_of_another() -> None:
    # The default group of objects is the one of the process, which tests of DeepSpeed
    # leave behind.
    function = f"from {__name__} import exchange_values_and_objects as run; run()"
    assert run_process([sys.executable, "-c", function]).returncode == 0


def test_rank__that_fails_ends_the_others() -> None:
    def job(rank: int) -> None:
        if rank:
            raise ValueError("of rank 1")
        dist.recv(torch.empty(1, device="cuda"), src=1)

    with pytest.raises(AssertionError, match="SystemExit: 1"):
        run_ranks(job)


def test_current_device__is_that_of_the_rank() -> None:
    def job(rank: int) -> None:
        torch.cuda.set_device(rank)
        made = torch.zeros(1, device="cuda"), torch.zeros(1).cuda()
        assert [one.device.index for one in made] == [rank, rank]
        with torch.cuda.device(1 - rank):
            assert torch.nn.Linear(2, 2).to("cuda").weight.device.index == 1 - rank
        assert torch.cuda.current_device() == rank

    run_ranks(job)


def test_meet__asks_for_ranks_that_are_few() -> None:
    with pytest.raises(PeersNeeded) as needed:
        Peers().meet([1, 0])
    assert needed.value.ranks == [0, 1]
    assert not Peers().meet(range(MOST_PEERS + 1))
    assert Peers(1, [0, 1], "folder").meet([0, 1])


PIPELINE = f"""
import os, sys, torch, torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
dist.init_process_group("nccl")
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.cuda.set_device(rank)
stage = torch.nn.Sequential(*[torch.nn.Linear({WIDTH}, {WIDTH}) for _ in range(4)])
stage = PipelineStage(stage.cuda(), rank, ranks, torch.device("cuda"))
schedule = ScheduleGPipe(stage, 4, loss_fn=lambda x, y: (x - y).square().mean())
optimizer = torch.optim.SGD(stage.submod.parameters())
data = torch.randn(4 * {WIDTH}, {WIDTH}, device="cuda")
while True:
    schedule.step(*([] if rank else [data]), **({{"target": data}} if rank else {{}}))
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.slow
def test_dry_run__has_the_bubble_of_a_pipeline(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(PIPELINE)
    command = ("dry-run", "--gpu", "h100-80gb", "-o", "run.ebb", "--ranks", "2")
    done = ebbtide(*command, "--", "python", "job.py", cwd=tmp_path)
    assert "ranks 0, 1 send tensors: all are run" in done.stderr
    trace = open_trace(tmp_path / "run.ebb")
    assert trace.ranks == [0, 1]
    phases = pd.concat([trace.phases(rank).assign(rank=rank) for rank in (0, 1)])
    phases = phases[(phases["iteration"] == 1) & (phases["phase"] != "update")]
    phases["ns"] = phases["gpu_end_ns"] - phases["gpu_start_ns"]
    busy = phases.groupby("rank")["ns"].sum()
    first = phases[phases["rank"] == 0]
    span = first["gpu_end_ns"].max() - first["gpu_start_ns"].min()
    # Beside all of the second stage, one micro-batch of four of the first.
    expected = busy[1] + busy[0] / 4
    assert expected < span < 1.15 * expected
