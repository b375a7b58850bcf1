"""Jobs for two ranks with compiled models whose updates run under the next forward."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.interleave.engine.late_rank_jobs import (
    OVERLAPS,
    Normalized,
    late_optimizer,
    on_all_ranks,
    train_replica,
)
from tests.interleave.engine.rank_jobs import RANKS, Result, loss_of, sharded
from tests.interleave.engine.training import batches


def compiled_shards(rank: int, folder: Path) -> bool:
    """Return whether late updates change no loss of a compiled sharded model."""
    losses = []
    for overlap in OVERLAPS:
        model, data = sharded(), batches(torch.float32)
        compiled: Any = torch.compile(model, backend="aot_eager")
        with late_optimizer(model, "streamed", overlap) as optimizer:
            values = []
            for _ in range(5):
                optimizer.zero_grad()
                loss = loss_of(compiled, next(data), 0, slice(rank, None, RANKS))
                values.append(loss.item())
                loss.backward()
                optimizer.step()
        losses.append(values)
    return on_all_ranks(losses[0] == losses[1])


def compiled_replicas(rank: int, folder: Path) -> bool:
    """Return whether late updates change no loss of a compiled replicated model."""
    losses = []
    for overlap in OVERLAPS:
        ddp = nn.parallel.DistributedDataParallel(Normalized())
        with late_optimizer(ddp, "kept", overlap) as optimizer:
            losses.append(
                train_replica(
                    torch.compile(ddp, backend="aot_eager"), optimizer, rank, 5
                )
            )
    return on_all_ranks(losses[0] == losses[1])


JOBS: tuple[Callable[[int, Path], Result | bool], ...] = (
    compiled_shards,
    compiled_replicas,
)
