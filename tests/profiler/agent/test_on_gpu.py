"""Recording on a real GPU: events, memory pools, counters, copies."""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Callable

import pytest

from tests.conftest import Recorded, ebbtide, run_process
from tests.profiler.agent.jobs import PLAIN, PRELUDE

pytestmark = pytest.mark.gpu
Record = Callable[..., Recorded]

# The model is large enough for its phases to be told apart on the device.
ON_GPU = (
    PRELUDE
    + textwrap.dedent(
        """
        def batch():
            return torch.randn(4096, 16, device="cuda"), torch.randn(4096, 4, device="cuda")
        def mlp():
            return nn.Sequential(nn.Linear(16, 4096), *(nn.Linear(4096, 4096) for _ in range(6)), nn.Linear(4096, 4))
        model = mlp().cuda()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        """
    )
    + PLAIN.replace("STEPS", "12")
    + "torch.cuda.synchronize()\n"
)


def test_phases__have_device_times_after_their_launch(record: Record) -> None:
    phases = record(ON_GPU).trace.phases(0)
    assert phases["gpu_end_ns"].notna().all()
    assert (phases["gpu_start_ns"] >= phases["start_ns"] - 50_000).all()
    assert (phases["gpu_end_ns"] > phases["gpu_start_ns"]).all()
    assert (phases["gpu_start_ns"].iloc[1:].to_numpy() >= phases["gpu_end_ns"].iloc[:-1].to_numpy()).all()


def test_iterations__agree_with_the_events_of_the_job(record: Record) -> None:
    job = ON_GPU.replace(
        "for _ in range(12):",
        "marks = []\nfor _ in range(12):\n    marks.append(torch.cuda.Event(enable_timing=True)); marks[-1].record()",
    )
    recorded = record(job + "print(*(a.elapsed_time(b) for a, b in zip(marks, marks[1:])))\n")
    event_ms = sorted(map(float, recorded.run.stdout.split()))
    summary = json.loads(ebbtide("summary", recorded.path, "--json").stdout)
    assert summary["iteration_ms"] == pytest.approx(event_ms[len(event_ms) // 2], rel=0.05)


def test_memory__agrees_with_torch_and_between_pools(record: Record) -> None:
    recorded = record(ON_GPU + "print(torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())\n")
    allocated, reserved = map(int, recorded.run.stdout.split())
    memory = recorded.trace.memory(0)
    peaks = memory.groupby("pool")["bytes"].max()
    assert peaks["requested"] <= allocated
    assert peaks["requested"] >= 0.95 * allocated
    assert peaks["allocated"] <= allocated
    assert peaks["reserved"] <= reserved
    assert peaks["device"] >= peaks["reserved"]
    assert (memory[memory["pool"].isin(["device", "reserved", "allocated"])]["device"] == "cuda:0").all()


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
    recorded = record(ON_GPU + copies, options=("--transfers", "--iterations", "0:100"))
    rows = recorded.trace.transfers(0)
    large = rows[(rows["direction"] == "h2d") & (rows["bytes"] == 1 << 28)]
    assert len(large) == 3
    assert set(large["host_memory"]) == {"pinned"}
    link = recorded.trace.link(0)
    assert len(link) > 0
    assert link["source"].nunique() == 1
    assert link[["h2d_bytes_per_s", "d2h_bytes_per_s"]].notna().any().all()


def test_state__has_plausible_values_of_a_busy_card(record: Record) -> None:
    recorded = record(ON_GPU.replace("range(12)", "range(300)"))
    state = recorded.trace.gpu(0)
    assert len(state) >= 2
    assert set(state["device"]) == {"cuda:0"}
    assert state["utilization_percent"].dropna().between(0, 100).all()
    limits = {"power_w": (20, 2000), "sm_clock_mhz": (100, 4000), "temperature_celsius": (10, 110)}
    for column, (lowest, highest) in limits.items():
        assert state[column].notna().any()
        assert state[column].dropna().between(lowest, highest).all()
    figures = json.loads(ebbtide("summary", recorded.path, "--json").stdout)["gpu"]
    assert {"utilization", "power", "sm_clock"} <= {figure["quantity"] for figure in figures}


def test_recorder__does_not_change_a_bit_of_the_parameters_on_a_gpu(record: Record) -> None:
    job = ON_GPU + "print(*(p.double().sum().item().hex() for p in model.parameters()))\n"
    recorded = record(job)
    bare = run_process([sys.executable, recorded.path.parent / "job.py"])
    assert bare.returncode == 0, bare.stderr
    assert recorded.run.stdout == bare.stdout
