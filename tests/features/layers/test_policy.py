"""Plans that move weights and activations of layers beside the optimizer's state."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace
from typing import Any

import pytest

from ebbtide.errors import PlanError, PolicyError, WorkloadError
from ebbtide.features.layers import layer_choice
from ebbtide.features.layers.layer_choice import (
    Cost,
    LayerChoice,
    LayerSearch,
    cost_of,
    plan_of_choice,
)
from ebbtide.features.layers.model import (
    ACTIVATION_KINDS,
    SLOTS,
    LayerPlan,
    SavedActivation,
    place,
)
from ebbtide.interleave.model.operations import FORWARD
from ebbtide.interleave.model.workload import Workload, workload_from
from ebbtide.interleave.policies import make_plan
from ebbtide.interleave.simulation.bound import bound, min_layer_iteration_s
from ebbtide.interleave.simulation.simulator import simulate, simulate_steps
from ebbtide.machines.machine import Machine
from tests.conftest import slow_case

MACHINE = Machine(
    name="test",
    h2d_bytes_per_s=10e9,
    d2h_bytes_per_s=10e9,
    host_memory_bytes_per_s=200e9,
    cpu_update_params_per_s=2e9,
    gpu_update_params_per_s=50e9,
)
FORMS: list[dict[str, Any]] = [
    {"name": "full", "bytes": 3e9, "recompute_s": 0},
    {"name": "input and attention", "bytes": 1e9, "recompute_s": 0.06},
    {"name": "input", "bytes": 2e8, "recompute_s": 0.1},
]


def _values(count: int = 3, chunks: int = 2, **other: Any) -> dict[str, Any]:
    layer = {"params": 1e9, "forward_s": 0.1, "backward_s": 0.2, "forms": FORMS}
    values = {
        "params": count * 1e9,
        "forward_s": 0.1 * count,
        "backward_s": 0.2 * count,
        "gpu_free_bytes": 1e11,
    }
    return {
        **values,
        "subgroup_params": 1e9,
        "layers": [layer] * count,
        "chunks": chunks,
        **other,
    }


def _workload(count: int = 3, chunks: int = 2, **other: Any) -> Workload:
    return workload_from(_values(count, chunks, **other), "test")


def _random_workload(source: random.Random, count: int = 3) -> Workload:
    layers = []
    for _ in range(count):
        forward_s, size = source.uniform(0.02, 0.2), source.uniform(0.5, 4) * 1e9
        forms = [{"name": "full", "bytes": size, "recompute_s": 0}]
        forms.append(
            {
                "name": "input",
                "bytes": size * source.uniform(0.02, 0.2),
                "recompute_s": forward_s,
            }
        )
        params = source.uniform(0.2, 1) * 1e9
        layers.append(
            {
                "params": round(params),
                "forward_s": forward_s,
                "backward_s": 2 * forward_s,
                "forms": forms,
            }
        )
    sums = {
        key: sum(layer[key] for layer in layers)
        for key in ("params", "forward_s", "backward_s")
    }
    activations = sum(layer["forms"][0]["bytes"] for layer in layers)
    free = source.uniform(0.25, 1.1) * (2 * sums["params"] + activations) + 2e9
    other = {
        "gpu_free_bytes": free,
        "layers": layers,
        "chunks": source.randint(1, 2),
        "subgroup_params": 2e8,
    }
    return workload_from({**sums, **other}, "random")


def test_layers__of_a_file_are_checked() -> None:
    layer = _values()["layers"][0]
    for change, text in (
        ({"layers": 3}, "layers is 3; it must be a list of"),
        ({"layers": [{"params": 1}]}, "has no forward_s"),
        ({"layers": [{**layer, "forms": None}]}, "must have activation_bytes"),
        ({"layers": [{**layer, "params": 1e10}]}, "params of layers add up to 1e.10"),
        ({"layers": [{**layer, "backward_s": 9}]}, "backward_s of layers add up to 9"),
        (
            {"layers": [{**layer, "forms": FORMS[::-1]}]},
            "the first form of layer 0 must have all",
        ),
        ({"chunks": 0}, "chunks is 0; it must be a whole number"),
        ({"layers": [{**layer, "params": 0}]}, "must have params, or frozen_bytes"),
    ):
        with pytest.raises(WorkloadError, match=text):
            workload_from(_values(**change), "test")


def test_as_json__of_layers_is_read_again() -> None:
    workload = _workload()
    assert workload_from(workload.as_json(), "test") == replace(
        workload, sizes=workload.sizes
    )
    assert (
        "layers" not in workload_from({**_values(), "layers": None}, "test").as_json()
    )


def test_make_plan__refuses_options_on_layers_without_layers() -> None:
    with pytest.raises(PolicyError, match="weights is for workloads with layers"):
        make_plan("pipelined,weights=streamed", _workload(layers=None), MACHINE)
    with pytest.raises(PolicyError, match="needs layers with recompute_s"):
        make_plan(
            "pipelined,activations=recompute",
            _workload(layers=[{**_values()["layers"][0], "forms": FORMS[:1]}]),
            MACHINE,
        )


def test_simulate__waits_for_streamed_weights() -> None:
    """Weights of 2 GB take 0.2 s, and compute of a layer 0.1 s: the third layer is
    there 0.2 s after the first."""
    workload = _workload()
    schedule = simulate(
        make_plan("gpu-only,weights=streamed", workload, MACHINE), workload, MACHINE
    )
    assert schedule.forward_s == pytest.approx(0.4)
    # The last two layers are on the device at the turn; the first comes from when the
    # third is done: 0.2 + 0.2 + 0.2.
    assert schedule.backward_s == pytest.approx(0.6)
    moved = [op.nbytes for op in schedule.plan.ops if op.kind == "weights up"]
    assert moved == [2e9, 2e9]


@pytest.mark.parametrize(
    ("count", "layers"), [(1, {7}), (2, {3, 7}), (3, {2, 5, 7}), (8, {*range(8)})]
)
def test_make_plan__streams_a_number_of_layers_that_are_evenly_spread(
    count: int, layers: set[int]
) -> None:
    workload = _workload(8)
    for activations in ("keep", "auto"):
        text = f"gpu-only,weights=streamed:{count},activations={activations}"
        plan = make_plan(text, workload, MACHINE)
        assert plan.layers is not None
        assert plan.layers.streamed == layers
        assert plan.policy == text


def test_make_plan__refuses_to_stream_more_layers_than_there_are() -> None:
    with pytest.raises(PolicyError, match=r"weights=streamed:9: test has 8 layers"):
        make_plan("gpu-only,weights=streamed:9", _workload(8), MACHINE)
    with pytest.raises(
        PolicyError, match=r"weights is one of resident, streamed, streamed:K, auto"
    ):
        make_plan("gpu-only,weights=streamed:K", _workload(8), MACHINE)


def test_streamed_weights__leave_parameters_outside_of_layers_on_the_device() -> None:
    """Two of eight layers of 2 GB stay for the next forward; 3 GB are outside of them,
    in two subgroups."""
    workload = _workload(8, params=9.5e9)
    for policy, gigabytes in (
        # Both passes copy what has no slot; updated parameters are uploaded where they
        # do not come with that.
        ("pipelined", {"h2d": 2 * (6 + 6) + 2 * 2 + 3, "d2h": 2 * 9.5}),
        # Updated weights of layers are copied to the host.
        ("gpu-only", {"h2d": 2 * (6 + 6), "d2h": 8 * 2}),
    ):
        ops = make_plan(f"{policy},weights=streamed", workload, MACHINE).ops
        assert {
            key: sum(op.nbytes for op in ops if op.resource == key) / 1e9
            for key in gigabytes
        } == gigabytes


def test_simulate__waits_for_offloaded_activations() -> None:
    """Chunks of 1.5 GB take 0.15 s down and up, and compute of one 0.05 s; the last two
    of six stay in their slots."""
    workload = _workload()
    schedule = simulate(
        make_plan("gpu-only,activations=offload", workload, MACHINE), workload, MACHINE
    )
    assert (
        schedule.moved_bytes("d2h")
        == schedule.moved_bytes("h2d")
        == pytest.approx(4 * 1.5e9)
    )
    # Copies of four begin when the first chunk is done; the last one waits for the slot
    # of the fourth.
    assert schedule.forward_s == pytest.approx(0.05 + 4 * 0.15 + 0.05)
    assert schedule.backward_s == pytest.approx(0.1 + 4 * 0.15 + 0.1)


def test_simulate__recomputes_in_the_backward() -> None:
    workload = _workload()
    schedule = simulate(
        make_plan("gpu-only,activations=recompute", workload, MACHINE),
        workload,
        MACHINE,
    )
    assert (schedule.forward_s, schedule.backward_s) == (
        pytest.approx(0.3),
        pytest.approx(0.9),
    )


def test_peak_job_bytes__has_layers_and_state() -> None:
    workload = _workload()
    kept = simulate(make_plan("gpu-only", workload, MACHINE), workload, MACHINE)
    # Weights and state of 3 G parameters, all activations, two slots of gradients, and
    # the first gradient that is kept.
    assert kept.peak_job_bytes() == pytest.approx(
        3e9 * (2 + 12) + 3 * 3e9 + 2 * 2e9 + 2e9
    )
    again = simulate(
        make_plan("pipelined,activations=recompute", workload, MACHINE),
        workload,
        MACHINE,
    )
    # Inputs of three layers, and the rest of one chunk while it is computed again.
    assert again.peak_job_bytes() == pytest.approx(
        3 * 2e9 + 2 * 2e9 + 3 * 2e8 + (3e9 - 2e8) / 2, rel=0.01
    )


def test_validate__rejects_plans_without_a_copy() -> None:
    workload = _workload()
    plan = make_plan("gpu-only,weights=streamed,activations=offload", workload, MACHINE)
    assert plan.layers is not None
    placed = place(workload, plan.layers)
    last = {
        kind: max(i for i, op in enumerate(plan.ops) if op.kind == kind)
        for kind in ("weights up", "activation up")
    }
    for index, text in (
        (last["weights up"], "not on the device"),
        (last["activation up"], "once each"),
    ):
        ops = list(plan.ops)
        ops[index] = ops[index]._replace(kind="layer gradient up")
        with pytest.raises(PlanError, match=text):
            replace(plan, ops=tuple(ops)).validate(placed)
    ops = list(plan.ops)
    ops[last["weights up"]] = ops[last["weights up"]]._replace(holds=None)
    with pytest.raises(PlanError, match="does not wait for weights"):
        replace(plan, ops=tuple(ops)).validate(placed)
    for kind, change, text in (
        (
            "activation up",
            {"holds": None},
            "activation 0 does not come back from the host in time",
        ),
        (
            "activation up",
            {"after": ()},
            "activation up of subgroup 0 does not wait for activation down of "
            "subgroup 0",
        ),
        ("activation down", {"start": FORWARD}, "is copied before it is computed"),
        (
            "activation down",
            {"tag": 99},
            "activation up of subgroup 1 finds no activation 3@host",
        ),
    ):
        index = max(index for index, op in enumerate(plan.ops) if op.kind == kind)
        changed = plan.ops[index]._replace(**change)
        with pytest.raises(PlanError, match=text):
            replace(
                plan, ops=(*plan.ops[:index], changed, *plan.ops[index + 1 :])
            ).validate(placed)


def _cost(text: str, workload: Workload) -> Cost:
    return cost_of(
        simulate_steps(make_plan(text, workload, MACHINE), workload, MACHINE), None
    )


def _best_cost(workload: Workload) -> Cost:
    """Return the lowest cost of all choices. Those are left out that lack memory
    whatever the plan, and those whose compute, copies within a phase and updates alone
    take as long as the best one."""
    count = len(workload.layers)
    choices = [
        LayerChoice(weights, forms, *slots)
        for weights in itertools.product((False, True), repeat=count)
        for forms in itertools.product((-2, -1, 0, 1), repeat=count)
        for slots in itertools.product(
            range(1, 1 + max(1, min(SLOTS, sum(weights)))),
            range(
                1,
                1
                + max(
                    1,
                    min(
                        SLOTS,
                        len(workload.chunk_shares) * sum(form < 0 for form in forms),
                    ),
                ),
            ),
        )
    ]
    best = (math.inf, 0.0, math.inf, 0.0)
    for least_s, choice in sorted(
        (_least_s(choice, workload), choice) for choice in choices
    ):
        if (best[0] or least_s < best[2]) and not place(
            workload, choice.plan(workload)
        ).missing_bytes:
            best = min(best, plan_of_choice(choice, workload, MACHINE, _pipelined).cost)
    return best


def _least_s(choice: LayerChoice, workload: Workload) -> float:
    """Return the seconds that compute, the copies of each phase and the updates take at
    least with a choice."""
    chunks, rate = len(workload.chunk_shares), MACHINE.h2d_bytes_per_s or math.inf
    forms = [
        layer.forms[form if form >= 0 else ~form]
        for layer, form in zip(workload.layers, choice.forms, strict=True)
    ]
    weights = [
        2.0 * layer.params
        for layer, streamed in zip(workload.layers, choice.streamed, strict=True)
        if streamed
    ]
    offloaded = [
        form.nbytes / chunks
        for form, one in zip(forms, choice.forms, strict=True)
        if one < 0
        for _ in range(chunks)
    ]
    copied = sum(offloaded[: max(0, len(offloaded) - choice.activation_slots)])
    slots = choice.weight_slots
    forward_s = max(workload.forward_s, sum(weights[slots:]) / rate, copied / rate)
    recompute_s = sum(form.recompute_s for form in forms)
    backward_s = max(
        workload.backward_s + recompute_s,
        (sum(weights[: max(0, len(weights) - slots)]) + copied) / rate,
    )
    return (
        forward_s
        + backward_s
        + workload.params / (MACHINE.cpu_update_params_per_s or math.inf)
    )


def _pipelined(placed: Workload, late: bool) -> Any:
    return make_plan("pipelined", placed, MACHINE)


def compare_with_all_choices(count: int, seed: int, layers: int = 3) -> list[float]:
    """Return by how much longer the iteration of auto is than that of the best choice,
    of random jobs that fit."""
    source, losses = random.Random(seed), []
    for _ in range(count):
        workload = _random_workload(source, layers)
        best = _best_cost(workload)
        if not best[0]:
            result = _cost("pipelined,weights=auto,activations=auto", workload)
            losses.append(result[2] / best[2] - 1 if not result[0] else 1.0)
    return losses


@pytest.mark.parametrize("count", [1, slow_case(2)])
def test_auto__is_near_the_best_choice_of_small_jobs(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layer_choice, "_EXACT_CHOICES", 0)
    losses = compare_with_all_choices(count, seed=1)
    assert losses
    assert max(losses) <= 0.05


@pytest.mark.parametrize("jobs", [2, slow_case(5)])
def test_auto__is_never_worse_than_a_single_choice(jobs: int) -> None:
    source = random.Random(3)
    for _ in range(jobs):
        workload = _random_workload(source)
        best = _cost("interleaved:2,weights=auto,activations=auto", workload)
        for weights, kind in itertools.product(
            ("resident", "streamed"), ACTIVATION_KINDS
        ):
            assert best <= _cost(
                f"interleaved:2,weights={weights},activations={kind}", workload
            )


def test_bound__is_below_random_plans() -> None:
    source = random.Random(4)
    for _ in range(12):
        workload = _random_workload(source)
        least_s = bound(workload, MACHINE).iteration_s
        search = LayerSearch(
            workload, MACHINE, {"weights": "auto", "activations": "auto"}
        )
        count = len(workload.layers)
        for policy in ("pipelined", "gpu-only", "interleaved:2"):
            weights = tuple(source.random() < 0.5 for _ in range(count))
            forms = tuple(source.randint(~1, 1) for _ in range(count))
            choice = LayerChoice(
                weights, forms, source.randint(1, 3), source.randint(1, 3)
            )
            cost, _ = plan_of_choice(
                choice,
                workload,
                MACHINE,
                lambda placed, _, policy=policy: make_plan(policy, placed, MACHINE),
            )
            assert cost[0] or least_s <= cost[2]
            # No choice is left out that has such a plan.
            assert search.may_be_better(
                choice, (*cost[:2], cost[2] * (1 + 1e-9), cost[3])
            )


def test_min_layer_iteration_s__is_the_link_where_nothing_fits() -> None:
    """Weights of 6 GB cross twice but for those that 1 GB holds, and no state fits."""
    workload = _workload(gpu_free_bytes=1e9, clipping=False)
    slow = replace(MACHINE, h2d_bytes_per_s=1e9)
    # Inputs of activations, 0.6 GB, are in memory at the turn or cross the link.
    assert min_layer_iteration_s(workload, slow) == pytest.approx(
        (6 - 1) + (6 - 1 + 0.6), rel=0.01
    )


def test_place__counts_rounds_into_the_forward() -> None:
    workload = _workload()
    plan = LayerPlan(frozenset(), (SavedActivation(0.5e9, 0.06),) * 3, rounds=2)
    placed = place(workload, plan)
    assert placed.compute_s == pytest.approx(workload.compute_s + 3 * 0.06)
    assert placed.backward_s == pytest.approx((0.6 + 0.18) / 2)


def _frozen(count: int = 8, **other: Any) -> Workload:
    """Return a workload of layers of 2 GB each, and 8 MB of adapters."""
    layer = {"params": 4e6, "frozen_bytes": 2e9, "forward_s": 0.1, "backward_s": 0.2}
    values = {
        "params": 4e6 * count,
        "forward_s": 0.1 * count,
        "backward_s": 0.2 * count,
        "gpu_free_bytes": 1e11,
        "layers": [{**layer, "activation_bytes": 1e8}] * count,
        "clipping": False,
    }
    return workload_from({**values, **other}, "frozen")


def _peak_of_layers(plan: Any, workload: Workload) -> float:
    return max(one.total for one in place(workload, plan.layers).layer_memory)


def test_streamed_weights__of_frozen_layers_go_up_only() -> None:
    workload = _frozen()
    all_on_device = _peak_of_layers(make_plan("gpu-only", workload, MACHINE), workload)
    for count in (2, 5, 8):
        policy = f"gpu-only,weights=streamed:{count}"
        plan = make_plan(policy, workload, MACHINE)
        ups = [op for op in plan.ops if op.resource == "h2d"]
        assert {op.kind for op in ups} <= {"weights up"}
        assert sum(op.nbytes for op in ups) == 2 * (count - SLOTS) * 2e9
        assert not any(op.resource == "d2h" for op in plan.ops)
        saved = all_on_device - _peak_of_layers(plan, workload)
        assert saved == pytest.approx((count - SLOTS) * 2e9)


def test_streamed_weights__of_layers_without_trained_params() -> None:
    """Adapters may be in modules of their own, as kohya's are."""
    layer = {"params": 0, "frozen_bytes": 2e9, "forward_s": 0.1, "backward_s": 0.2}
    workload = _frozen(layers=[{**layer, "activation_bytes": 1e8}] * 8)
    plan = make_plan("adaptive,weights=auto", workload, MACHINE)
    assert sum(workload.subgroups) == workload.params
    steps = simulate_steps(plan, place(workload, plan.layers), MACHINE)
    assert bound(workload, MACHINE).iteration_s <= steps.rating_s * (1 + 1e-9)


