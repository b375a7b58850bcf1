"""`adaptive`: never slower than the others, never below the bound, within what is free at every instant."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ebbtide.errors import PolicyError
from ebbtide.interleave.model.schedule import Schedule
from ebbtide.interleave.model.workload import FreeLine, Workload
from ebbtide.interleave.policies import make_plan
from ebbtide.interleave.simulation.bound import bound
from ebbtide.interleave.simulation.simulator import simulate
from ebbtide.machines.machine import Machine
from tests.conftest import examples, slow
from tests.interleave import on_device
from tests.interleave.simulation.test_simulator import BOX, even, ran
from tests.interleave.strategies import machines, workloads

GB = 1e9
OTHERS = (
    "zero-offload",
    "pipelined",
    *(f"twin-flow:{tenths / 10:g}" for tenths in range(11)),
    *(f"twin-flow:{tenths / 10:g},params=pipelined" for tenths in range(11)),
    *(f"interleaved:{stride}@{tenths / 10:g}" for stride in range(1, 11) for tenths in range(1, 11)),
)
# Each plans many policies.
few = settings(max_examples=examples(10))


@few
@given(workloads(), machines())
def test_it_is_never_slower_than_the_others_that_fit(workload: Workload, machine: Machine) -> None:
    ours = ran("adaptive", workload, machine)
    for policy in OTHERS:
        other = ran(policy, workload, machine)
        if other.fits_device(None):
            assert ours.iteration_s <= other.iteration_s * (1 + 1e-9), policy


@few
@given(workloads(), machines())
def test_it_is_never_below_the_bound(workload: Workload, machine: Machine) -> None:
    ours, least = ran("adaptive", workload, machine), bound(workload, machine)
    assert ours.exposed_s >= least.exposed_whole_s * (1 - 1e-5) - 1e-9
    assert ours.iteration_s >= least.iteration_s * (1 - 1e-5)


@few
@given(workloads(), machines())
def test_it_fits_what_is_free_at_every_instant(workload: Workload, machine: Machine) -> None:
    ours = ran("adaptive", workload, machine)
    assert ours.fits_device(None)
    grid = on_device.grid(ours)
    over = on_device.used(ours, grid) - on_device.free(ours, grid)
    # A step of the free line and one of the plan may fall together to within rounding.
    steps = [at for at, _ in workload.gpu_free or ()]
    for at, excess in zip(grid, over, strict=True):
        assert excess <= 10 or min(abs(at - step) for step in steps) < 1e-7 * ours.iteration_s


@few
@given(workloads(), machines())
def test_it_is_deterministic_and_says_what_it_does(workload: Workload, machine: Machine) -> None:
    plan = make_plan("adaptive", workload, machine)
    assert plan == make_plan("adaptive", workload, machine)
    assert_told(plan.remark, simulate(plan, workload, machine), machine)


def assert_told(remark: str, schedule: Schedule, machine: Machine) -> None:
    """The remark's counts are the plan's, or the plan is that of the policy it names."""
    workload, plan = schedule.workload, schedule.plan
    of_other = re.fullmatch(r"the plan of (\S+)", remark)
    if of_other:
        assert make_plan(of_other[1], workload, machine).ops == plan.ops
        return
    counts, best = re.fullmatch(r"(.*) on the CPU; the best of the others was (\S+)", remark).groups()  # type: ignore[union-attr]
    *placed, on_cpu = counts.split(", ")
    told = {name: int(count) for count, name in (place.split(" ") for place in placed)}
    assert int(on_cpu) == plan.counts().get("update on cpu", 0)
    assert told.get("resident", 0) == len(plan.resident)
    assert told.get("parked", 0) <= len(plan.parked)
    assert told.get("parked", 0) + told.get("streamed", 0) == plan.counts().get("fetch", 0)
    assert ran(best, workload, machine).iteration_s >= schedule.iteration_s * (1 - 1e-9)


# A job whose activations leave 40 GB in backward and update, and 2 GB in the forward.
SLOW = replace(BOX, cpu_update_params_per_s=1e9, host_memory_bytes_per_s=60e9, step_overhead_s=0.0)


def windowed(room: float, count: int = 60, **values: object) -> Workload:
    line: FreeLine = ((0.0, 2 * GB), (0.5, 2 * GB), (2.5, room))
    return even(count, other_s=0.5, forward_s=2.0, backward_s=4.0, gpu_free=line, **values)


def test_it_uses_windows_and_gives_the_memory_back() -> None:
    peaks, times = [], []
    for room in (2 * GB, 5 * GB, 10 * GB, 20 * GB, 40 * GB):
        ours = ran("adaptive", windowed(room), SLOW)
        assert ours.fits_device(None)
        peaks.append(ours.peak_device_bytes)
        times.append(ours.iteration_s)
        assert ours.peak_device_bytes <= room + 1
        # It is back within what is free before the forward needs it.
        used, at = on_device.used(ours, on_device.grid(ours)), on_device.grid(ours)
        assert used[at < 2.5].max() <= 2 * GB + 1
    assert peaks == sorted(peaks)
    assert times == sorted(times, reverse=True)
    assert peaks[-1] > 20 * GB
    assert peaks[0] <= 2 * GB + 1
    # What windows are worth: the same job with only what is always free.
    assert times[-1] < 0.95 * times[0]


@pytest.mark.parametrize("room", [0.0, 1.0, 1.19 * GB])
def test_without_room_for_a_subgroup_all_is_on_the_cpu(room: float) -> None:
    ours = ran("adaptive", even(8, gpu_free=((0.0, room),)), SLOW)
    assert ours.peak_device_bytes == 0
    assert ours.iteration_s == ran("pipelined", even(8), SLOW).iteration_s


def test_with_room_for_everything_hardly_any_is_on_the_cpu() -> None:
    workload = even(20, gpu_free=((0.0, 1e12),))
    ours = ran("adaptive", workload, BOX)
    assert ours.iteration_s <= ran("gpu-only", workload, BOX).iteration_s
    assert len(ours.plan.resident) >= 18


@pytest.mark.parametrize("count", slow([63, 64, 65, 127, 129, 187, 300], but=[64, 65, 187]))
@pytest.mark.parametrize("room", slow([3.0, 8.0, 20.0], but=[8.0]))
def test_merging_neighbours_leaves_no_plan_unsound(count: int, room: float) -> None:
    """Of many subgroups it merges neighbours first; their numbers need not divide."""
    line: FreeLine = ((0.0, room * GB), (1.0, room / 2 * GB), (3.0, room * GB))
    workload = even(count, 6 * 10**9 // count, forward_s=2.0, backward_s=4.0, gpu_free=line)
    ours = ran("adaptive", workload, SLOW)
    assert ours.fits_device(None)
    for policy in ("pipelined", "interleaved:2", "interleaved:3", "twin-flow:0.9,params=pipelined"):
        other = ran(policy, workload, SLOW)
        assert not other.fits_device(None) or ours.iteration_s <= other.iteration_s * (1 + 1e-9)
    assert_told(ours.plan.remark, ours, SLOW)


def test_what_the_host_cannot_hold_it_keeps_on_the_device() -> None:
    """40 subgroups take 48 GB of state; the host has room for half of it."""
    workload = even(40, gpu_free=((0.0, 60 * GB),))
    ours = ran("adaptive", workload, replace(BOX, host_memory_bytes=30 * GB))
    assert ours.host_bytes() <= 30 * GB
    # Where no plan fits the host it still answers.
    ran("adaptive", even(40, gpu_free=((0.0, 0.0),)), replace(BOX, host_memory_bytes=30 * GB))


def test_it_needs_to_know_what_is_free() -> None:
    with pytest.raises(PolicyError, match=r"'adaptive' needs to know what device memory is free: give it"):
        make_plan("adaptive", even(4), BOX)


@few
@given(workloads(), machines(), st.floats(0, 1))
def test_less_free_memory_is_never_exceeded_either(workload: Workload, machine: Machine, share: float) -> None:
    shrunk = replace(workload, gpu_free=tuple((at, size * share) for at, size in workload.gpu_free or ()))
    assert ran("adaptive", shrunk, machine).fits_device(None)
