"""The bound: closed forms, an independent program, and that no policy is below it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbtide.errors import MachineError
from ebbtide.interleave.model.workload import Workload
from ebbtide.interleave.policies import make_plan
from ebbtide.interleave.simulation.bound import Bound, bound
from ebbtide.interleave.simulation.simulator import simulate
from ebbtide.machines.machine import Machine
from tests.interleave.simulation import bound_lp
from tests.interleave.simulation.test_simulator import BOX, DOWN, OVERHEAD, UP, C, G, even
from tests.interleave.strategies import fixed_policies, machines, workloads

# What a linear program's solver takes for the same.
LEAST, SAME = 1e-9, 1e-5
N = 20 * 10**8
SLOW_CPU = replace(BOX, cpu_update_params_per_s=1.0)


def update_s(workload: Workload, machine: Machine) -> float:
    return bound(workload, machine).update_s


def job(**values: Any) -> Workload:
    """Two seconds of forward, twenty of backward."""
    return even(20, **{"forward_s": 2.0, "backward_s": 20.0, **values})


def test_without_room_on_the_device_the_cpu_does_it_all() -> None:
    found = bound(job(gpu_free=((0.0, 0.0),)), BOX)
    assert found.update_s == pytest.approx(OVERHEAD + N / C)
    assert found.exposed_s == pytest.approx(found.update_s)
    assert found.iteration_s == pytest.approx(22 + found.update_s)
    # As whole subgroups the last one's upload follows its update.
    assert found.exposed_whole_s == pytest.approx(OVERHEAD + N / C + 2e8 / UP)


def test_where_it_is_not_known_what_is_free_all_of_it_might_be() -> None:
    found = bound(job(), BOX)
    assert found == bound(job(gpu_free=((0.0, 14.0 * N),)), BOX)
    assert found.update_s == pytest.approx(OVERHEAD + N / (C + G))
    small = replace(BOX, gpu_memory_bytes=1e9)
    assert bound(job(), small) == bound(job(gpu_free=((0.0, 1e9),)), small)
    for policy in ("gpu-only", "interleaved:2"):
        assert simulate(make_plan(policy, job(), BOX), job(), BOX).exposed_s >= found.exposed_whole_s - LEAST


def test_all_resident_both_sides_share_the_updates() -> None:
    assert update_s(job(gpu_free=((0.0, 1e12),)), BOX) == pytest.approx(OVERHEAD + N / (C + G))
    assert update_s(job(gpu_free=((0.0, 1e12),)), SLOW_CPU) == pytest.approx(OVERHEAD + N / G)


def test_the_link_bounds_what_the_cpu_cannot_do() -> None:
    """A byte of room is enough to stream through, in shares however small; gradients go down and come back."""
    box = replace(SLOW_CPU, step_overhead_s=0.0)
    workload = job(gpu_free=((0.0, 1.0),))
    assert update_s(workload, box) == pytest.approx(max(14 * N / UP, 12 * N / DOWN))
    # With room for gradients they stay.
    roomy = job(gpu_free=((0.0, 0.0), (2.0, 2.0 * N), (22.0, 2.0 * N)))
    assert update_s(roomy, box) == pytest.approx(12 * N / DOWN)
    both = replace(box, duplex_bytes_per_s=40e9)
    assert update_s(roomy, both) == pytest.approx(24 * N / 40e9)


def test_room_that_is_always_free_saves_its_share_of_the_link() -> None:
    box = replace(SLOW_CPU, step_overhead_s=0.0, d2h_bytes_per_s=1e12)
    held = 12 * N / 4
    # A quarter of the state is resident, the gradients of the rest go down and come back.
    assert update_s(job(gpu_free=((0.0, held),), grad_bytes=0.0), box) == pytest.approx(12 * N * 3 / 4 / UP)


def test_host_memory_bounds_either_side() -> None:
    memory = 1e9
    slow = replace(BOX, host_memory_bytes_per_s=memory, step_overhead_s=0.0)
    # Gradients come down in the backward, as far as it is long enough.
    patient = job(backward_s=100.0, gpu_free=((0.0, 0.0),))
    assert update_s(patient, slow) == pytest.approx(30 * N / memory)
    # Through the GPU: state in, state out, and the gradient back up.
    assert update_s(replace(patient, gpu_free=((0.0, 1.0),)), slow) == pytest.approx(26 * N / memory)
    # As much of the gradients as the backward leaves time for.
    hasty = job(backward_s=1.0, gpu_free=((0.0, 0.0),))
    assert update_s(hasty, slow) == pytest.approx((32 * N - 1.0 * memory) / memory)


def test_state_that_is_parked_in_a_window_does_not_cross_in_the_update() -> None:
    box = replace(SLOW_CPU, step_overhead_s=0.0)
    everything = 14.0 * N
    # Free from the backward to the end of the forward's first second: it comes in the backward, goes in the forward.
    line = ((0.0, everything), (1.0, 0.0), (2.0, everything))
    workload = job(gpu_free=line)
    found = bound(workload, box)
    assert found.exposed_s == pytest.approx(N / G)
    assert found.update_s == pytest.approx(12 * N / DOWN)
    # Too short a window to leave in: what is left goes in the update.
    short = replace(workload, gpu_free=((0.0, everything), (0.2, 0.0), (2.0, everything)))
    assert bound(short, box).exposed_s == pytest.approx(12 * N / DOWN - 0.2)
    # No window in the forward at all: everything leaves in the update, and what came before need not come again.
    closed = replace(workload, gpu_free=((0.0, 0.0), (2.0, everything)))
    assert bound(closed, box).exposed_s == pytest.approx(12 * N / DOWN)


def test_without_clipping_updates_hide_in_the_backward() -> None:
    workload = job(clipping=False, gpu_free=((0.0, 0.0),))
    assert bound(workload, BOX).exposed_s == pytest.approx(OVERHEAD, rel=1e-3)
    slow = replace(BOX, cpu_update_params_per_s=N / 40)
    assert bound(workload, slow).exposed_s == pytest.approx(40 - 20)


@given(workloads(clipping=True, most=8), machines())
def test_it_is_what_another_writing_of_the_model_gives(workload: Workload, machine: Machine) -> None:
    found = bound(workload, machine)
    scale = workload.params / (machine.cpu_update_params_per_s or 1.0)
    assert found.exposed_s == pytest.approx(bound_lp.update_s(workload, machine, True), rel=1e-4, abs=1e-6 * scale)
    assert found.update_s == pytest.approx(bound_lp.update_s(workload, machine, False), rel=1e-4, abs=1e-6 * scale)


@given(fixed_policies() | st.just("adaptive"), workloads(), machines())
def test_no_policy_that_fits_is_below_it(policy: str, workload: Workload, machine: Machine) -> None:
    schedule = simulate(make_plan(policy, workload, machine), workload, machine)
    found = bound(workload, machine)
    assert found.exposed_whole_s >= found.exposed_s * (1 - SAME) - LEAST
    assert found.update_s >= found.exposed_s * (1 - SAME) - LEAST
    assert found.iteration_s == pytest.approx(workload.compute_s + found.exposed_s)
    if schedule.fits_device(None):
        assert schedule.exposed_s >= found.exposed_whole_s * (1 - SAME) - LEAST


MORE = [
    "h2d_bytes_per_s",
    "d2h_bytes_per_s",
    "duplex_bytes_per_s",
    "host_memory_bytes_per_s",
    "cpu_update_params_per_s",
    "gpu_update_params_per_s",
]


def no_worse(before: Bound, after: Bound) -> None:
    assert after.update_s <= before.update_s * (1 + SAME) + LEAST
    assert after.exposed_s <= before.exposed_s * (1 + SAME) + LEAST


@given(workloads(), machines(), st.sampled_from(MORE), st.floats(1, 10))
def test_more_of_a_rate_never_makes_it_worse(workload: Workload, machine: Machine, which: str, factor: float) -> None:
    more = getattr(machine, which)
    faster = {which: more * factor} if more is not None else {}
    no_worse(bound(workload, machine), bound(workload, replace(machine, **faster)))


@given(workloads(), machines())
def test_without_a_duplex_limit_it_is_no_worse(workload: Workload, machine: Machine) -> None:
    no_worse(bound(workload, machine), bound(workload, replace(machine, duplex_bytes_per_s=None)))


@given(workloads(), machines(), st.integers(0, 4), st.floats(0, 2))
def test_more_free_memory_never_makes_it_worse(workload: Workload, machine: Machine, where: int, share: float) -> None:
    line = workload.gpu_free or ()
    more = tuple(
        (at, size + share * 12 * workload.params if number == where % len(line) else size)
        for number, (at, size) in enumerate(line)
    )
    before, after = bound(workload, machine), bound(replace(workload, gpu_free=more), machine)
    no_worse(before, after)
    assert after.exposed_whole_s <= before.exposed_whole_s * (1 + SAME) + LEAST


@given(workloads(), machines(), st.sampled_from(["other_s", "forward_s", "backward_s"]), st.floats(1, 5))
def test_more_time_in_a_phase_never_makes_the_update_longer(
    workload: Workload, machine: Machine, phase: str, factor: float
) -> None:
    longer = replace(workload, **{phase: getattr(workload, phase) * factor})
    stretched = replace(
        longer, gpu_free=tuple((moved(workload, longer, at), size) for at, size in workload.gpu_free or ())
    )
    no_worse(bound(workload, machine), bound(stretched, machine))


def moved(old: Workload, new: Workload, seconds: float) -> float:
    """Where a time of one workload's iteration lies in that of another with longer phases."""
    begin = at = 0.0
    for phase in ("other_s", "forward_s", "backward_s"):
        length, now = getattr(old, phase), getattr(new, phase)
        if seconds < begin + length:
            return float(at + (seconds - begin) / length * now)
        begin, at = begin + length, at + now
    return float(at + seconds - begin)