def test_streamed_weights__mostly_trained_layers_move_whole() -> None:
    layer = {"params": 2e9, "frozen_bytes": 1e9, "forward_s": 0.1, "backward_s": 0.2}
    layers = [{**layer, "activation_bytes": 1e8}] * 8
    workload = _frozen(layers=layers, params=16e9, gpu_free_bytes=1e12)
    plan = make_plan("gpu-only,weights=streamed", workload, MACHINE)
    ups = [op.nbytes for op in plan.ops if op.kind == "weights up"]
    assert set(ups) == {2 * 2e9 + 1e9}
    downs = [op.nbytes for op in plan.ops if op.resource == "d2h"]
    assert set(downs) == {2 * 2e9}


def test_bound__is_below_plans_of_frozen_layers() -> None:
    source = random.Random(5)
    for _ in range(6):
        free = source.uniform(5e9, 2e10)
        slow = replace(MACHINE, h2d_bytes_per_s=source.uniform(2e9, 2e10))
        workload = _frozen(gpu_free_bytes=free)
        plan = make_plan("gpu-only,weights=auto", workload, slow)
        steps = simulate_steps(plan, place(workload, plan.layers), slow)
        fits = not place(workload, plan.layers).missing_bytes
        assert not fits or bound(workload, slow).iteration_s <= steps.rating_s * (
            1 + 1e-9
        )
