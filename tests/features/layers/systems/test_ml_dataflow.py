"""The policy `ml-dataflow`: the order in which it streams everything, and what it has
memory for."""

from __future__ import annotations

from typing import Any

import pytest

from ebbtide.errors import PolicyError
from ebbtide.features.layers.systems.ml_dataflow import (
    Slots,
    dataflow_layers,
    dataflow_plan,
    slots_in,
)
from ebbtide.interleave.model.workload import Workload, workload_from
from ebbtide.interleave.policies import make_plan
from ebbtide.interleave.simulation.bound import min_layer_iteration_s
from ebbtide.interleave.simulation.simulator import simulate
from tests.features.layers.test_policy import FORMS, MACHINE

COUNT = 4


def _workload(**other: Any) -> Workload:
    """Return 4 layers of 1 G parameters; with 2 chunks the activations of a layer have
    3 GB, 1.5 GB each."""
    layer = {"params": 1e9, "forward_s": 0.4, "backward_s": 0.8, "forms": FORMS}
    values = {
        "params": 4e9,
        "forward_s": 1.6,
        "backward_s": 3.2,
        "gpu_free_bytes": 12e9,
        "state_bytes": 4,
    }
    return workload_from(
        {**values, "layers": [layer] * COUNT, "chunks": 2, "clipping": False, **other},
        "test",
    )


def test_slots_in__counts_whole_layers_first() -> None:
    # A layer has 2 GB of weights, 2 GB of gradients and 1.5 GB of activations in a
    # round of one chunk.
    assert slots_in(_workload(), 2) == Slots(2, 2, 2)
    assert slots_in(_workload(gpu_free_bytes=13.5e9), 2) == Slots(3, 2, 2)
    assert slots_in(_workload(gpu_free_bytes=15.5e9), 2) == Slots(3, 2, 3)
    assert slots_in(_workload(gpu_free_bytes=1e12), 2) == Slots(4, 4, 4)


def test_ml_dataflow__moves_the_bytes_of_its_schedule() -> None:
    workload = _workload()
    schedule = simulate(make_plan("ml-dataflow", workload, MACHINE), workload, MACHINE)
    layers = schedule.plan.layers
    assert layers is not None
    # A round of one chunk has activations of 1.5 GB, about as large as weights of 2 GB.
    assert (
        layers.rounds,
        layers.weight_slots,
        layers.gradient_slots,
        layers.activation_slots,
    ) == (2, 2, 2, 2)
    counts = schedule.plan.counts()
    # Per round two layers of weights for the forward and for the backward, then two for
    # the update.
    assert counts["weights up"] == 2 * (2 + 2) + 2
    # Gradients go down in each round but those of the first layers before the update,
    # and come up in the second.
    assert (counts["layer gradient down"], counts["gradient down"]) == (4, 2)
    assert (counts["layer gradient up"], counts["gradient up"]) == (4, 2)
    assert counts["activation down"] == counts["activation up"] == 2 * 2
    assert counts["fetch"] == counts["flush"] == 4


def test_ml_dataflow__is_in_order_on_each_resource() -> None:
    workload = _workload()
    schedule = simulate(make_plan("ml-dataflow", workload, MACHINE), workload, MACHINE)
    for resource in ("h2d", "d2h", "gpu"):
        starts = [start for op, start, _ in schedule.items() if op.resource == resource]
        assert starts == sorted(starts)


def test_ml_dataflow__is_not_below_the_bound() -> None:
    workload = _workload()
    for device in (6e9, 12e9, 30e9):
        workload = _workload(gpu_free_bytes=device)
        schedule = simulate(
            make_plan("ml-dataflow", workload, MACHINE), workload, MACHINE
        )
        rounds = schedule.plan.layers.rounds if schedule.plan.layers else 1
        assert min_layer_iteration_s(workload, MACHINE, rounds) <= schedule.iteration_s


def test_dataflow_layers__recomputes_the_first_chunks_of_every_layer() -> None:
    workload = _workload(chunks=8)
    layers = dataflow_layers(workload, 2, Slots(2, 2, 4), [2, 4, 6])
    recomputed = [saved.recompute_s for saved in layers.activations]
    # Of 16 activations in a round the last 4 stay on the device, and 6 of the others
    # keep their input alone.
    assert recomputed[-4:] == [0.0] * 4
    again = [
        index
        for index, seconds in enumerate(recomputed)
        if seconds == pytest.approx(0.1 / 8 * 2)
    ]
    assert again == [0, 1, 4, 5, 8, 9]


def test_dataflow_plan__has_rounds_that_are_alike() -> None:
    times = []
    for rounds in (3, 4, 5):
        forms = [
            {
                key: value if key == "name" else rounds * value
                for key, value in form.items()
            }
            for form in FORMS
        ]
        layer = {
            "params": 1e9,
            "forward_s": 0.1 * rounds,
            "backward_s": 0.2 * rounds,
            "forms": forms,
        }
        sums = {"forward_s": 0.4 * rounds, "backward_s": 0.8 * rounds}
        workload = _workload(chunks=rounds, layers=[layer] * COUNT, **sums)
        layers = dataflow_layers(workload, rounds, Slots(2, 2, 2), [0, 1, 1])
        times.append(
            simulate(
                dataflow_plan("ml-dataflow", workload, layers), workload, MACHINE
            ).iteration_s
        )
    assert times[2] - times[1] == pytest.approx(times[1] - times[0], rel=1e-6)


def test_ml_dataflow__needs_layers() -> None:
    with pytest.raises(PolicyError, match="needs a workload with layers"):
        make_plan("ml-dataflow", _workload(layers=None), MACHINE)
    with pytest.raises(PolicyError, match="whole layers"):
        make_plan("ml-dataflow", _workload(subgroup_params=1e8), MACHINE)
