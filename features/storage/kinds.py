"""Operations that read state from storage and write it there.

Their tag is the buffer in host memory, by its index in `Plan.storage_buffers`, that the
subgroup has from the start of its read until the end of its write; None for the write
of a gradient."""

from collections.abc import Iterable
from typing import Final

from ebbtide.errors import MachineError
from ebbtide.interleave.model.kinds import Flow, Kind, Rates, no_rates
from ebbtide.interleave.model.operations import Op, split_lane
from ebbtide.interleave.model.plan import Plan
from ebbtide.machines.machine import Machine

# A rule that plans of other systems may depart from (see `operations.py`): gradients
# are in storage, too.
STATE_ONLY: Final = "storage has state only"


def path_of(op: Op) -> int:
    """Return the number of the storage path that a read or write is on.

    See `Machine.storage`.
    """
    return split_lane(op.resource)[1]


def _seconds(op: Op, rates: Rates) -> float:
    path = rates.machine.storage[path_of(op)]
    rate = path.read_bytes_per_s if op.kind == "read" else path.write_bytes_per_s
    return rates.operation_s + op.nbytes / rate


def _check_paths(ops: Iterable[Op], machine: Machine, policy: str) -> None:
    paths = max(path_of(op) + 1 for op in ops)
    if paths > len(machine.storage):
        raise MachineError(
            f"machine {machine.name} has {len(machine.storage)} paths of storage, and "
            f"policy {policy} needs "
            f"{paths}: measure them with `ebbtide calibrate --storage FOLDER`"
        )


def _read_flow(op: Op, plan: Plan) -> Flow:
    """Return the effect of a read: it takes a buffer, which its subgroup has until the
    write."""
    gradient = () if plan.follows(STATE_ONLY) else (f"grad@file {path_of(op)}",)
    moves = (f"state@file {path_of(op)}", f"buffer {op.tag}")
    return Flow(gradient, ("state@host", f"own@buffer {op.tag}"), moves)


def _write_flow(op: Op, plan: Plan) -> Flow:
    if op.tag is None and not plan.follows(STATE_ONLY):
        return Flow(("grad@host",), (f"grad@file {path_of(op)}",))
    writes = (f"state@file {path_of(op)}", f"buffer {op.tag}")
    return Flow(writes=writes, moves=("state@host", f"own@buffer {op.tag}"))


KINDS = (
    Kind(
        "read",
        ("storage_read",),
        seconds=_seconds,
        rates=no_rates,
        may_be_late=True,
        flow=_read_flow,
        perform="ebbtide.features.storage.engine.performing:read",
        check=_check_paths,
    ),
    Kind(
        "write",
        ("storage_write",),
        seconds=_seconds,
        rates=no_rates,
        may_be_late=True,
        flow=_write_flow,
        perform="ebbtide.features.storage.engine.performing:write",
        check=_check_paths,
    ),
)
