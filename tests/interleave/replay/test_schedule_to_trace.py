"""Tests of traces of schedules: they contain what was simulated."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ebbtide.analysis.metrics.summary import summarize
from ebbtide.analysis.metrics.windows import find_windows
from ebbtide.interleave.model.schedule import Schedule
from ebbtide.interleave.model.workload import Workload
from ebbtide.interleave.policies import BUILT_IN, make_plan
from ebbtide.interleave.replay.schedule_to_trace import trace_of
from ebbtide.interleave.replay.workload_from_trace import workload_of
from ebbtide.interleave.simulation.simulator import simulate
from ebbtide.machines.machine import Machine, machine_from
from ebbtide.profiler.trace import Trace
from tests.conftest import examples
from tests.interleave.job_files import machine, workload
from tests.interleave.strategies import fixed_policies, machines, workloads


def ran(policy: str, job: Workload, target: Machine) -> Schedule:
    return simulate(make_plan(policy, job, target), job, target)


def built(policy: str, iterations: int = 3, **changes: Any) -> tuple[Schedule, Trace]:
    job, target = workload(**changes), machine()
    schedule = ran(policy, job, target)
    return schedule, trace_of(schedule, target, iterations).build()


any_schedule = given(
    fixed_policies(), workloads(max_subgroups=6), machines(), st.integers(1, 3)
)


@any_schedule
def test_trace_of__has_the_phases_of_the_schedule(
    policy: str, job: Workload, target: Machine, iterations: int
) -> None:
    schedule = ran(policy, job, target)
    trace = trace_of(schedule, target, iterations).build()
    figures = {phase.phase: phase.median_ms for phase in summarize(trace).phases}
    for phase in ("forward", "backward", "update", "other"):
        # To the nanosecond, at both ends.
        assert figures[phase] == pytest.approx(
            getattr(schedule, f"{phase}_s") * 1e3, abs=3e-6
        ), phase
    rows = trace.phases(0)
    assert list(rows["iteration"]) == [n for n in range(iterations) for _ in range(3)]
    assert (rows["end_ns"].to_numpy() >= rows["start_ns"].to_numpy()).all()
    assert (rows["start_ns"].to_numpy()[1:] >= rows["end_ns"].to_numpy()[:-1]).all()


@any_schedule
def test_trace_of__has_the_operations_and_copies_of_the_schedule(
    policy: str, job: Workload, target: Machine, iterations: int
) -> None:
    schedule = ran(policy, job, target)
    trace = trace_of(schedule, target, iterations).build()
    ops, copies = trace.ops(0), trace.transfers(0)
    assert len(ops) == iterations * len(schedule.plan.ops)
    last = ops[ops["iteration"] == iterations - 1]
    base = (iterations - 1) * round(schedule.iteration_s * 1e9)
    expected = sorted(
        (base + round(start * 1e9), base + round(end * 1e9), op.resource)
        for op, start, end in schedule.items()
    )
    assert (
        sorted(
            last[["start_ns", "end_ns", "resource"]].itertuples(index=False, name=None)
        )
        == expected
    )
    assert last["end_ns"].max() <= base + round(schedule.iteration_s * 1e9)
    for direction in ("h2d", "d2h"):
        rows = copies[copies["direction"] == direction]
        moved = iterations * schedule.moved_bytes(direction)
        assert int(rows["bytes"].sum()) == pytest.approx(
            moved, abs=len(rows) / 2 + 1e-6 * moved
        )
    pageable = sum(op.pageable for op in schedule.plan.ops)
    assert (copies["host_memory"] == "pageable").sum() == iterations * pageable


@any_schedule
def test_trace_of__stays_within_the_capacity_if_the_plan_fits(
    policy: str, job: Workload, target: Machine, iterations: int
) -> None:
    schedule = ran(policy, job, target)
    capacity = math.ceil(
        1e6 + schedule.peak_device_bytes + max(size for _, size in job.gpu_free or ())
    )
    line = (
        trace_of(schedule, replace(target, gpu_memory_bytes=capacity), iterations)
        .build()
        .memory(0)
    )
    assert set(line["pool"]) == {"device"}
    assert line["bytes"].min() >= 0
    over = np.diff(
        line["t_ns"], append=iterations * round(schedule.iteration_s * 1e9)
    ) * (line["bytes"] > capacity + 2)
    # Above the capacity for longer than rounding errors last, exactly if it does not
    # fit.
    assert (over.max() > 2 + 2e-9 * schedule.iteration_s * 1e9) == (
        not schedule.fits_device(None)
    )


def test_trace_of__has_only_planned_memory_if_the_jobs_is_not_known() -> None:
    schedule, trace = built("twin-flow:0.5", gpu_free_bytes=None)
    line = trace.memory(0)
    assert set(line["pool"]) == {"planned"}
    assert line["bytes"].max() == round(schedule.peak_device_bytes)
    # Free memory cannot be computed.
    unknown = find_windows(trace, 1)
    assert not unknown.windows
    assert unknown.missing
    schedule, trace = built("twin-flow:0.5")
    assert set(trace.memory(0)["pool"]) == {"device"}
    free = [window.free_bytes for window in find_windows(trace, 1).windows]
    assert 0 < min(free) < max(free) <= 30e9


@pytest.mark.parametrize(
    "policy", [policy for policy in BUILT_IN if policy != "adaptive"]
)
def test_trace_of__is_read_back_unchanged(policy: str, tmp_path: Path) -> None:
    schedule = ran(policy, workload(), machine())
    trace = trace_of(schedule, machine()).write(tmp_path / "run.ebb")
    assert (trace.meta.source, trace.meta.policy) == ("simulated", policy)
    assert machine_from(trace.meta.machine, "") == machine()
    assert summarize(trace).iteration_ms == pytest.approx(
        schedule.iteration_s * 1e3, abs=3e-6
    )
    again = trace_of(schedule, machine()).write(tmp_path / "again.ebb")
    for file in sorted(path for path in trace.path.rglob("*") if path.is_file()):
        assert (
            file.read_bytes()
            == (again.path / file.relative_to(trace.path)).read_bytes()
        )


def test_trace_of__has_the_simulated_workload() -> None:
    """For a plan that needs no device memory and does not make the job wait."""
    free = [
        {"at_s": 0, "bytes": 20e9},
        {"at_s": 0.2, "bytes": 6e9},
        {"at_s": 0.8, "bytes": 20e9},
    ]
    schedule, trace = built("pipelined", gpu_free_bytes=free)
    job, recorded = schedule.workload, workload_of(trace)
    assert (recorded.params, recorded.subgroups) == (job.params, job.subgroups)
    assert (recorded.forward_s, recorded.backward_s, recorded.other_s) == pytest.approx(
        (0.2, 0.6, 0.0)
    )
    assert (recorded.param_bytes, recorded.grad_bytes, recorded.state_bytes) == (
        2,
        2,
        12,
    )
    for time in (0.0, 0.1, 0.19, 0.21, 0.5, 0.79, 0.81, 2.0):
        assert recorded.free_at(time) == job.free_at(time)
    assert ran("interleaved:2", recorded, machine()).iteration_s == pytest.approx(
        ran("interleaved:2", job, machine()).iteration_s
    )


overlapped = st.tuples(
    st.sampled_from(["pipelined", "interleaved:2", "interleaved:3@0.5"]),
    st.sampled_from(["forward", "both"]),
).map(lambda both: f"{both[0]},overlap={both[1]}")


@settings(max_examples=examples(20, by_default=8))
@given(overlapped, workloads(max_subgroups=6), machines(), st.integers(1, 3))
def test_trace_of__late_operations_run_under_the_forward_of_the_next_iteration(
    policy: str, job: Workload, target: Machine, iterations: int
) -> None:
    schedule = ran(policy, job, target)
    trace = trace_of(schedule, target, iterations).build()
    length = round(schedule.iteration_s * 1e9)
    ops, copies = trace.ops(0), trace.transfers(0)
    assert ops["start_ns"].min() >= 0
    assert ops["end_ns"].max() <= iterations * length
    # Every iteration has the same work, also the first and the last one.
    for direction in ("h2d", "d2h"):
        rows = copies[copies["direction"] == direction]
        moved = iterations * schedule.moved_bytes(direction)
        assert int(rows["bytes"].sum()) == pytest.approx(
            moved, rel=1e-6, abs=len(rows) / 2 + 1e-3 * moved / length
        )
    busy = dict.fromkeys(("cpu", "gpu", "h2d", "d2h"), 0)
    for row in ops.itertuples():
        busy[row.resource] += row.end_ns - row.start_ns
    for resource, total_ns in busy.items():
        expected_s = sum(
            end - start
            for op, start, end in schedule.items()
            if op.resource == resource
        )
        assert total_ns == pytest.approx(
            iterations * expected_s * 1e9, abs=2.0 * len(ops) + 1
        )
    late = [
        end for end in schedule.ends if end > schedule.iteration_s * (1 + 1e-9) + 2e-9
    ]
    before = ops[ops["iteration"].isna()]
    assert len(before) >= len(late)
    # The beginning of the backward waits for the last of them.
    assert (before["end_ns"] <= length - round(schedule.update_s * 1e9) + 2).all()


def test_trace_of__counts_device_memory_across_iterations() -> None:
    """Against the operations of five iterations in a row."""
    schedule, trace = built(
        "interleaved:2,overlap=forward", iterations=2, gpu_free_bytes=0
    )
    assert not schedule.plan.kept_gradients
    length_s = schedule.iteration_s
    assert max(end for op, _, end in schedule.items() if op.gives) > 1.01 * length_s
    line = trace.memory(0)
    times_s = line["t_ns"].to_numpy() / 1e9
    for before_s, after_s, nbytes in zip(
        times_s, times_s[1:], line["bytes"], strict=False
    ):
        middle_s = (before_s + after_s) / 2
        if after_s - before_s < 1e-6:
            continue
        taken = 0.0
        for op, start, end in schedule.items():
            for shift_s in length_s * np.arange(-3, 2):
                taken += op.takes * (start + shift_s <= middle_s) - op.gives * (
                    end + shift_s <= middle_s
                )
        assert nbytes == pytest.approx(80e9 + taken, abs=1.0)
