"""Tests of `adaptive`: never slower than others, never below the bound, within the free
memory at every instant."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ebbtide.errors import MachineError, PolicyError
from ebbtide.interleave.model.operations import OVERLAPS
from ebbtide.interleave.model.schedule import Schedule
from ebbtide.interleave.model.workload import FreeMemorySteps, Workload
from ebbtide.interleave.policies import BUILT_IN, make_plan
from ebbtide.interleave.policies.search import best_plan, placement_search
from ebbtide.interleave.simulation.bound import bound
from ebbtide.interleave.simulation.simulator import simulate
from ebbtide.machines.machine import Machine
from tests.conftest import examples, slow
from tests.interleave import on_device
from tests.interleave.policies.small_cases import KINDS, small_case
from tests.interleave.simulation.test_simulator import TEST_MACHINE, even, ran
from tests.interleave.strategies import machines, workloads

GB = 1e9
OTHERS = (
    "zero-offload",
    "pipelined",
    *(f"twin-flow:{tenths / 10:g}" for tenths in range(11)),
    *(f"twin-flow:{tenths / 10:g},params=pipelined" for tenths in range(11)),
    *(
        f"interleaved:{stride}@{tenths / 10:g}"
        for stride in range(1, 11)
        for tenths in range(1, 11)
    ),
)
# Each example plans many policies.
few_examples = settings(max_examples=examples(10, by_default=2))


@few_examples
@given(workloads(), machines())
def test_adaptive__is_never_slower_than_other_policies_that_fit(
    workload: Workload, machine: Machine
) -> None:
    ours = ran("adaptive", workload, machine)
    for policy in OTHERS:
        other = ran(policy, workload, machine)
        if other.fits_device(None):
            assert ours.iteration_s <= other.iteration_s * (1 + 1e-9), policy


@few_examples
@given(workloads(), machines())
def test_adaptive__with_late_updates_is_never_slower_than_any_policy(
    workload: Workload, machine: Machine
) -> None:
    ours = ran("adaptive,overlap=forward", workload, machine)
    assert ours.fits_device(None)
    for policy in (
        *BUILT_IN,
        "pipelined,overlap=forward",
        *(f"interleaved:{stride},overlap=forward" for stride in range(1, 5)),
        *(
            f"interleaved:{stride}@{share},overlap=forward"
            for stride in (1, 3)
            for share in (0.3, 0.8)
        ),
    ):
        other = ran(policy, workload, machine)
        if other.fits_device(None):
            assert ours.iteration_s <= other.iteration_s * (1 + 1e-9), policy


@few_examples
@given(workloads(), machines())
def test_adaptive__fits_the_free_memory_at_every_instant(
    workload: Workload, machine: Machine
) -> None:
    ours = ran("adaptive", workload, machine)
    assert ours.fits_device(None)
    grid = on_device.grid(ours)
    over = on_device.used(ours, grid) - on_device.free(ours, grid)
    # A step of the free memory and one of the plan may coincide to within rounding
    # errors.
    steps = [time for time, _ in workload.gpu_free or ()]
    for time, excess in zip(grid, over, strict=True):
        assert (
            excess <= 10
            or min(abs(time - step) for step in steps) < 1e-7 * ours.iteration_s
        )


@few_examples
@given(workloads(), machines())
def test_adaptive__is_deterministic_and_its_remark_is_true(
    workload: Workload, machine: Machine
) -> None:
    plan = make_plan("adaptive", workload, machine)
    assert plan == make_plan("adaptive", workload, machine)
    assert_remark_is_true(plan.remark, simulate(plan, workload, machine), machine)


def assert_remark_is_true(remark: str, schedule: Schedule, machine: Machine) -> None:
    """Check that the remark's counts are the plan's, or that the plan is that of the
    policy it names."""
    workload, plan = schedule.workload, schedule.plan
    of_other = re.fullmatch(r"the plan of (\S+)", remark)
    if of_other:
        assert make_plan(of_other[1], workload, machine).ops == plan.ops
        return
    pattern = (
        r"(.*) on the CPU(?: at (\S+) % of its rate)?; the best of the others was (\S+)"
    )
    counts, percent, best = re.fullmatch(pattern, remark).groups()  # type: ignore[union-attr]
    assert plan.cpu_share == pytest.approx(float(percent or 100) / 100, rel=0.01)
    *placed, on_cpu = counts.split(", ")
    on_gpu = {name: int(count) for count, name in (text.split(" ") for text in placed)}
    assert int(on_cpu) == plan.counts().get("update on cpu", 0)
    assert on_gpu.get("resident", 0) == len(plan.resident)
    assert on_gpu.get("parked", 0) <= len(plan.parked)
    assert on_gpu.get("parked", 0) + on_gpu.get("streamed", 0) == plan.counts().get(
        "fetch", 0
    )
    assert ran(best, workload, machine).iteration_s >= schedule.iteration_s * (1 - 1e-9)


# A job whose activations leave 40 GB in backward and update, and 2 GB in the forward.
SLOW = replace(
    TEST_MACHINE,
    cpu_update_params_per_s=1e9,
    host_memory_bytes_per_s=60e9,
    step_overhead_s=0.0,
)


def windowed(free_bytes: float, count: int = 60, **values: object) -> Workload:
    free: FreeMemorySteps = ((0.0, 2 * GB), (0.5, 2 * GB), (2.5, free_bytes))
    return even(
        count, other_s=0.5, forward_s=2.0, backward_s=4.0, gpu_free=free, **values
    )


def test_adaptive__uses_windows_and_releases_the_memory_in_time() -> None:
    peaks, times = [], []
    for free_bytes in (2 * GB, 10 * GB, 40 * GB):
        ours = ran("adaptive", windowed(free_bytes, 40), SLOW)
        assert ours.fits_device(None)
        peaks.append(ours.peak_device_bytes)
        times.append(ours.iteration_s)
        assert ours.peak_device_bytes <= free_bytes + 1
        # The memory is released before the forward needs it.
        used, moments = on_device.used(ours, on_device.grid(ours)), on_device.grid(ours)
        assert used[moments < 2.5].max() <= 2 * GB + 1
    assert peaks == sorted(peaks)
    assert times == sorted(times, reverse=True)
    assert peaks[-1] > 20 * GB
    assert peaks[0] <= 2 * GB + 1
    # The gain of windows: the same job with only the memory that is always free.
    assert times[-1] < 0.95 * times[0]


@pytest.mark.parametrize("free_bytes", [0.0, 1.0, 1.19 * GB])
def test_adaptive__updates_all_on_the_cpu_if_no_subgroup_fits(
    free_bytes: float,
) -> None:
    ours = ran("adaptive", even(8, gpu_free=((0.0, free_bytes),)), SLOW)
    assert ours.peak_device_bytes == 0
    assert ours.iteration_s == ran("pipelined", even(8), SLOW).iteration_s


def test_adaptive__keeps_nearly_all_resident_if_everything_fits() -> None:
    workload = even(20, gpu_free=((0.0, 1e12),))
    ours = ran("adaptive", workload, TEST_MACHINE)
    assert ours.iteration_s <= ran("gpu-only", workload, TEST_MACHINE).iteration_s
    assert len(ours.plan.resident) >= 18


@pytest.mark.parametrize("count", slow([63, 64, 65, 127, 129, 187, 300], but=[187]))
@pytest.mark.parametrize("free_gb", slow([3.0, 8.0, 20.0], but=[8.0]))
def test_adaptive__is_valid_and_fast_for_any_number_of_subgroups(
    count: int, free_gb: float
) -> None:
    """Many subgroups are merged first; their number need not be divisible."""
    free: FreeMemorySteps = (
        (0.0, free_gb * GB),
        (1.0, free_gb / 2 * GB),
        (3.0, free_gb * GB),
    )
    workload = even(
        count, 6 * 10**9 // count, forward_s=2.0, backward_s=4.0, gpu_free=free
    )
    ours = ran("adaptive", workload, SLOW)
    assert ours.fits_device(None)
    for policy in (
        "pipelined",
        "interleaved:2",
        "interleaved:3",
        "twin-flow:0.9,params=pipelined",
    ):
        other = ran(policy, workload, SLOW)
        assert not other.fits_device(None) or ours.iteration_s <= other.iteration_s * (
            1 + 1e-9
        )
    assert_remark_is_true(ours.plan.remark, ours, SLOW)


def test_adaptive__keeps_on_the_device_what_exceeds_host_memory() -> None:
    """40 subgroups take 48 GB of state; the host has memory for half of it."""
    workload = even(40, gpu_free=((0.0, 60 * GB),))
    ours = ran("adaptive", workload, replace(TEST_MACHINE, host_memory_bytes=30 * GB))
    assert ours.host_bytes() <= 30 * GB
    # If no plan fits the host there is a plan all the same.
    ran(
        "adaptive",
        even(40, gpu_free=((0.0, 0.0),)),
        replace(TEST_MACHINE, host_memory_bytes=30 * GB),
    )


@settings(max_examples=examples(3, by_default=1))
@given(
    workloads(),
    machines(),
    st.integers(2, 100) | st.integers(101, 2000),
    st.floats(0, 1).map(lambda share: 1000.0**-share),
)
def test_adaptive__is_never_slower_with_many_subgroups(
    workload: Workload, machine: Machine, count: int, free_share: float
) -> None:
    """Free memory from all of the state down to one subgroup."""
    size = max(1, workload.params // count)
    free_bytes = max(free_share * 14 * workload.params, workload.state_bytes * size)
    sizes = tuple(size for _ in range(count))
    free = tuple((time, free_bytes) for time, _ in workload.gpu_free or ())
    workload = replace(
        workload, params=sum(sizes), subgroup_params=size, sizes=sizes, gpu_free=free
    )
    ours = ran("adaptive", workload, machine)
    assert ours.fits_device(None)
    assert (
        ours.exposed_s >= bound(workload, machine).exposed_whole_s * (1 - 1e-5) - 1e-9
    )
    for policy in (
        *BUILT_IN,
        "twin-flow:0.2",
        "twin-flow:0.9",
        "interleaved:1",
        "interleaved:3",
        "interleaved:2@0.8",
    ):
        other = ran(policy, workload, machine)
        if other.fits_device(None):
            assert ours.iteration_s <= other.iteration_s * (1 + 1e-9), policy


def test_adaptive__searches_on_with_other_orders_and_gradients() -> None:
    """The best counts of gradients without round trips differ much from those with
    them."""
    machine = replace(
        TEST_MACHINE, h2d_bytes_per_s=19e9, d2h_bytes_per_s=21e9, duplex_bytes_per_s=18e9, host_memory_bytes_per_s=62e9,
        cpu_update_params_per_s=1.3e9, gpu_update_params_per_s=49e9,
    )  # fmt: skip
    free = (
        (0.0, 3e9),
        (0.2, 2e9),
        (0.6, 1.2e9),
        (1.0, 0.6e9),
        (2.1, 1.5e9),
        (2.8, 2.4e9),
        (3.14, 3e9),
    )
    workload = even(42, 84_500_000, forward_s=1.0, backward_s=2.15, gpu_free=free)
    schedule = ran("adaptive,overlap=forward", workload, machine)
    assert (
        schedule.iteration_s
        < 1.08 * bound(workload, machine, OVERLAPS["forward"]).iteration_s
    )


# Updates on the CPU need 5 times the bandwidth of host memory, and copies more than it.
STARVED_LINK = replace(
    TEST_MACHINE,
    h2d_bytes_per_s=19.7e9,
    d2h_bytes_per_s=20.2e9,
    host_memory_bytes_per_s=32e9,
    cpu_update_params_per_s=5.9e9,
    gpu_update_params_per_s=21.5e9,
    step_overhead_s=0.07,
)


def test_adaptive__uses_fewer_threads_where_the_cpu_starves_the_link(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """State is parked in a window, and copies of the update are short of host
    memory."""
    free: FreeMemorySteps = (
        (0.0, 15.2e9),
        (0.13, 10.6e9),
        (0.46, 6.1e9),
        (0.87, 3e9),
        (2.1, 7.6e9),
        (2.8, 12.1e9),
    )
    workload = even(
        56,
        123 * 10**6,
        other_s=0.05,
        forward_s=0.82,
        backward_s=2.45,
        gpu_free=free,
        h2d_busy_share=0.2,
    )
    ours = ran("adaptive", workload, STARVED_LINK)
    assert ours.plan.cpu_share < 1
    assert_remark_is_true(ours.plan.remark, ours, STARVED_LINK)
    assert ours.exposed_s >= bound(workload, STARVED_LINK).exposed_whole_s * (1 - 1e-5)
    monkeypatch.setattr(placement_search, "other_cpu_shares", lambda share: ())
    monkeypatch.setattr(placement_search, "_THROTTLED_STARTS", ())
    monkeypatch.setattr(placement_search, "_THROTTLE", 1.0)
    best_plan.search_plan.cache_clear()
    with_all_threads = ran("adaptive", workload, STARVED_LINK)
    best_plan.search_plan.cache_clear()
    assert with_all_threads.plan.cpu_share == 1
    assert ours.iteration_s < 0.98 * with_all_threads.iteration_s


@pytest.mark.slow
@pytest.mark.parametrize("faster", [1.5, 4.0])
def test_adaptive__is_hardly_ever_slower_on_a_faster_cpu(faster: float) -> None:
    """The CPU may use fewer threads. The search is no exact one, so single plans are a
    little slower."""
    ratios = []
    for kind in KINDS:
        for seed in range(examples(1)):
            workload, machine = small_case(kind, seed)
            fast = replace(
                machine,
                cpu_update_params_per_s=(machine.cpu_update_params_per_s or 0.0)
                * faster,
            )
            slow_s, fast_s = (
                ran("adaptive", workload, box).iteration_s for box in (machine, fast)
            )
            ratios.append(fast_s / slow_s)
    assert sum(ratio > 1.01 for ratio in ratios) <= 0.05 * len(ratios), ratios
    assert max(ratios) <= 1.05, ratios


def test_adaptive__plans_without_gpu_updates_if_their_rate_is_not_known() -> None:
    machine = replace(TEST_MACHINE, gpu_update_params_per_s=None)
    workload = even(8, gpu_free=((0.0, 60 * GB),))
    ours = ran("adaptive", workload, machine)
    assert ours.plan.counts()["update on cpu"] == 8
    assert ours.iteration_s <= ran("pipelined", workload, machine).iteration_s * (
        1 + 1e-9
    )
    assert "box has no gpu_update_params_per_s" in ours.plan.remark


@pytest.mark.parametrize(
    "rate",
    [
        "h2d_bytes_per_s",
        "d2h_bytes_per_s",
        "host_memory_bytes_per_s",
        "cpu_update_params_per_s",
    ],
)
def test_adaptive__names_a_missing_rate(rate: str) -> None:
    missing: dict[str, Any] = {rate: None}
    with pytest.raises(
        MachineError, match=f"box has no {rate}, which policy adaptive needs"
    ):
        make_plan(
            "adaptive",
            even(8, gpu_free=((0.0, 60 * GB),)),
            replace(TEST_MACHINE, **missing),
        )


def test_adaptive__does_not_need_the_rates_of_other_policies() -> None:
    machine = replace(
        TEST_MACHINE, cpu_cast_params_per_s=None, h2d_pageable_bytes_per_s=None
    )
    assert ran("adaptive", even(8, gpu_free=((0.0, 6 * GB),)), machine).fits_device(
        None
    )


def test_adaptive__refuses_unknown_free_memory() -> None:
    with pytest.raises(
        PolicyError,
        match=r"'adaptive' needs to know what device memory is free: give it",
    ):
        make_plan("adaptive", even(4), TEST_MACHINE)
