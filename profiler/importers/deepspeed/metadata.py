"""What a DeepSpeed log says of the job, as the meta of a trace."""

from __future__ import annotations

import shlex
from typing import Any

from ebbtide.profiler.importers.deepspeed.durations import Mark
from ebbtide.profiler.importers.deepspeed.settings import Facts
from ebbtide.profiler.trace import RankBuilder, TraceBuilder

# A log tells of rank 0, and monitor files of those on its host: more are not worth their files.
_MOST_RANKS = 64


def add_meta(builder: TraceBuilder, facts: Facts, marks: list[Mark]) -> dict[int, RankBuilder]:
    """Add facts to the trace, and an entry for each rank. Returns the entries, the first of which is rank 0."""
    meta: dict[str, Any] = builder.meta
    if facts.command is not None:
        try:
            meta["command"] = shlex.split(facts.command)
        except ValueError:
            meta["command"] = facts.command.split()
    # The share has one decimal: the largest tells the host's memory best.
    used, share = max((mark.host for mark in marks if mark.host), key=lambda host: host[1], default=(0, 0.0))
    if share > 0:
        meta["host"] = {"cpu": {"device": "cpu", "kind": "cpu", "capacity_bytes": round(used / share)}}
    subgroups = facts.subgroups.get(0, {})
    meta["deepspeed"] = {
        "version": facts.deepspeed,
        "config": facts.config,
        "subgroup_params": [subgroups[key] for key in sorted(subgroups)] or None,
        "activation_checkpointing": facts.checkpointing or None,
    }
    ranks = _ranks(builder, facts)
    shard, total = facts.shard_params(), facts.params()
    for rank, entry in ranks.items():
        entry.meta["model"] = {"total_params": total, "params": shard if shard is not None else total}
        if facts.optimizer is not None:
            entry.meta["optimizers"] = [{"class": facts.optimizer, "params": shard}]
        if facts.omp_threads is not None:
            entry.meta["threads"] = {"torch": None, "omp": facts.omp_threads}
        if rank == 0 or facts.torch is not None:
            entry.meta.update({"torch": facts.torch, "cuda": facts.cuda})
    return ranks


def _ranks(builder: TraceBuilder, facts: Facts) -> dict[int, RankBuilder]:
    world = facts.world_size or 1
    local = facts.visible_devices or list(range(world))
    ranks = {}
    if world > _MOST_RANKS:
        builder.note(f"the job has {world} ranks: the trace has the first {_MOST_RANKS}")
    for number in range(min(world, _MOST_RANKS)):
        entry = builder.rank(number, world_size=facts.world_size)
        device = f"cuda:{local[number % len(local)]}"
        if not entry.meta["devices"]:
            entry.meta["devices"] = [{"device": device, "kind": "cuda", "capacity_bytes": None, "link": None}]
        ranks[number] = entry
    return ranks
