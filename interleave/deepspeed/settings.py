"""The arguments of `enable`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ebbtide.interleave.engine.adaptive.budget import Budget
from ebbtide.interleave.engine.devices.device import Device
from ebbtide.machines.machine import Machine


@dataclass(frozen=True)
class Settings:
    """The settings of an optimizer; see `enable` for their meaning."""

    policy: str = "adaptive"
    memory_budget: Budget | None = None
    machine: Machine | None = None
    subgroup_params: int = 100_000_000
    threads: int | None = None
    device: Device | None = None
    storage: str | Path | Sequence[str | Path] | None = None
    host_memory_budget: float | None = None
