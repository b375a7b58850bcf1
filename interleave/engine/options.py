"""The options of optimizers: types, defaults, checks and documentation, written
once."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypedDict, TypeVar, Unpack

import torch

from ebbtide import seams
from ebbtide.errors import SizeError
from ebbtide.interleave.engine.devices.device import Device
from ebbtide.interleave.engine.devices.opening import DeviceArgument, as_device
from ebbtide.interleave.engine.errors import EngineError
from ebbtide.interleave.engine.runtime.backing import Backing
from ebbtide.interleave.model.operations import BOTH, OVERLAP, Overlap
from ebbtide.interleave.policies import Policy, as_policy
from ebbtide.machines.catalog import MachineArgument, find_machine
from ebbtide.machines.machine import Machine
from ebbtide.phases import PHASES
from ebbtide.units import ByteCount, byte_count

# Bytes of device memory for state: at any time, or by phase.
Budget = float | Mapping[str, float]
# The same as callers give them: sizes may be text.
BudgetArgument = ByteCount | Mapping[str, ByteCount]
_DEFAULT_POLICY = "adaptive"
Function = TypeVar("Function", bound=Callable[..., Any])


class SharedArguments(TypedDict, total=False):
    """The options that optimizers and DeepSpeed's `enable` have alike, as callers write
    them; see `OptimizerOptions`."""

    machine: MachineArgument | None
    subgroup_params: int
    memory_budget: BudgetArgument | None
    device: DeviceArgument | None
    threads: int | None
    storage: str | Path | Sequence[str | Path] | None
    host_memory_budget: ByteCount | None


class OptimizerArguments(SharedArguments, total=False):
    """The options of optimizers as callers write them.

    `OptimizerOptions` documents them.
    """

    policy: Policy | str
    overlap: Literal["none", "forward", "backward", "both", "auto"]
    max_grad_norm: float | None
    gradients: Literal["kept", "copied", "streamed"]
    loss_scale: float | Literal["dynamic"] | None
    model: torch.nn.Module | None


@dataclass(frozen=True, kw_only=True)
class OptimizerOptions:
    """The options of InterleavedAdamW and InterleavedOptimizer.

    DeepSpeed's `enable` has most of them. They are keywords there, and sizes, machines,
    devices and policies may be text.

    Args:
        policy: As for `ebbtide replay`; `adaptive` makes new plans while the job runs.
        machine: The first rates, or the name or file of a machine. By default,
            `adaptive` measures this one for a moment.
        subgroup_params: Number of parameters whose state is moved and updated as one.
        memory_budget: Bytes of device memory for state, as a number or as text like
            `4GiB`, or a dict of these by phase (`forward`, `backward`, `update`). By
            default, what the device has free.
        max_grad_norm: Maximum norm of all gradients, over all ranks; larger ones are
            clipped. None to not clip.
        gradients: `kept` in `p.grad` until the step. `copied` to the host as soon as
            the backward has computed them, too; those that the job changes after that,
            by clipping for instance, are copied again. `streamed` to the host, so that
            they take no device memory; then only the optimizer can clip and scale them.
        loss_scale: A number, or `dynamic`. Then back-propagate `scale(loss)`, and a
            step with a gradient that is not finite is skipped.
        device: By default the device of the parameters; for parameters on the CPU an
            emulated one.
        threads: Number of threads for updates on the CPU; by default all cores of this
            rank.
        overlap: Phases beside the step that updates may run in. `forward`: parameters
            are updated under the next forward, as far as it does not use them yet, and
            `step` returns before; read them outside of `model` only after
            `synchronize()`. `backward`: updates are computed as soon as gradients are
            there, beside the old state, and again where the step turns out to be
            clipped; this needs copied or streamed gradients and more host memory.
            `both`, or `auto`, the fastest of what gradients and `model` allow.
        model: With updates under the forward: the module whose forward uses the
            parameters, so that it waits for them.
        storage: A folder, or several, for state that host memory does not hold; see
            `commit`.
        host_memory_budget: With `storage`: bytes of host memory for state and buffers;
            by default most of what is free.
        offered: The phases beside the step in which updates can run, whatever the
            policy.
        beside_step: The phases beside the step in which the caller can run the updates
            of a policy that has some there; by default those that `model` and
            `gradients` allow, of any policy.

    Raises:
        EngineError: If an option is not valid, or contradicts another.
        PolicyError: If the policy has no such overlap.
    """

    policy: Policy = field(default_factory=partial(as_policy, _DEFAULT_POLICY))
    machine: Machine | None = None
    subgroup_params: int = 100_000_000
    memory_budget: Budget | None = None
    max_grad_norm: float | None = None
    gradients: str = "kept"
    loss_scale: float | str | None = None
    device: Device | None = None
    threads: int | None = None
    overlap: str = "none"
    # Not kept: engines do not keep models alive.
    model: InitVar[torch.nn.Module | None] = None
    storage: str | Path | Sequence[str | Path] | None = None
    host_memory_budget: float | None = None
    beside_step: InitVar[Overlap | None] = None
    offered: Overlap = field(init=False)
    supported: Overlap = field(init=False)

    def __post_init__(
        self, model: torch.nn.Module | None, beside_step: Overlap | None
    ) -> None:
        if self.gradients not in ("kept", "copied", "streamed"):
            raise EngineError(
                f"gradients is {self.gradients!r}: it must be 'kept', 'copied' or "
                "'streamed'"
            )
        if self.subgroup_params < 1:
            raise EngineError(
                f"subgroup_params is {self.subgroup_params}: it must be at least 1"
            )
        if self.threads is not None and self.threads < 1:
            raise EngineError(
                f"threads is {self.threads}: it must be at least 1, or None"
            )
        if self.max_grad_norm is not None and not self.max_grad_norm > 0:
            raise EngineError(
                f"max_grad_norm is {self.max_grad_norm}: it must be above 0, or None"
            )
        _check_budget(self.memory_budget)
        own = Overlap(forward=model is not None, backward=self.gradients != "kept")
        offered = own if beside_step is None else beside_step
        policy = self._policy_with_overlap(offered)
        object.__setattr__(self, "policy", policy)
        object.__setattr__(self, "offered", offered)
        object.__setattr__(
            self,
            "supported",
            own if beside_step is None else beside_step & policy.widest_overlap,
        )
        self.open_backing()

    @classmethod
    def of_arguments(
        cls, beside_step: Overlap | None = None, **arguments: Unpack[OptimizerArguments]
    ) -> "OptimizerOptions":
        """Return the options that arguments of a caller stand for.

        Policies, machines, sizes and devices may be text.

        Raises MachineError if there is no such machine, and as the class."""
        values: dict[str, Any] = {
            "policy": _DEFAULT_POLICY,
            "machine": None,
            **arguments,
        }
        values["policy"] = as_policy(values["policy"])
        values["device"] = as_device(values.get("device"))
        if values["machine"] is not None:
            values["machine"] = find_machine(values["machine"])
        for name in ("memory_budget", "host_memory_budget"):
            values[name] = budget_bytes(values.get(name), name)
        return cls(beside_step=beside_step, **values)

    @property
    def streamed(self) -> bool:
        """Whether gradients are moved to the host as soon as they are computed."""
        return self.gradients == "streamed"

    def open_backing(self) -> Backing:
        """Return the memory behind host memory for one engine, which opens files of its
        own."""
        if self.storage is not None:
            backing: Backing = seams.service("storage")(
                self.storage, self.host_memory_budget
            )
            return backing
        if self.host_memory_budget is not None:
            raise EngineError(
                "host_memory_budget needs storage=: a folder for state that host "
                "memory does not hold"
            )
        return Backing()

    def _policy_with_overlap(self, supported: Overlap) -> Policy:
        """Return the policy with the option `overlap`, unless it has one. `auto`
        becomes what is supported. Raises EngineError if the two contradict each other,
        or there is no such overlap with gradients of this kind."""
        policy, overlap = self.policy, self.overlap
        if overlap not in OVERLAP:
            raise EngineError(
                f"overlap is {overlap!r}: it must be one of {', '.join(OVERLAP)}"
            )
        if policy.states("overlap"):
            if overlap not in ("none", policy.overlap):
                raise EngineError(
                    f"policy is {policy.text!r} and overlap {overlap!r}: they must not "
                    "contradict each other"
                )
            overlap = policy.overlap
        elif overlap == "none":
            return policy
        if overlap in ("backward", "both") and self.gradients == "kept":
            raise EngineError(
                f"overlap is {overlap!r} and gradients are 'kept': updates inside the "
                "backward need gradients='copied' or gradients='streamed'"
            )
        if overlap == "auto":
            best = "auto" if supported == BOTH else supported.name
            overlap = best if "overlap" in policy.options else "none"
        return (
            policy
            if overlap == policy.overlap
            else policy.with_options(overlap=overlap)
        )


def shows_options(
    arguments: type, others: str | None = None
) -> Callable[[Function], Function]:
    """Let the signature of a function name the keywords that it takes.

    Args:
        arguments: TypedDict of the keywords; their defaults are in `OptimizerOptions`.
        others: Name under which the signature has any further keywords; None if there
            are none.
    """
    options = inspect.signature(OptimizerOptions).parameters
    types = inspect.get_annotations(arguments)

    def decorate(function: Function) -> Function:
        signature = inspect.signature(function)
        own = {
            name: one
            for name, one in signature.parameters.items()
            if one.kind is not one.VAR_KEYWORD
        }
        shown = [
            one.replace(
                annotation=types[name],
                default=_DEFAULT_POLICY if name == "policy" else one.default,
            )
            for name, one in options.items()
            if name in types and name not in own
        ]
        rest = (
            []
            if others is None
            else [inspect.Parameter(others, inspect.Parameter.VAR_KEYWORD)]
        )
        all_shown = signature.replace(parameters=[*own.values(), *shown, *rest])
        function.__signature__ = all_shown  # type: ignore[attr-defined]
        return function

    return decorate


def budget_bytes(size: Any, name: str = "memory_budget") -> Any:
    """Return a budget in bytes, which may be text or by phase; numbers as they are.
    Raises EngineError for others."""
    if isinstance(size, Mapping) and name == "memory_budget":
        return {phase: budget_bytes(one, name) for phase, one in size.items()}
    if size is None or isinstance(size, int | float):
        return size
    try:
        return byte_count(size, name)
    except SizeError as error:
        raise EngineError(str(error)) from None


# Smaller budgets hold no state of any use: they were meant in GB.
_LEAST_BUDGET_BYTES = 1000


def _check_budget(budget: Any) -> None:
    by_phase = isinstance(budget, Mapping)
    if by_phase and set(budget) != set(PHASES):
        raise EngineError(
            f"memory_budget by phase has {', '.join(map(str, budget))}: it needs "
            f"{', '.join(PHASES)}"
        )
    for size in budget.values() if by_phase else (budget,):
        if size is not None:
            check_budget_bytes(size, "a dict of bytes by phase")


def check_budget_bytes(size: Any, other: str) -> None:
    """Raise EngineError unless a budget is in bytes; `other`: what else it may be."""
    if not (isinstance(size, int | float) and size >= 0):
        raise EngineError(
            f"memory_budget is {size!r}: it must be bytes, at least 0, or {other}"
        )
    if 0 < size < _LEAST_BUDGET_BYTES:
        raise EngineError(
            f"memory_budget is {size!r} bytes: for {size:g} GB it must be {size:g}e9"
        )
