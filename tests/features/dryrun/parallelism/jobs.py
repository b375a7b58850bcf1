"""Small jobs of several ranks, for a dry run (`cuda`) and for real processes with gloo
(`cpu`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

WIDTH, LAYERS, BATCH, LENGTH, VOCABULARY = 128, 2, 8, 16, 512
STEPS = 3
# Of a model with LAYERS blocks: norm, two layers with bias; embedding and head with
# bias.
BLOCK_PARAMS = 2 * WIDTH + 8 * WIDTH * WIDTH + 5 * WIDTH
PARAMS = LAYERS * BLOCK_PARAMS + 2 * VOCABULARY * WIDTH + VOCABULARY
# Of each block, what tensor parallelism splits: both weights, and the bias of the first
# layer.
SPLIT_PARAMS = LAYERS * (8 * WIDTH * WIDTH + 4 * WIDTH)


class Block(nn.Module):
    """A residual block of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    """An embedding (if `first`), blocks, and a head (if `last`)."""

    def __init__(
        self, layers: int = LAYERS, first: bool = True, last: bool = True
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH) if first else None
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.head = nn.Linear(WIDTH, VOCABULARY) if last else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x if self.embed is None else self.embed(x)
        for block in self.blocks:
            x = block(x)
        return x if self.head is None else self.head(x)


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the loss."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _train(
    model: nn.Module, device: str, optimizer: Any = None, foreach: bool = True
) -> None:
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), foreach=foreach)
    for _ in range(STEPS):
        tokens = torch.randint(0, VOCABULARY, (BATCH, LENGTH)).to(device)
        loss_of(model(tokens), tokens).backward()
        optimizer.step()
        optimizer.zero_grad()


def _mesh(device: str) -> DeviceMesh:
    return init_device_mesh(device, (dist.get_world_size(),))


def _ddp(device: str, **options: Any) -> None:
    _train(DistributedDataParallel(Model().to(device), **options), device)


def _ddp_with_hook(device: str) -> None:
    model = DistributedDataParallel(Model().to(device))

    def halve(group: Any, bucket: Any) -> Any:
        half = bucket.buffer().to(torch.float16)
        future = dist.all_reduce(half, group=group, async_op=True).get_future()
        return future.then(lambda done: bucket.buffer().copy_(done.value()[0]))

    halve.__annotations__.clear()  # DDP compares them with types, and these are texts
    model.register_comm_hook(dist.group.WORLD, halve)
    _train(model, device)


def _ddp_without_sync(device: str) -> None:
    model = DistributedDataParallel(Model().to(device))
    tokens = torch.randint(0, VOCABULARY, (BATCH, LENGTH)).to(device)
    with model.no_sync():
        loss_of(model(tokens), tokens).backward()
    _train(model, device)


def _zero(device: str) -> None:
    model = DistributedDataParallel(Model().to(device))
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.AdamW, lr=1e-3, foreach=True
    )
    _train(model, device, optimizer)


def _fsdp(device: str, mesh: DeviceMesh | None = None, **options: Any) -> None:
    offloads = "offload_policy" in options
    model = Model().to("cpu" if offloads else device)
    mesh = mesh or _mesh(device)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    _train(model, device)


def _meta_fsdp(device: str) -> None:
    with torch.device("meta"):
        model = Model()
    for block in model.blocks:
        fully_shard(block, mesh=_mesh(device))
    fully_shard(model, mesh=_mesh(device))
    model.to_empty(device=device)
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    _train(model, device)


def _split(model: Model, mesh: DeviceMesh) -> None:
    for block in model.blocks:
        parallelize_module(
            block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()}
        )


def _tensor(device: str) -> None:
    model = Model().to(device)
    _split(model, _mesh(device))
    # torch has no foreach update of split and whole parameters together
    _train(model, device, foreach=False)


def _sequence(device: str) -> None:
    model = Model().to(device)
    ends = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    parts = {
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1)),
    }
    parallelize_module(model, _mesh(device), ends)
    for block in model.blocks:
        parallelize_module(block, _mesh(device), parts)
    _train(model, device)


def _tensor_and_fsdp(device: str) -> None:
    mesh = init_device_mesh(
        device, (dist.get_world_size() // 2, 2), mesh_dim_names=("data", "tensor")
    )
    model = Model().to(device)
    _split(model, mesh["tensor"])
    for block in model.blocks:
        fully_shard(block, mesh=mesh["data"])
    fully_shard(model, mesh=mesh["data"])
    _train(model, device)


def _hybrid(device: str) -> None:
    mesh = init_device_mesh(
        device, (dist.get_world_size() // 2, 2), mesh_dim_names=("replicate", "shard")
    )
    _fsdp(device, mesh)


def _pipeline(device: str, schedule: Any = ScheduleGPipe) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    first, last = rank == 0, rank == ranks - 1
    model = Model(1, first, last).to(device)
    stage = PipelineStage(model, rank, ranks, torch.device(device))
    schedule = schedule(stage, n_microbatches=4, loss_fn=loss_of)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    for _ in range(STEPS):
        tokens = torch.randint(0, VOCABULARY, (BATCH, LENGTH)).to(device)
        schedule.step(
            *([tokens] if first else []),
            **({"target": tokens, "losses": []} if last else {}),
        )
        optimizer.step()
        optimizer.zero_grad()


MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
JOBS: dict[str, Callable[[str], None]] = {
    "ddp": _ddp,
    "ddp-view": lambda device: _ddp(device, gradient_as_bucket_view=True),
    "ddp-hook": _ddp_with_hook,
    "ddp-unused": lambda device: _ddp(device, find_unused_parameters=True),
    "ddp-no-sync": _ddp_without_sync,
    "zero": _zero,
    "fsdp": _fsdp,
    "fsdp-keep": lambda device: _fsdp(device, reshard_after_forward=False),
    "fsdp-mixed": lambda device: _fsdp(device, mp_policy=MIXED),
    "fsdp-offload": lambda device: _fsdp(device, offload_policy=CPUOffloadPolicy()),
    "fsdp-meta": _meta_fsdp,
    "hybrid": _hybrid,
    "tensor": _tensor,
    "sequence": _sequence,
    "tensor-fsdp": _tensor_and_fsdp,
    "pipeline": _pipeline,
    "pipeline-1f1b": lambda device: _pipeline(device, Schedule1F1B),
}
