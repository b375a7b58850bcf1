"""Operations that read state from storage and write it there."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from ebbtide.errors import MachineError
from ebbtide.interleave.model.kinds import Kind
from ebbtide.machines.machine import Machine

if TYPE_CHECKING:
    from ebbtide.interleave.model.durations import Durations
    from ebbtide.interleave.model.operations import Op


def _seconds(op: Op, durations: Durations) -> float:
    paths = durations.machine.storage
    rate = paths[op.path].read_bytes_per_s if op.resource == "storage_read" else paths[op.path].write_bytes_per_s
    return durations.operation_s + op.nbytes / rate


def _rates(op: Op) -> Iterable[str]:
    """Return no names: rates of storage are those of its paths."""
    return ()


def _check_paths(ops: Iterable[Op], machine: Machine, policy: str) -> None:
    paths = max(op.path + 1 for op in ops)
    if paths > len(machine.storage):
        raise MachineError(
            f"machine {machine.name} has {len(machine.storage)} paths of storage, and policy {policy} needs "
            f"{paths}: measure them with `ebbtide calibrate --storage FOLDER`"
        )


KINDS = (
    Kind("read", ("storage_read",), seconds=_seconds, rates=_rates, may_be_late=True, check=_check_paths),
    Kind("write", ("storage_write",), seconds=_seconds, rates=_rates, may_be_late=True, check=_check_paths),
)
