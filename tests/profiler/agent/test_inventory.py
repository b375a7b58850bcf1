"""The inventory of parameters, buffers, gradients and optimizer state, compared with
the sizes of the tensors."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ebbtide.profiler.agent.inventory import list_holders


class Tied(nn.Module):
    """A model whose head has the weight of its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(100, 16)
        self.body = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16))
        self.head = nn.Linear(16, 100, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.embedding(x)))


def trained(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.arange(8)).sum().backward()
    optimizer.step()


def sizes(
    modules: list[Any], optimizers: list[Any], key: str = "category"
) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for holder in list_holders(modules, optimizers):
        counts[holder[key]] += holder["bytes"]
    return dict(counts)


def nbytes(tensors: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@pytest.mark.parametrize("wrapped", [False, True])
def test_list_holders__has_each_byte_of_a_model_once(wrapped: bool) -> None:
    model = Tied()
    optimizer = torch.optim.Adam(model.parameters())
    trained(model, optimizer)
    # The loss, and a part that ran by itself, are outermost modules of the same model.
    modules = (
        [torch.nn.DataParallel(model), model.body, nn.MSELoss(), model]
        if wrapped
        else [model]
    )
    parameters, state = list(model.parameters()), optimizer.state.values()
    assert sizes(modules, [optimizer]) == {
        "parameter": nbytes(parameters),
        "buffer": nbytes(model.buffers()),
        "gradient": nbytes(p.grad for p in parameters),
        # Moments, and a step count of 4 bytes per parameter.
        "optimizer_state": nbytes(value for entry in state for value in entry.values()),
    }
    assert nbytes(value for entry in state for value in entry.values()) == 2 * nbytes(
        parameters
    ) + 4 * len(parameters)
    by_module = sizes(modules, [optimizer], "module")
    assert set(by_module) == {"embedding", "body.0", "body.1"}
    assert by_module["body.0"] == 4 * 4 * (16 * 16 + 16) + 2 * 4
    assert {holder["device"] for holder in list_holders(modules, [optimizer])} == {
        "cpu"
    }


def test_list_holders__divides_a_bucket_among_the_gradients_in_it() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 2, bias=False))
    bucket = torch.zeros(4 * 4 + 4 * 2 + 6)
    model[0].weight.grad = bucket[:16].view(4, 4)
    model[1].weight.grad = bucket[16:24].view(2, 4)
    holders = {
        h["module"]: h["bytes"]
        for h in list_holders([model], [])
        if h["category"] == "gradient"
    }
    assert holders == {"0": 64, "1": 32, None: 24}


class Wrapper(torch.Tensor):
    """A tensor that consists of another, as the local part of a DTensor."""

    local: torch.Tensor

    @staticmethod
    def __new__(cls, local: torch.Tensor) -> Wrapper:
        wrapper: Wrapper = torch.Tensor._make_wrapper_subclass(cls, (1000, 1000))
        wrapper.local = local
        return wrapper

    @classmethod
    def __torch_dispatch__(cls, *_: Any) -> Any:
        return NotImplemented

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["local"], None


def test_list_holders__counts_only_the_memory_that_a_tensor_has() -> None:
    local = torch.zeros(3)
    released = torch.zeros(100)
    released.untyped_storage().resize_(0)
    meta = torch.empty(100, device="meta")
    parameter = torch.zeros(2, requires_grad=True)
    optimizer = SimpleNamespace(
        param_groups=[{"params": [parameter]}],
        state={
            parameter: {
                "a": Wrapper(local),
                "b": [released, meta, local],
                "c": 3,
                "d": {"e": torch.zeros(4)},
            }
        },
    )
    assert sizes([], [optimizer]) == {"parameter": 8, "optimizer_state": 12 + 16}
    assert [holder["module"] for holder in list_holders([], [optimizer])] == [
        None,
        None,
    ]


def test_list_holders__names_the_models_of_a_job_with_several() -> None:
    models = [nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2))]
    assert set(sizes(models, [], "module")) == {"Linear", "Sequential.0"}


def test_list_holders__sums_up_modules_in_their_parents_where_there_are_too_many() -> (
    None
):
    model = nn.Sequential(
        *(
            nn.Sequential(*(nn.Linear(1, 1, bias=False) for _ in range(40)))
            for _ in range(30)
        )
    )
    holders = list_holders([model], [])
    assert [holder["module"] for holder in holders] == [
        str(number) for number in range(30)
    ]
    assert {holder["bytes"] for holder in holders} == {40 * 4}


def test_list_holders__leaves_out_gradients_that_another_device_may_still_replace() -> (
    None
):
    model = nn.Linear(4, 2)
    model(torch.ones(1, 4)).sum().backward()
    size = 4 * (4 * 2 + 2)
    for failed_on, gradients in ((None, size), ("cpu", size), ("cuda:0", None)):
        counts = {h["category"]: 0 for h in list_holders([model], [], failed_on)}
        for holder in list_holders([model], [], failed_on):
            counts[holder["category"]] += holder["bytes"]
        assert counts == {
            "parameter": size,
            **({"gradient": gradients} if gradients else {}),
        }


@pytest.mark.slow
def test_list_holders__counts_the_shards_and_buckets_of_distributed_models() -> None:
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for make in (
            lambda m: DistributedDataParallel(m, gradient_as_bucket_view=True),
            fully_shard,
        ):
            model = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 4))
            size = 4 * (16 * 32 + 32 + 32 * 4 + 4)
            parallel = make(model)
            optimizer = torch.optim.Adam(parallel.parameters())
            for _ in range(2):
                optimizer.zero_grad()
                parallel(torch.ones(2, 16)).sum().backward()
                optimizer.step()
            counts = sizes([parallel], [optimizer])
            assert counts == {
                "parameter": size,
                "gradient": size,
                "optimizer_state": 2 * size + 4 * 4,
            }
            assert set(sizes([parallel], [optimizer], "module")) == {"0", "1"}
    finally:
        dist.destroy_process_group()


def test_list_holders__is_no_use_of_parameters_that_notice_uses() -> None:
    """As those whose updates are late: a use would wait."""

    class Noticing(nn.Parameter):
        @classmethod
        def __torch_function__(
            cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            raise AssertionError(f"{function} uses the parameter")

    model = nn.Linear(4, 4)
    expected = sizes([model], [])
    model.weight.__class__ = Noticing
    assert sizes([model], []) == expected
