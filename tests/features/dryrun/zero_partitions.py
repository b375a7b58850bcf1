"""A small DeepSpeed job, for real and in a dry run, and what its rank 0 holds."""

from __future__ import annotations

import functools
import os
import socket
from typing import Any

import torch
from torch import nn
from torch.distributed import distributed_c10d

from ebbtide.features.dryrun.session import DryRun, DryRunOptions
from ebbtide.profiler.agent.framework_objects import describe_engine, torch_optimizers
from ebbtide.profiler.agent.job_info import describe_model
from tests.features.dryrun.forked import run_forked

WIDTH = 272
CPU = {"device": "cpu"}
# Groups of a parent process, which must not be released in a child.
_keep_alive: list[Any] = []


class Net(nn.Module):
    """A model with odd sizes, so that partitions end with padding."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 515), nn.GELU(), nn.Linear(515, WIDTH))
            for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x).float().square().mean()


def config(
    stage: int,
    zero: dict[str, Any] | None = None,
    dtype: str = "bf16",
    accumulate: int = 1,
) -> dict[str, Any]:
    """Return a configuration; zero: further keys of the section zero_optimization.

    Without offload it uses torch's AdamW, since DeepSpeed would have to compile its
    FusedAdam for the real run.
    """
    zero = {
        "stage": stage,
        "sub_group_size": 200_000,
        "reduce_bucket_size": 150_000,
        **(zero or {}),
    }
    params: dict[str, Any] = {"lr": 1e-3}
    if "offload_optimizer" not in zero:
        params["torch_adam"] = True
    settings = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": accumulate,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": params},
        "zero_optimization": zero,
        "steps_per_print": 1_000_000,
    }
    return settings if dtype == "fp32" else {**settings, dtype: {"enabled": True}}


def train(settings: dict[str, Any], steps: int) -> Any:
    """Train some optimizer steps, and return the engine."""
    import cpuinfo
    import deepspeed

    # DeepSpeed calls it for every CPU Adam, and it takes a second.
    cpuinfo.get_cpu_info = functools.cache(cpuinfo.get_cpu_info)
    torch.manual_seed(0)
    model = Net()
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=settings
    )
    dtype = next(engine.module.parameters()).dtype
    for _ in range(steps * engine.gradient_accumulation_steps()):
        engine.backward(engine(torch.randn(4, WIDTH).to(engine.device, dtype)))
        engine.step()
    return engine


def dry_run(cases: dict[str, dict[str, Any]], ranks: int) -> dict[str, Any]:
    """Return what rank 0 holds in dry runs of the cases."""
    forget_groups()
    sizes = {}
    for name, settings in cases.items():
        with DryRun(DryRunOptions(iterations=2, ranks=ranks)):
            sizes[name] = sizes_of(train(settings, 1))
    return sizes


def run_for_real(cases: dict[str, dict[str, Any]], ranks: int) -> dict[str, Any]:
    """Return what rank 0 holds in real runs of the cases, on DeepSpeed's CPU
    accelerator."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    return run_forked(functools.partial(_run_ranks, cases, ranks, port))


def _run_ranks(
    cases: dict[str, dict[str, Any]], ranks: int, port: str
) -> dict[str, Any]:
    """Run all ranks: the first one in this process, the others in children of it."""
    rank = next((other for other in range(1, ranks) if not os.fork()), 0)
    try:
        sizes = _run_rank(cases, rank, ranks, port)
        if not rank:
            return sizes
    finally:
        if rank:
            os._exit(0)


def _run_rank(
    cases: dict[str, dict[str, Any]], rank: int, ranks: int, port: str
) -> dict[str, Any]:
    import deepspeed
    from deepspeed.utils import groups

    forget_groups()
    groups._WORLD_GROUP = deepspeed.comm.comm.cdb = None
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(ranks),
        MASTER_ADDR="127.0.0.1",
    )
    os.environ["MASTER_PORT"] = port
    deepspeed.init_distributed("gloo", verbose=False)
    return {name: sizes_of(train(settings, 1)) for name, settings in cases.items()}


def forget_groups() -> None:
    """Leave process groups of the parent process, without releasing them: their threads
    are not in this process."""
    _keep_alive.extend(distributed_c10d._world.pg_map)
    distributed_c10d.GroupMember.WORLD = None


def sizes_of(engine: Any) -> dict[str, Any]:
    """Return shapes and types of what a rank holds: parameters, masters, moments,
    gradients, subgroups and padding."""
    optimizer = engine.optimizer
    description = describe_engine(engine, False)
    sizes: dict[str, Any] = {
        "subgroups": description["subgroup_params"],
        "padding": optimizer.groups_padding,
        "model": describe_model([engine], [optimizer], False),
    }
    tensors = {"parameters": list(engine.module.parameters())}
    if engine.zero_optimization_stage() == 3:
        tensors["partitions"] = [
            parameter.ds_tensor for parameter in engine.module.parameters()
        ]
        tensors["flat"] = [
            part for part in optimizer.fp16_partitioned_groups_flat if part is not None
        ]
        tensors["masters"] = optimizer.fp32_partitioned_groups_flat
        tensors["gradients"] = [optimizer.grad_partitions_flat_buffer]
    else:
        tensors["flat"] = optimizer.bit16_groups_flat
        tensors["masters"] = optimizer.single_partition_of_fp32_groups
        sizes["first offset"] = optimizer.first_offset
    inner = torch_optimizers(optimizer)
    states = [
        part.state[master]
        for master in tensors["masters"]
        for part in inner
        if master in part.state
    ]
    tensors["moments"] = [
        state[name] for state in states for name in ("exp_avg", "exp_avg_sq")
    ]
    tensors["master gradients"] = [
        m.grad for m in tensors["masters"] if m.grad is not None
    ]
    for kind, items in tensors.items():
        sizes[kind] = [(tuple(tensor.shape), str(tensor.dtype)) for tensor in items]
    return sizes
