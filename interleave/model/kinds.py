"""Kinds of operations of plans: where each runs, its cost, what it reads and writes,
and when it may run.

Features add theirs."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Final, Literal, NamedTuple, Protocol

from ebbtide import seams
from ebbtide.errors import PlanError
from ebbtide.interleave.model.operations import (
    BACKWARD,
    ONE_UPDATE,
    ONE_UPLOAD,
    OWN_GRADIENT,
    UPDATE,
    Op,
    Resource,
)
from ebbtide.interleave.model.plan import Plan
from ebbtide.interleave.model.workload import Workload
from ebbtide.machines.machine import Machine

# The place of the factors that clipping gives. A place with an "@" is a place of each
# subgroup: "state@host", "state@gpu", "param@host", "param@gpu", "master@gpu" (to be
# converted), "grad@job" (where the backward leaves it), "grad@host", "grad@gpu",
# "grad@part" (what the GPU updates of a subgroup of the CPU), and the places of
# features. Any other place is shared by all subgroups.
FACTOR: Final = "factor"
# Contents of device memory that an operation takes when it starts, or gives back when
# it ends.
Content = Literal["state", "gradient"]


class Rates(Protocol):
    """Rates for a plan on a machine, per second, by resource."""

    machine: Machine
    # Bytes, by whether host memory is pageable.
    copy_rates: dict[bool, dict[str, float]]
    update_rates: dict[str, float]  # Parameters.
    cast_rates: dict[str, float]  # Parameters.
    # The share of its rate at which a speculative update runs.
    speculative_share: float
    norm_s: float  # Seconds that clipping waits for the norm of all gradients.
    operation_s: float  # Seconds that each operation takes besides.


def copy_seconds(op: Op, rates: Rates) -> float:
    """Return the seconds of a copy at the rate of its direction."""
    return rates.operation_s + op.nbytes / rates.copy_rates[op.pageable][op.resource]


def copy_rates(op: Op) -> Iterable[str]:
    """Return the names of the rates that a copy needs."""
    pageable = [f"{op.resource}_pageable_bytes_per_s"] if op.pageable else []
    return [f"{op.resource}_bytes_per_s", *pageable]


def no_rates(op: Op) -> Iterable[str]:
    """Return no names: the time follows from other rates, or from none."""
    return ()


def moved_bytes(op: Op, workload: Workload) -> float:
    """Return the bytes of host memory that a copy reads or writes: its own, once."""
    return op.nbytes


class Flow(NamedTuple):
    """The places that an operation reads and writes.

    Attributes:
        reads: Places whose content it uses.
        writes: Places that it fills; those that it reads, too, it changes.
        moves: Places whose content it uses and takes away. What fills them again comes
            from there.
        reads_all: Of every subgroup it uses the first of these places that is not
            empty.
        updates: Whether it writes the content of the next iteration.
        is_tentative: Whether clipping may yet change what it writes: whoever reads that
            waits for the factor.
    """

    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    moves: tuple[str, ...] = ()
    reads_all: tuple[str, ...] = ()
    updates: bool = False
    is_tentative: bool = False


def no_flow(op: Op, plan: Plan) -> Flow:
    """Return that an operation reads and writes nothing that others do."""
    return Flow()


@dataclass(frozen=True)
class Kind:
    """A kind of operations. By default it is a copy over the link that ends with its
    iteration.

    Attributes:
        resources: Resources that it may run on.
        seconds: Seconds of an operation if nothing else runs.
        rates: Names of the rates of a machine that an operation needs.
        host_bytes: Bytes of host memory that an operation reads and writes.
        on_subgroups: Whether each operation is on the subgroup `Op.subgroup`.
        may_be_late: Whether it may end in the next iteration.
        writes_parameters: Whether compute reads what it writes.
        needs_scalars: Whether it waits for the factors of the step.
        takes: What it takes device memory for.
        gives: What it gives device memory back of.
        flow: What an operation of a plan reads and writes.
        perform: The function of a `Store` and an operation that performs it, or issues
            it to the stream of its resource, as `module:name` that only an executor
            imports; None: plans with it are for simulation only.
        check: Raises MachineError where a machine lacks what operations of a policy
            need besides rates.
    """

    name: str
    resources: tuple[Resource, ...]
    seconds: Callable[[Op, Rates], float] = copy_seconds
    rates: Callable[[Op], Iterable[str]] = copy_rates
    host_bytes: Callable[[Op, Workload], float] = moved_bytes
    on_subgroups: bool = True
    may_be_late: bool = False
    writes_parameters: bool = False
    needs_scalars: bool = False
    takes: Content | None = None
    gives: Content | None = None
    flow: Callable[[Op, Plan], Flow] = no_flow
    perform: str | None = None
    check: Callable[[Iterable[Op], Machine, str], None] | None = None


# A cast reads fp32 and writes half precision.
CAST_READ_BYTES = 4.0


def _update_seconds(op: Op, rates: Rates) -> float:
    share = rates.speculative_share if op.is_speculative else 1.0
    return rates.operation_s + op.params / (rates.update_rates[op.resource] * share)


def _cast_seconds(op: Op, rates: Rates) -> float:
    return rates.operation_s + op.params / rates.cast_rates[op.resource]


def _update_bytes(op: Op, workload: Workload) -> float:
    """Return the bytes of gradient, state and parameter."""
    return workload.cpu_update_bytes * op.params


def _cast_bytes(op: Op, workload: Workload) -> float:
    return (CAST_READ_BYTES + workload.param_bytes) * op.params


def _clip_bytes(op: Op, workload: Workload) -> float:
    """Return the bytes of all gradients if their norm is computed on the host."""
    return workload.grad_bytes * workload.params if workload.norm == "host" else 0.0


def _update_flow(op: Op, plan: Plan) -> Flow:
    if op.resource == "cpu":
        gradient = ("grad@host",) if plan.follows(OWN_GRADIENT) else ()
        factor = () if op.is_speculative else (FACTOR,)
        # A cast that follows makes the parameters.
        params = () if op.subgroup in plan.casts else ("param@host",)
        reads = ("state@host", *gradient, *factor)
        return Flow(
            reads, ("state@host", *params), updates=True, is_tentative=op.is_speculative
        )
    if plan.follows(ONE_UPDATE):
        return Flow(
            ("state@gpu", "grad@gpu", FACTOR), ("state@gpu", "param@gpu"), updates=True
        )
    return Flow(("grad@part", FACTOR), ("state@part",))


def _cast_flow(op: Op, plan: Plan) -> Flow:
    if op.resource == "cpu":
        return Flow(("state@host",), ("param@host",))
    return Flow(("master@gpu",), ("param@gpu",))


def _upload_flow(op: Op, plan: Plan) -> Flow:
    if op.start < UPDATE and not plan.follows(ONE_UPLOAD):
        # Of parameters that the iteration before has updated.
        return Flow()
    if plan.casts.get(op.subgroup) == "gpu":
        return Flow(("state@host",), ("master@gpu",))
    return Flow(("param@host",), ("param@gpu",))


_PERFORM = "ebbtide.interleave.engine.runtime.performing:{}".format
_CORE = (
    Kind(
        "gradient down",
        ("d2h",),
        flow=lambda op, plan: Flow(writes=("grad@host",), moves=("grad@job",)),
        perform=_PERFORM("gradient_down"),
    ),
    Kind(
        "gradient up",
        ("h2d",),
        may_be_late=True,
        needs_scalars=True,
        takes="gradient",
        flow=lambda op, plan: Flow(("grad@host",), ("grad@gpu",)),
        perform=_PERFORM("gradient_up"),
    ),
    Kind(
        "clip",
        ("cpu",),
        seconds=lambda op, rates: rates.norm_s,
        rates=no_rates,
        host_bytes=_clip_bytes,
        on_subgroups=False,
        needs_scalars=True,
        # What is on the device still is clipped there.
        flow=lambda op, plan: Flow(
            writes=(FACTOR,), reads_all=("grad@host", "grad@job")
        ),
        perform=_PERFORM("clip"),
    ),
    Kind(
        "fetch",
        ("h2d",),
        may_be_late=True,
        takes="state",
        flow=lambda op, plan: Flow(writes=("state@gpu",), moves=("state@host",)),
        perform=_PERFORM("fetch"),
    ),
    Kind(
        "update",
        ("cpu", "gpu"),
        seconds=_update_seconds,
        rates=lambda op: [f"{op.resource}_update_params_per_s"],
        host_bytes=_update_bytes,
        may_be_late=True,
        writes_parameters=True,
        needs_scalars=True,
        gives="gradient",
        flow=_update_flow,
        perform=_PERFORM("update"),
    ),
    Kind(
        "flush",
        ("d2h",),
        may_be_late=True,
        gives="state",
        flow=lambda op, plan: Flow(writes=("state@host",), moves=("state@gpu",)),
        perform=_PERFORM("flush"),
    ),
    Kind(
        "cast",
        ("cpu", "gpu"),
        seconds=_cast_seconds,
        rates=lambda op: [f"{op.resource}_cast_params_per_s"],
        host_bytes=_cast_bytes,
        may_be_late=True,
        writes_parameters=True,
        flow=_cast_flow,
        perform=_PERFORM("cast"),
    ),
    Kind(
        "upload",
        ("h2d",),
        may_be_late=True,
        writes_parameters=True,
        needs_scalars=True,
        flow=_upload_flow,
        perform=_PERFORM("upload"),
    ),
)


@cache
def kinds() -> Mapping[str, Kind]:
    """Return the kinds of the core and of features by name."""
    table = {kind.name: kind for kind in _CORE}
    for added in seams.load_all("kinds"):
        for kind in added:
            assert kind.name not in table, (
                f"two kinds of operations are named {kind.name}"
            )
            table[kind.name] = kind
    return table


def find_kind(name: str) -> Kind:
    """Return the kind of a name. Raises PlanError for any other."""
    try:
        return kinds()[name]
    except KeyError:
        raise PlanError(
            f"there is no operation {name!r}: {', '.join(kinds())}"
        ) from None


def from_backward(op: Op) -> Op:
    """Return an operation of an iteration with late operations before it, which begins
    when these have ended."""
    if op.start >= BACKWARD or not find_kind(op.kind).on_subgroups:
        return op
    return op._replace(start=BACKWARD)
