"""Tests of the recommended setup."""

from __future__ import annotations

import json

import pytest

from ebbtide.errors import MachineError
from ebbtide.interleave.replay.recommend import recommend
from tests.interleave.experiments.sweep.sweeps import machine, workload
from tests.interleave.replay.test_ablation import ran


def test_recommend__does_not_offload_state_that_always_fits() -> None:
    # 24 GB of state, and 4 GB of gradients that stay until the update.
    enough = workload(gpu_free_bytes=28e9)
    advice = recommend(enough, machine())
    assert (advice.policy, advice.deepspeed, advice.code) == ("gpu-only", None, None)
    took = ran("gpu-only", enough, machine()).iteration_s * 1e3
    assert advice.line.startswith("do not offload: the optimizer's state (24.0 GB a rank) fits")
    assert f"takes {took:,.0f} ms then" in advice.line
    assert recommend(workload(gpu_free_bytes=27.9e9), machine()).policy == "adaptive"
    # If the free memory is not known, nothing is said to fit.
    assert recommend(workload(gpu_free_bytes=None), machine()).policy == "interleaved:2"


@pytest.mark.parametrize("free", [0.0, 3e9, 6e9, 14e9, 25e9])
def test_recommend__gives_deepspeed_the_fastest_split_that_fits(free: float) -> None:
    job, target = workload(gpu_free_bytes=free), machine()
    advice = recommend(job, target)
    assert advice.deepspeed is not None
    offload = advice.deepspeed["offload_optimizer"]
    assert isinstance(offload, dict)
    assert (offload["device"], advice.deepspeed["sub_group_size"]) == ("cpu", 10**8)
    chosen = ran(f"twin-flow:{offload['ratio']}", job, target)
    assert chosen.fits_device(None)
    for twentieths in range(21):
        other = ran(f"twin-flow:{twentieths / 20}", job, target)
        assert not other.fits_device(None) or other.iteration_s >= chosen.iteration_s
    assert (offload["ratio"] == 1) == (free == 0)
    # The line has the section as it is written in the configuration, and both iteration times.
    assert json.dumps(advice.deepspeed) in advice.line
    assert advice.line.startswith(f"adaptive: {ran('adaptive', job, target).iteration_s * 1e3:,.0f} ms an iteration")
    assert f": {chosen.iteration_s * 1e3:,.0f} ms" in advice.line


def test_recommend__gives_the_largest_of_equal_ratios() -> None:
    """With 20 subgroups each ratio is another split; with one, all ratios above 0 are the same."""
    advice = recommend(workload(subgroup_params=2e9), machine())
    assert advice.deepspeed is not None
    assert advice.deepspeed["offload_optimizer"] == {"device": "cpu", "pin_memory": True, "ratio": 1.0}


@pytest.mark.parametrize(("free", "policy"), [(6e9, "adaptive"), (None, "interleaved:2")])
def test_recommend__has_a_line_of_python_for_deepspeed_jobs(free: float | None, policy: str) -> None:
    advice = recommend(workload(gpu_free_bytes=free), machine())
    assert advice.policy == policy
    assert advice.code == f'ebbtide.interleave.deepspeed.enable(policy="{policy}")'
    assert f"; {policy} in a DeepSpeed job: {advice.code}" in advice.line


def test_recommend__offloads_everything_if_free_memory_is_not_known() -> None:
    advice = recommend(workload(gpu_free_bytes=None), machine())
    assert advice.deepspeed is not None
    assert advice.deepspeed["offload_optimizer"] == {"device": "cpu", "pin_memory": True, "ratio": 1.0}


@pytest.mark.parametrize(
    ("free", "mentioned"), [(15.9e9, None), (16e9, "8-bit moments"), (19.9e9, "8-bit moments"), (20e9, "bf16 moments")]
)
def test_recommend__mentions_smaller_state_that_would_fit(free: float, mentioned: str | None) -> None:
    """2e9 parameters: 6 or 8 bytes of state each, and 2 of gradient."""
    line = recommend(workload(gpu_free_bytes=free), machine()).line
    assert [kind for kind in ("8-bit moments", "bf16 moments") if f"with {kind}" in line] == (
        [mentioned] if mentioned else []
    )
    assert ("nothing would have to be offloaded (other arithmetic, other results)" in line) == (mentioned is not None)


def test_recommend__skips_deepspeed_if_rates_are_missing() -> None:
    advice = recommend(workload(), machine(cpu_cast_params_per_s=None))
    assert (advice.policy, advice.deepspeed) == ("adaptive", None)
    assert "plain DeepSpeed" not in advice.line
    assert advice.code == 'ebbtide.interleave.deepspeed.enable(policy="adaptive")'
    with pytest.raises(MachineError, match="has no gpu_update_params_per_s"):
        recommend(workload(), machine(gpu_update_params_per_s=None))
