"""Sub-steps: those of DeepSpeed fill an update, those of a schedule run at the same
time."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ebbtide.analysis.metrics.iterations import steady_iterations
from ebbtide.analysis.metrics.substeps.breakdown import SubStep, SubSteps, sub_steps
from ebbtide.analysis.metrics.substeps.operations import split_by_phase
from ebbtide.interleave.policies import make_plan
from ebbtide.interleave.replay.schedule_to_trace import trace_of
from ebbtide.interleave.simulation.simulator import simulate
from ebbtide.profiler.trace import TraceBuilder
from tests.analysis.metrics.deepspeed_jobs import (
    GIB,
    MS,
    PEAK,
    SIZE,
    SUBGROUP,
    deepspeed_job,
    update_ms,
)
from tests.conftest import examples
from tests.interleave.job_files import machine, workload

GPU = {
    "device": "cuda:0",
    "kind": "cuda",
    "capacity_bytes": 80 * GIB,
    "link": {"peak_bytes_per_s": PEAK},
}


def one(result: SubSteps, name: str, subgroup: int | None = None) -> SubStep:
    steps = result.steps if subgroup is None else result.subgroups
    (step,) = [step for step in steps if (step.name, step.subgroup) == (name, subgroup)]
    return step


def test_sub_steps__has_figures_of_deepspeed_update() -> None:
    result = sub_steps(deepspeed_job().build())
    assert (result.pool, result.tiles) == ("device", True)
    total_ms = update_ms(5)
    assert [(step.phase, step.name, step.median_ms) for step in result.steps] == [
        ("backward", "reduce", 60),
        ("backward", "gradient down", 20),
        ("update", "overflow check", 3),
        ("update", "gradient norm", 2),
        *(("update", name, 5 * ms) for name, _, ms, _ in SUBGROUP),
        ("update", "gather", 4),
        ("update", "rest", 1),
    ]
    update, parameters = one(result, "update"), one(result, "parameters")
    assert (update.count, update.share, update.resource, update.waits_for) == (
        5,
        200 / total_ms,
        "cpu",
        None,
    )
    assert (update.h2d.bytes, update.h2d.busy_share, update.h2d.busy_bytes_per_s) == (
        0,
        0,
        None,
    )
    # It converts for 5 ms, and then waits for a pageable copy.
    assert (parameters.bytes, parameters.h2d.bytes, parameters.waits_for) == (
        10 * SIZE,
        10 * SIZE,
        "h2d",
    )
    assert (parameters.h2d.pageable_share, parameters.h2d.pinned_share) == (0.75, 0)
    assert parameters.h2d.busy_bytes_per_s == pytest.approx(2 * SIZE / 0.015)
    assert parameters.h2d.share_of_peak == pytest.approx(2 * SIZE / 0.015 / PEAK)
    assert (parameters.peak_bytes, one(result, "reduce").peak_bytes) == (
        20 * GIB,
        70 * GIB,
    )
    reduce, down = one(result, "reduce"), one(result, "gradient down")
    assert (reduce.within, down.within, reduce.share) == (None, "reduce", 0.2)
    assert reduce.d2h.pinned_share == pytest.approx(20 / 60)
    assert [(use.phase, use.resource, use.median_ms) for use in result.resources] == [
        ("backward", "host", 60),
        ("update", "cpu", 240),
        ("update", "host", 120),
    ]
    assert {step.subgroup for step in result.subgroups} == set(range(5))
    assert one(result, "parameters", 3).median_ms == 20
    json.dumps(result.as_json(), allow_nan=False)


def test_sub_steps__unrecorded_figures_are_none() -> None:
    parameters = one(
        sub_steps(deepspeed_job(copies=False, gpu=False).build()), "parameters"
    )
    for side in (parameters.h2d, parameters.d2h):
        assert set(vars(side).values()) == {None}
    assert (parameters.waits_for, parameters.bytes) == (None, 10 * SIZE)


@pytest.mark.parametrize(("apart_ms", "resolved"), [(10, True), (30, False)])
def test_sub_steps__counters_give_bytes_of_long_sub_steps_only(
    apart_ms: int, resolved: bool
) -> None:
    parameters = one(
        sub_steps(deepspeed_job(copies=False, counters_ms=apart_ms).build()),
        "parameters",
    )
    assert parameters.h2d.bytes == (
        pytest.approx(0.1 * 1e10, rel=0.01) if resolved else None
    )
    assert (parameters.h2d.busy_share, parameters.waits_for) == (None, None)


def test_sub_steps__is_empty_without_sub_steps() -> None:
    builder = TraceBuilder()
    builder.rank(0, devices=[GPU]).phase("update", 0, MS, 0)
    result = sub_steps(builder.build("bare.ebb"))
    assert (result.tiles, result.steps, result.subgroups, result.resources) == (
        None,
        [],
        [],
        [],
    )


LENGTHS = st.lists(st.integers(1, 50), min_size=1, max_size=12)


@settings(max_examples=examples(20, by_default=6))
@given(
    iterations=st.lists(LENGTHS, min_size=1, max_size=6),
    names=st.lists(
        st.sampled_from(["unscale", "update", "parameters"]), min_size=12, max_size=12
    ),
    copies=st.lists(
        st.tuples(st.integers(0, 400), st.integers(1, 60), st.booleans()), max_size=8
    ),
)
def test_sub_steps__times_add_up_to_update(
    iterations: list[list[int]], names: list[str], copies: list[tuple[int, int, bool]]
) -> None:
    builder = TraceBuilder("recorded", warmup_iterations=0)
    rank = builder.rank(
        0, devices=[GPU], first_iteration_start_ns=0, transfers_recorded=True
    )
    now = 0
    for number, lengths in enumerate(iterations):
        rank.phase("forward", now, now + 10, number)
        begin = now = now + 10
        for index, (name, length) in enumerate(zip(names, lengths, strict=False)):
            times = {"start_ns": now, "end_ns": now + length}
            rank.add(
                "ops",
                **times,
                resource="host",
                name=name,
                iteration=number,
                subgroup=index // 3,
            )
            now += length
        rank.phase("update", begin, now, number)
    for start, length, pinned in copies:
        rank.transfer(
            "h2d",
            start,
            start + length,
            7,
            host_memory="pinned" if pinned else "pageable",
        )
    result = sub_steps(builder.build())
    update = [step for step in result.steps if step.phase == "update"]
    assert len(update) == len(result.steps)
    assert sum(step.share or 0.0 for step in update) == pytest.approx(1)
    assert sum(step.share or 0.0 for step in result.subgroups) == pytest.approx(1)
    for step in [*update, *result.subgroups]:
        side = step.h2d
        assert side.bytes is not None
        assert side.bytes >= 0
        for share in (side.busy_share, side.pinned_share, side.pageable_share):
            assert share is None or 0 <= share <= 1 + 1e-9
        if (
            side.busy_share is not None
            and side.pinned_share is not None
            and side.pageable_share is not None
        ):
            assert max(side.pinned_share, side.pageable_share) <= side.busy_share + 1e-9
            assert side.pinned_share + side.pageable_share >= side.busy_share - 1e-9


@settings(max_examples=examples(20, by_default=6))
@given(
    ops=st.lists(
        st.tuples(
            st.integers(0, 300),
            st.integers(0, 200),
            st.sampled_from(["update", "fetch", "flush"]),
        ),
        min_size=1,
    )
)
def test_split_by_phase__loses_no_time_and_counts_each_op_once(
    ops: list[tuple[int, int, str]],
) -> None:
    builder = TraceBuilder("simulated", warmup_iterations=0)
    rank = builder.rank(0, devices=[GPU], first_iteration_start_ns=0)
    for number in range(3):
        rank.phase("forward", 120 * number, 120 * number + 50, number)
        rank.phase("update", 120 * number + 60, 120 * number + 120, number)
    for start, length, name in ops:
        rank.add(
            "ops",
            start_ns=start,
            end_ns=start + length,
            resource="gpu",
            name=f"{name} 3",
            subgroup=3,
        )
    trace = builder.build()
    rows, phases = split_by_phase(trace, 0, steady_iterations(trace).numbers)
    inside = sum(max(0, min(start + length, 360) - start) for start, length, _ in ops)
    assert (rows["end_ns"] - rows["start_ns"]).sum() == inside
    assert rows["first"].sum() == sum(length > 0 for _, length, _ in ops)
    assert set(rows["name"]) <= {"update", "fetch", "flush"}
    edges = np.array([[0, 50], [50, 60], [60, 120]])
    for row in rows.itertuples():
        start, end = (
            row.start_ns - 120 * row.iteration,
            row.end_ns - 120 * row.iteration,
        )
        assert any(first <= start and end <= last for first, last in edges)
    assert phases["ms"].sum() * 1e6 == pytest.approx(120 * rows["iteration"].nunique())


def test_sub_steps__of_schedule_run_concurrently() -> None:
    job, rates = workload(), machine()
    schedule = simulate(make_plan("interleaved:2", job, rates), job, rates)
    result = sub_steps(trace_of(schedule, rates).build())
    assert not result.tiles
    # Nor with the sub-step `reduce` of DeepSpeed in the same trace.
    mixed = trace_of(schedule, rates)
    mixed.rank(0).add(
        "ops", start_ns=0, end_ns=MS, resource="host", name="reduce", iteration=0
    )
    assert not sub_steps(mixed.build()).tiles
    assert {step.name for step in result.steps} >= {
        "gradient down",
        "fetch",
        "update",
        "flush",
        "upload",
    }
    busy = schedule.busy_shares()
    shares = {
        use.resource: use.share for use in result.resources if use.phase == "update"
    }
    assert shares == {
        resource: pytest.approx(share, abs=1e-6)
        for resource, share in busy.items()
        if share
    }
    # Their sum is longer than the update.
    assert (
        sum(step.median_ms for step in result.steps if step.phase == "update")
        > schedule.update_s * 1e3
    )
    fetch = next(
        step for step in result.steps if (step.phase, step.name) == ("update", "fetch")
    )
    assert fetch.h2d.busy_share == pytest.approx(1)
    assert fetch.waits_for is None


def test_split_by_phase__uses_device_times_for_device_ops() -> None:
    builder = TraceBuilder("recorded", warmup_iterations=0)
    rank = builder.rank(0, devices=[GPU], first_iteration_start_ns=0)
    for number in range(3):
        start = 100 * MS * number
        # The device is 30 ms behind: what the update launched runs when the next
        # forward is launched.
        for phase, begin, end in (("forward", 0, 60), ("update", 60, 100)):
            times = start + begin * MS, start + end * MS
            rank.phase(phase, *times, number, 0, times[0] + 30 * MS, times[1] + 30 * MS)
        for resource, begin in (("host", 60), ("gpu", 110)):
            times = start + begin * MS, start + (begin + 20) * MS
            rank.add(
                "ops",
                start_ns=times[0],
                end_ns=times[1],
                resource=resource,
                name="update",
                subgroup=0,
            )
    result = sub_steps(builder.build())
    assert {(step.phase, step.resource, step.median_ms) for step in result.steps} == {
        ("update", "host", 20),
        ("update", "gpu", 20),
    }


def test_sub_steps__reports_every_rank_and_subgroup() -> None:
    builder = deepspeed_job(iterations=3)
    for row in (
        deepspeed_job(iterations=3, sizes=(SIZE,) * 2)
        .ranks[0]
        .frame("phases")
        .to_dict("records")
    ):
        builder.rank(1, devices=[GPU]).add("phases", **row)
    result = sub_steps(builder.build())
    assert {step.rank for step in result.steps} == {0}
    assert sub_steps(builder.build(), by_subgroup=False).subgroups == []
