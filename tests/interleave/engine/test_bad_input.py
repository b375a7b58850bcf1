"""Invalid input of InterleavedAdamW: each error is one clear line, and no thread stays
behind."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import pytest
import torch
from torch import nn

from ebbtide.errors import UserError
from ebbtide.interleave.engine.devices.emulated import EmulatedDevice
from ebbtide.interleave.engine.errors import EngineError
from ebbtide.interleave.engine.interleaved_adamw import InterleavedAdamW
from ebbtide.machines.machine import Machine
from tests.interleave.engine.jobs import closing
from tests.interleave.engine.training import MACHINE, Job, maker
from tests.interleave.engine.twins import no_thread_left

make = maker("interleaved:2", "kept")


def values(*shape: int, **options: Any) -> nn.Parameter:
    return nn.Parameter(torch.zeros(*shape, **options))


def frozen() -> list[nn.Parameter]:
    return [values(8).requires_grad_(False)]


INVALID_ARGUMENTS = [
    (lambda: make([values(8), values(8, device="meta")]), r"2 devices \(cpu, meta\)"),
    (lambda: make([values(8, device="meta")]), "kind meta"),
    (lambda: make([values(8, dtype=torch.float64)]), "float64"),
    (lambda: make([values(8, dtype=torch.complex64)]), "complex64"),
    (lambda: make([nn.Parameter(torch.zeros(8, 4)[:, ::2])]), "without gaps"),
    (lambda: make(frozen()), "no parameter that is not frozen"),
    (lambda: maker("nothing", "kept")([values(8)]), "nothing"),
    (lambda: maker("interleaved:many", "kept")([values(8)]), "interleaved"),
    (lambda: maker("twin-flow:2", "kept")([values(8)]), "twin-flow"),
    (
        lambda: maker("gpu-only", "kept", memory_budget=1000)([values(150)]),
        "1.17 KiB.*1000 bytes",
    ),
    (
        lambda: maker("gpu-only", "kept", device=EmulatedDevice(1000))([values(150)]),
        "1000",
    ),
    (
        lambda: maker("adaptive", "kept", machine=Machine(name="m"))([values(100)]),
        "machine m has no",
    ),
    (
        lambda: make([values(8)], memory_budget=4),
        "memory_budget is 4 bytes: for 4 GB it must be 4e9",
    ),
    (lambda: make([values(8)], lr=-1e-3), "lr"),
    (lambda: make([values(8)], lr=float("nan")), "lr"),
    (lambda: make([values(8)], lr="fast"), "lr"),
    (lambda: make([values(8)], lr="3e-4"), "lr is '3e-4': it must be a number"),
    (lambda: make([values(8)], machine="rtx40"), "did you mean rtx4060"),
    (lambda: make([values(8)], device="meta"), "kind meta"),
    (lambda: make([values(8)], eps=-1), "eps"),
    (lambda: make([values(8)], weight_decay=-1), "weight_decay"),
    (lambda: make([values(8)], betas=(0.9, 1.0)), "betas"),
    (lambda: make([values(8)], betas=0.9), "betas"),
    (lambda: make([{"params": [values(8)], "lr": -1}]), "lr"),
    (lambda: make([{"params": [values(8)], "amsgrad": True}]), "amsgrad"),
    (lambda: make([{"params": [values(8)], "maximize": True}]), "maximize"),
    (lambda: make([values(8)], amsgrad=True), "amsgrad is not supported: leave it off"),
    (
        lambda: make([values(8)], differentiable=True),
        "differentiable is not supported: leave it off",
    ),
    (
        lambda: make([values(8)], fuse=True),
        "fuse is no hyperparameter of adamw: these are lr",
    ),
    (lambda: make([values(8)], subgroup_params=0), "subgroup_params"),
    (lambda: make([values(8)], threads=0), "threads"),
    (lambda: make([values(8)], threads=-1), "threads"),
    (lambda: make([values(8)], max_grad_norm=0.0), "max_grad_norm"),
    (lambda: make([values(8)], max_grad_norm=float("nan")), "max_grad_norm"),
    (lambda: make([values(8)], loss_scale="static"), "loss_scale"),
    (lambda: make([values(8)], loss_scale=0.0), "loss_scale"),
    (lambda: make([values(8)], loss_scale=float("inf")), "loss_scale"),
    (lambda: make([values(8)], loss_scale=True), "loss_scale"),
    (lambda: maker("interleaved:2", "lost")([values(8)]), "gradients"),
    (lambda: make([values(8)], memory_budget=-1.0), "memory_budget"),
    (lambda: make([values(8)], memory_budget=float("nan")), "memory_budget"),
    (lambda: make([values(8)], memory_budget="much"), "memory_budget"),
    (
        lambda: make([values(8)], memory_budget={"forward": 1e6, "update": 1e6}),
        "memory_budget.*backward",
    ),
    (
        lambda: make(
            [values(8)], memory_budget={"forward": 1e6, "backward": -1, "update": 1e6}
        ),
        "memory_budget",
    ),
]


def test_init__refuses_invalid_arguments_with_one_line() -> None:
    for build, message in INVALID_ARGUMENTS:
        with no_thread_left():
            with pytest.raises(UserError, match=message) as error:
                build()
            assert "\n" not in str(error.value)


def with_gradient(optimizer: InterleavedAdamW, gradient: torch.Tensor) -> None:
    param = optimizer.param_groups[0]["params"][0]
    param.grad = gradient
    optimizer.step()


@pytest.mark.parametrize(
    ("do", "message"),
    [
        (copy.deepcopy, "copied or pickled"),
        (pickle.dumps, "copied or pickled"),
        (
            lambda optimizer: with_gradient(optimizer, torch.eye(8).to_sparse()),
            "sparse",
        ),
        (
            lambda optimizer: with_gradient(optimizer, torch.full((8, 8), torch.nan)),
            "not a number",
        ),
        (
            lambda optimizer: with_gradient(optimizer, torch.full((8, 8), torch.inf)),
            "infinite",
        ),
        (
            lambda optimizer: optimizer.add_param_group(
                {"params": [values(8)], "lr": -1}
            ),
            "lr",
        ),
        (
            lambda optimizer: optimizer.add_param_group(
                {"params": [values(8, device="meta")]}
            ),
            "2 devices",
        ),
        (
            lambda optimizer: optimizer.add_param_group(
                {"params": [values(8, dtype=torch.float64)]}
            ),
            "float64",
        ),
    ],
)
def test_refused_calls__change_nothing(
    do: Callable[[InterleavedAdamW], object], message: str
) -> None:
    weight, other = values(8, 8), values(8)
    with (
        no_thread_left(),
        closing(make([weight, other], max_grad_norm=1.0)) as optimizer,
    ):
        other.grad = torch.full((8,), 100.0)
        with pytest.raises(EngineError, match=message) as error:
            do(optimizer)
        assert "\n" not in str(error.value)
        assert len(optimizer.param_groups) == 1
        assert not weight.any()
        # The refused gradient does not count in a later norm either.
        optimizer.zero_grad()
        weight.grad = torch.full((8, 8), 1e-3)
        optimizer.step()
        assert optimizer.state_dict()["state"][0]["exp_avg"][0, 0] == torch.tensor(
            1e-3
        ) * torch.tensor(0.1)


def backward_and_step(embedding: nn.Embedding, optimizer: InterleavedAdamW) -> None:
    embedding(torch.tensor([1, 2])).sum().backward()
    optimizer.step()


def test_streamed__refuses_sparse_gradients() -> None:
    embedding = nn.Embedding(16, 4, sparse=True)
    with (
        no_thread_left(),
        closing(
            maker("interleaved:2", "streamed")(embedding.parameters())
        ) as optimizer,
    ):
        for _ in range(3):
            embedding.zero_grad()
            # At first the step refuses it, later the backward, which offloads it.
            with pytest.raises(EngineError, match="sparse"):
                backward_and_step(embedding, optimizer)


@pytest.mark.parametrize("mode", ["kept", "streamed"])
def test_close__refuses_later_calls(mode: str) -> None:
    job = Job()
    with no_thread_left():
        optimizer = maker("interleaved:2", mode)(job.net.parameters())
        for _ in range(3):
            job.step(optimizer)
        state = optimizer.state_dict()
        optimizer.close()
        optimizer.close()
        # Backwards of the job still work.
        job.net.zero_grad()
        job.loss().backward()
        assert torch.isfinite(job.net.first.weight.grad).all()
        group = {"params": [values(8)]}
        for call in (
            optimizer.step,
            optimizer.state_dict,
            lambda: optimizer.load_state_dict(state),
            lambda: optimizer.add_param_group(group),
            lambda: optimizer.plan,
        ):
            with pytest.raises(EngineError, match="closed"):
                call()
        assert len(optimizer.param_groups) == 1
        assert optimizer.last_schedule is None


def test_adaptive__uses_the_cpu_if_the_device_has_no_memory() -> None:
    job = Job()
    device = EmulatedDevice(0)
    with closing(
        maker("adaptive", "kept", device=device, machine=MACHINE)(job.net.parameters())
    ) as optimizer:
        for _ in range(4):
            job.step(optimizer)
    assert device.peak_bytes == 0


@pytest.mark.parametrize("gradients", ["kept", "streamed"])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("lr", math.nan),
        ("lr", -1.0),
        ("lr", math.inf),
        ("betas", (1.0, 0.999)),
        ("eps", -1.0),
        ("weight_decay", math.nan),
        ("maximize", True),
        ("amsgrad", True),
    ],
)
def test_step__refuses_settings_that_were_changed_and_goes_on_with_those_before(
    name: str, value: object, gradients: Literal["kept", "streamed"]
) -> None:
    results = []
    for is_changed in (False, True):
        model = torch.nn.Linear(3, 3)
        torch.nn.init.ones_(model.weight)
        torch.nn.init.ones_(model.bias)
        optimizer = InterleavedAdamW(
            model.parameters(), policy="interleaved:2", gradients=gradients
        )
        for step in range(4):
            model(torch.full((2, 3), 1.0 + step)).square().sum().backward()
            if is_changed and step == 2:
                group = optimizer.param_groups[0]
                before = group.get(name)
                group[name] = value
                with pytest.raises(EngineError, match=name):
                    optimizer.step()
                group[name] = before
            optimizer.step()
            optimizer.zero_grad()
        results.append([param.detach().clone() for param in model.parameters()])
        optimizer.close()
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("gradients", ["kept", "streamed"])
def test_step__refuses_a_removed_group_and_goes_on_when_it_is_back(
    gradients: Literal["kept", "streamed"],
) -> None:
    results = []
    for is_removed in (False, True):
        params = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
        groups = [{"params": [param]} for param in params]
        optimizer = InterleavedAdamW(
            groups,
            policy="pipelined,overlap=auto",
            gradients=gradients,
            machine=MACHINE,
        )
        for step in range(4):
            if is_removed and step == 2:
                removed = optimizer.param_groups.pop()
            ((params[0] + 2 * params[1]) ** 2).sum().backward()
            if is_removed and step == 2:
                for call in (
                    optimizer.step,
                    optimizer.state_dict,
                    partial(optimizer.load_state_dict, {}),
                ):
                    with pytest.raises(
                        EngineError,
                        match="1 parameters of this optimizer are in no group any more",
                    ):
                        call()
                optimizer.param_groups.append(removed)
            optimizer.step()
            optimizer.zero_grad()
        results.append([param.detach().clone() for param in params])
        optimizer.close()
    assert all(map(torch.equal, *results))


def test_constructor__refuses_parameters_that_share_memory() -> None:
    """Also in part, and any two of many; parameters without elements, and those that
    touch, share none."""
    flat = torch.zeros(10_000)
    params = [torch.nn.Parameter(values) for values in flat.split(3)]
    empty = [torch.nn.Parameter(flat[100:100]) for _ in range(2)]
    make([*reversed(params), *empty]).close()
    for shared in (flat[:3], flat[5_000:5_001], flat[2:4], flat):
        with pytest.raises(
            EngineError,
            match="share memory: tie weights by one Parameter in both places",
        ):
            make([*params, torch.nn.Parameter(shared)])


@pytest.mark.parametrize("steps", [0, 1])
def test_step__refuses_parameters_that_share_memory_since_then(steps: int) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = make(model.parameters())
    own = model[1].weight.data
    for _ in range(steps):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    model[1].weight.data = model[0].weight.data
    model(torch.ones(2, 4)).sum().backward()
    with pytest.raises(
        EngineError, match="parameters 0 and 2 of this optimizer share memory"
    ):
        optimizer.step()
    model[1].weight.data = own
    optimizer.step()
    optimizer.close()
