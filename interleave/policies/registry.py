"""The registry of policies, and the text that selects them.

Examples are `twin-flow:0.4` and `interleaved:2@0.8,grads=blocking`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from operator import attrgetter
from typing import ClassVar, NamedTuple, Protocol

from ebbtide import seams
from ebbtide.errors import PolicyError
from ebbtide.interleave.model.operations import BOTH, NO_OVERLAP, OVERLAPS, Overlap
from ebbtide.interleave.model.plan import Plan
from ebbtide.interleave.model.workload import FreeMemorySteps, Workload
from ebbtide.machines.catalog import MachineArgument, find_machine
from ebbtide.machines.machine import Machine

# Makes the plan of a policy, by the passes that come after.
Maker = Callable[["Policy", Workload, Machine], Plan]


class PlanPass(Protocol):
    """A pass over the plans of policies.

    Attributes:
        name: Its name, by which a policy says that it does what the pass does itself
            (`RegisteredPolicy.without`).
        position: Passes with a higher one come before, nearer to the policy.
        in_memory: Whether it is also for plans as if host and device memory held
            everything (`plan_in_memory`).
        offers: Options for it that a policy may take (`policy`): their values, the
            default first.
        options: Options that each built-in policy has for it: their values, the default
            first.
    """

    name: ClassVar[str]
    position: ClassVar[int]
    in_memory: ClassVar[bool]
    offers: ClassVar[Mapping[str, tuple[str, ...]]]
    options: ClassVar[Mapping[str, tuple[str, ...]]]

    def plan(
        self, make: Maker, policy: Policy, workload: Workload, machine: Machine
    ) -> Plan:
        """Return the plan of a policy, of those that `make` makes. Raises what
        `Policy.plan` raises."""

    def complete(self, plan: Plan, workload: Workload, machine: Machine) -> Plan:
        """Return a plan of a search, not validated, with what it lacks on a machine,
        added by one simple choice."""


@cache
def plan_passes() -> Sequence[PlanPass]:
    """Return the passes of all features, the outermost first."""
    passes: list[PlanPass] = seams.load_all("plan-passes")
    return sorted(passes, key=attrgetter("position"))


@cache
def pass_options() -> Mapping[str, tuple[str, ...]]:
    """Return the options that built-in policies have for passes."""
    return {
        name: values for one in plan_passes() for name, values in one.options.items()
    }


@cache
def offered_options() -> Mapping[str, tuple[str, ...]]:
    """Return the options for passes that policies may take."""
    return {
        name: values for one in plan_passes() for name, values in one.offers.items()
    }


def complete(plan: Plan, workload: Workload, machine: Machine) -> Plan:
    """Return a plan of a search, completed for a machine.

    See `PlanPass.complete`.
    """
    for one in plan_passes():
        plan = one.complete(plan, workload, machine)
    return plan


@dataclass(frozen=True)
class Policy:
    """A policy as a user chose it. Its text is parsed once, by `as_policy` where it
    comes in.

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
        """Parse a text. Raises PolicyError where the policy, an option or an option's
        value does not exist."""
        head, *option_texts = (part.strip() for part in text.split(","))
        name, colon, value = head.partition(":")
        if name not in POLICIES:
            raise PolicyError(
                f"there is no policy {name!r}; there are "
                f"{with_values(POLICIES.values())}"
            )
        allowed = POLICIES[name].options
        options = {key: values[0] for key, values in allowed.items()}
        for option_text in option_texts:
            key, equals, chosen = (part.strip() for part in option_text.partition("="))
            if not equals or key not in allowed:
                choices = (
                    ", ".join(f"{k}={'|'.join(v)}" for k, v in allowed.items())
                    or "none"
                )
                raise PolicyError(
                    f"{text!r}: {name} has no option {option_text!r}; it has {choices}"
                )
            if not is_choice(chosen, allowed[key]):
                raise PolicyError(
                    f"{text!r}: {key} is one of {', '.join(allowed[key])}"
                )
            options[key] = chosen
        return cls(name, value if colon else None, options, text=text)

    @classmethod
    def make(cls, name: str, value: object = None, **options: str) -> Policy:
        """Make a policy of its parts. Raises PolicyError as `parse`."""
        head = name if value is None else f"{name}:{value}"
        return cls.parse(
            ",".join([head, *(f"{key}={chosen}" for key, chosen in options.items())])
        )

    @classmethod
    def of_plan(cls, plan: Plan) -> Policy:
        """Return the policy that made a plan, which has its text. Raises PolicyError if
        it is registered no more."""
        return cls.parse(plan.policy)

    def __str__(self) -> str:
        return self.text

    def with_options(self, **options: str) -> Policy:
        """Return the policy with other options.

        Its text has the options that are not at their default.
        """
        head, *parts = self.text.split(",")
        kept = [part for part in parts if part.partition("=")[0].strip() not in options]
        defaults = {key: values[0] for key, values in self.registered.options.items()}
        changed = [
            f"{key}={chosen}"
            for key, chosen in options.items()
            if chosen != defaults.get(key)
        ]
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
        return (
            BOTH if self.overlap == "auto" else OVERLAPS.get(self.overlap, NO_OVERLAP)
        )

    @property
    def speculates(self) -> bool:
        """Whether updates may run before all gradients are there."""
        return self.widest_overlap.backward

    @property
    def depends_on_rates(self) -> bool:
        """Whether its plans depend on rates of a machine and lengths of the job's
        phases."""
        return self.is_adaptive or self.speculates

    def uses(self, pass_name: str) -> bool:
        """Return whether its plans have what a pass adds, by an option or by its own
        function without the pass."""
        options = {
            key: values
            for one in plan_passes()
            if one.name == pass_name
            for key, values in one.options.items()
        }
        return pass_name in self.registered.without or bool(self.changed(options))

    def changed(self, options: Mapping[str, Sequence[str]]) -> list[str]:
        """Return the names of those options that are not at their default.

        The default is the first of their values.
        """
        return [
            key
            for key, values in options.items()
            if self.options.get(key, values[0]) != values[0]
        ]

    def states(self, option: str) -> bool:
        """Return whether its text has an option."""
        return any(
            part.partition("=")[0].strip() == option
            for part in self.text.split(",")[1:]
        )

    def number(
        self,
        what: str,
        default: float | None,
        minimum: float,
        maximum: float,
        part: str | None = None,
    ) -> float:
        """Return the value as a number from `minimum` to `maximum`.

        Args:
            what: Meaning of the number, for the error message.
            default: Number if there is no value; None if a value is required.
            part: The part of the value that is the number; None: the whole value.

        Raises:
            PolicyError: The value is missing or not such a number.
        """
        value = self.value if part is None else part
        if value is None or not value.strip():
            if default is None:
                example = with_values([self.registered])
                raise PolicyError(
                    f"{self.text!r} lacks {what}: write it after a colon, as in "
                    f"{example}"
                )
            return default
        try:
            number = float(value)
        except ValueError:
            number = float("nan")
        if not minimum <= number <= maximum:
            raise PolicyError(
                f"{self.text!r}: {what} is {value!r}; it must be a number from "
                f"{minimum:g} to {maximum:g}"
            )
        return number

    def reject_value(self) -> None:
        """Raise PolicyError if a value follows a colon, for policies without values."""
        if self.value is not None:
            raise PolicyError(f"{self.text!r}: {self.name} takes nothing after a colon")

    def refuse_simulation_only(self) -> None:
        """Raise PolicyError if it can only be simulated."""
        if self.registered.simulation_only:
            others = with_values(
                other for other in POLICIES.values() if not other.simulation_only
            )
            raise PolicyError(
                f"policy {self.text} can be simulated, by `ebbtide replay`, and not "
                "run: run the system itself, or "
                f"choose {others}"
            )

    def free_memory_steps(self, workload: Workload) -> FreeMemorySteps:
        """Return the free device memory of a workload over the iteration. Raises
        PolicyError where it is not known."""
        if workload.gpu_free is None:
            raise PolicyError(
                f"{self.text!r} needs to know what device memory is free: give it "
                "(--free-bytes 20GiB, or "
                "gpu_free_bytes in a workload file), or a trace with the memory of a "
                "GPU"
            )
        return workload.gpu_free

    def plan(self, workload: Workload, machine: Machine) -> Plan:
        """Make the plan for a workload on a machine.

        Features add what its options and the machine ask for, by passes over plans.

        Raises:
            PolicyError: The policy cannot plan this workload.
            MachineError: The machine lacks a rate that the policy needs.
        """
        return self._make_plan(workload, machine, plan_passes())

    def plan_in_memory(self, workload: Workload, machine: Machine) -> Plan:
        """Make the plan as if host memory held all state.

        Weights and activations stay where they are.
        """
        return self._make_plan(
            workload, machine, [one for one in plan_passes() if one.in_memory]
        )

    def _make_plan(
        self, workload: Workload, machine: Machine, passes: Sequence[PlanPass]
    ) -> Plan:
        make: Maker = _plan_alone
        for one in reversed(passes):
            if one.name not in self.registered.without:
                make = partial(one.plan, make)
        return make(self, workload, machine)


