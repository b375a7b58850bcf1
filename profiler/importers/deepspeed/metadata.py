"""Adds the settings of a DeepSpeed job to the metadata of a trace."""

from __future__ import annotations

import shlex
from typing import Any

from ebbtide.profiler.importers.deepspeed.log_data import HostMemory, MemoryMark
from ebbtide.profiler.importers.deepspeed.settings import JobSettings
from ebbtide.profiler.importers.nvml_monitor.monitor import Coverage
from ebbtide.profiler.trace import RankBuilder, TraceBuilder

# A log has data of rank 0, and monitor files of the ranks on its host: the files of more ranks would be empty.
_MAX_RANKS = 64


def add_metadata(builder: TraceBuilder, settings: JobSettings, marks: list[MemoryMark]) -> dict[int, RankBuilder]:
    """Add the settings to a trace, and an entry for each rank.

    Args:
        builder: The trace.
        settings: Settings of the job.
        marks: Memory marks, from which the memory of the host follows.

    Returns:
        The builders of the ranks, rank 0 first.
    """
    meta: dict[str, Any] = builder.meta
    if settings.command is not None:
        try:
            meta["command"] = shlex.split(settings.command)
        except ValueError:
            meta["command"] = settings.command.split()
    # The share has one decimal: the largest share gives the host's memory with the smallest error.
    hosts = (mark.host for mark in marks if mark.host)
    host = max(hosts, key=lambda memory: memory.share, default=HostMemory(0, 0.0))
    if host.share > 0:
        capacity = round(host.used_bytes / host.share)
        meta["host"] = {"cpu": {"device": "cpu", "kind": "cpu", "capacity_bytes": capacity}}
    subgroups = settings.subgroups.get(0, {})
    meta["deepspeed"] = {
        "version": settings.deepspeed,
        "config": settings.config,
        "subgroup_params": [subgroups[key] for key in sorted(subgroups)] or None,
        "activation_checkpointing": settings.checkpointing or None,
    }
    ranks = add_ranks(builder, settings)
    shard, total = settings.shard_params(), settings.params()
    for rank, entry in ranks.items():
        entry.meta["model"] = {"total_params": total, "params": shard if shard is not None else total}
        if settings.optimizer is not None:
            entry.meta["optimizers"] = [{"class": settings.optimizer, "params": shard}]
        if settings.omp_threads is not None:
            entry.meta["threads"] = {"torch": None, "omp": settings.omp_threads}
        if rank == 0 or settings.torch is not None:
            entry.meta.update({"torch": settings.torch, "cuda": settings.cuda})
    return ranks


def add_ranks(builder: TraceBuilder, settings: JobSettings) -> dict[int, RankBuilder]:
    """Add an entry for each rank of a job, with its device, and return the builders by rank."""
    world_size = settings.world_size or 1
    local_devices = settings.visible_devices or list(range(world_size))
    ranks = {}
    if world_size > _MAX_RANKS:
        builder.note(f"the job has {world_size} ranks: the trace has the first {_MAX_RANKS}")
    for number in range(min(world_size, _MAX_RANKS)):
        entry = builder.rank(number, world_size=settings.world_size)
        device = f"cuda:{local_devices[number % len(local_devices)]}"
        if not entry.meta["devices"]:
            entry.meta["devices"] = [{"device": device, "kind": "cuda", "capacity_bytes": None, "link": None}]
        ranks[number] = entry
    return ranks


def monitored_ranks(ranks: dict[int, RankBuilder], monitors: Coverage | None) -> list[int]:
    """Return the ranks whose device monitor files cover.

    Args:
        ranks: The builders of the ranks.
        monitors: What the files cover; None if there are none.
    """
    owners: dict[str, int] = {}
    for rank, entry in ranks.items():
        owners.setdefault(entry.meta["devices"][0]["device"], rank)
    covered = [f"cuda:{number}" for number in monitors.devices] if monitors is not None else []
    return [owners[device] for device in covered if device in owners]
