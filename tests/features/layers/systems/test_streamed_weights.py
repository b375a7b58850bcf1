"""Systems that keep all weights on the host and update there: bytes over the link,
memory and compute."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ebbtide.errors import PolicyError
from ebbtide.interleave.model.schedule import Schedule
from ebbtide.interleave.model.workload import Workload, workload_from
from ebbtide.interleave.policies import make_plan
from ebbtide.interleave.simulation.simulator import simulate
from tests.features.layers.test_policy import FORMS, _workload
from tests.features.layers.test_policy import MACHINE as PLAIN_MACHINE

MACHINE = replace(
    PLAIN_MACHINE, cpu_cast_params_per_s=4e9, h2d_pageable_bytes_per_s=5e9
)
LAYERS, RECOMPUTE_S = 8, FORMS[-1]["recompute_s"]
WEIGHTS, INPUT = 2e9, FORMS[-1]["bytes"]


def _schedule(text: str, **other: Any) -> tuple[Workload, Schedule]:
    workload = _workload(LAYERS, **{"chunks": 2, **other})
    return workload, simulate(make_plan(text, workload, MACHINE), workload, MACHINE)


def _bytes(schedule: Schedule, kind: str) -> float:
    return sum(op.nbytes for op in schedule.plan.ops if op.kind == kind)


def test_megatrain__streams_weights_three_times_for_each_micro_batch() -> None:
    workload, schedule = _schedule("megatrain")
    # Two layers stay in slots between forward and backward, and between micro-batches.
    assert _bytes(schedule, "weights up") == pytest.approx(
        2 * (LAYERS - 2) * 3 * WEIGHTS
    )
    # Gradients of each micro-batch go to the host.
    assert (
        _bytes(schedule, "layer gradient down") + _bytes(schedule, "gradient down")
        == 2 * LAYERS * WEIGHTS
    )
    assert schedule.plan.counts()["update on cpu"] == len(workload.subgroups)
    assert schedule.plan.is_exact
    placed = schedule.workload
    assert placed.compute_s == pytest.approx(
        workload.compute_s + 2 * LAYERS * RECOMPUTE_S
    )


def test_megatrain__sends_gradients_in_their_own_width() -> None:
    _, schedule = _schedule("megatrain", grad_bytes=4)
    assert (
        _bytes(schedule, "layer gradient down")
        == _bytes(schedule, "gradient down")
        == LAYERS * 4e9
    )


def test_megatrain__keeps_the_inputs_of_blocks_and_of_one_block() -> None:
    _, schedule = _schedule("megatrain", chunks=1)
    layers = schedule.plan.layers
    assert layers is not None
    assert sum(saved.nbytes for saved in layers.activations) == (2 + 3) * INPUT
    with pytest.raises(PolicyError, match="one size"):
        _schedule("megatrain", chunks=[0.4, 0.6])


def test_roundpipe__updates_one_iteration_late() -> None:
    workload, schedule = _schedule("roundpipe")
    # All inputs but those in two slots go down and come back, and weights cross twice.
    assert _bytes(schedule, "activation down") == pytest.approx(
        (2 * LAYERS - 2) * INPUT / 2
    )
    assert _bytes(schedule, "weights up") == pytest.approx((LAYERS - 2) * 2 * WEIGHTS)
    assert not schedule.plan.is_exact
    # The CPU needs longer than the GPU, and all the time.
    update_s = workload.params / 2e9
    assert update_s > schedule.workload.compute_s
    assert schedule.iteration_s == pytest.approx(update_s, rel=0.06)


def test_zero3_offload_params__is_zero_offload_with_streamed_weights() -> None:
    for option, form in (("keep", "keep"), ("recompute", "recompute")):
        _, schedule = _schedule(f"zero3-offload-params,activations={option}")
        _, other = _schedule(f"zero-offload,weights=streamed,activations={form}")
        assert schedule.iteration_s == other.iteration_s
        assert schedule.peak_job_bytes() == other.peak_job_bytes()


@pytest.mark.parametrize("text", ["megatrain", "roundpipe", "zero3-offload-params"])
def test_systems__need_layers(text: str) -> None:
    with pytest.raises(PolicyError, match="needs a workload with layers"):
        make_plan(
            text,
            workload_from({"params": 1e9, "forward_s": 1, "backward_s": 2}, "test"),
            MACHINE,
        )