def _plan_alone(policy: Policy, workload: Workload, machine: Machine) -> Plan:
    """Make the plan of a policy without any pass over it."""
    return policy.registered.function(workload, machine, policy)


def is_choice(text: str, choices: Sequence[str]) -> bool:
    """Return whether a text is one of some choices.

    In `NAME:K`, a number takes the place of K.
    """
    name, colon, number = text.partition(":")
    if colon and f"{name}:K" in choices:
        return number.isdecimal() and int(number) > 0
    return text in choices


def as_policy(policy: Policy | str) -> Policy:
    """Return a policy, of its text as a user writes it. Raises PolicyError as
    `Policy.parse`."""
    if isinstance(policy, Policy):
        return policy
    if not isinstance(policy, str):
        raise PolicyError(
            f"policy is {policy!r:.80}: it must be text such as 'adaptive', or a Policy"
        )
    return Policy.parse(policy)


def make_plan(
    policy: Policy | str, workload: Workload, machine: MachineArgument
) -> Plan:
    """Make the plan of a policy on a machine; see `Policy.plan`.

    The policy may be a text that selects one, and the machine its file or its name.

    Raises:
        PolicyError: The text selects no policy, or the policy cannot plan this
            workload.
        MachineError: There is no such machine, or it lacks a rate that the policy
            needs.
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
    # The values that each option may have, the default first.
    options: Mapping[str, tuple[str, ...]]
    summary: str  # First paragraph of the function's docstring.
    # How the policy is run by default, or where all systems are asked for; None: only
    # by its name.
    run: DefaultRun | SystemRun | None = None
    # Whether the engine cannot run its plans; `replay` can.
    simulation_only: bool = False
    # Names of passes over plans that are left out: it does that itself, or not at all.
    without: frozenset[str] = frozenset()
    # Names of options that passes offer (`PlanPass.offers`), of those that it has.
    takes: frozenset[str] = frozenset()
    # Whether all state stays on the device: the job's own optimizer updates it.
    keeps_state: bool = False

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
    without: Iterable[str] = (),
    takes: Iterable[str] = (),
    keeps_state: bool = False,
    **options: tuple[str, ...],
) -> Callable[[PolicyFunction], PolicyFunction]:
    """Register the decorated function as a policy, with attributes of
    `RegisteredPolicy`.

    Of the options that it `takes`, it has those whose feature is there.
    """

    def register(function: PolicyFunction) -> PolicyFunction:
        taken = {
            key: values for key, values in offered_options().items() if key in takes
        }
        options.update(taken)
        if isinstance(run, DefaultRun):
            options.update(pass_options())
        summary = " ".join((function.__doc__ or "").strip().split("\n\n")[0].split())
        POLICIES[name] = RegisteredPolicy(
            name,
            function,
            options,
            summary,
            run,
            simulation_only,
            frozenset(without),
            frozenset(taken),
            keeps_state,
        )
        return function

    return register


# Registers another system, whose plans the engine cannot run, and whose state is in
# storage only as it has it there.
system = partial(policy, simulation_only=True, without=("storage",))


def with_values(policies: Iterable[RegisteredPolicy]) -> str:
    """Return the names of policies, with a typical value where they take one, in a list
    for people."""
    return ", ".join(
        sorted(
            policy.run.text.partition(",")[0] if policy.run else policy.name
            for policy in policies
        )
    )
