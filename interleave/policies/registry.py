"""The registry of policies, and the strings that select them: `twin-flow:0.4`, `interleaved:2@0.8,grads=blocking`."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

from ebbtide.errors import PolicyError
from ebbtide.features.layers.layer_choice import LAYER_OPTIONS, plan_with_layers
from ebbtide.features.storage.policy import with_storage
from ebbtide.interleave.model.plan import Plan
from ebbtide.interleave.model.workload import FreeMemorySteps, Workload
from ebbtide.machines.machine import Machine


@dataclass(frozen=True)
class PolicySpec:
    """A policy's string, taken apart.

    Attributes:
        text: The string as the user wrote it.
        value: Text after the colon, None without a colon.
        options: Options after commas, with defaults filled in.
    """

    text: str
    name: str
    value: str | None = None
    options: Mapping[str, str] = field(default_factory=dict)

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
                example = with_values([POLICIES[self.name]])
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


PolicyFunction = Callable[[Workload, Machine, PolicySpec], Plan]


class DefaultRun(NamedTuple):
    """The run of a built-in policy where the user names no policy."""

    text: str
    position: int


class SystemRun(NamedTuple):
    """The run of another system, where the user asks for all of them."""

    text: str  # The policy's string, with typical values.
    position: int  # Sort key among the systems.
    # The strings as the system runs today, which a recommendation compares; None: `text`.
    advised: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Policy:
    """A registered policy."""

    name: str
    function: PolicyFunction
    options: Mapping[str, tuple[str, ...]]  # The values that each option may have, the default first.
    summary: str  # First line of the function's docstring.
    # How the policy is run by default, or where all systems are asked for; None: only by its name.
    run: DefaultRun | SystemRun | None = None
    simulation_only: bool = False  # Whether the engine cannot run its plans; `replay` can.
    # Whether state that host memory does not hold may be in storage. Without, it does not fit.
    uses_storage: bool = True
    in_deepspeed: bool = False  # Whether DeepSpeed's configuration alone selects it.
    plans_layers: bool = False  # Whether it decides itself what happens to weights and activations of layers.


POLICIES: dict[str, Policy] = {}
GRADS = ("async", "blocking")
PARAMS = ("pipelined", "blocking")
PARAMS_BLOCKING = ("blocking", "pipelined", "gpu-cast")


def policy(
    name: str,
    run: DefaultRun | SystemRun | None = None,
    /,
    simulation_only: bool = False,
    uses_storage: bool = True,
    in_deepspeed: bool = False,
    plans_layers: bool = False,
    **options: tuple[str, ...],
) -> Callable[[PolicyFunction], PolicyFunction]:
    """Register the decorated function as a policy, with the attributes of `Policy`."""

    def register(function: PolicyFunction) -> PolicyFunction:
        if isinstance(run, DefaultRun):
            options.update(LAYER_OPTIONS)
        summary = (function.__doc__ or "").strip().split("\n")[0]
        flags = simulation_only, uses_storage, in_deepspeed, plans_layers
        POLICIES[name] = Policy(name, function, options, summary, run, *flags)
        return function

    return register


# Registers another system, whose plans the engine cannot run, and whose state is in storage only as it has it there.
system = partial(policy, simulation_only=True, uses_storage=False)


def with_values(policies: Iterable[Policy]) -> str:
    """Return the names of policies in a list for people, with a typical value where they have one."""
    return ", ".join(sorted(policy.run.text.partition(",")[0] if policy.run else policy.name for policy in policies))


def parse(text: str) -> PolicySpec:
    """Parse a policy's string. Raises PolicyError where the policy, an option or an option's value does not exist."""
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
        if chosen not in allowed[key]:
            raise PolicyError(f"{text!r}: {key} is one of {', '.join(allowed[key])}")
        options[key] = chosen
    return PolicySpec(text, name, value if colon else None, options)


def refuse_simulation_only(text: str) -> None:
    """Raise PolicyError if the policy that a string selects can only be simulated, or does not exist."""
    if POLICIES[parse(text).name].simulation_only:
        others = with_values(other for other in POLICIES.values() if not other.simulation_only)
        raise PolicyError(
            f"policy {text} can be simulated, by `ebbtide replay`, and not run: run the system itself, or choose "
            f"{others}"
        )


def depends_on_rates(text: str) -> bool:
    """Return whether the plans of a policy depend on how fast a machine is and how long the phases of the job are."""
    spec = parse(text)
    return spec.name == "adaptive" or spec.options.get("overlap", "none") not in ("none", "forward")


def plan_in_memory(text: str, workload: Workload, machine: Machine) -> Plan:
    """Make the plan of the policy that a string selects, as if host memory held all state."""
    spec = parse(text)
    return POLICIES[spec.name].function(workload, machine, spec)


def make_plan(text: str, workload: Workload, machine: Machine) -> Plan:
    """Make the plan of the policy that a string selects.

    State that host memory does not hold is in storage, if the machine has storage (see `with_storage`) and the policy
    uses it.

    Raises:
        PolicyError: The string selects no policy, or the policy cannot plan this workload.
        MachineError: The machine lacks a rate that the policy needs.
    """
    spec = parse(text)
    if workload.layers and not workload.layer_memory and not POLICIES[spec.name].plans_layers:
        plan = plan_with_layers(
            workload,
            machine,
            spec.options,
            lambda placed, late: make_plan(text if late else _without_late(spec), placed, machine),
            lambda placed, _: make_plan(_quick(spec, placed, machine), placed, machine),
        )
        return replace(plan, policy=text)
    moved = _options_of_layers(spec)
    if moved and not workload.layers:
        raise PolicyError(f"{text!r}: {moved[0]} is for workloads with layers, and {workload.name} has none")
    plan = plan_in_memory(text, workload, machine)
    return with_storage(plan, workload, machine) if POLICIES[spec.name].uses_storage else plan


def moves_layers(text: str) -> bool:
    """Return whether the policy that a string selects moves weights or activations of layers."""
    spec = parse(text)
    return POLICIES[spec.name].plans_layers or bool(_options_of_layers(spec))


def _options_of_layers(spec: PolicySpec) -> list[str]:
    """Return the options for layers that are not at their default."""
    return [key for key, values in LAYER_OPTIONS.items() if spec.options.get(key, values[0]) != values[0]]


def _quick(spec: PolicySpec, placed: Workload, machine: Machine) -> str:
    """Return the string of a policy whose plans are made quickly: that of a spec itself, but for adaptive one that
    keeps as much state on the device as there is memory for, and interleaves the rest."""
    if spec.name != "adaptive":
        return _without_late(spec)
    if machine.gpu_update_params_per_s is None:
        return "pipelined"
    state_bytes = (placed.state_bytes + placed.grad_bytes) * placed.params
    return f"interleaved:2@{max(0.0, 1 - (placed.min_free_bytes or 0.0) / state_bytes):.6f}"


def _without_late(spec: PolicySpec) -> str:
    """Return the string of a policy whose updates end with the step."""
    overlap = {"forward": "none", "both": "backward", "auto": "backward"}
    options = {key: overlap.get(value, value) if key == "overlap" else value for key, value in spec.options.items()}
    head = spec.name if spec.value is None else f"{spec.name}:{spec.value}"
    return ",".join([head, *(f"{key}={value}" for key, value in options.items())])


def reject_value(spec: PolicySpec) -> None:
    """Raise PolicyError if the string has a value after the colon, for policies that take none."""
    if spec.value is not None:
        raise PolicyError(f"{spec.text!r}: {spec.name} takes nothing after a colon")


def free_memory_steps(workload: Workload, spec: PolicySpec) -> FreeMemorySteps:
    """Return the free device memory of a workload over the iteration. Raises PolicyError where it is not known."""
    if workload.gpu_free is None:
        raise PolicyError(
            f"{spec.text!r} needs to know what device memory is free: give it (--free-bytes 20GiB, or gpu_free_bytes "
            "in a workload file), or a trace with the memory of a GPU"
        )
    return workload.gpu_free
