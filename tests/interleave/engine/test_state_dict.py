"""State dicts: to torch.optim.AdamW and back, and from one policy to another, with the
same bits."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ebbtide.interleave.engine.errors import EngineError
from ebbtide.interleave.engine.interleaved_adamw import InterleavedAdamW
from ebbtide.interleave.engine.optimizer import InterleavedOptimizer
from ebbtide.interleave.engine.runtime.subgroup_states import SubgroupStates
from tests.conftest import slow
from tests.interleave.engine.jobs import closing
from tests.interleave.engine.states import bits
from tests.interleave.engine.training import (
    Job,
    ReferenceOptimizer,
    maker,
    run,
    two_groups,
)

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def saved(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return a state dict saved to a file and loaded by torch without unpickling
    objects."""
    file = io.BytesIO()
    torch.save(state_dict, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, weights_only=True)
    return loaded


def assert_equal(one: Any, other: Any) -> None:
    """Compare nested values, tensors by their bits."""
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype
        assert torch.equal(bits(one), bits(other))
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_equal(one[key], other[key])
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for item, other_item in zip(one, other, strict=True):
            assert_equal(item, other_item)
    else:
        assert one == other


def test_state_dict__is_exact_to_torch_and_back_for_fp32() -> None:
    job = Job(torch.float32)
    with closing(maker("interleaved:2", "kept")(two_groups(job))) as optimizer:
        for _ in range(5):
            job.step(optimizer)
        ours = copy.deepcopy(optimizer.state_dict())
        theirs = torch.optim.AdamW(two_groups(job))
        theirs.load_state_dict(saved(ours))
        for index, entry in ours["state"].items():
            torch_entry = theirs.state_dict()["state"][index]
            for name in ("step", "exp_avg", "exp_avg_sq"):
                assert_equal(torch_entry[name], entry[name])
        assert theirs.param_groups[0]["lr"] == 3e-3
        job.net.zero_grad()
        job.loss().backward()
        before = [param.detach().clone() for param in job.net.parameters()]
        theirs.step()
        by_torch = [param.detach().clone() for param in job.net.parameters()]
        state = saved(theirs.state_dict())
        # From the same state, the next step of torch equals that of the optimizer
        # within rounding.
        with torch.no_grad():
            for param, value in zip(job.net.parameters(), before, strict=True):
                param.copy_(value)
        optimizer.step()
        for param, value in zip(job.net.parameters(), by_torch, strict=True):
            torch.testing.assert_close(param.detach(), value, rtol=1e-5, atol=1e-6)
        optimizer.load_state_dict(state)
        for index, entry in optimizer.state_dict()["state"].items():
            for name in ("step", "exp_avg", "exp_avg_sq"):
                assert_equal(entry[name], state["state"][index][name])


@pytest.mark.parametrize("dtype", DTYPES)
def test_load_state_dict__starts_masters_from_the_parameters_without_saved_masters(
    dtype: torch.dtype,
) -> None:
    job = Job(dtype)
    theirs = torch.optim.AdamW(job.net.parameters())
    for _ in range(3):
        job.net.zero_grad()
        job.loss().backward()
        theirs.step()
    with closing(maker("interleaved:2", "streamed")(job.net.parameters())) as optimizer:
        optimizer.load_state_dict(theirs.state_dict())
        params = list(job.net.parameters())
        for index, entry in optimizer.state_dict()["state"].items():
            assert ("master" in entry) == (dtype != torch.float32)
            assert_equal(
                entry.get("master", params[index].detach()),
                params[index].detach().float(),
            )
            assert_equal(
                entry["exp_avg"], theirs.state[params[index]]["exp_avg"].float()
            )
            assert entry["step"] == 3


def test_state_dict__does_not_change_with_later_steps() -> None:
    job = Job(torch.float32)
    with closing(maker("gpu-only", "kept")(job.net.parameters())) as optimizer:
        job.step(optimizer)
        state = optimizer.state_dict()
        before = copy.deepcopy(state)
        job.step(optimizer)
        assert_equal(state, before)


def test_state_dict__of_a_new_optimizer_is_empty_and_loads() -> None:
    job = Job()
    with closing(maker("interleaved:2", "kept")(job.net.parameters())) as optimizer:
        fresh = saved(optimizer.state_dict())
        assert fresh["state"] == {}
    job = Job()
    expected = run(job, ReferenceOptimizer(job.net.parameters()), steps=4)
    job = Job()
    optimizer = maker("interleaved:2", "kept")(job.net.parameters())
    optimizer.load_state_dict(fresh)
    assert run(job, optimizer, steps=4) == expected


