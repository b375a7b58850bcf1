"""The options of InterleavedAdamW and of the engine behind it, and their checks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ebbtide.features.overlap.policy import OVERLAP
from ebbtide.features.storage.engine.stored_states import StorageOptions
from ebbtide.interleave.engine.devices.device import Device
from ebbtide.interleave.engine.devices.opening import DeviceArgument, as_device
from ebbtide.interleave.engine.errors import EngineError
from ebbtide.interleave.model.operations import BOTH, NO_OVERLAP, Overlap
from ebbtide.interleave.policies import parse
from ebbtide.machines.catalog import find_machine
from ebbtide.machines.machine import Machine
from ebbtide.phases import PHASES
from ebbtide.units import byte_count

# Bytes of device memory for state: at any time, or by phase.
Budget = float | Mapping[str, float]
# The same as callers give them: sizes may be text.
BudgetArgument = float | str | Mapping[str, float | str]
MachineArgument = Machine | str | Path


@dataclass(frozen=True)
class EngineOptions:
    """The options of an engine, named as for InterleavedAdamW; EngineError if one is not valid. `supported`: something
    calls `wait_for_params` before parameters are read (`forward`), or `Engine.assume` (`backward`)."""

    policy: str = "adaptive"
    machine: Machine | None = None
    subgroup_params: int = 100_000_000
    memory_budget: Budget | None = None
    max_grad_norm: float | None = None
    gradients: str = "kept"
    device: Device | None = None
    threads: int | None = None
    storage: str | Path | Sequence[str | Path] | None = None
    host_memory_budget: float | None = None
    master: str = "fp32"
    supported: Overlap = NO_OVERLAP

    def __post_init__(self) -> None:
        if self.gradients not in ("kept", "streamed"):
            raise EngineError(f"gradients is {self.gradients!r}: it must be 'kept' or 'streamed'")
        if self.subgroup_params < 1:
            raise EngineError(f"subgroup_params is {self.subgroup_params}: it must be at least 1")
        if self.threads is not None and self.threads < 1:
            raise EngineError(f"threads is {self.threads}: it must be at least 1, or None")
        if self.max_grad_norm is not None and not self.max_grad_norm > 0:
            raise EngineError(f"max_grad_norm is {self.max_grad_norm}: it must be above 0, or None")
        _check_budget(self.memory_budget)
        if self.master not in ("fp32", "remainder"):
            raise EngineError(f"master is {self.master!r}: it must be 'fp32' or 'remainder'")
        if self.has_remainders and parse(self.policy).options.get("overlap", "none") not in ("none", "forward"):
            raise EngineError(
                "master='remainder' is not supported with updates inside the backward: use overlap='none' or 'forward'"
            )
        self.open_storage()

    @classmethod
    def of_arguments(
        cls,
        *,
        machine: MachineArgument | None,
        memory_budget: BudgetArgument | None,
        host_memory_budget: float | str | None,
        device: DeviceArgument | None,
        **others: Any,
    ) -> "EngineOptions":
        """Return the options that arguments of a caller stand for; machines, sizes and devices may be text."""
        budget: Budget | None
        if isinstance(memory_budget, Mapping):
            budget = {phase: budget_bytes(size) for phase, size in memory_budget.items()}
        else:
            budget = budget_bytes(memory_budget)
        return cls(
            machine=None if machine is None else find_machine(machine),
            memory_budget=budget,
            host_memory_budget=budget_bytes(host_memory_budget, "host_memory_budget"),
            device=as_device(device),
            **others,
        )

    @property
    def streamed(self) -> bool:
        """Whether gradients are offloaded as soon as they are computed."""
        return self.gradients == "streamed"

    @property
    def has_remainders(self) -> bool:
        """Whether the masters are remainders: see remainder.py."""
        return self.master == "remainder"

    def open_storage(self) -> StorageOptions | None:
        """Return the storage of one engine, which opens files of its own; None without storage."""
        if self.storage is not None:
            return StorageOptions(self.storage, self.host_memory_budget)
        if self.host_memory_budget is not None:
            raise EngineError("host_memory_budget needs storage=: a folder for state that host memory does not hold")
        return None


def budget_bytes(size: Any, name: str = "memory_budget") -> Any:
    """Return a budget that may be text in bytes, numbers as they are. Raises EngineError for anything else."""
    if size is None or isinstance(size, int | float):
        return size
    try:
        return byte_count(size, name)
    except ValueError as error:
        raise EngineError(str(error)) from None


# Smaller budgets hold no state of any use: they were meant in GB.
_LEAST_BUDGET_BYTES = 1000


def _check_budget(budget: Any) -> None:
    by_phase = isinstance(budget, Mapping)
    if by_phase and set(budget) != set(PHASES):
        raise EngineError(f"memory_budget by phase has {', '.join(map(str, budget))}: it needs {', '.join(PHASES)}")
    for size in budget.values() if by_phase else (budget,):
        if size is not None:
            check_budget_bytes(size, "a dict of bytes by phase")


def check_budget_bytes(size: Any, other: str) -> None:
    """Raise EngineError unless a budget is in bytes; `other`: what else it may be."""
    if not (isinstance(size, int | float) and size >= 0):
        raise EngineError(f"memory_budget is {size!r}: it must be bytes, at least 0, or {other}")
    if 0 < size < _LEAST_BUDGET_BYTES:
        raise EngineError(f"memory_budget is {size!r} bytes: for {size:g} GB it must be {size:g}e9")


def with_overlap_option(policy: str, overlap: str, gradients: str, supported: Overlap) -> str:
    """Return the policy with the option `overlap`, unless it has one. `auto` becomes what is supported. Raises
    EngineError if the two contradict each other, or there is no such overlap with gradients of this kind."""
    if overlap not in OVERLAP:
        raise EngineError(f"overlap is {overlap!r}: it must be one of {', '.join(OVERLAP)}")
    options = parse(policy).options
    parts = policy.split(",")
    others = [part for part in parts if part.partition("=")[0].strip() != "overlap"]
    if len(others) < len(parts):
        if overlap not in ("none", options["overlap"]):
            raise EngineError(f"policy is {policy!r} and overlap {overlap!r}: they must not contradict each other")
        overlap = options["overlap"]
    if overlap in ("backward", "both") and gradients != "streamed":
        raise EngineError(
            f"overlap is {overlap!r} and gradients are {gradients!r}: updates inside the backward need "
            "gradients='streamed'"
        )
    if overlap == "auto":
        best = "auto" if supported == BOTH else supported.name
        overlap = best if "overlap" in options else "none"
    return ",".join(others) if overlap == "none" else ",".join((*others, f"overlap={overlap}"))
