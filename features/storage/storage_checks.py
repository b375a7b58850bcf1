"""Checks of the operations of a plan that move state between storage and host memory."""

from collections.abc import Sequence

from ebbtide.errors import PlanError
from ebbtide.interleave.model.operations import BACKWARD, Op, plan_error, uses_state_on_host
from ebbtide.interleave.model.workload import Workload
from ebbtide.state_bytes import MASTER_BYTES


def check_storage(
    policy: str,
    ops: Sequence[Op],
    buffers: Sequence[float],
    not_stored: frozenset[int],
    workload: Workload,
    has_gradients: bool = False,
) -> None:
    """Check that state in storage is in host memory when it is used, that every change is written back, and that no
    buffer has state of two subgroups at once, in this iteration or the next. Raises PlanError. `not_stored` subgroups
    are on the device when the iteration begins; with `has_gradients` each has fp32 gradients there, too."""
    reads = {op.subgroup: index for index, op in enumerate(ops) if op.kind == "read"}
    all_writes = [index for index, op in enumerate(ops) if op.kind == "write"]
    gradient_writes = {ops[index].subgroup: index for index in all_writes if has_gradients and ops[index].buffer < 0}
    of_gradients = frozenset(gradient_writes.values())
    writes = {ops[index].subgroup: index for index in all_writes if index not in of_gradients}
    if has_gradients:
        _check_gradients(policy, ops, reads, gradient_writes, workload)
    if len(all_writes) > len(writes) + (len(reads) if has_gradients else 0):
        raise plan_error(policy, ops[all_writes[-1]], "is repeated")
    if not reads and not writes and not buffers:
        return
    for subgroup in writes.keys() - reads.keys():
        raise plan_error(policy, ops[writes[subgroup]], "comes without a read")
    used = _users(policy, ops, reads, writes, not_stored)
    for subgroup, read in reads.items():
        if subgroup not in writes:
            raise plan_error(policy, ops[read], "is not followed by a write: the updated state is lost")
        _check_pair(policy, ops[read], ops[writes[subgroup]], buffers, workload, has_gradients)
        if missing := [index for index in used[subgroup] if index not in ops[writes[subgroup]].after]:
            raise plan_error(policy, ops[writes[subgroup]], f"does not wait for its {ops[missing[-1]].kind}")
    _check_buffers(policy, ops, reads, writes, len(buffers))


def _users(
    policy: str, ops: Sequence[Op], reads: dict[int, int], writes: dict[int, int], not_stored: frozenset[int]
) -> dict[int, list[int]]:
    """Return the last operations that use the state of each stored subgroup in host memory."""
    for subgroup in reads.keys() & not_stored:
        raise plan_error(policy, ops[reads[subgroup]], "is of state that is on the device when the iteration begins")
    last: dict[int, list[int]] = {subgroup: [] for subgroup in reads}
    casts_on_gpu = {op.subgroup for op in ops if op.kind == "cast" and op.resource == "gpu"}
    for index, op in enumerate(ops):
        read = reads.get(op.subgroup)
        if read is None or not uses_state_on_host(op, casts_on_gpu):
            continue
        if index > writes.get(op.subgroup, index):
            raise plan_error(policy, op, "comes after its write")
        on_host = op.kind == "fetch" or (op.kind == "update" and op.resource == "cpu")
        if on_host and read not in op.after:
            raise plan_error(policy, op, "does not wait for its read")
        if op.kind != "fetch":
            last[op.subgroup] = [index]
    return last


def _check_gradients(
    policy: str, ops: Sequence[Op], reads: dict[int, int], writes: dict[int, int], workload: Workload
) -> None:
    """Check that the gradient of each stored subgroup is written when it is on the host, and read after that."""
    copies = {op.subgroup: index for index, op in enumerate(ops) if op.kind == "gradient down"}
    for subgroup, index in writes.items():
        op = ops[index]
        if copies.get(subgroup, -1) not in op.after:
            raise plan_error(policy, op, "does not wait for its gradient down")
        if op.nbytes != MASTER_BYTES * workload.subgroups[subgroup]:
            raise plan_error(policy, op, "does not move the whole gradient")
    for subgroup, read in reads.items():
        if writes.get(subgroup, -1) not in ops[read].after:
            raise plan_error(policy, ops[read], "does not wait for the write of its gradient")
        if ops[writes[subgroup]].path != ops[read].path:
            raise plan_error(policy, ops[read], "is not of the path that its gradient was written to")


def _check_pair(
    policy: str, read: Op, write: Op, buffers: Sequence[float], workload: Workload, has_gradients: bool
) -> None:
    """Check buffer, path and times of a read and the write that follows it."""
    if not 0 <= read.buffer < len(buffers) or read.buffer != write.buffer or read.path != write.path:
        raise plan_error(policy, write, "is not of the buffer and the path that its read is of")
    if min(read.path, read.buffer) < 0:
        raise plan_error(policy, read, "is of a path that does not exist")
    size = workload.state_bytes * workload.subgroups[read.subgroup]
    read_size = size + MASTER_BYTES * workload.subgroups[read.subgroup] if has_gradients else size
    if read.nbytes != read_size or write.nbytes != size:
        raise plan_error(policy, read, "does not move the whole state")
    if buffers[read.buffer] < read_size:
        raise plan_error(policy, read, "is larger than its buffer")
    if read.point < BACKWARD:
        # The write of the iteration before may still run until then, of this subgroup or of another one in the buffer.
        raise plan_error(policy, read, "starts before the backward")


def _check_buffers(policy: str, ops: Sequence[Op], reads: dict[int, int], writes: dict[int, int], buffers: int) -> None:
    """Check that a buffer is read into when the state that it had has been written."""
    if not reads:
        raise PlanError(f"policy {policy}: there are {buffers} storage buffers, and nothing is in storage")
    last_write: dict[int, int] = {}
    for subgroup, read in sorted(reads.items(), key=lambda entry: entry[1]):
        op = ops[read]
        before = last_write.get(op.buffer)
        if before is not None and before not in op.after:
            raise plan_error(policy, op, "does not wait for the write that frees its buffer")
        last_write[op.buffer] = writes[subgroup]
