"""Sub-steps: they tile an update, they say what ran meanwhile, and those of a schedule are not added up."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ebbtide.analysis.metrics.iterations import counted
from ebbtide.analysis.metrics.substeps.aggregate import SubStep
from ebbtide.analysis.metrics.substeps.breakdown import SubSteps, sub_steps
from ebbtide.analysis.metrics.substeps.operations import op_pieces
from ebbtide.errors import TraceError
from ebbtide.interleave.policies import make_plan
from ebbtide.interleave.replay.schedule_to_trace import trace_of
from ebbtide.interleave.simulation.simulator import simulate
from ebbtide.profiler.trace import TraceBuilder
from tests.analysis.metrics.deepspeed_jobs import GIB, MS, PEAK, SIZE, SUBGROUP, deepspeed_job, update_ms
from tests.conftest import examples
from tests.interleave.experiments.sweep.sweeps import machine, workload

GPU = {"device": "cuda:0", "kind": "cuda", "capacity_bytes": 80 * GIB, "link": {"peak_bytes_per_s": PEAK}}


def one(found: SubSteps, name: str, subgroup: int | None = None) -> SubStep:
    steps = found.steps if subgroup is None else found.subgroups
    (step,) = [step for step in steps if (step.name, step.subgroup) == (name, subgroup)]
    return step


def test_the_sub_steps_of_a_deepspeed_update() -> None:
    found = sub_steps(deepspeed_job().build())
    assert (found.pool, found.tiles) == ("device", True)
    whole = update_ms(5)
    assert [(step.phase, step.name, step.median_ms) for step in found.steps] == [
        ("backward", "reduce", 60),
        ("backward", "gradient down", 20),
        ("update", "overflow check", 3),
        ("update", "gradient norm", 2),
        *(("update", name, 5 * ms) for name, _, ms, _ in SUBGROUP),
        ("update", "gather", 4),
        ("update", "rest", 1),
    ]
    update, parameters = one(found, "update"), one(found, "parameters")
    assert (update.count, update.share, update.resource, update.waits_for) == (5, 200 / whole, "cpu", None)
    assert (update.h2d.bytes, update.h2d.busy_share, update.h2d.busy_bytes_per_s) == (0, 0, None)
    # It converts for 5 ms, and then waits for a pageable copy.
    assert (parameters.bytes, parameters.h2d.bytes, parameters.waits_for) == (10 * SIZE, 10 * SIZE, "h2d")
    assert (parameters.h2d.pageable_share, parameters.h2d.pinned_share) == (0.75, 0)
    assert parameters.h2d.busy_bytes_per_s == pytest.approx(2 * SIZE / 0.015)
    assert parameters.h2d.share_of_peak == pytest.approx(2 * SIZE / 0.015 / PEAK)
    assert (parameters.peak_bytes, one(found, "reduce").peak_bytes) == (20 * GIB, 70 * GIB)
    reduce, down = one(found, "reduce"), one(found, "gradient down")
    assert (reduce.within, down.within, reduce.share) == (None, "reduce", 0.2)
    assert reduce.d2h.pinned_share == pytest.approx(20 / 60)
    assert [(use.phase, use.resource, use.median_ms) for use in found.resources] == [
        ("backward", "host", 60),
        ("update", "cpu", 240),
        ("update", "host", 120),
    ]
    assert {step.subgroup for step in found.subgroups} == set(range(5))
    assert one(found, "parameters", 3).median_ms == 20
    json.dumps(found.as_json(), allow_nan=False)


def test_what_was_not_recorded_is_not_known() -> None:
    parameters = one(sub_steps(deepspeed_job(copies=False, gpu=False).build()), "parameters")
    for side in (parameters.h2d, parameters.d2h):
        assert set(vars(side).values()) == {None}
    assert (parameters.waits_for, parameters.bytes) == (None, 10 * SIZE)


@pytest.mark.parametrize(("apart_ms", "known"), [(10, True), (30, False)])
def test_counters_tell_of_sub_steps_that_are_longer_than_they_lie_apart(apart_ms: int, known: bool) -> None:
    parameters = one(sub_steps(deepspeed_job(copies=False, counters_ms=apart_ms).build()), "parameters")
    assert parameters.h2d.bytes == (pytest.approx(0.1 * 1e10, rel=0.01) if known else None)
    assert (parameters.h2d.busy_share, parameters.waits_for) == (None, None)


def test_a_trace_without_sub_steps_says_what_to_do() -> None:
    builder = TraceBuilder()
    builder.rank(0, devices=[GPU]).phase("update", 0, MS, 0)
    with pytest.raises(TraceError, match="record a DeepSpeed job with `ebbtide profile`"):
        sub_steps(builder.build("bare.ebb"))


LENGTHS = st.lists(st.integers(1, 50), min_size=1, max_size=12)


@settings(max_examples=examples(20))
@given(
    iterations=st.lists(LENGTHS, min_size=1, max_size=6),
    names=st.lists(st.sampled_from(["unscale", "update", "parameters"]), min_size=12, max_size=12),
    copies=st.lists(st.tuples(st.integers(0, 400), st.integers(1, 60), st.booleans()), max_size=8),
)
def test_what_tiles_an_update_adds_up_to_it(
    iterations: list[list[int]], names: list[str], copies: list[tuple[int, int, bool]]
) -> None:
    builder = TraceBuilder("recorded", warmup_iterations=0)
    rank = builder.rank(0, devices=[GPU], first_iteration_start_ns=0, transfers_recorded=True)
    now = 0
    for number, lengths in enumerate(iterations):
        rank.phase("forward", now, now + 10, number)
        begin = now = now + 10
        for place, (name, length) in enumerate(zip(names, lengths, strict=False)):
            times = {"start_ns": now, "end_ns": now + length}
            rank.add("ops", **times, resource="host", name=name, iteration=number, subgroup=place // 3)
            now += length
        rank.phase("update", begin, now, number)
    for start, length, pinned in copies:
        rank.transfer("h2d", start, start + length, 7, host_memory="pinned" if pinned else "pageable")
    found = sub_steps(builder.build())
    update = [step for step in found.steps if step.phase == "update"]
    assert len(update) == len(found.steps)
    assert sum(step.share or 0.0 for step in update) == pytest.approx(1)
    assert sum(step.share or 0.0 for step in found.subgroups) == pytest.approx(1)
    for step in [*update, *found.subgroups]:
        side = step.h2d
        assert side.bytes is not None
        assert side.bytes >= 0
        for share in (side.busy_share, side.pinned_share, side.pageable_share):
            assert share is None or 0 <= share <= 1 + 1e-9
        if side.busy_share is not None and side.pinned_share is not None and side.pageable_share is not None:
            assert max(side.pinned_share, side.pageable_share) <= side.busy_share + 1e-9
            assert side.pinned_share + side.pageable_share >= side.busy_share - 1e-9


@settings(max_examples=examples(20))
@given(
    ops=st.lists(
        st.tuples(st.integers(0, 300), st.integers(0, 200), st.sampled_from(["update", "fetch", "flush"])), min_size=1
    )
)
def test_ops_are_cut_at_phases_and_lose_no_time_and_count_once(ops: list[tuple[int, int, str]]) -> None:
    builder = TraceBuilder("simulated", warmup_iterations=0)
    rank = builder.rank(0, devices=[GPU], first_iteration_start_ns=0)
    for number in range(3):
        rank.phase("forward", 120 * number, 120 * number + 50, number)
        rank.phase("update", 120 * number + 60, 120 * number + 120, number)
    for start, length, name in ops:
        rank.add("ops", start_ns=start, end_ns=start + length, resource="gpu", name=f"{name} 3", subgroup=3)
    trace = builder.build()
    rows, phases = op_pieces(trace, 0, counted(trace)[0])
    inside = sum(max(0, min(start + length, 360) - start) for start, length, _ in ops)
    assert (rows["end_ns"] - rows["start_ns"]).sum() == inside
    assert rows["first"].sum() == sum(length > 0 for _, length, _ in ops)
    assert set(rows["name"]) <= {"update", "fetch", "flush"}
    edges = np.array([[0, 50], [50, 60], [60, 120]])
    for row in rows.itertuples():
        place = [(row.start_ns - 120 * row.iteration, row.end_ns - 120 * row.iteration)]
        assert any(first <= start and end <= last for first, last in edges for start, end in place)
    assert phases["ms"].sum() * 1e6 == pytest.approx(120 * rows["iteration"].nunique())


def test_those_of_a_schedule_run_beside_each_other() -> None:
    job, box = workload(), machine()
    schedule = simulate(make_plan("interleaved:2", job, box), job, box)
    found = sub_steps(trace_of(schedule, box).build())
    assert not found.tiles
    # Nor do they where DeepSpeed's own reducing is told beside them.
    mixed = trace_of(schedule, box)
    mixed.rank(0).add("ops", start_ns=0, end_ns=MS, resource="host", name="reduce", iteration=0)
    assert not sub_steps(mixed.build()).tiles
    assert {step.name for step in found.steps} >= {"gradient down", "fetch", "update", "flush", "upload"}
    busy = schedule.busy_shares()
    shares = {use.resource: use.share for use in found.resources if use.phase == "update"}
    assert shares == {resource: pytest.approx(share, abs=1e-6) for resource, share in busy.items() if share}
    # Together they are more than the update.
    assert sum(step.median_ms for step in found.steps if step.phase == "update") > schedule.update_s * 1e3
    fetch = next(step for step in found.steps if (step.phase, step.name) == ("update", "fetch"))
    assert fetch.h2d.busy_share == pytest.approx(1)
    assert fetch.waits_for is None


def test_what_ran_on_the_gpu_lies_in_the_phases_by_the_gpus_own_times() -> None:
    builder = TraceBuilder("recorded", warmup_iterations=0)
    rank = builder.rank(0, devices=[GPU], first_iteration_start_ns=0)
    for number in range(3):
        start = 100 * MS * number
        # The device is 30 ms behind: what the update launched runs when the next forward is launched.
        for phase, begin, end in (("forward", 0, 60), ("update", 60, 100)):
            times = start + begin * MS, start + end * MS
            rank.phase(phase, *times, number, 0, times[0] + 30 * MS, times[1] + 30 * MS)
        for resource, begin in (("host", 60), ("gpu", 110)):
            times = start + begin * MS, start + (begin + 20) * MS
            rank.add("ops", start_ns=times[0], end_ns=times[1], resource=resource, name="update", subgroup=0)
    found = sub_steps(builder.build())
    assert {(step.phase, step.resource, step.median_ms) for step in found.steps} == {
        ("update", "host", 20),
        ("update", "gpu", 20),
    }


def test_many_ranks_and_subgroups_are_each_told() -> None:
    builder = deepspeed_job(iterations=3)
    for row in deepspeed_job(iterations=3, sizes=(SIZE,) * 2).ranks[0].frame("phases").to_dict("records"):
        builder.rank(1, devices=[GPU]).add("phases", **row)
    found = sub_steps(builder.build())
    assert {step.rank for step in found.steps} == {0}
    assert sub_steps(builder.build(), by_subgroup=False).subgroups == []
