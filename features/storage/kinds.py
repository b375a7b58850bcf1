"""Operations that read state from storage and write it there."""

from collections.abc import Iterable
from typing import Final

from ebbtide.errors import MachineError
from ebbtide.interleave.model.kinds import Flow, Kind, Rates, no_rates
from ebbtide.interleave.model.operations import Op
from ebbtide.interleave.model.plan import Plan
from ebbtide.machines.machine import Machine

# A rule that plans of other systems may depart from (see `operations.py`): gradients are in storage, too.
STATE_ONLY: Final = "storage has state only"


def _seconds(op: Op, rates: Rates) -> float:
    paths = rates.machine.storage
    rate = paths[op.path].read_bytes_per_s if op.resource == "storage_read" else paths[op.path].write_bytes_per_s
    return rates.operation_s + op.nbytes / rate


def _check_paths(ops: Iterable[Op], machine: Machine, policy: str) -> None:
    paths = max(op.path + 1 for op in ops)
    if paths > len(machine.storage):
        raise MachineError(
            f"machine {machine.name} has {len(machine.storage)} paths of storage, and policy {policy} needs "
            f"{paths}: measure them with `ebbtide calibrate --storage FOLDER`"
        )


def _read_flow(op: Op, plan: Plan) -> Flow:
    """Return what a read does: it takes a buffer, which its subgroup has until the write."""
    gradient = () if plan.follows(STATE_ONLY) else (f"grad@file {op.path}",)
    moves = (f"state@file {op.path}", f"buffer {op.buffer}")
    return Flow(gradient, ("state@host", f"own@buffer {op.buffer}"), moves)


def _write_flow(op: Op, plan: Plan) -> Flow:
    if op.buffer < 0 and not plan.follows(STATE_ONLY):
        return Flow(("grad@host",), (f"grad@file {op.path}",))
    writes = (f"state@file {op.path}", f"buffer {op.buffer}")
    return Flow(writes=writes, moves=("state@host", f"own@buffer {op.buffer}"))


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
