"""Rows of the bound for state in storage: memory of the host, and what is read and written."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ebbtide.interleave.model.host_memory import available_host_bytes
from ebbtide.interleave.model.workload import Workload
from ebbtide.interleave.simulation.linear_program import LinearProgram
from ebbtide.machines.machine import Machine
from ebbtide.phases import FORWARD, OTHER

# Parameters in each interval: state read from storage, written to it, of that state which this cycle has updated, and
# state flushed that it has not updated.
STORAGE_FLOWS = ("read", "written", "written updated", "flushed not updated", "kept for the next cycle")
# State in host memory at the end of an interval, before and after its update.
HOST_STATES = ("host not updated", "host updated")


@dataclass(frozen=True)
class StorageLimits:
    """Limits of host memory and storage, bytes and bytes/s.

    Attributes:
        host_bytes: Host memory of state and of the buffers of copies.
        read: Reads of all paths.
        write: Writes of all paths.
        both: Reads and writes together.
    """

    host_bytes: float
    read: float
    write: float
    both: float


def storage_limits(workload: Workload, machine: Machine) -> StorageLimits | None:
    """Return the limits of a machine with storage and known host memory; else None.

    A plan that cannot fit with all state in storage is compared with the bound of a host that is just large enough.
    """
    available = available_host_bytes(workload, machine)
    if available is None or not machine.storage:
        return None
    copies = workload.params * (workload.grad_bytes + workload.param_bytes)
    least = copies + workload.state_bytes * max(workload.subgroups)
    return StorageLimits(
        max(available, least) * (1 + 1e-9),
        sum(path.read_bytes_per_s for path in machine.storage),
        sum(path.write_bytes_per_s for path in machine.storage),
        sum(
            min(path.duplex_bytes_per_s or math.inf, path.read_bytes_per_s + path.write_bytes_per_s)
            for path in machine.storage
        ),
    )


def add_storage_rows(
    program: LinearProgram, workload: Workload, limits: StorageLimits, phases: Sequence[str], late_updates: bool
) -> None:
    """Require that state is in host memory when it is updated, fetched or written, that host memory holds what is
    there, and that state which leaves both memories is written and read in each cycle.

    A cycle updates all parameters once. When it begins, what is in host memory waits either for its next update or
    still for its write.

    Args:
        program: The linear program, with the variables of `STORAGE_FLOWS` and `HOST_STATES` and those of its own.
        workload: The workload.
        limits: The limits.
        phases: The phase of each interval.
        late_updates: Whether updates may end in the next forward, so that the cycle begins with the backward.
    """
    count = len(phases)
    start, stays = program.add_variable("host not updated at start"), program.add_variable("in memory all the time")
    written_at_start = program.add_variable("host updated at start")
    last, last_updated = (program.variable(name, count - 1) for name in HOST_STATES)
    program.add_row({start: 1.0, written_at_start: 1.0, last: -1.0, last_updated: -1.0}, upper=0.0)
    program.add_row({written_at_start: 1.0, last_updated: -1.0}, upper=0.0)
    copies = workload.grad_bytes + workload.param_bytes
    buffers = {program.variable("cpu updates", index): copies for index in range(count)}
    before, updated_before = start, written_at_start
    for index, phase in enumerate(phases):
        names = (*STORAGE_FLOWS, *HOST_STATES, "fetched", "flushed", "cpu updates")
        of = {name: program.variable(name, index) for name in names}
        if not late_updates or phase not in (OTHER, FORWARD):
            program.limit(of["kept for the next cycle"], 0.0)
        program.add_row({of["flushed not updated"]: 1.0, of["flushed"]: -1.0}, upper=0.0)
        program.add_row({of["written updated"]: 1.0, of["written"]: -1.0}, upper=0.0)
        leaving = {of["fetched"]: 1.0, of["cpu updates"]: 1.0}
        arriving = {of["read"]: -1.0, of["flushed not updated"]: -1.0, of["kept for the next cycle"]: -1.0}
        program.add_row({of["host not updated"]: 1.0, before: -1.0, **leaving, **arriving}, upper=0.0)
        leaving = {of["written updated"]: 1.0, of["kept for the next cycle"]: 1.0}
        arriving = {of["cpu updates"]: -1.0, of["flushed"]: -1.0, of["flushed not updated"]: 1.0}
        program.add_row({of["host updated"]: 1.0, updated_before: -1.0, **leaving, **arriving}, lower=0.0)
        before, updated_before = of["host not updated"], of["host updated"]
        in_host = {before: workload.state_bytes, updated_before: workload.state_bytes}
        program.add_row({**in_host, **buffers}, upper=limits.host_bytes / workload.params)
        program.add_row(
            {stays: 1.0, before: -1.0, updated_before: -1.0, program.variable("state", index): -1.0}, upper=0.0
        )
    for name in ("read", "written"):
        program.add_row({stays: 1.0, **{program.variable(name, index): 1.0 for index in range(count)}}, lower=1.0)
