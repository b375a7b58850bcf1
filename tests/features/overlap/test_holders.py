"""Reads of late parameters that no gate sees, by what got them, or their memory, before
the step."""

from __future__ import annotations

import gc
import threading
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.dlpack
from torch import nn
from torch.multiprocessing.reductions import reduce_tensor

from ebbtide.features.overlap.holders import ReferenceCounts
from ebbtide.interleave import InterleavedAdamW
from ebbtide.interleave.engine.devices.emulated import EmulatedDevice
from tests.conftest import slow, slow_case

WIDTH = 16
INPUTS = torch.linspace(-1, 1, 2 * WIDTH).reshape(2, WIDTH)
# Slower than any read.
_SLOW = 1e5

Read = Callable[[], Any]


class _Net(nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(inputs)))


def _called(module: Callable[[torch.Tensor], torch.Tensor]) -> Read:
    return lambda: module(INPUTS)


def _frozen(net: _Net) -> Read:
    net.eval()
    frozen = torch.jit.freeze(torch.jit.script(net))
    net.train()
    return _called(frozen)


def _without_grad(net: _Net) -> Read:
    with torch.no_grad():
        array = net.second.weight.numpy()
    return lambda: array.copy()


def _array_below(net: _Net) -> Read:
    array = np.linspace(0, 1, WIDTH * WIDTH, dtype=np.float32).reshape(WIDTH, WIDTH)
    net.second.weight = nn.Parameter(torch.from_numpy(array))
    return lambda: array.copy()


def _other_mapping(net: _Net) -> Read:
    net.share_memory()
    rebuild, arguments = reduce_tensor(net.second.weight.data)
    other = rebuild(*arguments)
    return lambda: other.clone()


def _dlpack(net: _Net) -> Read:
    return _copied(
        torch.from_dlpack(torch.utils.dlpack.to_dlpack(net.second.weight.detach()))
    )


def _state_dict(net: _Net) -> Read:
    state_dict = net.state_dict()
    return lambda: torch.cat([value.flatten() for value in state_dict.values()])


def _copied(tensor: torch.Tensor) -> Read:
    return lambda: tensor.clone()


# Made before the step; the read comes after it.
READERS: dict[str, Callable[[_Net], Read]] = {
    "scripted": lambda net: _called(torch.jit.script(net)),
    "traced": lambda net: _called(torch.jit.trace(net, INPUTS)),
    "child scripted": lambda net: _called(torch.jit.script(net.second)),
    "frozen": _frozen,
    "exported": lambda net: _called(torch.export.export(net, (INPUTS,)).module()),
    "compiled": lambda net: _called(
        torch.compile(lambda inputs: net.second(inputs), backend="aot_eager")
    ),
    "compiled function": lambda net: _called(
        torch.compile(lambda inputs: inputs @ net.second.weight, backend="aot_eager")
    ),
    "view": lambda net: _copied(net.second.weight.view(-1)),
    "data": lambda net: _copied(net.second.weight.data),
    "detached view": lambda net: _copied(net.second.weight.detach()[1:3]),
    "numpy": lambda net: net.second.weight.detach().numpy().copy,
    "numpy without grad": _without_grad,
    "array below": _array_below,
    "other mapping": _other_mapping,
    "dlpack": _dlpack,
    "state dict": _state_dict,
    "method": lambda net: net.second.weight.clone,
    "out": lambda net: (
        lambda: torch.mul(net.second.weight.detach(), 2, out=torch.empty(WIDTH, WIDTH))
    ),
    "parameter": lambda net: _copied(net.second.weight),
}
# One of each way to the memory.
QUICK_READERS = (
    "scripted",
    "frozen",
    "compiled function",
    "view",
    "numpy",
    "other mapping",
    "state dict",
    "out",
)


def _train(
    make_reader: Callable[[_Net], Read], reader_first: bool, **overlap: Any
) -> list[torch.Tensor]:
    """Return what a reader reads after each of some steps."""
    torch.manual_seed(0)
    net, values = _Net(), []
    read = make_reader(net) if reader_first else None
    device = EmulatedDevice(None, _SLOW, _SLOW, None)
    options = {**overlap, "model": net} if overlap else {}
    optimizer = InterleavedAdamW(
        net.parameters(),
        lr=1e-2,
        subgroup_params=100,
        policy="pipelined",
        threads=1,
        device=device,
        **options,
    )
    try:
        read = read or make_reader(net)
        for _ in range(3):
            net(INPUTS).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                values.append(torch.as_tensor(read()))
    finally:
        optimizer.close()
        device.close()
    return values


def _check(make_reader: Callable[[_Net], Read], reader_first: bool) -> None:
    plain, late = (
        _train(make_reader, reader_first),
        _train(make_reader, reader_first, overlap="forward"),
    )
    assert len(plain) == len(late)
    assert all(map(torch.equal, plain, late))


