"""Jobs for two ranks whose updates run under the next forward; each returns the result
of rank 0."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel.distributed import _MixedPrecision

from ebbtide.interleave.engine.errors import EngineError
from tests.interleave.engine.rank_jobs import RANKS, Result, loss_of, sharded
from tests.interleave.engine.training import MACHINE, batches, maker, throttle_cpu

OVERLAPS = ("none", "forward")
Values = list[float]


@contextmanager
def late_optimizer(
    model: nn.Module,
    mode: str,
    overlap: str,
    policy: str = "pipelined",
    max_grad_norm: float = 0.3,
) -> Iterator[Any]:
    """Yield an optimizer whose updates on the CPU are slow, so that steps return long
    before they have ended."""
    late: dict[str, Any] = (
        {}
        if overlap == "none"
        else {"overlap": overlap, "model": model, "machine": MACHINE}
    )
    optimizer = maker(policy, mode)(
        model.parameters(), max_grad_norm=max_grad_norm, **late
    )
    throttle_cpu(optimizer, lambda: 1e6)
    try:
        yield optimizer
    finally:
        optimizer.close()


def train(model: Any, optimizer: Any, rank: int) -> Values:
    """Train with accumulation, evaluation and state dicts; return what was read
    meanwhile, and the last parameters."""
    data, part, read = batches(torch.float32), slice(rank, None, RANKS), []
    for step, backwards in enumerate((1, 1, 1, 2, 2, 1)):
        branch = step // 3
        optimizer.zero_grad()
        for _ in range(backwards):
            loss = loss_of(model, next(data), branch, part)
            read.append(loss.item())
            loss.backward()
        optimizer.step()
        if step == 1:
            read += [
                float(value.to_local().sum()) for value in model.state_dict().values()
            ]
        elif step == 2:
            full = get_model_state_dict(
                model, options=StateDictOptions(full_state_dict=True)
            )
            read += [float(value.sum()) for value in full.values()]
        elif step == 3:
            state = optimizer.state_dict()["state"]
            read += [
                float(entry["exp_avg"].to_local().sum()) for entry in state.values()
            ]
        elif step == 4:
            with torch.no_grad():
                read.append(loss_of(model, next(data), branch, part).item())
    optimizer.synchronize()
    # After an evaluation, the parameters of the root module are the gathered ones.
    return read + values_of(
        param.to_local() for param in optimizer.param_groups[0]["params"]
    )


def values_of(tensors: Iterable[torch.Tensor]) -> Values:
    return [value for tensor in tensors for value in tensor.flatten().tolist()]


def on_all_ranks(is_true: bool) -> bool:
    flag = torch.tensor([int(is_true)])
    dist.all_reduce(flag, op=dist.ReduceOp.MIN)
    return bool(flag.item())


def reads_of_late_parameters(rank: int, folder: Path) -> Result:
    """Return the losses of a forward that begins while an update waits: without
    overlap, with gates, without gates."""
    results: Result = {}
    for case in ("no overlap", "gates", "no gates"):
        model = sharded()
        with late_optimizer(
            model, "kept", "none" if case == "no overlap" else "forward"
        ) as optimizer:
            if case == "no gates":
                optimizer._calls.close()
            data, part, released = (
                batches(torch.float32),
                slice(rank, None, RANKS),
                threading.Event(),
            )
            # The first step compiles the kernels.
            loss_of(model, next(data), 0, part).backward()
            optimizer.step()
            optimizer.synchronize()
            update = optimizer._runner.kernel.update_ranges

            def update_when_released(
                *arguments: Any, update: Any = update, released: Any = released
            ) -> None:
                assert released.wait(30)
                update(*arguments)

            optimizer._runner.kernel.update_ranges = update_when_released
            loss_of(model, next(data), 0, part).backward()
            if case == "no overlap":
                released.set()
            optimizer.step()
            if case == "gates":
                threading.Timer(0.1, released.set).start()
            results[case] = loss_of(model, next(data), 0, part).item()
            released.set()
    return results


class Normalized(nn.Sequential):  # type: ignore[misc]
    """A network with buffers, which all ranks take from one of them."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(
            nn.Linear(24, 24), nn.BatchNorm1d(24), nn.Tanh(), nn.Linear(24, 24)
        )


def train_replica(ddp: Any, optimizer: Any, rank: int, steps: int) -> Values:
    read, data = [], batches(torch.float32)
    for step in range(steps):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        inputs, targets = next(data)
        loss = ((ddp(inputs[rank::RANKS]) - targets[rank::RANKS]) ** 2).mean()
        read.append(loss.item())
        loss.backward()
        optimizer.step()
    return read


def late_replicas(rank: int, folder: Path) -> Result:
    """Return whether late updates change nothing, for both kinds of `model`."""
    results: Result = {}
    for kind, options in (
        ("ddp", {"gradient_as_bucket_view": True, "static_graph": True}),
        ("plain", {}),
    ):
        values = []
        for overlap in OVERLAPS:
            ddp = nn.parallel.DistributedDataParallel(Normalized(), **options)
            with late_optimizer(
                ddp if kind == "ddp" else ddp.module, "kept", overlap
            ) as optimizer:
                read = train_replica(ddp, optimizer, rank, 4)
                optimizer.synchronize()
            values.append(read + values_of(ddp.parameters()))
        results[kind] = on_all_ranks(values[0] == values[1])
    return results


def late_replicas_with_uneven_inputs(rank: int, folder: Path) -> Result:
    """Return whether late updates change nothing, for both kinds of `model`."""
    results: Result = {}
    for kind in ("ddp", "plain"):
        values = []
        for overlap in OVERLAPS:
            ddp = nn.parallel.DistributedDataParallel(Normalized())
            with late_optimizer(
                ddp if kind == "ddp" else ddp.module, "kept", overlap
            ) as optimizer:
                throttle_cpu(optimizer, lambda: 1e5)
                with ddp.join():
                    read = train_replica(ddp, optimizer, rank, 2 + 2 * rank)
                # The parameters of the last rank, which the others take.
                read += values_of(ddp.parameters())
                read += train_replica(ddp, optimizer, rank, 2)
                optimizer.synchronize()
            values.append(read)
        results[kind] = on_all_ranks(values[0] == values[1])
    return results


def refused(rank: int, folder: Path) -> Result:
    """Return the errors for models that late updates do not support."""
    mesh = init_device_mesh("cpu", (RANKS,))
    tensor_parallel = nn.Linear(24, 24, bias=False)
    tensor_parallel.weight = nn.Parameter(
        distribute_tensor(tensor_parallel.weight.detach(), mesh, [Shard(0)])
    )
    unknown = sharded()
    unknown._get_fsdp_state()._fsdp_param_groups[0].fsdp_params[0].sharded_param = None
    models = {
        "tensor parallel": tensor_parallel,
        "unknown": unknown,
        "flat": FullyShardedDataParallel(
            nn.Linear(24, 24), device_id=torch.device("cpu")
        ),
        "converted": nn.parallel.DistributedDataParallel(
            nn.Linear(24, 24),
            mixed_precision=_MixedPrecision(param_dtype=torch.bfloat16),
        ),
    }
    messages: Result = {}
    for name, model in models.items():
        try:
            maker("pipelined", "kept")(
                model.parameters(), overlap="forward", model=model
            ).close()
        except EngineError as error:
            messages[name] = str(error)
    return messages


JOBS: tuple[Callable[[int, Path], Result], ...] = (
    reads_of_late_parameters,
    late_replicas,
    late_replicas_with_uneven_inputs,
    refused,
)
