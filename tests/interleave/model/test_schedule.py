"""Schedules: what lies on the device when, whether it fits, and what the update waits for."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given

from ebbtide.interleave.model.schedule import host_traffic
from ebbtide.interleave.model.workload import Workload
from ebbtide.machines.machine import Machine
from tests.interleave import on_device
from tests.interleave.simulation.fluid import Fluid, traffic_bytes
from tests.interleave.simulation.test_simulator import BOX, OVERHEAD, C, even, ran
from tests.interleave.strategies import machines, policies, workloads


@given(policies(), workloads(), machines())
def test_the_device_line_is_what_lies_there(policy: str, workload: Workload, machine: Machine) -> None:
    schedule = ran(policy, workload, machine)
    times, sizes = schedule.device_line()
    assert times[0] == 0
    assert np.all(np.diff(times) > 0)
    assert np.all(sizes >= 0)
    grid = on_device.grid(schedule, 1000)
    # Times that a rounding could put on the other side of a step are left out.
    grid = grid[np.min(np.abs(grid[:, None] - times[None, :]), axis=1) > 1e-7 * schedule.iteration_s]
    told = sizes[np.searchsorted(times, grid, side="right") - 1]
    np.testing.assert_allclose(told, on_device.used(schedule, grid), rtol=1e-9, atol=100)
    assert schedule.peak_device_bytes == sizes.max()
    # An iteration ends with what the next one begins with.
    home = schedule.plan.resident | schedule.plan.parked
    state = workload.state_bytes * sum(workload.subgroups[subgroup] for subgroup in home)
    assert sizes[-1] == pytest.approx(state, rel=1e-9, abs=10)


@given(policies(), workloads(), machines())
def test_fits_is_what_the_grid_says(policy: str, workload: Workload, machine: Machine) -> None:
    schedule = ran(policy, workload, machine)
    if "blocking" in policy:
        # Waiting stretches the free line.
        return
    grid = on_device.grid(schedule)
    over = on_device.used(schedule, grid) - on_device.free(schedule, grid)
    if schedule.fits_device(None):
        # What lasts no longer than rounding, and a byte, do not count: nor do the grid's own roundings of a step.
        wrong = grid[over > 10]
        steps = np.concatenate([schedule.device_line()[0], [at for at, _ in workload.gpu_free or ()]])
        assert all(np.min(np.abs(steps - at)) < 1e-7 * schedule.iteration_s for at in wrong)
    else:
        # It exceeds somewhere, though maybe between two points of the grid.
        edges = np.concatenate([schedule.device_line()[0], [at for at, _ in workload.gpu_free or ()]])
        close = np.concatenate([edges * (1 + 1e-12) + 1e-12, edges + 1e-6 * schedule.iteration_s])
        close = close[close < schedule.iteration_s]
        assert (on_device.used(schedule, close) - on_device.free(schedule, close)).max() > 0


def test_fits_where_it_is_not_known_what_is_free() -> None:
    unknown = even(8)
    assert ran("pipelined", unknown, BOX).fits_device(None) is True
    assert ran("interleaved:2", unknown, BOX).fits_device(80e9) is None
    assert ran("interleaved:2", unknown, BOX).fits_device(None) is None
    # More than the whole device never fits.
    assert ran("gpu-only", unknown, BOX).fits_device(8 * 14e8 - 1) is False
    assert ran("gpu-only", unknown, BOX).fits_device(8 * 14e8) is None


@pytest.mark.parametrize(("free", "fits"), [(14e8, True), (14e8 - 10, False)])
def test_fits_to_the_byte(free: float, fits: bool) -> None:
    workload = even(1, gpu_free=((0.0, 12e8), (1.0, free)))
    assert ran("gpu-only", workload, BOX).fits_device(None) is fits


def test_a_dip_of_the_free_memory_counts_wherever_it_lies() -> None:
    for begin in (0.0, 0.5, 3.0, 10.9, 11.2):
        line = ((0.0, 20e9), (begin, 1e9), (begin + 0.05, 20e9))
        assert ran("gpu-only", even(8, gpu_free=line[begin == 0.0 :]), BOX).fits_device(None) is False
    # But not after the iteration.
    late = even(8, gpu_free=((0.0, 20e9), (100.0, 0.0)))
    assert ran("gpu-only", late, BOX).fits_device(None) is True


def test_waiting_in_the_backward_stretches_what_is_free() -> None:
    workload = even(8, forward_s=1.0, backward_s=2.0, gpu_free=((0.0, 1.0), (1.0, 2.0), (2.0, 3.0), (3.0, 4.0)))
    schedule = ran("zero-offload,grads=blocking", workload, BOX)
    assert schedule.backward_s > 2.5
    line = schedule.free_line()
    assert line is not None
    np.testing.assert_allclose(line[0], [0, 1, 1 + schedule.backward_s / 2, 1 + schedule.backward_s])
    assert list(line[1]) == [1, 2, 3, 4]


def test_resident_state_lies_there_all_the_time_and_gradients_until_their_update() -> None:
    """Room for a gradient is taken as the backward begins to make it."""
    workload = even(2, forward_s=1.0, backward_s=2.0)
    schedule = ran("gpu-only", workload, BOX)
    times, sizes = schedule.device_line()
    update = 3.0 + OVERHEAD
    np.testing.assert_allclose(times, [0, 1, 2, update + 1e8 / 50e9, update + 2e8 / 50e9])
    np.testing.assert_allclose(sizes, [24e8, 26e8, 28e8, 26e8, 24e8])


@given(policies(), workloads(), machines())
def test_host_traffic_of_the_update_is_that_of_its_operations(
    policy: str, workload: Workload, machine: Machine
) -> None:
    schedule = ran(policy, workload, machine)
    for op in schedule.plan.ops:
        assert host_traffic(op, workload) == pytest.approx(traffic_bytes(op, workload))
    whole = sum(traffic_bytes(op, workload) for op in schedule.plan.ops)
    in_update = schedule.host_traffic_in_update()
    assert 0 <= in_update <= whole * (1 + 1e-9)
    # As much as its memory lets through, and all of it where nothing moves before.
    assert in_update <= (machine.host_memory_bytes_per_s or 0) * schedule.update_s * (1 + 1e-6) + 1 or any(
        start < schedule.iteration_s - schedule.update_s < end for _, start, end in schedule.items()
    )
    if workload.compute_s == 0 and "blocking" not in policy:
        assert in_update == pytest.approx(whole)


@given(policies(), workloads(), machines())
def test_busy_shares_are_times_within_the_update(policy: str, workload: Workload, machine: Machine) -> None:
    schedule = ran(policy, workload, machine)
    begin = schedule.iteration_s - schedule.update_s
    at = 0.0
    busy = dict.fromkeys(("cpu", "gpu", "h2d", "d2h"), 0.0)
    for seconds, speeds in Fluid(schedule, machine).segments:
        inside = max(0.0, at + seconds - max(at, begin))
        for index in speeds:
            busy[schedule.plan.ops[index].resource] += inside
        at += seconds
    for resource, share in schedule.busy_shares().items():
        assert share * schedule.update_s == pytest.approx(busy[resource], abs=1e-6 * schedule.iteration_s)


def test_an_update_of_no_length_has_no_busy_resource() -> None:
    schedule = ran("gpu-only", even(1, 1), replace(BOX, step_overhead_s=0.0, gpu_update_params_per_s=1e15))
    nothing = replace(schedule, update_s=0.0)
    assert set(nothing.busy_shares().values()) == {0.0}


def test_host_bytes_are_state_that_goes_home_and_its_buffers() -> None:
    n = 8 * 10**8
    assert ran("zero-offload", even(8), BOX).host_bytes() == (12 + 2 + 2) * n
    assert ran("twin-flow:0.5", even(8), BOX).host_bytes() == (12 + 2 + 2) * n / 2
    # A streamed subgroup's gradient stays on the device and its parameters do not come from the host.
    assert ran("interleaved:2", even(8), BOX).host_bytes() == 12 * n + (2 + 2) * n / 2


def test_a_busy_cpu_is_one() -> None:
    schedule = ran("pipelined", even(8), BOX)
    assert schedule.busy_shares()["cpu"] == pytest.approx(8e8 / C / schedule.update_s)
    assert schedule.busy_shares()["gpu"] == 0
