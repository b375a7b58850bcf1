"""Operations that read state from storage and write it there."""

from collections.abc import Iterable

from ebbtide.errors import MachineError
from ebbtide.interleave.model.kinds import Kind, Rates, no_rates
from ebbtide.interleave.model.operations import Op
from ebbtide.machines.machine import Machine


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


KINDS = (
    Kind("read", ("storage_read",), seconds=_seconds, rates=no_rates, may_be_late=True, check=_check_paths),
    Kind("write", ("storage_write",), seconds=_seconds, rates=no_rates, may_be_late=True, check=_check_paths),
)
