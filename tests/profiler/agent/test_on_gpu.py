"""Recording on a real GPU: events, memory pools, counters, copies."""

from __future__ import annotations

import json
import statistics
import sys
import textwrap
from collections.abc import Callable
from typing import Any

import pytest

from tests.conftest import Recorded, ebbtide, run_process
from tests.cuda_runtime.build import is_on_stand_in
from tests.profiler.agent.jobs import PRELUDE

pytestmark = pytest.mark.gpu
Record = Callable[..., Recorded]

# On the stand-in, a host that takes the times waits for Python's lock, which the
# kernels have.
CLOCK_NS = 20_000_000 if is_on_stand_in() else 50_000
# The model is large enough for its phases to be told apart on the device, and small on
# the stand-in. There is an event before each iteration, and one at the end.
JOB = PRELUDE + textwrap.dedent(
    """
    import json
    STEPS = 12
    width = 4096 if torch.cuda.mem_get_info()[1] > 8 << 30 else 256
    def batch():
        return torch.randn(width, 16, device="cuda"), torch.randn(width, 4, device="cuda")
    def mlp():
        inner = [nn.Linear(width, width) for _ in range(6)]
        return nn.Sequential(nn.Linear(16, width), *inner, nn.Linear(width, 4))
    marks = []
    def mark():
        marks.append(torch.cuda.Event(enable_timing=True))
        marks[-1].record()
    model = mlp().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for _ in range(STEPS):
        mark()
        x, y = batch()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    mark()
    torch.cuda.synchronize()
    print(json.dumps({
        "iterations_ms": [a.elapsed_time(b) for a, b in zip(marks, marks[1:])],
        "allocated": torch.cuda.max_memory_allocated(),
        "reserved": torch.cuda.max_memory_reserved(),
        "sums": [p.double().sum().item().hex() for p in model.parameters()],
    }))
    """
)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    folder = tmp_path_factory.mktemp("recorded")
    job, path = folder / "job.py", folder / "run.ebb"
    job.write_text(JOB)
    options = ["--allocator-iterations", "4"]
    return Recorded(
        ebbtide("profile", "-o", path, *options, "--", sys.executable, job), path
    )


@pytest.fixture(scope="module")
def figures(recorded: Recorded) -> dict[str, Any]:
    """The figures of the job itself."""
    of_job: dict[str, Any] = json.loads(recorded.run.stdout)
    return of_job


def test_phases__have_device_times_after_their_launch(recorded: Recorded) -> None:
    phases = recorded.trace.phases(0)
    assert phases["gpu_end_ns"].notna().all()
    assert (phases["gpu_start_ns"] >= phases["start_ns"] - CLOCK_NS).all()
    assert (phases["gpu_end_ns"] > phases["gpu_start_ns"]).all()
    assert (
        phases["gpu_start_ns"].iloc[1:].to_numpy()
        >= phases["gpu_end_ns"].iloc[:-1].to_numpy()
    ).all()


def test_iterations__agree_with_the_events_of_the_job(
    recorded: Recorded, figures: dict[str, Any]
) -> None:
    summary = json.loads(ebbtide("summary", recorded.path, "--json").stdout)
    # All but the first ones.
    steady = figures["iterations_ms"][-len(summary["iterations_ms"]) :]
    assert summary["iteration_ms"] == pytest.approx(statistics.median(steady), rel=0.05)


def test_memory__agrees_with_torch_and_between_pools(
    recorded: Recorded, figures: dict[str, Any]
) -> None:
    allocated, reserved = figures["allocated"], figures["reserved"]
    memory = recorded.trace.memory(0)
    peaks = memory.groupby("pool")["bytes"].max()
    assert peaks["requested"] <= allocated
    assert peaks["requested"] >= 0.95 * allocated
    assert peaks["allocated"] <= allocated
    assert peaks["reserved"] <= reserved
    assert peaks["device"] >= peaks["reserved"]
    assert (
        memory[memory["pool"].isin(["device", "reserved", "allocated"])]["device"]
        == "cuda:0"
    ).all()


def test_transfers__include_the_copies_of_the_job(record: Record) -> None:
    copies = textwrap.dedent(
        """
        host = torch.empty(1 << 28, dtype=torch.uint8, pin_memory=True)
        for _ in range(3):
            host.cuda(non_blocking=True)
        model(batch()[0]).sum().backward()
        optimizer.step()
        """
    )
    # With an end of the iterations the slices have no pauses.
    recorded = record(JOB + copies, options=("--transfers", "--iterations", "0:100"))
    rows = recorded.trace.transfers(0)
    large = rows[(rows["direction"] == "h2d") & (rows["bytes"] == 1 << 28)]
    assert len(large) == 3
    assert set(large["host_memory"]) == {"pinned"}
    link = recorded.trace.link(0)
    assert len(link) > 0
    assert link["source"].nunique() == 1
    assert link[["h2d_bytes_per_s", "d2h_bytes_per_s"]].notna().any().all()


@pytest.mark.real_gpu
def test_state__has_plausible_values_of_a_busy_card(record: Record) -> None:
    recorded = record(JOB.replace("STEPS = 12", "STEPS = 300"))
    state = recorded.trace.gpu(0)
    assert len(state) >= 2
    assert set(state["device"]) == {"cuda:0"}
    assert state["utilization_percent"].dropna().between(0, 100).all()
    limits = {
        "power_w": (20, 2000),
        "sm_clock_mhz": (100, 4000),
        "temperature_celsius": (10, 110),
    }
    for column, (lowest, highest) in limits.items():
        assert state[column].notna().any()
        assert state[column].dropna().between(lowest, highest).all()
    figures = json.loads(ebbtide("summary", recorded.path, "--json").stdout)["gpu"]
    assert {"utilization", "power", "sm_clock"} <= {
        figure["quantity"] for figure in figures
    }


def test_recorder__does_not_change_a_bit_of_the_parameters_on_a_gpu(
    recorded: Recorded, figures: dict[str, Any]
) -> None:
    bare = run_process([sys.executable, recorded.path.parent / "job.py"])
    assert bare.returncode == 0, bare.stderr
    assert json.loads(bare.stdout)["sums"] == figures["sums"]
