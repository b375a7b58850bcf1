"""Operations of a plan: their kinds, the resources that run them, and when they may start and must end."""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal, NamedTuple

from ebbtide.errors import PlanError

OpKind = Literal["gradient down", "gradient up", "clip", "read", "fetch", "update", "flush", "cast", "upload", "write"]
Resource = Literal["cpu", "gpu", "h2d", "d2h", "storage_read", "storage_write"]
# Each path of the storage (see `Op.path`) has both of the others.
RESOURCES: tuple[Resource, ...] = ("cpu", "gpu", "h2d", "d2h")
DEVICE_RESOURCES: tuple[Resource, ...] = ("gpu", "h2d", "d2h")
STORAGE_RESOURCES: tuple[Resource, ...] = ("storage_read", "storage_write")

# Points of an iteration at which an operation may start: the number of the phase plus the share of it that is done.
# The update begins at UPDATE. At STEP the overhead of the optimizer's step is over and its operations are issued.
OTHER, FORWARD, BACKWARD, UPDATE, STEP = 0.0, 1.0, 2.0, 3.0, 4.0

RESOURCES_OF_KIND: dict[OpKind, tuple[Resource, ...]] = {
    "gradient down": ("d2h",),
    "gradient up": ("h2d",),
    "clip": ("cpu",),
    "fetch": ("h2d",),
    "update": ("cpu", "gpu"),
    "flush": ("d2h",),
    "cast": ("cpu", "gpu"),
    "upload": ("h2d",),
    "read": ("storage_read",),
    "write": ("storage_write",),
}


# Operations that may end in the next iteration, and those of them that write parameters.
LATE_KINDS: frozenset[OpKind] = frozenset(
    {"gradient up", "read", "fetch", "update", "flush", "cast", "upload", "write"}
)
WRITES_PARAMETERS: frozenset[OpKind] = frozenset({"update", "cast", "upload"})


class Op(NamedTuple):
    """One operation on one subgroup.

    Attributes:
        kind: What the operation does.
        resource: The resource that runs it.
        subgroup: Index of the subgroup, -1 for an operation on all of them.
        params: Parameters it works on.
        nbytes: Bytes moved; 0 for updates and casts.
        point: The earliest point of the iteration at which it may start (see `UPDATE`).
        after: Indices of the operations that must have ended.
        pageable: Whether the host memory of a copy is pageable rather than pinned.
        blocking: Whether forward and backward stop until it has ended.
        acquire: Bytes of device memory allocated when it starts.
        release: Bytes of device memory freed when it ends.
        due: The point of the next iteration at which compute waits until it has ended; None: it ends with the update of
            its own iteration. Operations with a point are called late.
        speculative: Whether an update on the CPU runs before clipping has said that it is valid, and writes beside the
            old state (or over it, see `Plan.rolls_back`).
        path: Of a read or write: the path of the storage (see `Machine.storage`).
        buffer: Of a read or write: the buffer in host memory, by its index in `Plan.storage_buffers`. A subgroup has it
            from the start of its read until the end of its write. -1: a write of a gradient (see `STATE_ONLY` of the
            departures).
    """

    kind: OpKind
    resource: Resource
    subgroup: int
    params: int
    nbytes: float
    point: float
    after: tuple[int, ...] = ()
    pageable: bool = False
    blocking: bool = False
    acquire: float = 0.0
    release: float = 0.0
    due: float | None = None
    speculative: bool = False
    path: int = 0
    buffer: int = -1

    @property
    def lane(self) -> str:
        """The name of its resource, with the number of the path of the storage if that is not the first."""
        return f"{self.resource} {self.path}" if self.path else self.resource


def uses_state_on_host(op: Op, casts_on_gpu: Collection[int]) -> bool:
    """Return whether an operation reads or writes the state of its subgroup in host memory.

    Args:
        op: The operation.
        casts_on_gpu: Subgroups whose masters are uploaded and converted on the GPU.
    """
    if op.kind == "upload":
        return op.subgroup in casts_on_gpu
    return op.kind in ("fetch", "flush") or (op.kind in ("update", "cast") and op.resource == "cpu")


def plan_error(policy: str, op: Op, problem: str) -> PlanError:
    """Return the error of a plan with a wrong operation."""
    return PlanError(f"policy {policy}: {op.kind} of subgroup {op.subgroup} {problem}")
