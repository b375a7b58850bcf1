"""Random jobs with layers that move, on several ranks; each returns the result of rank 0."""

from __future__ import annotations

import random
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from ebbtide.interleave.engine.layers import activations, model_layers
from ebbtide.interleave.engine.layers.weights import stream_weights
from tests.interleave.engine.layers.random_jobs import CountingDevice, Job, Model, Parallel, random_job, time_limit
from tests.interleave.engine.layers.random_planner import RandomPlanner

KINDS = ("ddp", "views", "unused", "sharded", "resharded")


def parallel(model: Model, kind: str, syncs_last: bool) -> Parallel:
    """Return a model that is replicated or sharded on all ranks."""
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (dist.get_world_size(),))
    if kind in ("ddp", "views", "unused"):
        ddp = nn.parallel.DistributedDataParallel(
            model, gradient_as_bucket_view=kind == "views", find_unused_parameters=kind == "unused"
        )
        return Parallel("ddp", ddp, rank, syncs_last)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=kind == "resharded")
    return Parallel("sharded", fully_shard(model, mesh=mesh), rank, syncs_last)


def rank_job(seed: int, kind: str) -> Job:
    """Return a random job without what these ranks cannot do: two backwards of a graph, and errors."""
    job = replace(random_job(seed, same_length=True), twice=False, fault=None)
    streams = job.overlap in ("backward", "both", "auto")
    return replace(job, overlap="forward") if streams and kind not in ("sharded", "resharded") else job


def run_case(seed: int, patch: pytest.MonkeyPatch) -> tuple[str, bool]:
    """Return the kind of a random job, and whether it has the plain one's bits on this rank."""
    draw = random.Random(seed)
    kind, syncs_last, streams = draw.choice(KINDS), draw.random() < 0.5, draw.random() < 0.4
    job, rates = rank_job(seed, kind), [draw.choice((None, 2e6, 2e7)) for _ in "ab"]
    plain, model = job.model(), job.model()
    expected = job.train(plain, None, parallel(plain, kind, syncs_last))
    replicas = parallel(model, kind, syncs_last)
    device = CountingDevice(None, *rates)
    # Each rank has a plan of its own, as after its own measurements.
    planner = RandomPlanner(random.Random(seed * 10 + dist.get_rank()), is_limited=not job.autocast)
    with patch.context() as patched:
        patched.setattr(model_layers, "plan_orders", planner.plan)
        with (
            stream_weights(model, memory_budget=12e3, device=device) if streams else nullcontext(),
            activations.offload_activations(model, memory_budget=1e9, device=device) as planner.activations,
        ):
            actual = job.train(model, device, replicas)
    return f"{kind}{' streamed' if streams else ''}", [*map(_equal, actual, expected)] == [True] * len(expected)


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(*(value.to_local() if hasattr(value, "to_local") else value for value in (one, other)))


def random_layers(rank: int, folder: Path, cases: int = 8) -> dict[str, Any]:
    """Return the numbers of jobs by kind, and the seeds of those that differ on a rank."""
    patch, differing = pytest.MonkeyPatch(), []
    counts: Counter[str] = Counter()
    for seed in range(cases):
        with time_limit(60.0, f"case {seed}"):
            kind, is_equal = run_case(seed, patch)
        on_ranks = [None] * dist.get_world_size()
        dist.all_gather_object(on_ranks, is_equal)
        counts[kind] += 1
        if not all(on_ranks):
            differing.append(seed)
    return {"counts": dict(counts), "differing": differing}


def many_random_layers(rank: int, folder: Path) -> dict[str, Any]:
    return random_layers(rank, folder, 60)


JOBS = (random_layers,)
