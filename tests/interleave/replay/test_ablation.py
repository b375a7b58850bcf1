"""What each mechanism is worth, and what is recommended."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings

from ebbtide.errors import MachineError
from ebbtide.interleave.model.schedule import Schedule
from ebbtide.interleave.model.workload import Workload
from ebbtide.interleave.policies import make_plan
from ebbtide.interleave.replay.ablation import explain, recommend
from ebbtide.interleave.simulation.simulator import simulate
from ebbtide.machines.machine import Machine
from tests.conftest import examples
from tests.interleave.experiments.sweep.sweeps import machine, workload
from tests.interleave.strategies import machines, workloads

LADDER = ["zero-offload,grads=blocking", "zero-offload", "pipelined", "interleaved:2", "adaptive", "adaptive"]


def ran(policy: str, job: Workload, box: Machine) -> Schedule:
    return simulate(make_plan(policy, job, box), job, box)


@settings(max_examples=examples(10))
@given(workloads(most=6, known=False), machines())
def test_gains_add_up_to_the_whole(job: Workload, box: Machine) -> None:
    steps = explain(job, box)
    assert steps[0].gain_ms == 0
    whole = steps[0].iteration_ms - steps[-1].iteration_ms
    assert sum(step.gain_ms for step in steps) == pytest.approx(whole, abs=1e-9 * steps[0].iteration_ms)
    # Without knowing what is free the ladder ends before shares and windows.
    assert [step.policy for step in steps] == LADDER[:4]
    for step in steps:
        assert step.iteration_ms == ran(step.policy, job, box).iteration_s * 1e3


def test_shares_come_in_what_is_always_free_and_windows_after_them() -> None:
    job, box = workload(), machine()
    steps = explain(job, box)
    assert [step.policy for step in steps] == LADDER
    assert len({step.mechanism for step in steps}) == len(steps)
    always = replace(job, gpu_free=((0.0, 6e9),))
    assert steps[4].iteration_ms == ran("adaptive", always, box).iteration_s * 1e3
    assert steps[5].iteration_ms == ran("adaptive", job, box).iteration_s * 1e3
    whole = steps[0].iteration_ms - steps[-1].iteration_ms
    assert sum(step.gain_ms for step in steps) == pytest.approx(whole)
    # Where as much is free all the time, there are no windows to be worth anything.
    assert explain(always, box) == steps[:5]


def test_steps_that_lack_a_rate_are_left_out_and_the_others_follow_each_other() -> None:
    job = workload()
    without = explain(job, machine(d2h_pageable_bytes_per_s=None))
    assert [step.policy for step in without] == LADDER[1:]
    assert without[0].gain_ms == 0
    assert without[1:] == explain(job, machine())[2:]
    on_cpu = explain(job, machine(gpu_update_params_per_s=None))
    assert [step.policy for step in on_cpu] == LADDER[:3]
    assert explain(job, Machine()) == []


def test_what_fits_all_the_time_is_not_to_be_offloaded() -> None:
    # 24 GB of state, and 4 GB of gradients that stay until the update.
    enough = workload(gpu_free_bytes=28e9)
    advice = recommend(enough, machine())
    assert (advice.policy, advice.deepspeed, advice.code) == ("gpu-only", None, None)
    took = ran("gpu-only", enough, machine()).iteration_s * 1e3
    assert advice.line.startswith("do not offload: the optimizer's state (24.0 GB a rank) fits")
    assert f"takes {took:,.0f} ms then" in advice.line
    assert recommend(workload(gpu_free_bytes=27.9e9), machine()).policy == "adaptive"
    # What is not known is not said to fit.
    assert recommend(workload(gpu_free_bytes=None), machine()).policy == "interleaved:2"


@pytest.mark.parametrize("free", [0.0, 3e9, 6e9, 14e9, 25e9])
def test_deepspeed_gets_the_quickest_split_that_fits(free: float) -> None:
    job, box = workload(gpu_free_bytes=free), machine()
    advice = recommend(job, box)
    assert advice.deepspeed is not None
    offload = advice.deepspeed["offload_optimizer"]
    assert isinstance(offload, dict)
    assert (offload["device"], advice.deepspeed["sub_group_size"]) == ("cpu", 10**8)
    chosen = ran(f"twin-flow:{offload['ratio']}", job, box)
    assert chosen.fits_device(None)
    for twentieths in range(21):
        other = ran(f"twin-flow:{twentieths / 20}", job, box)
        assert not other.fits_device(None) or other.iteration_s >= chosen.iteration_s
    assert (offload["ratio"] == 1) == (free == 0)
    # The line says it as it is to be written, with what it takes beside what the best takes.
    assert json.dumps(advice.deepspeed) in advice.line
    assert advice.line.startswith(f"adaptive: {ran('adaptive', job, box).iteration_s * 1e3:,.0f} ms an iteration")
    assert f": {chosen.iteration_s * 1e3:,.0f} ms" in advice.line


def test_ratios_that_deepspeed_rounds_alike_are_told_as_the_largest() -> None:
    """Of 20 subgroups each ratio is another split; of one, all but 0 are none."""
    advice = recommend(workload(subgroup_params=2e9), machine())
    assert advice.deepspeed is not None
    assert advice.deepspeed["offload_optimizer"] == {"device": "cpu", "pin_memory": True, "ratio": 1.0}


@pytest.mark.parametrize(("free", "policy"), [(6e9, "adaptive"), (None, "interleaved:2")])
def test_the_same_in_a_deepspeed_job_is_a_line_of_python(free: float | None, policy: str) -> None:
    advice = recommend(workload(gpu_free_bytes=free), machine())
    assert advice.policy == policy
    assert advice.code == f'ebbtide.interleave.deepspeed.enable(policy="{policy}")'
    assert f"; {policy} in a DeepSpeed job: {advice.code}" in advice.line


def test_where_it_is_not_known_what_is_free_nothing_resident_is_recommended() -> None:
    advice = recommend(workload(gpu_free_bytes=None), machine())
    assert advice.deepspeed is not None
    assert advice.deepspeed["offload_optimizer"] == {"device": "cpu", "pin_memory": True, "ratio": 1.0}


@pytest.mark.parametrize(
    ("free", "said"), [(15.9e9, None), (16e9, "8-bit moments"), (19.9e9, "8-bit moments"), (20e9, "bf16 moments")]
)
def test_smaller_state_that_would_fit_is_said(free: float, said: str | None) -> None:
    """2e9 parameters: 6 or 8 bytes of state each, and 2 of gradient."""
    line = recommend(workload(gpu_free_bytes=free), machine()).line
    assert [kind for kind in ("8-bit moments", "bf16 moments") if f"with {kind}" in line] == ([said] if said else [])
    assert ("nothing would have to be offloaded (other arithmetic, other results)" in line) == (said is not None)


def test_what_deepspeed_lacks_rates_for_is_not_recommended() -> None:
    advice = recommend(workload(), machine(cpu_cast_params_per_s=None))
    assert (advice.policy, advice.deepspeed) == ("adaptive", None)
    assert "plain DeepSpeed" not in advice.line
    assert advice.code == 'ebbtide.interleave.deepspeed.enable(policy="adaptive")'
    with pytest.raises(MachineError, match="has no gpu_update_params_per_s"):
        recommend(workload(), machine(gpu_update_params_per_s=None))
