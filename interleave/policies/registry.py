"""The registry of policies, and the text that selects them: `twin-flow:0.4`, `interleaved:2@0.8,grads=blocking`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

from ebbtide.errors import PolicyError
from ebbtide.features.layers.layer_choice import LAYER_OPTIONS, is_choice, plan_with_layers
from ebbtide.features.storage.policy import with_storage
from ebbtide.interleave.model.operations import BOTH, NO_OVERLAP, OVERLAPS, Overlap
from ebbtide.interleave.model.plan import Plan
from ebbtide.interleave.model.workload import FreeMemorySteps, Workload
from ebbtide.machines.catalog import MachineArgument, find_machine
from ebbtide.machines.machine import Machine

# The option `overlap` without the updates that end in the next forward.
_WITHOUT_LATE = {"forward": "none", "both": "backward", "auto": "backward"}


@dataclass(frozen=True)
class Policy:
    """A policy as a user chose it. Its text is parsed once, by `as_policy` where it comes in.

    Attributes:
        value: Text after the colon, None without a colon.
        options: Options after commas, with defaults filled in.
        text: The text as the user wrote it, which files and screens show.
    """

    name: str
    value: str | None = field(default=None, compare=False)
    options: Mapping[str, str] = field(default_factory=dict, compare=False)
    text: str = field(kw_only=True)

    @classmethod
    def parse(cls, text: str) -> Policy:
        """Parse a text. Raises PolicyError where the policy, an option or an option's value does not exist."""
        head, *option_texts = (part.strip() for part in text.split(","))
        name, colon, value = head.partition(":")
        if name not in POLICIES:
            raise PolicyError(f"{text!r}: there is no policy {name!r}; there are {with_values(POLICIES.values())}")
        allowed = POLICIES[name].options
        options = {key: values[0] for key, values in allowed.items()}
        for option_text in option_texts:
            key, equals, chosen = (part.strip() for part in option_text.partition("="))
            if not equals or key not in allowed:
                choices = ", ".join(f"{k}={'|'.join(v)}" for k, v in allowed.items()) or "none"
                raise PolicyError(f"{text!r}: {name} has no option {option_text!r}; it has {choices}")
            if not is_choice(chosen, allowed[key]):
                raise PolicyError(f"{text!r}: {key} is one of {', '.join(allowed[key])}")
            options[key] = chosen
        return cls(name, value if colon else None, options, text=text)

    @classmethod
    def make(cls, name: str, value: object = None, **options: str) -> Policy:
        """Make a policy of its parts. Raises PolicyError as `parse`."""
        head = name if value is None else f"{name}:{value}"
        return cls.parse(",".join([head, *(f"{key}={chosen}" for key, chosen in options.items())]))

    @classmethod
    def of_plan(cls, plan: Plan) -> Policy:
        """Return the policy that made a plan, which has its text. Raises PolicyError if it is registered no more."""
        return cls.parse(plan.policy)

    def __str__(self) -> str:
        return self.text

    def with_options(self, **options: str) -> Policy:
        """Return the policy with other options, of which the text has those that are not at their default."""
        head, *parts = self.text.split(",")
        kept = [part for part in parts if part.partition("=")[0].strip() not in options]
        defaults = {key: values[0] for key, values in self.registered.options.items()}
        changed = [f"{key}={chosen}" for key, chosen in options.items() if chosen != defaults.get(key)]
        return self.parse(",".join([head, *kept, *changed]))

    @property
    def registered(self) -> RegisteredPolicy:
        """The entry of the registry."""
        return POLICIES[self.name]

    @property
    def is_adaptive(self) -> bool:
        """Whether it is the policy that follows the machine and the free memory."""
        return self.name == "adaptive"

    @property
    def overlap(self) -> str:
        """The option `overlap`; none where the policy has no such option."""
        return self.options.get("overlap", "none")

    @property
    def widest_overlap(self) -> Overlap:
        """The phases that updates may run in at most, beside the step."""
        return BOTH if self.overlap == "auto" else OVERLAPS.get(self.overlap, NO_OVERLAP)

    @property
    def speculates(self) -> bool:
        """Whether updates may run before all gradients are there."""
        return self.widest_overlap.backward

    @property
    def depends_on_rates(self) -> bool:
        """Whether its plans depend on how fast a machine is and how long the phases of the job are."""
        return self.is_adaptive or self.speculates

    @property
    def moves_layers(self) -> bool:
        """Whether it moves weights or activations of layers."""
        return self.registered.plans_layers or bool(self._layer_options)

    @property
    def _layer_options(self) -> list[str]:
        """The options for layers that are not at their default."""
        return [key for key, values in LAYER_OPTIONS.items() if self.options.get(key, values[0]) != values[0]]

    def states(self, option: str) -> bool:
        """Return whether its text has an option."""
        return any(part.partition("=")[0].strip() == option for part in self.text.split(",")[1:])

    def number(
        self, what: str, default: float | None, minimum: float, maximum: float, part: str | None = None
    ) -> float:
        """Return the value as a number from `minimum` to `maximum`.

        Args:
            what: Meaning of the number, for the error message.
            default: Number if there is no value; None if a value is required.
            part: The part of the value that is the number; None: all of it.

        Raises:
            PolicyError: The value is missing or not such a number.
        """
        value = self.value if part is None else part
        if value is None or not value.strip():
            if default is None:
                example = with_values([self.registered])
                raise PolicyError(f"{self.text!r} lacks {what}: write it after a colon, as in {example}")
            return default
        try:
            number = float(value)
        except ValueError:
            number = float("nan")
        if not minimum <= number <= maximum:
            raise PolicyError(
                f"{self.text!r}: {what} is {value!r}; it must be a number from {minimum:g} to {maximum:g}"
            )
        return number

    def reject_value(self) -> None:
        """Raise PolicyError if there is a value after a colon, for policies that take none."""
        if self.value is not None:
            raise PolicyError(f"{self.text!r}: {self.name} takes nothing after a colon")

    def refuse_simulation_only(self) -> None:
        """Raise PolicyError if it can only be simulated."""
        if self.registered.simulation_only:
            others = with_values(other for other in POLICIES.values() if not other.simulation_only)
            raise PolicyError(
                f"policy {self.text} can be simulated, by `ebbtide replay`, and not run: run the system itself, or "
                f"choose {others}"
            )

    def free_memory_steps(self, workload: Workload) -> FreeMemorySteps:
        """Return the free device memory of a workload over the iteration. Raises PolicyError where it is not known."""
        if workload.gpu_free is None:
            raise PolicyError(
                f"{self.text!r} needs to know what device memory is free: give it (--free-bytes 20GiB, or "
                "gpu_free_bytes in a workload file), or a trace with the memory of a GPU"
            )
        return workload.gpu_free

    def plan(self, workload: Workload, machine: Machine) -> Plan:
        """Make the plan for a workload on a machine.

        State that host memory does not hold is in storage, if the machine has storage (see `with_storage`) and the
        policy uses it.

        Raises:
            PolicyError: The policy cannot plan this workload.
            MachineError: The machine lacks a rate that the policy needs.
        """
        if workload.layers and not workload.layer_memory and not self.registered.plans_layers:
            plan = plan_with_layers(
                workload,
                machine,
                self.options,
                lambda placed, late: (self if late else self._without_late()).plan(placed, machine),
                lambda placed, _: self._quick(placed, machine).plan(placed, machine),
            )
            return replace(plan, policy=self.text)
        moved = self._layer_options
        if moved and not workload.layers:
            raise PolicyError(f"{self.text!r}: {moved[0]} is for workloads with layers, and {workload.name} has none")
        plan = self.plan_in_memory(workload, machine)
        return with_storage(plan, workload, machine) if self.registered.uses_storage else plan

    def plan_in_memory(self, workload: Workload, machine: Machine) -> Plan:
        """Make the plan as if host memory held all state."""
        return self.registered.function(workload, machine, self)

    def _quick(self, placed: Workload, machine: Machine) -> Policy:
        """Return a policy whose plans are made quickly: this one, but for adaptive one that keeps as much state on the
        device as there is memory for, and interleaves the rest."""
        if not self.is_adaptive:
            return self._without_late()
        if machine.gpu_update_params_per_s is None:
            return Policy.make("pipelined")
        state_bytes = (placed.state_bytes + placed.grad_bytes) * placed.params
        share = max(0.0, 1 - (placed.min_free_bytes or 0.0) / state_bytes)
        return Policy.make("interleaved", f"2@{share:.6f}")

    def _without_late(self) -> Policy:
        """Return the policy with updates that end with the step."""
        overlap = _WITHOUT_LATE.get(self.overlap)
        return self if overlap is None else self.with_options(overlap=overlap)


