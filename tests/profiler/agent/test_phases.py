"""Phases and iterations of every kind of training loop, in real jobs."""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from ebbtide.profiler.trace import Trace, open_trace
from tests.conftest import Recorded, phases_of, run_process
from tests.profiler.agent.jobs import ADAMW, CASES, PRELUDE, STEPS

Record = Callable[..., Recorded]


# Inductor starts a C++ compiler.
COMPILED = [
    name for name in CASES if "compiled" in name and "without a compiler" not in name
]

TRACE_ALL = """
import json, sys
from ebbtide.profiler import Tracer
for number, job in enumerate(json.load(open(sys.argv[1]))):
    with Tracer(f"{number}.ebb"):
        exec(compile(job, "job", "exec"), {"__name__": "__main__"})
"""


def read_all(folder: Path, jobs: dict[str, str]) -> dict[str, Trace]:
    """Return the traces that `trace_all` wrote, by the names of the jobs."""
    return {
        name: open_trace(folder / f"{number}.ebb") for number, name in enumerate(jobs)
    }


def trace_all(
    folder: Path, jobs: dict[str, str], prelude: str = PRELUDE + ADAMW
) -> dict[str, Trace]:
    """Record each job with `Tracer`, all in one process; return the traces by the names
    of the jobs."""
    (folder / "jobs.json").write_text(
        json.dumps([prelude + textwrap.dedent(job) for job in jobs.values()])
    )
    run = run_process([sys.executable, "-c", TRACE_ALL, "jobs.json"], cwd=folder)
    assert run.returncode == 0, run.stderr
    return read_all(folder, jobs)


@pytest.mark.parametrize("name", [name for name in CASES if name not in COMPILED])
def test_tracer__records_the_phases_of_every_loop(
    name: str, traced: dict[str, Trace]
) -> None:
    assert phases_of(traced[name]) == [CASES[name][1].split()] * STEPS


@pytest.mark.slow
@pytest.mark.parametrize("name", COMPILED)
def test_profile__records_the_phases_of_compiled_loops(
    name: str, record: Record
) -> None:
    job, expected = CASES[name]
    recorded = record(PRELUDE + ADAMW + textwrap.dedent(job))
    assert recorded.run.returncode == 0, recorded.run.stderr
    assert recorded.phases() == [expected.split()] * STEPS


DISTRIBUTED = """
import os
from torch import distributed
distributed.init_process_group("gloo")
torch.manual_seed(distributed.get_rank())
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
{wrap}
optimizer = {optimizer}(model.parameters(), lr=1e-2)
for step in range(4):
    x, y = torch.randn(8, 16), torch.randn(8, 4)
    F.mse_loss(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
distributed.destroy_process_group()
"""

WRAPS = {
    "hooks": """
for p in model.parameters():
    p.register_post_accumulate_grad_hook(lambda p: distributed.all_reduce(p.grad))
""",
    "DDP": "model = nn.parallel.DistributedDataParallel(model)",
    "FSDP2": """
from torch.distributed.fsdp import fully_shard
mesh = distributed.init_device_mesh("cpu", (2,))
fully_shard(model[0], mesh=mesh)
fully_shard(model, mesh=mesh)
""",
}


# tests/nvml_mock/test_profile.py has a job of several ranks in `make test`.
@pytest.mark.slow
@pytest.mark.parametrize("kind", WRAPS)
def test_profile__records_two_ranks_on_one_clock(kind: str, record: Record) -> None:
    launcher = (
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
    )
    optimizer = "PlainSGD" if kind == "hooks" else "torch.optim.AdamW"
    recorded = record(
        PRELUDE + DISTRIBUTED.format(wrap=WRAPS[kind], optimizer=optimizer),
        launcher=launcher,
    )
    assert recorded.run.returncode == 0, recorded.run.stderr
    trace = recorded.trace
    assert trace.ranks == [0, 1]
    assert [trace.rank(rank).world_size for rank in trace.ranks] == [2, 2]
    for rank in trace.ranks:
        assert recorded.phases(rank) == [["forward", "backward", "update"]] * 4
    # The backward ends with a reduction over both ranks: on one clock, each must end
    # after the other began.
    first, second = (
        trace.phases(rank).query("phase == 'backward'") for rank in trace.ranks
    )
    assert (first["end_ns"].to_numpy() > second["start_ns"].to_numpy()).all()
    assert (second["end_ns"].to_numpy() > first["start_ns"].to_numpy()).all()


@pytest.mark.slow
def test_profile__records_ranks_started_by_spawn(record: Record) -> None:
    recorded = record(
        """
        import torch
        from torch import nn
        def train(rank):
            torch.distributed.init_process_group("gloo", init_method="tcp://127.0.0.1:29617", rank=rank, world_size=2)
            model = nn.parallel.DistributedDataParallel(nn.Linear(4, 4))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for _ in range(3):
                model(torch.randn(2, 4)).sum().backward()
                optimizer.step()
            torch.distributed.destroy_process_group()
        if __name__ == "__main__":
            torch.multiprocessing.spawn(train, nprocs=2)
        """
    )
    assert recorded.trace.ranks == [0, 1]
    assert recorded.phases(1) == [["forward", "backward", "update"]] * 3


def test_phases__have_numbered_micro_steps(traced: dict[str, Trace]) -> None:
    first = traced["gradient accumulation"].phases(0).query("iteration == 1")
    assert list(first["micro_step"]) == [0, 0, 1, 1, 2, 2, 2]


@pytest.mark.slow
def test_phase__contains_the_phases_detected_inside_it(
    record: Record, tmp_path: object
) -> None:
    recorded = record(
        PRELUDE
        + textwrap.dedent(
            """
            from ebbtide.profiler import Tracer
            with Tracer("unused.ebb") as tracer:
                for _ in range(STEPS):
                    x, y = batch()
                    with tracer.phase("forward"):
                        loss = F.mse_loss(model(x) + model(-x), y)
                    with tracer.phase("backward"):
                        loss.backward()
                    with tracer.phase("update"):
                        optimizer.step()
            import os
            assert not os.path.exists("unused.ebb")
            """
        )
    )
    assert recorded.run.returncode == 0, recorded.run.stderr
    assert recorded.phases() == [["forward", "backward", "update"]] * STEPS
