"""The static split of DeepSpeed jobs, and published runs: the same answer in findings
and replay."""

from __future__ import annotations

from pathlib import Path

import pytest

from ebbtide.analysis.findings import find
from ebbtide.analysis.metrics.job import JobMetrics
from ebbtide.analysis.metrics.memory import memory_use
from ebbtide.analysis.metrics.summary import summarize
from ebbtide.analysis.metrics.windows import find_windows
from ebbtide.interleave.policies import make_plan
from ebbtide.interleave.replay.workload_from_trace import workload_of
from ebbtide.interleave.simulation.simulator import simulate
from ebbtide.profiler.trace import open_trace
from tests.analysis.findings.jobs import GIB, offloaded
from tests.analysis.metrics.test_static_split import (
    MACHINE,
    fits_in_findings,
    fits_in_replay,
)

TRACES = Path(__file__).parents[3] / "traces"

QUICK = ("h100-20b-ratio0.8-interleaved-2", "a100-13b-async", "a100-ranks1-async")
PUBLISHED = sorted(
    path.stem for path in TRACES.glob("*.ebb") if path.stem != "a100-torch-profiler"
)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in QUICK else pytest.mark.slow)
        for name in PUBLISHED
    ],
)
def test_largest_split__agrees_with_replay_on_published_runs(name: str) -> None:
    trace = open_trace(TRACES / f"{name}.ebb")
    metrics = JobMetrics(trace)
    assert fits_in_findings(metrics) == fits_in_replay(trace)
    # Every output computes free memory from the same pool, and says so.
    pool = "device" if name.startswith("h100") else "reserved"
    summary, windows = summarize(trace), find_windows(trace, GIB)
    assert (summary.free_pool, windows.pool, metrics.free_pool) == (pool, pool, pool)
    assert f"free device memory: capacity minus {pool}" in workload_of(trace).notes
    lines = [
        line
        for finding in find(trace).findings
        for line in finding.evidence
        if "capacity minus" in line
    ]
    # Of one rank with 11 G parameters no whole subgroup fits into 3 GiB.
    assert bool(lines) != name.startswith("a100-ranks1")
    assert all(f"capacity minus {pool}" in line for line in lines)
    (gap,) = [
        gap
        for gap in memory_use(trace, [0]).gaps
        if (gap.gap, gap.phase) == ("free", "update")
    ]
    (update,) = [
        phase
        for phase in summarize(trace.of_ranks([0])).phases
        if phase.phase == "update"
    ]
    assert update.min_free_bytes == pytest.approx(gap.low_bytes, abs=1)


@pytest.mark.parametrize(
    ("free_bytes", "fits"), [(12.5e9, False), (14.5e9, False), (14.7e9, True)]
)
def test_largest_split__counts_gradients_as_replay_does(
    free_bytes: float, fits: bool
) -> None:
    """Without offload 14 B a parameter, and 6 B of one of the ten subgroups."""
    trace = offloaded(used=80 - free_bytes / GIB).trace
    assert fits_in_findings(JobMetrics(trace)) == fits_in_replay(trace) == fits


@pytest.mark.parametrize(("ratio", "left_gib"), [(0.5, 24.4), (0.8, 40.7)])
def test_twin_flow__leaves_as_much_memory_as_published_runs_with_a_ratio(
    ratio: float, left_gib: float
) -> None:
    """The run that offloads all state, replayed with a ratio, beside the recorded run
    with that ratio."""
    recorded = JobMetrics(
        open_trace(TRACES / f"h100-20b-ratio{ratio:g}-async.ebb")
    ).always_free_bytes
    assert recorded is not None
    assert recorded / GIB == pytest.approx(left_gib, abs=0.06)
    workload = workload_of(open_trace(TRACES / "h100-20b-async.ebb"))
    free = workload.min_free_bytes
    assert free is not None
    used = simulate(
        make_plan(f"twin-flow:{ratio:g}", workload, MACHINE), workload, MACHINE
    ).peak_device_bytes
    assert free - used == pytest.approx(recorded, abs=0.5 * GIB)
    # What such a run keeps on the device counts as free in its own workload.
    again = workload_of(
        open_trace(TRACES / f"h100-20b-ratio{ratio:g}-async.ebb")
    ).min_free_bytes
    assert again == pytest.approx(free, abs=0.5 * GIB)