def group(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda state: state["param_groups"][0].update(changes)


def entry(
    change: Callable[[dict[str, Any]], object],
) -> Callable[[dict[str, Any]], None]:
    return lambda state: change(state["state"][1])  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.clear(), "not the state dict of an optimizer"),
        (lambda state: state["param_groups"].pop(), "another model"),
        (lambda state: state["param_groups"][0]["params"].pop(), "another model"),
        (
            lambda state: state["param_groups"].append(state["param_groups"][0]),
            "another model",
        ),
        (group(lr=-1.0), "lr"),
        (group(amsgrad=True), "amsgrad"),
        (entry(lambda entry: entry.update(exp_avg=torch.zeros(3))), "another model"),
        (
            entry(lambda entry: entry.update(master=torch.zeros(24, 23))),
            "another model",
        ),
        (entry(lambda entry: entry.pop("exp_avg_sq")), "no exp_avg_sq that"),
        (
            entry(lambda entry: entry.update(max_exp_avg_sq=entry["exp_avg_sq"])),
            "AMSGrad",
        ),
        (
            entry(lambda entry: entry.update(exp_avg="text")),
            "no exp_avg that is a tensor",
        ),
        (entry(lambda entry: entry.update(step="text")), "step"),
        (group(betas=0.9), "betas"),
        (lambda state: state["state"].update({1: 7}), "state of parameter 1 is int"),
        (lambda state: state.update(param_groups=[{}, {}]), "param_groups"),
        (lambda state: state.update(loss_scale={}), "loss_scale"),
    ],
)
def test_load_state_dict__refuses_other_state_dicts_and_changes_nothing(
    change: Callable[[dict[str, Any]], Any], message: str
) -> None:
    job = Job()
    with closing(
        maker("interleaved:2", "streamed", loss_scale="dynamic")(two_groups(job))
    ) as optimizer:
        for _ in range(3):
            job.step(optimizer)
        before = saved(optimizer.state_dict())
        wrong = saved(optimizer.state_dict())
        for state in wrong["state"].values():
            state["exp_avg"] += 1
        change(wrong)
        with pytest.raises(EngineError, match=message) as error:
            optimizer.load_state_dict(wrong)
        assert "\n" not in str(error.value)
        assert_equal(saved(optimizer.state_dict()), before)
        job.step(optimizer)


def test_state_dict__holds_one_subgroup_at_a_time_besides_the_result(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    params = [torch.nn.Parameter(torch.ones(100)) for _ in range(5)]
    written: list[int] = []
    write = SubgroupStates.write

    def recorded_write(
        states: SubgroupStates, subgroup: int, state: torch.Tensor
    ) -> None:
        written.append(state.data_ptr())
        write(states, subgroup, state)

    monkeypatch.setattr(SubgroupStates, "write", recorded_write)
    with closing(
        InterleavedAdamW(params, policy="gpu-only", subgroup_params=150)
    ) as optimizer:
        for param in params:
            param.grad = torch.ones_like(param)
        optimizer.step()
        assert len(written) == 4
        assert len(set(written)) == 1
        # State on the device is copied to the result, without other host memory.
        monkeypatch.setattr(SubgroupStates, "read", None)
        optimizer.state_dict()


@pytest.mark.parametrize(
    "order", ["model first", "optimizer first", "parameters are there"]
)
@pytest.mark.parametrize(
    ("dtype", "rule"),
    [
        (torch.bfloat16, "adamw"),
        (torch.float16, "adamw"),
        (torch.bfloat16, "adamw-remainder"),
    ],
)
@pytest.mark.parametrize(
    "policy", slow(["zero-offload", "interleaved:2", "gpu-only"], but=["interleaved:2"])
)
def test_load_state_dict__takes_no_master_that_another_optimizer_has_left_behind(
    policy: str,
    dtype: torch.dtype,
    rule: str,
    order: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """torch.optim.AdamW keeps the entry `master` of its state, and does not update
    it."""
    caplog.set_level("WARNING", "ebbtide")

    def trained(model: torch.nn.Module, optimizer: Any, steps: int) -> None:
        for step in range(steps):
            model(
                torch.full((2, 40), 1.0 + step, dtype=dtype)
            ).float().square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    def own(model: torch.nn.Module, lr: float) -> InterleavedOptimizer:
        options = {"policy": policy, "subgroup_params": 500}
        return InterleavedOptimizer(
            model.parameters(), rule, lr=lr, weight_decay=0.0, **options
        )  # type: ignore[arg-type]

    torch.manual_seed(0)
    model = torch.nn.Linear(40, 40).to(dtype)
    first = own(model, 0.05)
    trained(model, first, 3)
    between = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4)
    between.load_state_dict(first.state_dict())
    first.close()
    # So that some elements stay.
    model.bias.requires_grad_(False)
    trained(model, between, 3)
    model.bias.requires_grad_(True)
    saved, weights = (
        between.state_dict(),
        {name: value.clone() for name, value in model.state_dict().items()},
    )
    saved["param_groups"][0]["lr"] = 0.0
    if order != "parameters are there":
        model = torch.nn.Linear(40, 40).to(dtype)
    last = own(model, 0.0)
    if order == "model first":
        model.load_state_dict(weights)
    last.load_state_dict(saved)
    if order == "optimizer first":
        model.load_state_dict(weights)
    trained(model, last, 1)
    for name, value in model.state_dict().items():
        assert torch.equal(value, weights[name])
    entries = last.state_dict()["state"]
    # A step with a learning rate of 0 leaves masters alone.
    for entry, name in zip(entries.values(), ("weight", "bias"), strict=True):
        stale, value = (
            saved["state"][0 if name == "weight" else 1]["master"],
            weights[name],
        )
        kept = stale.float().to(dtype) == value
        assert bool(kept.all()) == (name == "bias")
        assert torch.equal(
            entry["master"], torch.where(kept, stale.float(), value.float())
        )
    assert (
        caplog.text.count(
            "1 parameters have changed since the masters in the state dict"
        )
        == 1
    )
    last.close()
