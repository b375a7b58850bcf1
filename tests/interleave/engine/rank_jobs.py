"""Jobs for two ranks; each returns the result of rank 0."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from ebbtide.interleave import InterleavedOptimizer
from ebbtide.interleave.engine.errors import EngineError
from tests.conftest import FUZZ
from tests.interleave.engine.compile_once import compile_once
from tests.interleave.engine.training import MACHINE, Net, batches, maker, net
from tests.interleave.quick_plans import plan_quickly

RANKS = 2
STEPS = 8
# (policy, gradients)
CASES = (
    ("zero-offload", "kept"),
    ("interleaved:2", "streamed"),
    ("adaptive", "streamed"),
    *(
        (("zero-offload", "streamed"), ("gpu-only", "kept"), ("gpu-only", "streamed"))
        if FUZZ > 1
        else ()
    ),
)
Result = dict[str, Any]


def backwards(step: int) -> int:
    return (1, 1, 2, 4, 1, 3)[step % 6]


def loss_of(
    model: Any, batch: tuple[torch.Tensor, torch.Tensor], step: int, part: slice
) -> torch.Tensor:
    """Return the loss of a part of the batch; each step uses another branch."""
    inputs, targets = batch
    return ((model(inputs[part], step % 3).float() - targets[part]) ** 2).mean()


def sharded() -> Net:
    model = net(torch.float32)
    mesh = init_device_mesh("cpu", (RANKS,))
    for branch in model.branches:
        fully_shard(branch, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def train(model: Any, optimizer: Any, rank: int, steps: int = STEPS) -> list[float]:
    data = batches(torch.float32)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        for _ in range(backwards(step)):
            loss = loss_of(model, next(data), step, slice(rank, None, RANKS))
            losses.append(loss.item())
            loss.backward()
        optimizer.step()
    return losses


def full_params(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: param.full_tensor().detach() for name, param in model.named_parameters()
    }


def every_policy(rank: int, folder: Path) -> Result:
    results: Result = {}
    for policy, mode in CASES:
        model = sharded()
        optimizer = maker(policy, mode, machine=MACHINE)(
            model.parameters(), max_grad_norm=0.3
        )
        losses = train(model, optimizer, rank)
        optimizer.close()
        results[f"{policy} {mode}"] = losses, full_params(model)
    return results


def saved(rank: int, folder: Path) -> Result:
    """Save a checkpoint after some steps; return its state, and the parameters some
    steps later."""
    model = sharded()
    optimizer = maker("interleaved:2", "streamed")(
        model.parameters(), max_grad_norm=0.3
    )
    train(model, optimizer, rank)
    optimizer.zero_grad()
    before = full_params(model)
    state = get_optimizer_state_dict(model, optimizer)
    dcp.save(
        {"model": model.state_dict(), "optimizer": state},
        checkpoint_id=folder / "checkpoint",
    )
    full = {
        name: {
            key: value.full_tensor() if hasattr(value, "full_tensor") else value
            for key, value in entry.items()
        }
        for name, entry in state["state"].items()
    }
    train(model, optimizer, rank, 3)
    optimizer.close()
    return {"state": full, "params": before, "later": full_params(model)}


def clipped_by_torch(rank: int, folder: Path) -> Result:
    """Return the error if torch clips gradients that were offloaded."""
    model = sharded()
    optimizer = maker("interleaved:2", "streamed")(model.parameters())
    for _ in range(2):
        train(model, optimizer, rank, 1)
    optimizer.zero_grad()
    loss_of(model, next(batches(torch.float32)), 0, slice(None)).backward()
    try:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    except EngineError as error:
        return {"error": str(error)}
    finally:
        optimizer.close()
    return {}


def replicated(rank: int, folder: Path) -> Result:
    model = net(torch.float32)
    ddp = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    optimizer = maker("interleaved:2", "kept")(ddp.parameters(), max_grad_norm=0.3)
    train(ddp, optimizer, rank)
    optimizer.close()
    return {name: param.detach() for name, param in model.named_parameters()}


def replicated_and_streamed(rank: int, folder: Path) -> Result:
    ddp = nn.parallel.DistributedDataParallel(net(torch.float32))
    try:
        maker("interleaved:2", "streamed")(ddp.parameters())
    except EngineError as error:
        return {"error": str(error)}
    return {}


def with_empty_shards(rank: int, folder: Path) -> Result:
    """Return how often each policy has updated a parameter with one row on two
    ranks."""
    results: Result = {}
    for policy, mode in CASES:
        model = nn.Linear(3, 1, bias=False)
        fully_shard(model, mesh=init_device_mesh("cpu", (RANKS,)))
        optimizer = maker(policy, mode, machine=MACHINE)(
            model.parameters(), max_grad_norm=0.3
        )
        for _ in range(4):
            optimizer.zero_grad()
            model(torch.ones(2, 3)).square().sum().backward()
            optimizer.step()
        results[f"{policy} {mode}"] = int(optimizer.state_dict()["state"][0]["step"])
        optimizer.close()
    return results


def saved_in_8_bits(rank: int, folder: Path) -> Result:
    """Return whether a job that loads a checkpoint of shards goes on with the same
    bits."""

    def optimizer_of(model: nn.Module) -> InterleavedOptimizer:
        return InterleavedOptimizer(
            model.parameters(), "adamw-8bit", policy="interleaved:2", machine=MACHINE
        )

    model, resumed = sharded(), sharded()
    optimizer, other = optimizer_of(model), optimizer_of(resumed)
    train(model, optimizer, rank, 3)
    optimizer.zero_grad()
    state = {
        "model": model.state_dict(),
        "optimizer": get_optimizer_state_dict(model, optimizer),
    }
    dcp.save(state, checkpoint_id=folder / "8-bit")
    loaded = {
        "model": resumed.state_dict(),
        "optimizer": get_optimizer_state_dict(resumed, other),
    }
    dcp.load(loaded, checkpoint_id=folder / "8-bit")
    resumed.load_state_dict(loaded["model"])
    set_optimizer_state_dict(resumed, other, loaded["optimizer"])
    for own, its in ((model, optimizer), (resumed, other)):
        train(own, its, rank, 3)
        its.close()
    expected, params = full_params(model), full_params(resumed)
    return {
        "equal": all(
            torch.equal(params[name], value) for name, value in expected.items()
        )
    }


JOBS: tuple[Callable[[int, Path], Result], ...] = (
    every_policy,
    saved,
    clipped_by_torch,
    replicated,
    replicated_and_streamed,
    with_empty_shards,
    saved_in_8_bits,
)


def main(
    rank: int, folder: Path, jobs: tuple[Callable[[int, Path], Result], ...], ranks: int
) -> None:
    """Run jobs on one of several ranks; rank 0 writes the results to the folder."""
    torch.set_num_threads(1)
    compile_once()
    plan_quickly(pytest.MonkeyPatch())
    gc.freeze()
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(str(folder / "store"), ranks),
        rank=rank,
        world_size=ranks,
    )
    results = {job.__name__: job(rank, folder) for job in jobs}
    if rank == 0:
        torch.save(results, folder / "results")
    dist.destroy_process_group()
