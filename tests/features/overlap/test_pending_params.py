"""Parameters whose updates have not ended: writes of the job are kept or raise an
error, and guarded readers wait."""

from __future__ import annotations

import copy
import io
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
)

from ebbtide.interleave.engine.devices.device import Direction
from ebbtide.interleave.engine.devices.emulated import EmulatedDevice
from ebbtide.interleave.engine.errors import EngineError
from ebbtide.interleave.engine.interleaved_adamw import InterleavedAdamW
from tests.features.overlap.test_late_updates import late_optimizer
from tests.interleave.engine.training import Job, ReferenceOptimizer, throttle_cpu


@contextmanager
def _optimizer(
    job: Job, late: bool = True, **options: Any
) -> Iterator[InterleavedAdamW]:
    options |= {} if late else {"overlap": "none", "model": None}
    with late_optimizer(job, "pipelined", "kept", **options) as optimizer:
        yield optimizer


def _saved(value: Any) -> Any:
    stream = io.BytesIO()
    torch.save(value, stream)
    stream.seek(0)
    return torch.load(stream, weights_only=False)


def _no_parameters(job: Job, optimizer: InterleavedAdamW) -> list[torch.Tensor]:
    """Use what has no values of parameters, and return none."""
    optimizer.param_groups[0]["weight_decay"] = 0.01
    optimizer.zero_grad()
    job.net.zero_grad()
    job.net.train().eval().train()
    return []


READERS: dict[str, Callable[[Job, InterleavedAdamW], Any]] = {
    "checkpoint": lambda job, optimizer: get_model_state_dict(job.net),
    "checkpoint of the optimizer": lambda job, optimizer: [
        entry["exp_avg"]
        for entry in get_optimizer_state_dict(job.net, optimizer)["state"].values()
    ],
    "save": lambda job, optimizer: _saved(job.net).state_dict(),
    "synchronize": lambda job, optimizer: (
        optimizer.synchronize(),
        list(job.net.parameters()),
    )[1],
    "nothing": _no_parameters,
}


def _values_read(
    late: bool, read: Callable[[Job, InterleavedAdamW], Any]
) -> list[torch.Tensor]:
    job = Job()
    with _optimizer(job, late) as optimizer:
        job.step(optimizer)
        # The updates take longer than any reader.
        params_per_s = 5e4
        throttle_cpu(optimizer, lambda: params_per_s)
        job.step(optimizer, 1)
        leaves = torch.utils._pytree.tree_leaves(read(job, optimizer))
        values = [leaf.detach().clone() for leaf in leaves]
        params_per_s = 1e9
        job.step(optimizer, 2)
        optimizer.synchronize()
        return values + job.outcome().params


@pytest.mark.parametrize("name", READERS)
def test_readers__wait_for_the_updates_of_the_last_step(name: str) -> None:
    got, expected = (
        _values_read(True, READERS[name]),
        _values_read(False, READERS[name]),
    )
    assert len(got) == len(expected)
    assert all(map(torch.equal, got, expected))


def test_copies__have_no_hooks_and_their_own_parameters() -> None:
    job = Job()
    plain = {
        name: len(getattr(job.net.late, name))
        for name in vars(job.net.late)
        if name.endswith("hooks")
    }
    with _optimizer(job) as optimizer:
        job.step(optimizer)
        for other in (copy.deepcopy(job.net), _saved(job.net)):
            assert {name: len(getattr(other.late, name)) for name in plain} == plain
            assert "__getstate__" not in vars(other)
            assert other.first.weight is other.last.weight is not job.net.first.weight
    assert {name: len(getattr(job.net.late, name)) for name in plain} == plain
    assert "__getstate__" not in vars(job.net)


def test_optimizer__leaves_no_hooks_on_the_model_of_an_invalid_call() -> None:
    job = Job()
    with pytest.raises(EngineError, match="more than the budget"):
        InterleavedAdamW(
            job.net.parameters(),
            policy="gpu-only",
            device=EmulatedDevice(capacity_bytes=1),
            model=job.net,
            memory_budget=1e3,
        )
    assert not job.net.late._forward_pre_hooks
    assert "__getstate__" not in vars(job.net)


def test_copies__wait_for_each_of_two_optimizers() -> None:
    job = Job()
    params = list(job.net.parameters())
    options: dict[str, Any] = {
        "policy": "pipelined",
        "overlap": "forward",
        "model": job.net,
        "subgroup_params": 500,
    }
    first, second = (
        InterleavedAdamW(params[:4], **options),
        InterleavedAdamW(params[4:], **options),
    )
    try:
        for _ in range(2):
            job.net.zero_grad()
            job.loss().backward()
            first.step()
            second.step()
            copied = copy.deepcopy(job.net)
            first.synchronize()
            second.synchronize()
            assert all(map(torch.equal, copied.parameters(), params))
    finally:
        first.close()
        copy.deepcopy(job.net)
        second.close()


def test_forward__raises_the_error_of_a_late_operation_once() -> None:
    job, same = Job(), Job()
    expected = ReferenceOptimizer(same.net.parameters())
    with _optimizer(job, device=EmulatedDevice()) as optimizer:
        job.step(optimizer)
        same.step(expected)
        optimizer.synchronize()
        copy_pairs, returned, failing = (
            optimizer._runner.device.copy,
            threading.Event(),
            iter([True]),
        )

        def fail_once(direction: Direction, pairs: Any) -> None:
            if direction == "h2d" and next(failing, False):
                assert returned.wait(30)
                raise RuntimeError("the link is down")
            copy_pairs(direction, pairs)

        optimizer._runner.device.copy = fail_once  # type: ignore[method-assign]
        job.step(optimizer)
        same.step(expected)
        returned.set()
        with pytest.raises(EngineError) as error:
            job.net(torch.ones(1, 24, dtype=torch.bfloat16), 0)
        message = (
            "an operation of the plan failed: the link is down; the step was completed "
            "on the CPU"
        )
        assert str(error.value) == message
        for _ in range(2):
            job.step(optimizer)
            same.step(expected)
        optimizer.synchronize()
        assert job.outcome() == same.outcome()