def as_policy(policy: Policy | str) -> Policy:
    """Return a policy, of its text as a user writes it. Raises PolicyError as `Policy.parse`."""
    if isinstance(policy, Policy):
        return policy
    if not isinstance(policy, str):
        raise PolicyError(f"policy is {policy!r:.80}: it must be text such as 'adaptive', or a Policy")
    return Policy.parse(policy)


def make_plan(policy: Policy | str, workload: Workload, machine: MachineArgument) -> Plan:
    """Make the plan of a policy, or of a text that selects one, on a machine, its file or its name; see `Policy.plan`.

    Raises:
        PolicyError: The text selects no policy, or the policy cannot plan this workload.
        MachineError: There is no such machine, or it lacks a rate that the policy needs.
    """
    return as_policy(policy).plan(workload, find_machine(machine))


PolicyFunction = Callable[[Workload, Machine, Policy], Plan]


class DefaultRun(NamedTuple):
    """The run of a built-in policy where the user names no policy."""

    text: str
    position: int


class SystemRun(NamedTuple):
    """The run of another system, where the user asks for all of them."""

    text: str  # The policy's text, with typical values.
    position: int  # Sort key among the systems.
    # The texts as the system runs today, which a recommendation compares; None: `text`.
    advised: tuple[str, ...] | None = None


