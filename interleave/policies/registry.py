"""Policies by name, and the strings that people write for them: `twin-flow:0.4`, `interleaved:2@0.8,grads=blocking`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from ebbtide.errors import PolicyError
from ebbtide.interleave.model.plan import Plan
from ebbtide.interleave.model.workload import Workload
from ebbtide.machines.machine import Machine


@dataclass(frozen=True)
class Choice:
    """A policy as it was asked for: `text` is the string given, `value` what follows the colon, `knobs` what follows
    commas."""

    text: str
    name: str
    value: str | None = None
    knobs: Mapping[str, str] = field(default_factory=dict)

    def number(self, what: str, default: float | None, least: float, most: float) -> float:
        """The value as a number from `least` to `most`. Raises PolicyError for anything else."""
        return to_number(self.text, self.value, what, default, least, most)


Rule = Callable[[Workload, Machine, Choice], Plan]


@dataclass(frozen=True)
class Policy:
    """A rule that makes a plan. knobs: the values that each knob may have, the first one its default."""

    name: str
    rule: Rule
    knobs: Mapping[str, tuple[str, ...]]
    summary: str


POLICIES: dict[str, Policy] = {}
GRADS = ("async", "blocking")
PARAMS = ("pipelined", "blocking")
PARAMS_BLOCKING = ("blocking", "pipelined")


def policy(name: str, **knobs: tuple[str, ...]) -> Callable[[Rule], Rule]:
    """Register a rule under a name. Its docstring's first line says what it does."""

    def register(rule: Rule) -> Rule:
        summary = (rule.__doc__ or "").strip().split("\n")[0]
        POLICIES[name] = Policy(name, rule, knobs, summary)
        return rule

    return register


def parse(text: str) -> Choice:
    """Read a policy's string. Raises PolicyError for a policy, a knob or a knob's value that does not exist."""
    head, *rest = (part.strip() for part in text.split(","))
    name, colon, value = head.partition(":")
    if name not in POLICIES:
        raise PolicyError(f"{text!r}: there is no policy {name!r}; there are {', '.join(sorted(POLICIES))}")
    known = POLICIES[name].knobs
    knobs = {key: values[0] for key, values in known.items()}
    for part in rest:
        key, equals, chosen = (piece.strip() for piece in part.partition("="))
        if not equals or key not in known:
            has = "it has " + ", ".join(f"{k}={'|'.join(v)}" for k, v in known.items()) if known else "it has none"
            raise PolicyError(f"{text!r}: {name} has no knob {part!r}; {has}")
        if chosen not in known[key]:
            raise PolicyError(f"{text!r}: {key} is one of {', '.join(known[key])}")
        knobs[key] = chosen
    return Choice(text, name, value if colon else None, knobs)


def make_plan(text: str, workload: Workload, machine: Machine) -> Plan:
    """The plan of the policy that a string names. Raises PolicyError for a string that names none, MachineError where a
    rate that it needs is not known."""
    choice = parse(text)
    return POLICIES[choice.name].rule(workload, machine, choice)


def to_number(text: str, value: str | None, what: str, default: float | None, least: float, most: float) -> float:
    """A number of a policy's string."""
    if value is None or not value.strip():
        if default is None:
            raise PolicyError(f"{text!r} lacks {what}: write it after a colon")
        return default
    try:
        found = float(value)
    except ValueError:
        found = float("nan")
    if not least <= found <= most:
        raise PolicyError(f"{text!r}: {what} is {value!r}; it must be a number from {least:g} to {most:g}")
    return found


def nothing_after_colon(choice: Choice) -> None:
    """Raise PolicyError for a value that a policy does not take."""
    if choice.value is not None:
        raise PolicyError(f"{choice.text!r}: {choice.name} takes nothing after a colon")
