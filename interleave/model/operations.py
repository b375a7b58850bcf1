"""Operations of a plan: their kinds, resources, and points.

At the points they may start and must end.
"""

from functools import cache, lru_cache
from itertools import accumulate
from typing import Any, Final, NamedTuple

from ebbtide.errors import PlanError
from ebbtide.interleave.model.workload import Workload

# The name of a kind: see `kinds.py`.
OpKind = str
# Features add theirs, each with a lane of its own: see `simulation/lanes.py`.
Resource = str
RESOURCES: tuple[Resource, ...] = ("cpu", "gpu", "h2d", "d2h")
DEVICE_RESOURCES: tuple[Resource, ...] = ("gpu", "h2d", "d2h")
STORAGE_RESOURCES: tuple[Resource, ...] = ("storage_read", "storage_write")


@cache
def split_lane(resource: Resource) -> tuple[Resource, int]:
    """Return the name of a lane without its number, and the number.

    The number is 0 for the first or only one.
    """
    name, _, number = resource.partition(" ")
    return name, int(number or 0)


def numbered_lane(name: Resource, number: int) -> Resource:
    """Return the name of one of several lanes, see `split_lane`."""
    return f"{name} {number}" if number else name


# Points of an iteration at which an operation may start: the number of the phase plus
# the share of the phase that is done. The update begins at UPDATE. At STEP the overhead
# of the optimizer's step is over and its operations are issued.
OTHER, FORWARD, BACKWARD, UPDATE, STEP = 0.0, 1.0, 2.0, 3.0, 4.0

_NAMES = ("none", "forward", "backward", "both")
# Workloads whose points are remembered: searches ask for them with every plan.
_REMEMBERED = 8


class Hold(NamedTuple):
    """A point at which compute waits until an operation has ended."""

    point: float
    # Whether it is a point of the next iteration: the operation is late.
    is_next: bool = False


# The tag of an update on the CPU that runs before clipping has said that it is valid,
# and writes beside the old state (or over it, see `Plan.rolls_back`).
SPECULATIVE: Final = "speculative"


class Op(NamedTuple):
    """One operation on one subgroup, or on one layer (`Kind.on_layer`)."""

    kind: OpKind
    resource: Resource  # The lane that runs it.
    subgroup: int  # Index of the subgroup, -1 for an operation on all of them.
    params: int
    nbytes: float  # Bytes moved; 0 for updates and casts.
    # The earliest point of the iteration at which it may start (see `UPDATE`).
    start: float
    after: tuple[int, ...] = ()  # Indices of the operations that must have ended.
    # Whether the host memory of a copy is pageable rather than pinned.
    pageable: bool = False
    # None: compute waits for it at the end of its iteration only.
    holds: Hold | None = None
    takes: float = 0.0  # Bytes of device memory allocated when it starts.
    gives: float = 0.0  # Bytes of device memory freed when it ends.
    tag: Any = None  # The feature's own: see its kinds of operations.

    @property
    def name(self) -> str:
        """Its kind and its subgroup, for messages."""
        return (
            self.kind
            if self.subgroup < 0
            else f"{self.kind} of subgroup {self.subgroup}"
        )

    @property
    def due(self) -> float | None:
        """The point of the next iteration at which compute waits for its end.

        None: it is not late.
        """
        return (
            self.holds.point if self.holds is not None and self.holds.is_next else None
        )

    @property
    def is_late(self) -> bool:
        """Whether it may end in the next iteration."""
        return self.holds is not None and self.holds.is_next

    @property
    def is_speculative(self) -> bool:
        """Whether it updates state before it is known whether the update is valid."""
        return self.tag is SPECULATIVE

    @property
    def is_blocking(self) -> bool:
        """Whether compute stops where it may start until it has ended."""
        return self.holds == (self.start, False)


def plan_error(policy: str, op: Op, problem: str) -> PlanError:
    """Return the error of a plan with a wrong operation."""
    return PlanError(f"policy {policy}: {op.name} {problem}")


