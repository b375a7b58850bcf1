"""Tests of replay results: their order, their figures, whether they fit, and what
limits them."""

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
from ebbtide.interleave.replay.replay import PolicyResult, replay
from ebbtide.interleave.simulation.simulator import simulate
from ebbtide.machines.machine import Machine
from tests.conftest import examples
from tests.interleave.job_files import machine, workload
from tests.interleave.simulation.test_simulator import TEST_MACHINE, even
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
    "speculated_subgroups",
    "redone_iteration_ms",
    "storage_read_bytes",
    "storage_written_bytes",
    "storage_written_bytes_per_day",
    "storage_busy",
    "stored_subgroups",
    "exact",
    "note",
    "weights",
    "activations",
    "job_peak_device_bytes",
]
WITHOUT_OVERLAP = ["iteration_ms", "exposed_ms", "exposed_whole_subgroups_ms"]
WITH_OVERLAP = [f"overlap_{key}" for key in WITHOUT_OVERLAP]
BOUND = ["update_ms", *WITHOUT_OVERLAP, "overlap", *WITH_OVERLAP]


def one(policy: str, job: Workload, target: Machine) -> PolicyResult:
    (result,) = replay(job, target, [policy]).results
    return result


@settings(max_examples=examples(15, by_default=8))
@given(
    st.lists(fixed_policies(), min_size=1, max_size=3),
    workloads(max_subgroups=6),
    machines(),
)
def test_replay__gives_the_results_of_the_schedules_in_the_requested_order(
    policies: list[str], job: Workload, target: Machine
) -> None:
    replayed = replay(job, target, [*policies, policies[0]])
    assert [result.policy for result in replayed.results] == [*policies, policies[0]]
    assert replayed.results[0] == replayed.results[-1]
    for result, schedule in zip(replayed.results, replayed.schedules, strict=True):
        assert schedule == simulate(make_plan(result.policy, job, target), job, target)
        phases = (
            result.forward_ms + result.backward_ms + result.update_ms + result.other_ms
        )
        assert (
            result.iteration_ms
            == pytest.approx(phases)
            == pytest.approx(schedule.iteration_s * 1e3)
        )
        assert result.exposed_ms == pytest.approx(
            result.iteration_ms - job.compute_s * 1e3, abs=1e-6
        )
        assert (result.h2d_bytes, result.d2h_bytes) == (
            schedule.moved_bytes("h2d"),
            schedule.moved_bytes("d2h"),
        )
        assert list(result.busy) == ["cpu", "gpu", "h2d", "d2h"]
        assert all(0 <= share <= 1 for share in result.busy.values())


def test_as_json__has_the_keys_of_the_contract() -> None:
    values = replay(workload(), machine()).as_json()
    # Keys may be added to it, these may not change.
    assert list(values) == [
        "workload",
        "machine",
        "results",
        "bound",
        "skipped",
        "late",
        "accuracy",
    ]
    assert [result["policy"] for result in values["results"]] == list(BUILT_IN)
    assert all(list(result) == RESULT for result in values["results"])
    assert list(values["bound"]) == BOUND
    # The built-in policies have no overlap.
    assert values["bound"].pop("overlap") == "none"
    assert [values["bound"][key] for key in WITH_OVERLAP] == [
        values["bound"][key] for key in WITHOUT_OVERLAP
    ]
    assert {
        key: values["machine"][key]
        for key in ("name", "duplex_bytes_per_s", "step_overhead_s")
    } == {
        "name": "box",
        "duplex_bytes_per_s": None,
        "step_overhead_s": None,
    }
    figures = [
        value
        for result in values["results"]
        for value in result.values()
        if isinstance(value, (int, float))
    ]
    assert all(
        math.isfinite(value) and value >= 0
        for value in [*figures, *values["bound"].values()]
    )
    json.dumps(values, allow_nan=False)


def test_replay__repeats_policy_strings_as_given() -> None:
    strings = [
        " interleaved:2@1 , grads=blocking",
        "twin-flow:0.50",
        "zero-offload",
        "interleaved:2e0",
    ]
    assert [
        result.policy for result in replay(workload(), machine(), strings).results
    ] == strings


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
def test_fits__covers_both_memories_and_is_null_if_one_is_not_known(
    device: float | None, host: float | None, fits: bool | None
) -> None:
    """Interleaving 2e9 parameters takes two buffers of 1.2 GB, and 24 GB of state and
    copies on the host."""
    assert (
        one(
            "interleaved:2",
            workload(gpu_free_bytes=device),
            machine(host_memory_bytes=host),
        ).fits
        is fits
    )


def test_fits__needs_only_host_memory_for_plans_without_device_memory() -> None:
    unknown, full = workload(gpu_free_bytes=None), workload(gpu_free_bytes=0)
    assert one("zero-offload", unknown, machine()).fits is True
    assert one("zero-offload", full, machine()).fits is True
    # 28 GB of state and gradients are more than a card of 20 GB ever has.
    assert one("gpu-only", unknown, machine(gpu_memory_bytes=20e9)).fits is False
    # It needs no host memory, whose size need not be known.
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
def test_limited_by__is_the_busiest_resource_or_dependencies(
    policy: str, changes: dict[str, Any], limit: str
) -> None:
    target = replace(TEST_MACHINE, step_overhead_s=0.0, **changes)
    assert one(policy, even(50), target).limited_by == limit


def test_replay__skips_built_in_policies_that_lack_rates() -> None:
    target = machine(gpu_update_params_per_s=None)
    replayed = replay(workload(), target)
    assert [result.policy for result in replayed.results] == [
        "zero-offload",
        "pipelined",
        "adaptive",
    ]
    assert list(replayed.skipped) == ["twin-flow:0.5", "interleaved:2", "gpu-only"]
    assert all("gpu_update_params_per_s" in why for why in replayed.skipped.values())
    with pytest.raises(MachineError, match="has no gpu_update_params_per_s"):
        replay(workload(), target, ["zero-offload", "interleaved:2"])
    with pytest.raises(MachineError, match="has no"):
        replay(workload(), Machine())
    with pytest.raises(PolicyError, match="there is no policy 'magic'"):
        replay(workload(), machine(), ["zero-offload", "magic"])


def test_replay__has_the_bound_of_the_overlap_of_all_policies() -> None:
    policies = [
        "pipelined",
        "pipelined,overlap=backward",
        "interleaved:2,overlap=forward",
    ]
    replayed = replay(workload(), machine(), policies)
    assert replayed.overlap.name == "both"
    assert replayed.overlap_bound.iteration_s < replayed.bound.iteration_s
    plain, speculating, _ = replayed.results
    assert plain.redone_iteration_ms is None
    assert speculating.speculated_subgroups > 0
    assert speculating.redone_iteration_ms is not None
    assert speculating.iteration_ms < speculating.redone_iteration_ms