@given(workloads(most=8), machines(), st.integers(-18, 30), st.integers(-15, 15))
def test_tiny_and_huge_jobs_are_in_proportion(workload: Workload, machine: Machine, params: int, seconds: int) -> None:
    """2 ** params times the parameters, 2 ** seconds times the time."""
    bigger, longer = 2.0**params, 2.0**seconds
    sizes = tuple(-(-size // 2**18) * 2**18 for size in workload.subgroups)
    workload = replace(workload, sizes=sizes, params=sum(sizes))
    scaled_sizes = tuple(int(size * bigger) for size in sizes)
    scaled = replace(
        workload,
        sizes=scaled_sizes,
        params=sum(scaled_sizes),
        **{phase: getattr(workload, phase) * longer for phase in ("other_s", "forward_s", "backward_s")},
        gpu_free=tuple((at * longer, size * bigger) for at, size in workload.gpu_free or ()),
    )
    rates = {name: v * bigger / longer for name, v in vars(machine).items() if name.endswith("_per_s") and v}
    faster = replace(machine, step_overhead_s=(machine.step_overhead_s or 0.0) * longer, **rates)
    one, other = bound(workload, machine), bound(scaled, faster)
    least = 1e-6 * workload.params / (machine.cpu_update_params_per_s or 1.0)
    for name in ("update_s", "exposed_s", "exposed_whole_s"):
        assert getattr(other, name) / longer == pytest.approx(getattr(one, name), rel=1e-4, abs=least)


@given(workloads(most=8), machines(), st.sampled_from(MORE), st.sampled_from([1e-3, 1.0, 1e12]))
def test_an_absurd_rate_still_has_a_bound(workload: Workload, machine: Machine, which: str, rate: float) -> None:
    changed: dict[str, Any] = {which: rate}
    found = bound(workload, replace(machine, **changed))
    assert 0 <= found.exposed_s <= found.update_s * (1 + SAME) + LEAST
    assert found.exposed_s <= found.exposed_whole_s * (1 + SAME) + LEAST


@pytest.mark.parametrize("size", [2e-2, 2.0])
def test_room_that_is_next_to_none_is_none(size: float) -> None:
    job = even(1, forward_s=0.0, backward_s=0.0, other_s=0.1, clipping=False)
    lines = [((0.0, free), (0.003, 0.0)) for free in (0.0, size)]
    none, little = (bound(replace(job, params=250_000, subgroup_params=250_000, gpu_free=line), BOX) for line in lines)
    assert little.exposed_whole_s == pytest.approx(none.exposed_whole_s)


@pytest.mark.parametrize("entries", [1, 30, 300])
def test_a_long_free_line_is_no_trouble(entries: int) -> None:
    line = tuple((22.0 * number / entries, 14.0 * N * (number % 2)) for number in range(entries))
    found = bound(job(gpu_free=line), BOX)
    assert OVERHEAD <= found.exposed_s <= found.update_s <= OVERHEAD + N / C + LEAST


def test_what_it_needs_and_is_not_known_is_named() -> None:
    for missing in ("h2d_bytes_per_s", "d2h_bytes_per_s", "host_memory_bytes_per_s", "cpu_update_params_per_s"):
        gone: dict[str, Any] = {missing: None}
        box = replace(BOX, **gone)
        with pytest.raises(MachineError, match=f"box has no {missing}, which the bound needs"):
            bound(job(), box)
    # Without a GPU's rate nothing is updated there.
    unknown = replace(BOX, gpu_update_params_per_s=None)
    assert update_s(job(gpu_free=((0.0, 1e12),)), unknown) == pytest.approx(OVERHEAD + N / C)


def test_it_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    """The solver's own integer programs print to stdout on some of these."""
    for count in (3, 20, 50):
        for free in (0.1, 0.3, 0.7):
            bound(even(count, gpu_free=((0.0, 14e8 * count * free), (2.0, 14e8 * count * free / 3))), BOX)
    assert capfd.readouterr() == ("", "")
