"""A replay's results: their order, their figures, whether they fit, and what limits them."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ebbtide.errors import MachineError, PolicyError
from ebbtide.interleave.model.workload import Workload
from ebbtide.interleave.policies import BUILT_IN, make_plan
from ebbtide.interleave.replay.results import Result, replay
from ebbtide.interleave.simulation.simulator import simulate
from ebbtide.machines.machine import Machine
from tests.conftest import examples
from tests.interleave.experiments.sweep.sweeps import machine, workload
from tests.interleave.simulation.test_simulator import BOX, even
from tests.interleave.strategies import fixed_policies, machines, workloads

RESULT = [
    "policy",
    "iteration_ms",
    "forward_ms",
    "backward_ms",
    "update_ms",
    "other_ms",
    "exposed_ms",
    "h2d_bytes",
    "d2h_bytes",
    "busy",
    "peak_device_bytes",
    "host_bytes",
    "fits",
    "limited_by",
]
BOUND = ["update_ms", "iteration_ms", "exposed_ms", "exposed_whole_subgroups_ms"]


def one(policy: str, job: Workload, box: Machine) -> Result:
    (result,) = replay(job, box, [policy]).results
    return result


@settings(max_examples=examples(15))
@given(st.lists(fixed_policies(), min_size=1, max_size=3), workloads(most=6), machines())
def test_results_are_those_of_the_schedules_in_the_order_asked_for(
    policies: list[str], job: Workload, box: Machine
) -> None:
    found = replay(job, box, [*policies, policies[0]])
    assert [result.policy for result in found.results] == [*policies, policies[0]]
    assert found.results[0] == found.results[-1]
    for result, schedule in zip(found.results, found.schedules, strict=True):
        assert schedule == simulate(make_plan(result.policy, job, box), job, box)
        phases = result.forward_ms + result.backward_ms + result.update_ms + result.other_ms
        assert result.iteration_ms == pytest.approx(phases) == pytest.approx(schedule.iteration_s * 1e3)
        assert result.exposed_ms == pytest.approx(result.iteration_ms - job.compute_s * 1e3, abs=1e-6)
        assert (result.h2d_bytes, result.d2h_bytes) == (schedule.moved_bytes("h2d"), schedule.moved_bytes("d2h"))
        assert list(result.busy) == ["cpu", "gpu", "h2d", "d2h"]
        assert all(0 <= share <= 1 for share in result.busy.values())


def test_the_object_is_the_contracts() -> None:
    found = replay(workload(), machine()).as_json()
    # More keys may be added to it, these may not change.
    assert list(found) == ["workload", "machine", "results", "bound", "skipped"]
    assert [result["policy"] for result in found["results"]] == list(BUILT_IN)
    assert all(list(result) == RESULT for result in found["results"])
    assert list(found["bound"]) == BOUND
    assert {key: found["machine"][key] for key in ("name", "duplex_bytes_per_s", "step_overhead_s")} == {
        "name": "box",
        "duplex_bytes_per_s": None,
        "step_overhead_s": None,
    }
    figures = [value for result in found["results"] for value in result.values() if isinstance(value, (int, float))]
    assert all(math.isfinite(value) and value >= 0 for value in [*figures, *found["bound"].values()])
    json.dumps(found, allow_nan=False)


def test_a_policys_string_is_given_back_as_it_was_given() -> None:
    given = [" interleaved:2@1 , grads=blocking", "twin-flow:0.50", "zero-offload", "interleaved:2e0"]
    assert [result.policy for result in replay(workload(), machine(), given).results] == given


@pytest.mark.parametrize(
    ("device", "host", "fits"),
    [
        (20e9, 200e9, True),
        (20e9, None, None),
        (20e9, 10e9, False),
        (2e9, 200e9, False),
        (2e9, None, False),
        (None, 200e9, None),
        (None, None, None),
        (None, 10e9, False),
    ],
)
def test_fits_is_of_both_memories_and_null_where_one_is_not_known(
    device: float | None, host: float | None, fits: bool | None
) -> None:
    """Interleaving 2e9 parameters takes two buffers of 1.2 GB, and 24 GB of state and copies on the host."""
    assert one("interleaved:2", workload(gpu_free_bytes=device), machine(host_memory_bytes=host)).fits is fits


def test_what_takes_nothing_on_the_device_fits_wherever_the_host_does() -> None:
    unknown, full = workload(gpu_free_bytes=None), workload(gpu_free_bytes=0)
    assert one("zero-offload", unknown, machine()).fits is True
    assert one("zero-offload", full, machine()).fits is True
    # 28 GB of state and gradients are more than a card of 20 GB ever has.
    assert one("gpu-only", unknown, machine(gpu_memory_bytes=20e9)).fits is False
    # It needs no host memory: how much there is need not be known.
    assert one("gpu-only", unknown, machine()).fits is None


@pytest.mark.parametrize(
    ("policy", "changes", "limit"),
    [
        ("pipelined", {}, "cpu"),
        ("gpu-only", {}, "gpu"),
        ("pipelined", {"host_memory_bytes_per_s": 28e9}, "host memory"),
        ("interleaved:1", {"h2d_bytes_per_s": 5e9, "d2h_bytes_per_s": 40e9}, "h2d"),
        ("interleaved:1", {"h2d_bytes_per_s": 40e9, "d2h_bytes_per_s": 5e9}, "d2h"),
        # Updates, casts and pageable uploads of a subgroup follow each other.
        ("zero-offload", {"h2d_pageable_bytes_per_s": 4e9}, "dependencies"),
    ],
)
def test_what_an_update_waits_for_most(policy: str, changes: dict[str, Any], limit: str) -> None:
    box = replace(BOX, step_overhead_s=0.0, **changes)
    assert one(policy, even(50), box).limited_by == limit


def test_what_was_not_asked_for_is_left_out_where_rates_are_missing() -> None:
    box = machine(gpu_update_params_per_s=None)
    found = replay(workload(), box)
    assert [result.policy for result in found.results] == ["zero-offload", "pipelined"]
    assert list(found.skipped) == ["twin-flow:0.5", "interleaved:2", "adaptive", "gpu-only"]
    assert all("gpu_update_params_per_s" in why for why in found.skipped.values())
    with pytest.raises(MachineError, match="has no gpu_update_params_per_s"):
        replay(workload(), box, ["zero-offload", "interleaved:2"])
    with pytest.raises(MachineError, match="has no"):
        replay(workload(), Machine())
    with pytest.raises(PolicyError, match="there is no policy 'magic'"):
        replay(workload(), machine(), ["zero-offload", "magic"])


def test_no_policy_that_fits_is_quicker_than_the_bound() -> None:
    for size in (0.0, 4e9, 12e9, 60e9):
        found = replay(workload(gpu_free_bytes=size), machine())
        for result in found.results:
            if result.fits:
                assert result.iteration_ms >= found.bound.iteration_s * 1e3 * (1 - 1e-6)
                assert result.exposed_ms >= found.bound.exposed_whole_s * 1e3 * (1 - 1e-6)
