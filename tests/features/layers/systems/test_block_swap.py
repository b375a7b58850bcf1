"""Block swap of frozen layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ebbtide.errors import PolicyError
from ebbtide.features.layers.model import place
from ebbtide.interleave.model.plan import Plan
from ebbtide.interleave.model.workload import Workload, workload_from
from ebbtide.interleave.policies import make_plan
from ebbtide.interleave.simulation.simulator import simulate
from ebbtide.machines.machine import Machine

LAYERS, LAYER_BYTES = 10, 2e9
# A copy of a layer takes 0.2 s, as a forward of a layer with its part of the backward.
MACHINE = Machine(
    name="test",
    h2d_bytes_per_s=10e9,
    d2h_bytes_per_s=10e9,
    h2d_pageable_bytes_per_s=5e9,
    d2h_pageable_bytes_per_s=5e9,
    host_memory_bytes_per_s=200e9,
    gpu_update_params_per_s=50e9,
)


def _workload(forward_s: float = 1.0, **other: Any) -> Workload:
    layer = {
        "params": 4e6,
        "frozen_bytes": LAYER_BYTES,
        "forward_s": forward_s,
        "backward_s": 2 * forward_s,
        "activation_bytes": 1e8,
    }
    values = {
        "params": 4e6 * LAYERS,
        "forward_s": LAYERS * forward_s,
        "backward_s": 2 * LAYERS * forward_s,
        "gpu_free_bytes": 1e11,
        "layers": [layer] * LAYERS,
        "clipping": False,
    }
    return workload_from({**values, **other}, "test")


def _peak_bytes(plan: Plan, workload: Workload) -> float:
    return max(one.total for one in place(workload, plan.layers).layer_memory)


def _bytes(plan: Plan, resource: str) -> float:
    return sum(op.nbytes for op in plan.ops if op.resource == resource)


def _iteration_s(policy: str, workload: Workload, machine: Machine = MACHINE) -> float:
    plan = make_plan(policy, workload, machine)
    return simulate(plan, place(workload, plan.layers), machine).iteration_s


@pytest.mark.parametrize("swapped", [1, 4, 8])
def test_block_swap__exchanges_layers_in_both_passes(swapped: int) -> None:
    workload = _workload()
    plan = make_plan(f"block-swap:{swapped}", workload, MACHINE)
    moved = 2 * swapped * LAYER_BYTES
    assert (_bytes(plan, "h2d"), _bytes(plan, "d2h")) == (moved, moved)
    all_bytes = _peak_bytes(make_plan("block-swap:0", workload, MACHINE), workload)
    saved = all_bytes - _peak_bytes(plan, workload)
    assert saved == pytest.approx(swapped * LAYER_BYTES)
    assert plan.layers is not None
    assert plan.layers.host_bytes(workload) == swapped * LAYER_BYTES
    assert plan.layers.counts(1)[0]["streamed"] == swapped


@pytest.mark.parametrize("swapped", [3, 6, 10])
def test_block_swap__up_only_takes_two_buffers(swapped: int) -> None:
    workload = _workload()
    plan = make_plan(f"block-swap:{swapped},down=no", workload, MACHINE)
    assert _bytes(plan, "h2d") == 2 * (swapped - 2) * LAYER_BYTES
    assert _bytes(plan, "d2h") == 0
    all_bytes = _peak_bytes(make_plan("block-swap:0", workload, MACHINE), workload)
    saved = all_bytes - _peak_bytes(plan, workload)
    assert saved == pytest.approx((swapped - 2) * LAYER_BYTES)


def test_block_swap__is_hidden_by_compute_or_limited_by_the_link() -> None:
    """Copies of one direction at a time take 0.4 s a layer, up only 0.2 s."""
    hidden = _workload(1.0)
    assert _iteration_s("block-swap:4", hidden) == pytest.approx(
        _iteration_s("block-swap:0", hidden), rel=1e-3
    )
    shown = _workload(1e-3)
    for policy, seconds in (
        ("block-swap:8", 2 * 8 * 0.4),
        ("block-swap:8,memory=pageable", 2 * 8 * 0.8),
        ("block-swap:10,down=no", 2 * 8 * 0.2),
    ):
        assert _iteration_s(policy, shown) == pytest.approx(seconds, rel=0.02)


@pytest.mark.parametrize("down", ["yes", "no"])
def test_block_swap__auto_swaps_as_few_as_fit(down: str) -> None:
    workload = _workload(gpu_free_bytes=11.5e9)
    plan = make_plan(f"block-swap:auto,down={down}", workload, MACHINE)
    count = int(plan.remark.split()[1])
    for swapped, fits in ((count, True), (count - 1, False)):
        fixed = make_plan(f"block-swap:{swapped},down={down}", workload, MACHINE)
        placed = place(workload, fixed.layers)
        schedule = simulate(fixed, placed, MACHINE)
        is_enough = not placed.missing_bytes and schedule.fits_device(None)
        assert bool(is_enough) is fits


def test_block_swap__counts_quantized_weights_by_their_bytes() -> None:
    whole = _workload()
    layers = [one._replace(frozen_bytes=LAYER_BYTES / 2) for one in whole.layers]
    half = replace(whole, layers=tuple(layers))
    plan = make_plan("block-swap:4", half, MACHINE)
    assert _bytes(plan, "h2d") == 2 * 4 * LAYER_BYTES / 2


@pytest.mark.parametrize(
    ("policy", "change", "message"),
    [
        ("block-swap:4", {"layers": None}, "layers whose weights are frozen"),
        ("block-swap:9", {}, "block-swap:9"),
        ("block-swap:x", {}, "block-swap:x"),
    ],
)
def test_block_swap__refuses_what_it_cannot_swap(
    policy: str, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(PolicyError, match=message):
        make_plan(policy, _workload(**change), MACHINE)
