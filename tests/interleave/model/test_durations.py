"""Costs beside rates: the gradient norm, operations, collectives, casts on the GPU,
slack, pinned memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from ebbtide.errors import MachineError, WorkloadError
from ebbtide.interleave import InterleavedAdamW
from ebbtide.interleave.engine.devices.emulated import EmulatedDevice
from ebbtide.interleave.engine.errors import EngineError
from ebbtide.interleave.model.durations import norm_s, phase_before
from ebbtide.interleave.model.schedule import Schedule
from ebbtide.interleave.model.workload import Workload, workload_from
from ebbtide.interleave.policies import make_plan
from ebbtide.interleave.replay.replay import replay
from ebbtide.interleave.simulation.simulator import simulate
from ebbtide.machines.machine import Machine
from tests.interleave.simulation.test_simulator import TEST_MACHINE, G, even

N = 20 * 10**8


def ran(policy: str, workload: Workload, machine: Machine = TEST_MACHINE) -> Schedule:
    return simulate(make_plan(policy, workload, machine), workload, machine)


def job(**values: Any) -> Workload:
    return even(20, gpu_free=((0.0, 1e12),), **values)


def test_norm__without_a_rate_takes_the_bandwidth_of_host_memory() -> None:
    assert norm_s(job(norm="host", clipping=False), TEST_MACHINE) == 0
    assert norm_s(job(norm="host"), TEST_MACHINE) == pytest.approx(2 * N / 1e13)
    with pytest.raises(
        MachineError, match="host_memory_bytes_per_s, which the gradient norm needs"
    ):
        norm_s(job(norm="host"), replace(TEST_MACHINE, host_memory_bytes_per_s=None))


def test_collectives__of_more_than_the_link_carries_leave_a_little_of_it() -> None:
    flooded = job(collective_bytes=(("forward", 1e13, 1e13), ("backward", 1e13, 1e13)))
    assert ran("pipelined", flooded).iteration_s < 1e3


@pytest.mark.parametrize(
    ("point", "phase"),
    [(0.5, "other"), (1.0, "other"), (1.1, "forward"), (2.5, "backward")],
)
def test_phase_before__is_the_phase_of_the_compute_that_ends_at_a_point(
    point: float, phase: str
) -> None:
    assert phase_before(point) == phase


@pytest.mark.parametrize(
    "policy", ["zero-offload,params=gpu-cast", "twin-flow:0.5,params=gpu-cast"]
)
def test_gpu_cast__uploads_masters_and_converts_them_on_the_gpu(policy: str) -> None:
    machine = replace(TEST_MACHINE, gpu_cast_params_per_s=8e9)
    schedule = ran(policy, job(), machine)
    offloaded = [op for op in schedule.plan.ops if op.kind == "upload"]
    assert {op.nbytes for op in offloaded} == {4e8}
    casts = [
        (op, end - start) for op, start, end in schedule.items() if op.kind == "cast"
    ]
    assert len(casts) == len(offloaded)
    assert {op.resource for op, _ in casts} == {"gpu"}
    assert [seconds for _, seconds in casts] == pytest.approx([1e8 / 8e9] * len(casts))
    # One staging buffer of fp32 parameters at least, given back at the end.
    assert schedule.peak_device_bytes >= 4e8
    # A rate that is not known follows from that of updates: 6 bytes a parameter instead
    # of 28.
    assumed = [
        (op, end - start)
        for op, start, end in ran(policy, job()).items()
        if op.kind == "cast"
    ]
    assert [seconds for _, seconds in assumed] == pytest.approx(
        [1e8 / G * 6 / 28] * len(assumed)
    )
    with pytest.raises(MachineError, match="gpu_update_params_per_s"):
        ran(policy, job(), replace(TEST_MACHINE, gpu_update_params_per_s=None))


def test_slack__is_left_free_by_every_plan() -> None:
    base = {
        "params": 2e9,
        "subgroup_params": 1e8,
        "forward_s": 1,
        "backward_s": 3,
        "gpu_free_bytes": 9e9,
    }
    free = ran("adaptive", workload_from(base, "w.json")).peak_device_bytes
    left = ran(
        "adaptive", workload_from(base | {"gpu_slack_bytes": 3e9}, "w.json")
    ).peak_device_bytes
    assert 6e9 < free <= 9e9
    assert left <= 6e9


def test_pinned_memory__limits_what_fits() -> None:
    pinned = ran("pipelined", job()).pinned_bytes()
    # the buffers of gradients and parameters
    assert pinned == pytest.approx(2 * N + 2 * N)
    fetched = ran("interleaved:2", job()).pinned_bytes()
    assert fetched > pinned
    machine = replace(
        TEST_MACHINE, host_memory_bytes=1e12, pinned_memory_bytes=(pinned + fetched) / 2
    )
    results = replay(job(), machine, ["pipelined", "interleaved:2"]).results
    assert [result.fits for result in results] == [True, False]


def test_workload_from__refuses_impossible_costs() -> None:
    for key, value in [
        ("norm", "gpu"),
        ("norm", True),
        ("collective_bytes", {"update": {"h2d": 1}}),
        ("collective_bytes", {"forward": {"h2d": -1}}),
        ("collective_bytes", [1]),
        ("gpu_slack_bytes", -1),
        ("gpu_slack_bytes", "all"),
    ]:
        base: dict[str, Any] = {"params": 2e9, "forward_s": 1, "backward_s": 3}
        with pytest.raises(WorkloadError, match=key):
            workload_from(base | {key: value}, "w.json")


def test_optimizer__refuses_to_convert_on_the_gpu() -> None:
    machine = replace(TEST_MACHINE, gpu_cast_params_per_s=8e9)
    parameter = torch.nn.Parameter(torch.ones(64).bfloat16())
    policy = "zero-offload,params=gpu-cast"
    with pytest.raises(EngineError, match="params=pipelined"):
        InterleavedAdamW(
            [parameter], policy=policy, machine=machine, device=EmulatedDevice()
        )