@dataclass(frozen=True)
class RegisteredPolicy:
    """An entry of the registry: a policy as its author wrote it."""

    name: str
    function: PolicyFunction
    options: Mapping[str, tuple[str, ...]]  # The values that each option may have, the default first.
    summary: str  # First line of the function's docstring.
    # How the policy is run by default, or where all systems are asked for; None: only by its name.
    run: DefaultRun | SystemRun | None = None
    simulation_only: bool = False  # Whether the engine cannot run its plans; `replay` can.
    # Whether state that host memory does not hold may be in storage. Without, it does not fit.
    uses_storage: bool = True
    plans_layers: bool = False  # Whether it decides itself what happens to weights and activations of layers.

    @property
    def typical(self) -> Policy:
        """The policy as it is run by default, or without value and options."""
        return Policy.parse(self.name if self.run is None else self.run.text)


POLICIES: dict[str, RegisteredPolicy] = {}
GRADS = ("async", "blocking")
PARAMS = ("pipelined", "blocking")
PARAMS_BLOCKING = ("blocking", "pipelined", "gpu-cast")


def policy(
    name: str,
    run: DefaultRun | SystemRun | None = None,
    /,
    simulation_only: bool = False,
    uses_storage: bool = True,
    plans_layers: bool = False,
    **options: tuple[str, ...],
) -> Callable[[PolicyFunction], PolicyFunction]:
    """Register the decorated function as a policy, with the attributes of `RegisteredPolicy`."""

    def register(function: PolicyFunction) -> PolicyFunction:
        if isinstance(run, DefaultRun):
            options.update(LAYER_OPTIONS)
        summary = (function.__doc__ or "").strip().split("\n")[0]
        flags = simulation_only, uses_storage, plans_layers
        POLICIES[name] = RegisteredPolicy(name, function, options, summary, run, *flags)
        return function

    return register


# Registers another system, whose plans the engine cannot run, and whose state is in storage only as it has it there.
system = partial(policy, simulation_only=True, uses_storage=False)


def with_values(policies: Iterable[RegisteredPolicy]) -> str:
    """Return the names of policies in a list for people, with a typical value where they have one."""
    return ", ".join(sorted(policy.run.text.partition(",")[0] if policy.run else policy.name for policy in policies))
