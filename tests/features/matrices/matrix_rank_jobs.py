"""Jobs for two ranks whose matrices are sharded and updated as a whole; each returns
the result of rank 0."""

from __future__ import annotations

from pathlib import Path
from typing import Any

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
from tests.interleave.engine.late_rank_jobs import on_all_ranks
from tests.interleave.engine.rank_jobs import RANKS, Result
from tests.interleave.engine.training import MACHINE

WIDTH = 25
CASES: tuple[dict[str, Any], ...] = (
    {"policy": "gpu-only"},
    {"policy": "zero-offload", "subgroup_params": 700},
    {"policy": "interleaved:2", "overlap": "forward", "subgroup_params": 100},
    {"policy": "pipelined", "gradients": "streamed", "overlap": "both"},
    {"policy": "adaptive", "gradients": "streamed", "storage": True},
)


class Net(nn.Module):  # type: ignore[misc]
    """Hidden matrices with odd numbers of rows, one of them with a single row, between
    an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(50, WIDTH)
        self.hidden = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.gate = nn.Linear(WIDTH, 1)
        self.head = nn.Linear(WIDTH, 50)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.hidden:
            x = x + torch.tanh(layer(x))
        return self.head(x * torch.sigmoid(self.gate(x)))

    def groups(self) -> list[dict[str, Any]]:
        matrices = [layer.weight for layer in (*self.hidden, self.gate)]
        others = [
            param
            for param in self.parameters()
            if all(param is not matrix for matrix in matrices)
        ]
        return [
            {"params": matrices, "lr": 0.02},
            {"params": others, "rule": "adamw", "lr": 3e-3},
        ]


def sharded() -> Net:
    model, mesh = Net(), init_device_mesh("cpu", (RANKS,))
    for layer in model.hidden:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def optimizer_of(model: Net, **options: Any) -> InterleavedOptimizer:
    model_option = model if options.get("overlap") in ("forward", "both") else None
    return InterleavedOptimizer(
        model.groups(), "muon", machine=MACHINE, model=model_option, **options
    )


def full(tensor: torch.Tensor) -> torch.Tensor:
    return (
        tensor.detach().full_tensor().clone()
        if hasattr(tensor, "full_tensor")
        else tensor.detach().clone()
    )


def train(
    model: Net,
    optimizer: InterleavedOptimizer,
    rank: int,
    steps: int,
    gradients: list[list[torch.Tensor]] | None = None,
) -> list[float]:
    """Train, and return the losses; the reduced gradients are added to a list."""
    generator, losses = torch.Generator().manual_seed(rank), []
    for _ in range(steps):
        tokens = torch.randint(0, 50, (4, 9), generator=generator)
        loss = nn.functional.cross_entropy(
            model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()
        )
        loss.backward()
        if gradients is not None:
            gradients.append([full(param.grad) for param in model.parameters()])
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    optimizer.synchronize()
    return losses


def matrices_under_every_policy(rank: int, folder: Path) -> Result:
    """Return whether losses, parameters and state are the same in all cases, and those
    of one process that has the same gradients, and the bytes of state for each
    parameter."""
    results, states, gradients = [], [], []
    for case in CASES:
        (own_folder := folder / f"storage-{rank}").mkdir(exist_ok=True)
        options = {**case, "storage": own_folder} if "storage" in case else case
        model = sharded()
        optimizer = optimizer_of(model, **options)
        losses = train(
            model, optimizer, rank, 4, gradients if case is CASES[0] else None
        )
        results.append((losses, [full(param) for param in model.parameters()]))
        entries = optimizer.state_dict()["state"]
        states.append(
            [
                full(entries[index][name])
                for index in range(4)
                for name in ("master", "momentum_buffer")
            ]
        )
        own_bytes = sum(
            row.nbytes
            for name, row in optimizer.ebbtide_state
            if name == "momentum_buffer"
        )
        optimizer.close()
    (expected_losses, expected), *others = results
    equal = [
        losses == expected_losses
        and all(map(torch.equal, params, expected))
        and all(map(torch.equal, state, states[0]))
        for (losses, params), state in zip(others, states[1:], strict=True)
    ]
    whole = Net()
    optimizer = optimizer_of(whole, policy="zero-offload")
    for step in gradients:
        for param, gradient in zip(whole.parameters(), step, strict=True):
            param.grad = gradient
        optimizer.step()
    entries = optimizer.state_dict()["state"]
    state = [
        entries[index][name]
        for index in range(4)
        for name in ("master", "momentum_buffer")
    ]
    optimizer.close()
    is_that_of_one = all(map(torch.equal, whole.parameters(), expected)) and all(
        map(torch.equal, state, states[0])
    )
    sizes = [None] * RANKS
    dist.all_gather_object(sizes, own_bytes)
    return {
        "equal": on_all_ranks(all(equal)),
        "one process": on_all_ranks(is_that_of_one),
        "momentum bytes": sizes,
    }


def resumed_matrices(rank: int, folder: Path) -> Result:
    """Return whether a job that loads a checkpoint goes on with the same bits, after
    the job has changed parameters."""
    model, resumed = sharded(), sharded()
    optimizer, other = (
        optimizer_of(model, policy="interleaved:2"),
        optimizer_of(resumed, policy="zero-offload"),
    )
    train(model, optimizer, rank, 3)
    with torch.no_grad():
        # A single rank changes its part.
        if rank == 1:
            model.hidden[0].weight.to_local().mul_(0.5)
    train(model, optimizer, rank, 1)
    state = {
        "model": model.state_dict(),
        "optimizer": get_optimizer_state_dict(model, optimizer),
    }
    dcp.save(state, checkpoint_id=folder / "matrices")
    loaded = {
        "model": resumed.state_dict(),
        "optimizer": get_optimizer_state_dict(resumed, other),
    }
    dcp.load(loaded, checkpoint_id=folder / "matrices")
    resumed.load_state_dict(loaded["model"])
    set_optimizer_state_dict(resumed, other, loaded["optimizer"])
    results = []
    for own, its in ((model, optimizer), (resumed, other)):
        losses = train(own, its, rank, 3)
        results.append((losses, [full(param) for param in own.parameters()]))
        its.close()
    (losses, params), (other_losses, other_params) = results
    return {
        "equal": on_all_ranks(
            losses == other_losses and all(map(torch.equal, params, other_params))
        )
    }


def failed_matrices(rank: int, folder: Path) -> Result:
    """Return the errors of all ranks after an update on one of them has failed."""
    model = sharded()
    optimizer = optimizer_of(model, policy="zero-offload")
    train(model, optimizer, rank, 1)

    def fail(*arguments: Any) -> None:
        raise RuntimeError("no")

    if rank == 1:
        optimizer._runner.kernel.update_ranges = fail
    messages = []
    for _ in range(2):
        try:
            train(model, optimizer, rank, 1)
        except EngineError as error:
            messages.append(str(error))
    errors = [None] * RANKS
    dist.all_gather_object(errors, messages)
    return {"errors": errors}


JOBS = (matrices_under_every_policy, resumed_matrices, failed_matrices)
