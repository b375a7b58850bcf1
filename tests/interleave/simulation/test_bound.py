"""Tests of the bound: closed forms, an independent linear program, and that no policy
is below it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbtide.errors import MachineError
from ebbtide.interleave.model.workload import Workload
from ebbtide.interleave.policies import make_plan
from ebbtide.interleave.simulation.bound import bound
from ebbtide.interleave.simulation.simulator import simulate
from ebbtide.machines.machine import Machine
from tests.interleave.simulation import bound_lp
from tests.interleave.simulation.test_simulator import (
    DOWN,
    OVERHEAD,
    TEST_MACHINE,
    UP,
    C,
    G,
    even,
)
from tests.interleave.strategies import fixed_policies, machines, workloads

# Absolute and relative tolerance of the solver.
ABSOLUTE, RELATIVE = 1e-9, 1e-5
N = 20 * 10**8
SLOW_CPU = replace(TEST_MACHINE, cpu_update_params_per_s=1.0)


def update_s(workload: Workload, machine: Machine) -> float:
    return bound(workload, machine).update_s


def job(**values: Any) -> Workload:
    """Return a workload with two seconds of forward and twenty of backward."""
    return even(20, **{"forward_s": 2.0, "backward_s": 20.0, **values})


def test_bound__counts_all_memory_as_free_if_it_is_not_known() -> None:
    bounds = bound(job(), TEST_MACHINE)
    assert bounds == bound(job(gpu_free=((0.0, 14.0 * N),)), TEST_MACHINE)
    assert bounds.update_s == pytest.approx(OVERHEAD + N / (C + G))
    small = replace(TEST_MACHINE, gpu_memory_bytes=1e9)
    assert bound(job(), small) == bound(job(gpu_free=((0.0, 1e9),)), small)
    for policy in ("gpu-only", "interleaved:2"):
        assert (
            simulate(
                make_plan(policy, job(), TEST_MACHINE), job(), TEST_MACHINE
            ).exposed_s
            >= bounds.exposed_whole_s - ABSOLUTE
        )


def test_bound__of_the_master_as_remainder_moves_26_and_10_bytes() -> None:
    """Host memory alone limits both kinds of update: on the CPU with its gradient and
    upload, and of fetched state."""
    machine = replace(TEST_MACHINE, host_memory_bytes_per_s=1e9)
    for master, state, cpu in (("fp32", 12.0, 28.0), ("remainder", 10.0, 26.0)):
        on_cpu = job(
            gpu_free=((0.0, 0.0),),
            master=master,
            state_bytes=state,
            gradients_held_until_step=True,
        )
        assert update_s(on_cpu, machine) == pytest.approx(
            N * (cpu + 2 + 2) / 1e9, rel=1e-4
        )
        schedule = simulate(
            make_plan("interleaved:1", job(master=master, state_bytes=state), machine),
            on_cpu,
            machine,
        )
        assert (schedule.moved_bytes("h2d"), schedule.moved_bytes("d2h")) == (
            state * N,
            state * N,
        )


@pytest.mark.parametrize("ratio", [None, 0.5, 1.5])
def test_bound__updates_remainders_at_their_own_rate(ratio: float | None) -> None:
    machine = replace(SLOW_CPU, cpu_remainder_ratio=ratio)
    for master, rate in (
        ("fp32", 1.0),
        ("remainder", 28 / 26 if ratio is None else ratio),
    ):
        state_bytes = 12.0 if master == "fp32" else 10.0
        on_cpu = job(gpu_free=((0.0, 0.0),), master=master, state_bytes=state_bytes)
        assert update_s(on_cpu, machine) == pytest.approx(N / rate, rel=1e-3)
        schedule = simulate(make_plan("pipelined", on_cpu, machine), on_cpu, machine)
        assert sum(
            end - start for op, start, end in schedule.items() if op.kind == "update"
        ) == pytest.approx(N / rate)


def test_bound__without_clipping_hides_updates_in_the_backward() -> None:
    workload = job(clipping=False, gpu_free=((0.0, 0.0),))
    assert bound(workload, TEST_MACHINE).exposed_s == pytest.approx(OVERHEAD, rel=1e-3)
    slow = replace(TEST_MACHINE, cpu_update_params_per_s=N / 40)
    assert bound(workload, slow).exposed_s == pytest.approx(40 - 20)


@pytest.mark.parametrize("backward_s", [0.0, 20.0])
def test_bound__without_clipping_updates_the_last_subgroup_after_its_gradient(
    backward_s: float,
) -> None:
    """The last gradient is ready when the backward ends. On the CPU it is copied down
    and the result up, by itself."""
    size, down, up = N / 20, DOWN, UP
    machine = replace(TEST_MACHINE, step_overhead_s=0.0)
    none_free = bound(
        job(clipping=False, backward_s=backward_s, gpu_free=((0.0, 0.0),)), machine
    )
    on_cpu = 2 * size / down + size / C + 2 * size / up
    assert none_free.exposed_whole_s >= on_cpu * (1 - RELATIVE)
    # On the GPU it is quicker, and it may stay there.
    all_free = bound(
        job(clipping=False, backward_s=backward_s, gpu_free=((0.0, 1e12),)), machine
    )
    assert all_free.exposed_whole_s >= size / G * (1 - RELATIVE)
    if backward_s:
        assert none_free.exposed_whole_s == pytest.approx(on_cpu)
        assert all_free.exposed_whole_s == pytest.approx(size / G)
        # Subgroups may be divided in the other bound.
        assert none_free.exposed_s == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("free_bytes", [1.2e9, 2.4e9, 12 * 432_635_583])
def test_bound__accepts_subgroups_that_fit_exactly(free_bytes: float) -> None:
    """Streaming one subgroup at a time takes its memory, and not a byte more."""
    size = 432_635_583 if free_bytes > 3e9 else 10**8
    workload = even(
        8, size, gpu_free=((0.0, free_bytes),), forward_s=0.0, backward_s=0.0
    )
    machine = replace(TEST_MACHINE, cpu_update_params_per_s=0.3e9)
    schedule = simulate(make_plan("adaptive", workload, machine), workload, machine)
    assert schedule.plan.counts()["fetch"] > 0
    assert schedule.exposed_s >= bound(workload, machine).exposed_whole_s * (
        1 - RELATIVE
    )
    almost = replace(workload, gpu_free=((0.0, 12 * size - 100.0),))
    assert (
        bound(almost, machine).exposed_whole_s
        > bound(workload, machine).exposed_whole_s
    )


@given(workloads(clipping=True, max_subgroups=8), machines())
def test_bound__matches_an_independent_linear_program(
    workload: Workload, machine: Machine
) -> None:
    bounds = bound(workload, machine)
    scale = workload.params / (machine.cpu_update_params_per_s or 1.0)
    assert bounds.exposed_s == pytest.approx(
        bound_lp.update_s(workload, machine, True), rel=1e-4, abs=1e-6 * scale
    )
    assert bounds.update_s == pytest.approx(
        bound_lp.update_s(workload, machine, False), rel=1e-4, abs=1e-6 * scale
    )


@given(fixed_policies() | st.just("adaptive"), workloads(), machines())
def test_bound__is_below_every_policy_that_fits(
    policy: str, workload: Workload, machine: Machine
) -> None:
    schedule = simulate(make_plan(policy, workload, machine), workload, machine)
    bounds = bound(workload, machine)
    assert bounds.exposed_whole_s >= bounds.exposed_s * (1 - RELATIVE) - ABSOLUTE
    assert bounds.update_s >= bounds.exposed_s * (1 - RELATIVE) - ABSOLUTE
    assert bounds.iteration_s == pytest.approx(workload.compute_s + bounds.exposed_s)
    if schedule.fits_device(None):
        assert schedule.exposed_s >= bounds.exposed_whole_s * (1 - RELATIVE) - ABSOLUTE


RATES = [
    "h2d_bytes_per_s",
    "d2h_bytes_per_s",
    "duplex_bytes_per_s",
    "host_memory_bytes_per_s",
    "cpu_update_params_per_s",
    "gpu_update_params_per_s",
]


def moved(old: Workload, new: Workload, seconds: float) -> float:
    """Convert a time of one workload's iteration to that of another with longer
    phases."""
    old_begin = new_begin = 0.0
    for phase in ("other_s", "forward_s", "backward_s"):
        old_length, new_length = getattr(old, phase), getattr(new, phase)
        if seconds < old_begin + old_length:
            return float(new_begin + (seconds - old_begin) / old_length * new_length)
        old_begin, new_begin = old_begin + old_length, new_begin + new_length
    return float(new_begin + seconds - old_begin)


@given(
    workloads(max_subgroups=8), machines(), st.integers(-18, 30), st.integers(-15, 15)
)
def test_bound__scales_with_tiny_and_huge_jobs(
    workload: Workload, machine: Machine, params: int, seconds: int
) -> None:
    """2 ** params times the parameters, 2 ** seconds times the time."""
    bigger, longer = 2.0**params, 2.0**seconds
    sizes = tuple(-(-size // 2**18) * 2**18 for size in workload.subgroups)
    workload = replace(workload, sizes=sizes, params=sum(sizes))
    scaled_sizes = tuple(int(size * bigger) for size in sizes)
    scaled = replace(
        workload,
        sizes=scaled_sizes,
        params=sum(scaled_sizes),
        **{
            phase: getattr(workload, phase) * longer
            for phase in ("other_s", "forward_s", "backward_s")
        },
        gpu_free=tuple(
            (time * longer, size * bigger) for time, size in workload.gpu_free or ()
        ),
        collective_bytes=tuple(
            (phase, h2d * bigger, d2h * bigger)
            for phase, h2d, d2h in workload.collective_bytes
        ),
    )
    rates = {
        name: v * bigger / longer
        for name, v in vars(machine).items()
        if name.endswith("_per_s") and v
    }
    faster = replace(
        machine, step_overhead_s=(machine.step_overhead_s or 0.0) * longer, **rates
    )
    one, other = bound(workload, machine), bound(scaled, faster)
    tolerance = 1e-6 * workload.params / (machine.cpu_update_params_per_s or 1.0)
    for name in ("update_s", "exposed_s", "exposed_whole_s"):
        assert getattr(other, name) / longer == pytest.approx(
            getattr(one, name), rel=1e-4, abs=tolerance
        )


@given(
    workloads(max_subgroups=8),
    machines(),
    st.sampled_from(RATES),
    st.sampled_from([1e-3, 1.0, 1e12]),
)
def test_bound__exists_for_extreme_rates(
    workload: Workload, machine: Machine, rate: str, value: float
) -> None:
    changed: dict[str, Any] = {rate: value}
    bounds = bound(workload, replace(machine, **changed))
    assert 0 <= bounds.exposed_s <= bounds.update_s * (1 + RELATIVE) + ABSOLUTE
    assert bounds.exposed_s <= bounds.exposed_whole_s * (1 + RELATIVE) + ABSOLUTE


@pytest.mark.parametrize("size", [2e-2, 0.27, 0.3, 2.0])
def test_bound__treats_tiny_free_memory_as_none(size: float) -> None:
    job = even(1, forward_s=0.0, backward_s=0.0, other_s=0.1, clipping=False)
    timelines = [((0.0, free), (0.003, 0.0)) for free in (0.0, size)]
    none, little = (
        bound(
            replace(job, params=250_000, subgroup_params=250_000, gpu_free=timeline),
            TEST_MACHINE,
        )
        for timeline in timelines
    )
    assert little.exposed_whole_s == pytest.approx(none.exposed_whole_s)


@pytest.mark.parametrize("entries", [1, 30, 300])
def test_bound__accepts_many_steps_of_free_memory(entries: int) -> None:
    free = tuple(
        (22.0 * number / entries, 14.0 * N * (number % 2)) for number in range(entries)
    )
    bounds = bound(job(gpu_free=free), TEST_MACHINE)
    assert (
        OVERHEAD <= bounds.exposed_s <= bounds.update_s <= OVERHEAD + N / C + ABSOLUTE
    )


def test_bound__names_a_missing_rate() -> None:
    for missing in (
        "h2d_bytes_per_s",
        "d2h_bytes_per_s",
        "host_memory_bytes_per_s",
        "cpu_update_params_per_s",
    ):
        removed: dict[str, Any] = {missing: None}
        machine = replace(TEST_MACHINE, **removed)
        with pytest.raises(
            MachineError, match=f"box has no {missing}, which the bound needs"
        ):
            bound(job(), machine)
    # Without its rate the GPU updates nothing.
    unknown = replace(TEST_MACHINE, gpu_update_params_per_s=None)
    assert update_s(job(gpu_free=((0.0, 1e12),)), unknown) == pytest.approx(
        OVERHEAD + N / C
    )
