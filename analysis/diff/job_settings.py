"""The settings of a job, its host and its first rank, from the metadata of a trace."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from ebbtide.profiler.trace import Trace
from ebbtide.profiler.trace.metadata import RankInfo


def job_settings(trace: Trace) -> dict[str, Any]:
    """Return the settings of the job, the host and the first rank, by their path in the metadata."""
    meta = trace.meta
    entry = meta.ranks[0] if meta.ranks else RankInfo(rank=0)
    settings: dict[str, Any] = {key: getattr(meta, key) for key in ("source", "warmup_iterations")}
    settings |= {"command": list(meta.command) or None, "ranks": len(meta.ranks), "devices": len(entry.devices)}
    settings |= {key: getattr(entry, key) for key in ("world_size", "python", "torch", "cuda", "transfers_recorded")}
    settings |= _with_prefix("threads", entry.threads)
    settings |= _with_prefix("device", entry.main_device, ("device", "kind", "name", "capacity_bytes"))
    settings |= _with_prefix("link", entry.main_device.link)
    settings |= _with_prefix("model", entry.model)
    for number, optimizer in enumerate(entry.optimizers, start=1):
        settings |= _with_prefix("optimizer" if number == 1 else f"optimizer {number}", optimizer)
    if meta.deepspeed is not None:
        keys = ("version", "stage", "policy", "subgroup_params", "subgroup_devices")
        settings |= _with_prefix("deepspeed", meta.deepspeed, keys) | _with_prefix(
            "deepspeed", _flat(meta.deepspeed.config)
        )
    settings |= _with_prefix("host", meta.host, ("name", "kernel")) | _with_prefix(
        "host.cpu", meta.host.cpu, ("name", "cores")
    )
    for gpu in meta.host.gpus[:1]:
        settings |= _with_prefix("host.gpu", gpu, ("name", "driver", "link_source"))
    return settings | _with_prefix("options", meta.options)


def _flat(config: Any, prefix: str = "") -> dict[str, Any]:
    """Return the entries of nested sections, by the path to each."""
    entries: dict[str, Any] = {}
    for key, value in config.items() if isinstance(config, Mapping) else ():
        entries |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return entries


def _with_prefix(name: str, section: Any, keys: Sequence[str] | None = None) -> dict[str, Any]:
    """Return `name.key` for some keys of a section of the metadata, or (None) for all."""
    section = msgspec.to_builtins(section)
    return {f"{name}.{key}": section.get(key) for key in (section if keys is None else keys)}
