"""Tests of schedules: device memory over time, whether it fits, traffic and busy shares
of the update."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings

from ebbtide.interleave.model.schedule import host_traffic
from ebbtide.interleave.model.workload import Workload
from ebbtide.machines.machine import Machine
from tests.conftest import examples
from tests.interleave import on_device
from tests.interleave.simulation.fluid import Fluid, traffic_bytes
from tests.interleave.simulation.test_simulator import TEST_MACHINE, C, even, ran
from tests.interleave.strategies import machines, policies, workloads

# Some cases plan and simulate for long.
SCHEDULED = settings(max_examples=examples(25, by_default=6))


@SCHEDULED
@given(policies(), workloads(), machines())
def test_device_memory_line__matches_an_independent_count(
    policy: str, workload: Workload, machine: Machine
) -> None:
    schedule = ran(policy, workload, machine)
    times, sizes = schedule.device_memory_line()
    assert times[0] == 0
    assert np.all(np.diff(times) > 0)
    assert np.all(sizes >= 0)
    grid = on_device.grid(schedule, 1000)
    # Times within rounding errors of a step are left out.
    grid = grid[
        np.min(np.abs(grid[:, None] - times[None, :]), axis=1)
        > 1e-7 * schedule.iteration_s
    ]
    computed = sizes[np.searchsorted(times, grid, side="right") - 1]
    np.testing.assert_allclose(
        computed, on_device.used(schedule, grid), rtol=1e-9, atol=100
    )
    assert schedule.peak_device_bytes == sizes.max()
    # An iteration ends with the state that the next one begins with.
    on_device_at_end = schedule.plan.resident | schedule.plan.parked
    state = workload.state_bytes * sum(
        workload.subgroups[subgroup] for subgroup in on_device_at_end
    )
    assert sizes[-1] == pytest.approx(state, rel=1e-9, abs=10)


@SCHEDULED
@given(policies(), workloads(), machines())
def test_fits_device__agrees_with_a_fine_grid_of_times(
    policy: str, workload: Workload, machine: Machine
) -> None:
    schedule = ran(policy, workload, machine)
    if "blocking" in policy:
        # Waiting stretches the free line.
        return
    grid = on_device.grid(schedule)
    over = on_device.used(schedule, grid) - on_device.free(schedule, grid)
    if schedule.fits_device(None):
        # Rounding errors of a few bytes, and those of the grid near a step, do not
        # count.
        exceeding = grid[over > 10]
        steps = np.concatenate(
            [
                schedule.device_memory_line()[0],
                [time for time, _ in workload.gpu_free or ()],
            ]
        )
        assert all(
            np.min(np.abs(steps - time)) < 1e-7 * schedule.iteration_s
            for time in exceeding
        )
    else:
        # It exceeds the free memory somewhere, maybe between two points of the grid.
        edges = np.concatenate(
            [
                schedule.device_memory_line()[0],
                [time for time, _ in workload.gpu_free or ()],
            ]
        )
        close = np.concatenate(
            [edges * (1 + 1e-12) + 1e-12, edges + 1e-6 * schedule.iteration_s]
        )
        close = close[close < schedule.iteration_s]
        assert (
            on_device.used(schedule, close) - on_device.free(schedule, close)
        ).max() > 0


@pytest.mark.parametrize(("free", "fits"), [(14e8, True), (14e8 - 10, False)])
def test_fits_device__is_exact_to_the_byte(free: float, fits: bool) -> None:
    workload = even(1, gpu_free=((0.0, 12e8), (1.0, free)))
    assert ran("gpu-only", workload, TEST_MACHINE).fits_device(None) is fits


def test_free_memory_line__is_stretched_by_waiting_in_the_backward() -> None:
    workload = even(
        8,
        forward_s=1.0,
        backward_s=2.0,
        gpu_free=((0.0, 1.0), (1.0, 2.0), (2.0, 3.0), (3.0, 4.0)),
    )
    schedule = ran("zero-offload,grads=blocking", workload, TEST_MACHINE)
    assert schedule.backward_s > 2.5
    free_line = schedule.free_memory_line()
    assert free_line is not None
    np.testing.assert_allclose(
        free_line[0], [0, 1, 1 + schedule.backward_s / 2, 1 + schedule.backward_s]
    )
    assert list(free_line[1]) == [1, 2, 3, 4]


@SCHEDULED
@given(policies(), workloads(), machines())
def test_host_traffic__of_the_update_is_that_of_its_operations(
    policy: str, workload: Workload, machine: Machine
) -> None:
    schedule = ran(policy, workload, machine)
    for op in schedule.plan.ops:
        assert host_traffic(op, workload) == pytest.approx(traffic_bytes(op, workload))
    total = sum(traffic_bytes(op, workload) for op in schedule.plan.ops)
    in_update = schedule.host_traffic_in_update()
    assert 0 <= in_update <= total * (1 + 1e-9)
    # At most what host memory can transfer, and all of it if nothing moves before the
    # update.
    assert in_update <= (machine.host_memory_bytes_per_s or 0) * schedule.update_s * (
        1 + 1e-6
    ) + 1 or any(
        start < schedule.iteration_s - schedule.update_s < end
        for _, start, end in schedule.items()
    )
    if workload.compute_s == 0 and "blocking" not in policy:
        assert in_update == pytest.approx(total)


@SCHEDULED
@given(policies(), workloads(), machines())
def test_busy_shares__are_times_within_the_update(
    policy: str, workload: Workload, machine: Machine
) -> None:
    schedule = ran(policy, workload, machine)
    begin = schedule.iteration_s - schedule.update_s
    now = 0.0
    busy = dict.fromkeys(("cpu", "gpu", "h2d", "d2h"), 0.0)
    for seconds, speeds in Fluid(schedule, machine).segments:
        inside = max(0.0, now + seconds - max(now, begin))
        for index in speeds:
            busy[schedule.plan.ops[index].resource] += inside
        now += seconds
    for resource, share in schedule.busy_shares().items():
        assert share * schedule.update_s == pytest.approx(
            busy[resource], abs=1e-6 * schedule.iteration_s
        )


def test_busy_shares__are_zero_in_an_update_of_no_length() -> None:
    schedule = ran(
        "gpu-only",
        even(1, 1),
        replace(TEST_MACHINE, step_overhead_s=0.0, gpu_update_params_per_s=1e15),
    )
    nothing = replace(schedule, update_s=0.0)
    assert set(nothing.busy_shares().values()) == {0.0}


def test_host_bytes__are_offloaded_state_and_its_buffers() -> None:
    n = 8 * 10**8
    assert ran("zero-offload", even(8), TEST_MACHINE).host_bytes() == (12 + 2 + 2) * n
    assert (
        ran("twin-flow:0.5", even(8), TEST_MACHINE).host_bytes() == (12 + 2 + 2) * n / 2
    )
    # The gradient of a streamed subgroup stays on the device, and its parameters are
    # not uploaded.
    assert (
        ran("interleaved:2", even(8), TEST_MACHINE).host_bytes()
        == 12 * n + (2 + 2) * n / 2
    )


def test_busy_shares__of_the_cpu_match_its_updates() -> None:
    schedule = ran("pipelined", even(8), TEST_MACHINE)
    assert schedule.busy_shares()["cpu"] == pytest.approx(8e8 / C / schedule.update_s)
    assert schedule.busy_shares()["gpu"] == 0
