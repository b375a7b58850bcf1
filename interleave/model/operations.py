"""Operations of a plan: their kinds, resources, and the points at which they may start and must end."""

from functools import lru_cache
from itertools import accumulate
from typing import Final, NamedTuple

from ebbtide.errors import PlanError
from ebbtide.interleave.model.workload import Workload

# The name of a kind: see `kinds.py`.
OpKind = str
# Features add theirs, each with a lane of its own: see `simulation/lanes.py`.
Resource = str
# Each path of the storage (see `Op.path`) has both of the others.
RESOURCES: tuple[Resource, ...] = ("cpu", "gpu", "h2d", "d2h")
DEVICE_RESOURCES: tuple[Resource, ...] = ("gpu", "h2d", "d2h")
STORAGE_RESOURCES: tuple[Resource, ...] = ("storage_read", "storage_write")

# Points of an iteration at which an operation may start: the number of the phase plus the share of it that is done.
# The update begins at UPDATE. At STEP the overhead of the optimizer's step is over and its operations are issued.
OTHER, FORWARD, BACKWARD, UPDATE, STEP = 0.0, 1.0, 2.0, 3.0, 4.0

_NAMES = ("none", "forward", "backward", "both")
# Workloads whose points are remembered: searches ask for them with every plan.
_REMEMBERED = 8


class Op(NamedTuple):
    """One operation on one subgroup, or on one layer (`Kind.on_layer`)."""

    kind: OpKind
    resource: Resource
    subgroup: int  # Index of the subgroup, -1 for an operation on all of them.
    params: int
    nbytes: float  # Bytes moved; 0 for updates and casts.
    point: float  # The earliest point of the iteration at which it may start (see `UPDATE`).
    after: tuple[int, ...] = ()  # Indices of the operations that must have ended.
    pageable: bool = False  # Whether the host memory of a copy is pageable rather than pinned.
    blocking: bool = False  # Whether forward and backward stop until it has ended.
    acquire: float = 0.0  # Bytes of device memory allocated when it starts.
    release: float = 0.0  # Bytes of device memory freed when it ends.
    # The point of the next iteration at which compute waits for its end; None: it ends with its own (not late).
    due: float | None = None
    # Whether an update on the CPU runs before clipping has said that it is valid, and writes beside the old state (or
    # over it, see `Plan.rolls_back`).
    speculative: bool = False
    path: int = 0  # Of a read or write: the path of the storage (see `Machine.storage`).
    # Of a read or write: the buffer in host memory, by its index in `Plan.storage_buffers`. A subgroup has it from the
    # start of its read until the end of its write. -1: a write of a gradient (see `STATE_ONLY` of the departures).
    buffer: int = -1
    needed: float | None = None  # The point of its own iteration at which compute waits until it has ended.

    @property
    def name(self) -> str:
        """Its kind and its subgroup, for messages."""
        return self.kind if self.subgroup < 0 else f"{self.kind} of subgroup {self.subgroup}"

    @property
    def lane(self) -> str:
        """The name of its resource, with the number of the path of the storage if that is not the first."""
        return f"{self.resource} {self.path}" if self.path else self.resource


def plan_error(policy: str, op: Op, problem: str) -> PlanError:
    """Return the error of a plan with a wrong operation."""
    return PlanError(f"policy {policy}: {op.name} {problem}")


@lru_cache(maxsize=_REMEMBERED)
def gradient_ready_points(workload: Workload) -> list[float]:
    """Return the point of the iteration at which the backward has computed each subgroup's gradient.

    The backward computes gradients in reverse: those of subgroup 0 come last."""
    if workload.layers:
        ends = [workload.backward_s]
        for layer in workload.layers[:-1]:
            ends.append(ends[-1] - layer.backward_s)
        # Those after all layers are ready with the last one's.
        ends.append(ends[-1])
        return [BACKWARD + min(1.0, ends[layer] / workload.backward_s) for layer in workload.layers_of_subgroups]
    points, params_done = [], 0
    for size in reversed(workload.subgroups):
        params_done += size
        points.append(min(BACKWARD + params_done / workload.params, UPDATE))
    return points[::-1]


def backward_points(workload: Workload) -> list[float]:
    """Return the point of the iteration at which the backward first uses the parameters of each subgroup."""
    return [*gradient_ready_points(workload)[1:], BACKWARD]


@lru_cache(maxsize=_REMEMBERED)
def forward_points(workload: Workload) -> list[float]:
    """Return the point of the iteration at which the forward first uses the parameters of each subgroup.

    The forward uses subgroups in their order, each for a time in proportion to its parameters."""
    if workload.layers:
        starts = [*accumulate((layer.forward_s for layer in workload.layers[:-1]), initial=0.0)]
        starts.append(starts[-1])
        return [FORWARD + min(1.0, starts[layer] / workload.forward_s) for layer in workload.layers_of_subgroups]
    points, params_done = [], 0
    for size in workload.subgroups:
        points.append(FORWARD + params_done / workload.params)
        params_done += size
    return points


def point_at(workload: Workload, seconds: float) -> float:
    """Return the point of an iteration that is reached after so many seconds without any waiting."""
    begin = 0.0
    for phase, length in enumerate((workload.other_s, workload.forward_s, workload.backward_s)):
        if seconds < begin + length:
            return phase + max(0.0, (seconds - begin) / length)
        begin += length
    return UPDATE


# Rules of valid plans that plans of other systems may depart from; `Plan.validate` leaves out what they ask for. Those
# of features are beside their kinds of operations.
Rule = str
OWN_GRADIENT: Final = "an update on the CPU waits for its gradient of this iteration"
CLIPPING_FIRST: Final = "clipping comes before updates and uploads"
ONE_UPDATE: Final = "a subgroup has one update"
ONE_UPLOAD: Final = "parameters are uploaded once"


class Departures(NamedTuple):
    """The rules that a plan does not follow."""

    rules: frozenset[Rule] = frozenset()
    # How the results differ from those of a plan that follows them, for people; empty if they do not.
    consequence: str = ""


NO_DEPARTURES: Final = Departures()


class Overlap(NamedTuple):
    """Phases that updates may run in, beside the step."""

    forward: bool = False  # Whether updates may end in the next forward, as far as it does not need the parameters yet.
    # Whether updates on the CPU may run in the backward before it is known whether they are valid.
    backward: bool = False

    @property
    def name(self) -> str:
        """The value of a policy's option `overlap`."""
        return _NAMES[self.forward + 2 * self.backward]

    def __and__(self, other: "Overlap") -> "Overlap":
        """Return the phases of both."""
        return Overlap(self.forward and other.forward, self.backward and other.backward)


NO_OVERLAP, BOTH = Overlap(), Overlap(forward=True, backward=True)
OVERLAPS = {overlap.name: overlap for overlap in (NO_OVERLAP, Overlap(forward=True), Overlap(backward=True), BOTH)}