@lru_cache(maxsize=_REMEMBERED)
def gradient_ready_points(workload: Workload) -> list[float]:
    """Return the point of the iteration at which the backward has computed each
    subgroup's gradient.

    The backward computes gradients in reverse: the gradients of subgroup 0 come last.
    """
    if workload.layers:
        ends = [workload.backward_s]
        for layer in workload.layers[:-1]:
            ends.append(ends[-1] - layer.backward_s)
        # Those after all layers are ready with the last one's.
        ends.append(ends[-1])
        return [
            BACKWARD + min(1.0, ends[layer] / workload.backward_s)
            for layer in workload.layers_of_subgroups
        ]
    points, params_done = [], 0
    for size in reversed(workload.subgroups):
        params_done += size
        points.append(min(BACKWARD + params_done / workload.params, UPDATE))
    return points[::-1]


def backward_points(workload: Workload) -> list[float]:
    """Return the point of the iteration at which the backward first uses each
    subgroup's parameters."""
    return [*gradient_ready_points(workload)[1:], BACKWARD]


@lru_cache(maxsize=_REMEMBERED)
def forward_points(workload: Workload) -> list[float]:
    """Return the point of the iteration at which the forward first uses each subgroup's
    parameters.

    The forward uses subgroups in their order, each for a time in proportion to its
    parameters.
    """
    if workload.layers:
        starts = [
            *accumulate(
                (layer.forward_s for layer in workload.layers[:-1]), initial=0.0
            )
        ]
        starts.append(starts[-1])
        return [
            FORWARD + min(1.0, starts[layer] / workload.forward_s)
            for layer in workload.layers_of_subgroups
        ]
    points, params_done = [], 0
    for size in workload.subgroups:
        points.append(FORWARD + params_done / workload.params)
        params_done += size
    return points


def point_at(workload: Workload, seconds: float) -> float:
    """Return the point of an iteration that is reached after these seconds without any
    waiting."""
    begin = 0.0
    for phase, length in enumerate(
        (workload.other_s, workload.forward_s, workload.backward_s)
    ):
        if seconds < begin + length:
            return phase + max(0.0, (seconds - begin) / length)
        begin += length
    return UPDATE


# Rules of valid plans that plans of other systems may depart from; `Plan.validate`
# leaves out what they ask for. The rules of features are beside their kinds of
# operations.
Rule = str
OWN_GRADIENT: Final = "an update on the CPU waits for its gradient of this iteration"
CLIPPING_FIRST: Final = "clipping comes before updates and uploads"
ONE_UPDATE: Final = "a subgroup has one update"
ONE_UPLOAD: Final = "parameters are uploaded once"


class Departures(NamedTuple):
    """The rules that a plan does not follow."""

    rules: frozenset[Rule] = frozenset()
    # How the results differ from the results of a plan that follows them, for people;
    # empty if they do not.
    consequence: str = ""


NO_DEPARTURES: Final = Departures()


class Overlap(NamedTuple):
    """Phases that updates may run in, beside the step."""

    # Whether updates may end in the next forward, as far as it does not need the
    # parameters yet.
    forward: bool = False
    # Whether updates on the CPU may run in the backward before it is known whether they
    # are valid.
    backward: bool = False

    @property
    def name(self) -> str:
        """The value of a policy's option `overlap`."""
        return _NAMES[self.forward + 2 * self.backward]

    def __and__(self, other: "Overlap") -> "Overlap":
        """Return the phases of both."""
        return Overlap(self.forward and other.forward, self.backward and other.backward)


NO_OVERLAP, BOTH = Overlap(), Overlap(forward=True, backward=True)
OVERLAPS = {
    overlap.name: overlap
    for overlap in (NO_OVERLAP, Overlap(forward=True), Overlap(backward=True), BOTH)
}
# The values of the option.
OVERLAP = (*OVERLAPS, "auto")


def overlaps_of(option: str) -> tuple[Overlap, ...]:
    """Return the overlaps, besides none, of which a policy takes the best, by the value
    of its option `overlap`."""
    names = {
        "auto": ("forward", "backward", "both"),
        "both": ("forward", "backward", "both"),
        "none": (),
    }.get(option, (option,))
    return tuple(OVERLAPS[name] for name in names)
