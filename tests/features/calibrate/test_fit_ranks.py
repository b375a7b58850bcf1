"""Tests of fits to runs of several models and of several numbers of ranks on a host."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ebbtide.errors import MachineError
from ebbtide.features.calibrate.fitting.from_traces import fit, machine_of
from ebbtide.features.calibrate.fitting.samples import FitSample, sample_of
from ebbtide.interleave.model.workload import Workload
from ebbtide.interleave.policies import as_policy
from ebbtide.machines.machine import Box, Machine
from ebbtide.profiler.trace import open_trace
from tests.interleave.published import TRACES

# Reported total of four ranks of the same kind with everything on the CPU; that run is
# not among the traces.
FOUR_RANKS_PARAMS_PER_S = 1.93e9
# A rank alone is 1.5 times as fast as one of two.
TRUE = Machine(
    host_memory_bytes_per_s=45e9,
    cpu_update_params_per_s=1.3e9,
    cpu_cast_params_per_s=9e9,
    gpu_update_params_per_s=30e9,
    h2d_bytes_per_s=24e9,
    d2h_bytes_per_s=24e9,
    h2d_pageable_bytes_per_s=12e9,
    d2h_pageable_bytes_per_s=4e9,
    step_overhead_s=0.25,
    box=Box(
        2,
        2.6e9,
        90e9,
        one_rank_cpu_update_params_per_s=1.95e9,
        one_rank_host_memory_bytes_per_s=67e9,
    ),
)


def sample(policy: str, params: float, ranks: int | None) -> FitSample:
    """Return a run of a model as the true machine does it."""
    workload = Workload(
        "job", round(params), 250_000_000, forward_s=0.2, backward_s=0.5, other_s=0.1
    )
    run = FitSample(
        f"{policy} {params:g} {ranks}",
        workload,
        as_policy(policy),
        1.0,
        None,
        ranks=ranks,
    )
    return replace(run, update_s=run.simulate(TRUE).update_s)


def samples(
    params: float, ranks: int, strides: tuple[int, ...] = (2, 6)
) -> list[FitSample]:
    policies = ["zero-offload", *(f"interleaved:{stride}@1" for stride in strides)]
    return [sample(policy, params, ranks) for policy in policies]


@pytest.fixture(scope="module")
def fitted() -> Machine:
    """The fit of runs with one and two ranks on a host, of two models."""
    return fit([*samples(2e9, 1), *samples(1e9, 2), *samples(3e9, 2)]).machine


@pytest.mark.slow
def test_fit__finds_the_total_and_the_rates_of_a_rank_alone(fitted: Machine) -> None:
    box = fitted.box
    assert box is not None
    assert fitted.cpu_update_params_per_s == pytest.approx(1.3e9, rel=0.1)
    assert box.cpu_update_params_per_s == 2 * (fitted.cpu_update_params_per_s or 0)
    assert box.host_memory_bytes_per_s == 2 * (fitted.host_memory_bytes_per_s or 0)
    assert box.one_rank_cpu_update_params_per_s == pytest.approx(1.95e9, rel=0.1)


@pytest.mark.slow
def test_fit__several_models_tell_the_overhead_from_the_rates() -> None:
    one_model = fit(samples(1e9, 1))
    two_models = fit([*samples(1e9, 1), *samples(4e9, 1)])
    assert "step_overhead_s" not in two_models.unidentified
    assert (
        two_models.uncertainty["step_overhead_s"]
        < one_model.uncertainty["step_overhead_s"]
    )
    assert two_models.machine.step_overhead_s == pytest.approx(0.25, rel=0.2)
    assert two_models.machine.box is None


def test_fit__runs_with_the_same_number_of_ranks_have_a_box_of_so_many() -> None:
    machine = fit(samples(1e9, 2)).machine
    assert machine.box == Box(
        2,
        2 * (machine.cpu_update_params_per_s or 0),
        2 * (machine.host_memory_bytes_per_s or 0),
    )


def test_fit__refuses_runs_of_which_only_some_tell_their_ranks() -> None:
    with pytest.raises(MachineError, match="it is not known how many shared its host"):
        fit([sample("zero-offload", 1e9, 2), sample("interleaved:2@1", 1e9, None)])


@pytest.mark.slow
def test_machine_of__published_runs_with_one_and_two_ranks_predict_another_with_two() -> (
    None
):
    """The rates of a rank alone predict it a third too short."""
    names = ("a100-ranks1-async", "a100-ranks1-interleaved-6", "a100-ranks2-async")
    machine = machine_of([TRACES / f"{name}.ebb" for name in names], "a100")
    other = sample_of(open_trace(TRACES / "a100-ranks2-interleaved-6.ebb"))
    assert other.ranks == 2
    assert other.simulate(machine).update_s == pytest.approx(other.update_s, rel=0.10)
    assert replace(other, ranks=1).simulate(machine).update_s < 0.75 * other.update_s
    # The runs of traces/ with four ranks bind each to a NUMA node of its own, so their
    # times are no measure here. Only the sizes of their subgroups are used.
    four = sample_of(open_trace(TRACES / "a100-13b-async.ebb"))
    assert four.ranks == 4
    total = 4 * four.workload.params / four.simulate(machine).update_s
    assert total == pytest.approx(FOUR_RANKS_PARAMS_PER_S, rel=0.10)
    assert machine.extra["fit"]["ranks"] == dict(zip(names, (1, 1, 2), strict=True))
    # Ranks divide the memory of the host.
    assert machine.host_memory_bytes == pytest.approx(540e9 / 2, rel=0.01)
    # The file has the rates with the rounding of its totals: they do not change for its
    # own number of ranks.
    assert machine.for_ranks(2) == machine