@pytest.fixture(autouse=True)
def _quiet() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.mark.parametrize(
    "reader_first", [True, slow_case(False)], ids=["before the optimizer", "after it"]
)
@pytest.mark.parametrize("reader", slow(READERS, but=QUICK_READERS))
def test_step__has_written_what_others_read_without_a_gate(
    reader: str, reader_first: bool
) -> None:
    _check(READERS[reader], reader_first)


def _scripted_late(net: _Net) -> Read:
    return lambda: torch.jit.script(net.second)(INPUTS)


def _in_thread(net: _Net) -> Read:
    """A thread that has had the parameter for long, and reads it when the step has
    returned."""
    begin, end, values = threading.Semaphore(0), threading.Semaphore(0), []

    def run(weight: torch.Tensor) -> None:
        while begin.acquire():
            values.append(weight.detach().clone())
            end.release()

    threading.Thread(target=run, args=(net.second.weight,), daemon=True).start()

    def read() -> torch.Tensor:
        begin.release()
        end.acquire()
        return values[-1]

    return read


@pytest.mark.parametrize("make_reader", [_scripted_late, _in_thread])
def test_late_params__wait_in_readers_that_are_made_after_the_step(
    make_reader: Callable[[_Net], Read],
) -> None:
    _check(make_reader, False)


def test_step__holds_back_a_view_that_another_thread_takes_in_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Views that are taken while a step runs wait until it has returned, and then for
    the update."""
    torch.manual_seed(0)
    net, views = _Net(), []
    device = EmulatedDevice(None, _SLOW, _SLOW, None)
    optimizer = InterleavedAdamW(
        net.parameters(),
        subgroup_params=100,
        policy="pipelined",
        device=device,
        overlap="forward",
        model=net,
    )
    thread = threading.Thread(target=lambda: views.append(net.second.weight.view(-1)))
    step = optimizer._runner.step

    def step_and_read(*arguments: Any) -> None:
        thread.start()
        thread.join(0.2)
        step(*arguments)

    try:
        net(INPUTS).square().mean().backward()
        monkeypatch.setattr(optimizer._runner, "step", step_and_read)
        optimizer.step()
        thread.join()
        value = views[0].detach().clone()
        optimizer.synchronize()
        assert torch.equal(value, net.second.weight.view(-1))
    finally:
        optimizer.close()
        device.close()


def test_find_held__does_not_count_the_graph_of_the_gradient_nor_own_views() -> None:
    params = [
        nn.Parameter(torch.ones(2)),
        nn.Parameter(torch.ones(2), requires_grad=False),
    ]
    holders, views = ReferenceCounts(), [param.data for param in params]
    loss = sum(param.sum() for param in params)
    loss.backward()
    assert holders.find_held(params, 1) == [False, False]
    assert holders.find_held(params, 0) == [True, True]
    del views, loss
    node = params[0].exp().grad_fn
    assert holders.find_held(params, 0) == [False, False]
    # It has saved the factor of the gradient.
    kept = (params[0] * params[1]).grad_fn
    assert holders.find_held(params, 0) == [False, True]
    del node, kept
    gc.collect()
    assert holders.find_held(params, 0) == [False, False]


class _Heads(nn.Module):  # type: ignore[misc]
    """Two heads, of which each iteration uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.heads = (
            nn.Linear(WIDTH, WIDTH),
            nn.ModuleList(nn.Linear(WIDTH, 4) for _ in range(2)),
        )

    def forward(self, head: int) -> torch.Tensor:
        return self.heads[head](torch.tanh(self.body(INPUTS)))


def _scale_part(weight: nn.Parameter) -> None:
    weight.data[1].mul_(10.0)


def _scale_array(weight: nn.Parameter) -> None:
    weight.detach().numpy()[...] *= 10.0


def _step_by_torch(weight: nn.Parameter) -> None:
    other = torch.optim.SGD([weight], lr=0.5)
    weight.grad = torch.ones_like(weight)
    other.step()
    other.zero_grad()


EDITS = [_scale_part, _scale_array, _step_by_torch]


@pytest.mark.parametrize("edited", [0, slow_case(1)], ids=["not updated", "updated"])
@pytest.mark.parametrize("edit", EDITS)
def test_step__keeps_edits_that_are_made_beside_late_updates(
    edit: Callable[[nn.Parameter], None], edited: int
) -> None:
    """Edit a parameter that the step before has not updated, or one that it has."""

    def train(**overlap: Any) -> list[torch.Tensor]:
        torch.manual_seed(0)
        net = _Heads()
        device = EmulatedDevice(None, _SLOW, _SLOW, None)
        options = {**overlap, "model": net} if overlap else {}
        optimizer = InterleavedAdamW(
            net.parameters(),
            lr=1e-2,
            subgroup_params=100,
            policy="pipelined",
            threads=1,
            device=device,
            **options,
        )
        try:
            for number, head in enumerate((0, 1, 0, 1, 0, 1)):
                net(head).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                if number == 3:
                    edit(net.heads[edited].weight)
            optimizer.synchronize()
            values = [param.detach().clone() for param in net.parameters()]
        finally:
            optimizer.close()
            device.close()
        return values

    assert all(map(torch.equal, train(), train(overlap="forward")))
