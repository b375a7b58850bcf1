"""Systems with state in storage: DeepSpeed's ZeRO-Infinity on one drive, and
MLP-Offload on several paths at once."""

from dataclasses import replace

from ebbtide.errors import PolicyError
from ebbtide.features.storage.kinds import STATE_ONLY
from ebbtide.features.storage.policy import StorageLayout, storage_summary, stored_in
from ebbtide.interleave.model.operations import Departures, numbered_lane
from ebbtide.interleave.model.plan import STEP, Plan
from ebbtide.interleave.model.schedule import available_host_bytes
from ebbtide.interleave.model.workload import Workload
from ebbtide.interleave.policies.plan_builder import PlanBuilder
from ebbtide.interleave.policies.registry import Policy, SystemRun, system
from ebbtide.machines.machine import Machine
from ebbtide.state_bytes import MASTER_BYTES
from ebbtide.units import bytes_text

# Master weight, two moments and gradient of a subgroup each take a buffer.
BUFFERS_OF_SUBGROUP = 4
_MOST_BUFFERS = 4096
_TEXT = "zero-infinity:12,pipeline_read=true,pipeline_write=true"


@system(
    "zero-infinity",
    SystemRun(_TEXT, 80, (_TEXT, f"{_TEXT},gradients=device")),
    pipeline_read=("false", "true"),
    pipeline_write=("false", "true"),
    gradients=("storage", "device"),
)
def zero_infinity(workload: Workload, machine: Machine, policy: Policy) -> Plan:
    """Keep all state, and fp32 gradients, in storage; read, update on the CPU, upload
    and write one subgroup after another, as DeepSpeed's ZeRO-Infinity does.

    The number after the colon is `buffer_count`: buffers of the largest subgroup's size
    in fp32; each subgroup in host memory takes four. With `pipeline_read` the next
    subgroup is read during an update, with `pipeline_write` the one before is written.
    Gradients are written in the backward, which stops whenever all buffers are full
    until all are written. `gradients=device`: with an `aio.block_size` above the
    largest gradient DeepSpeed does not write them, and they stay on the device in fp32.
    The fastest path is used."""
    number = policy.number("buffer_count", BUFFERS_OF_SUBGROUP, 1, _MOST_BUFFERS)
    count = int(number)
    if count != number:
        raise PolicyError(
            f"{policy.text!r}: buffer_count is {number:g}; it must be a whole number"
        )
    ahead = int(policy.options["pipeline_read"] == "true")
    behind = int(policy.options["pipeline_write"] == "true")
    slots = 1 + ahead + behind
    if count < BUFFERS_OF_SUBGROUP * slots:
        raise PolicyError(
            f"{policy.text!r}: DeepSpeed runs out of swap buffers with buffer_count "
            f"{count}; these pipelines need "
            f"{BUFFERS_OF_SUBGROUP * slots}"
        )
    path = _fastest_path(workload, machine, policy)
    builder = PlanBuilder(policy.text, workload)
    gradients_stored = policy.options["gradients"] == "storage"
    if gradients_stored:
        gradient_writes = _written_gradients(builder, count, path)
    else:
        gradient_writes = {}
        for subgroup in reversed(range(len(builder.sizes))):
            builder.gradient(
                subgroup,
                workload.grad_bytes,
                takes=MASTER_BYTES * builder.sizes[subgroup],
            )
        builder.clip_copied_gradients()
    width = workload.state_bytes
    read_bytes = width + (MASTER_BYTES if gradients_stored else 0)
    uploads: list[int] = []
    writes: list[int] = []
    # DeepSpeed waits for all gradients before the first read.
    before_read = tuple(gradient_writes.values())
    for subgroup, size in enumerate(builder.sizes):
        buffer = subgroup % slots
        own_gradient = (gradient_writes[subgroup],) if gradients_stored else ()
        buffer_freed = (
            *_before(uploads, subgroup, 1 + ahead),
            *_before(writes, subgroup, slots),
        )
        after = tuple({*before_read, *own_gradient, *buffer_freed})
        read = builder.add(
            "read",
            numbered_lane("storage_read", path),
            subgroup,
            read_bytes,
            after,
            tag=buffer,
        )
        before_read = (read,)
        after = (
            read,
            *_before(uploads, subgroup, 1),
            *_before(writes, subgroup, 1 + behind),
        )
        uploads.append(builder.on_cpu(subgroup, "blocking", after))
        if not gradients_stored:
            builder.ops[-1] = builder.ops[-1]._replace(gives=MASTER_BYTES * size)
        after = tuple(range(read + 1, uploads[-1] + 1))
        write = builder.add(
            "write",
            numbered_lane("storage_write", path),
            subgroup,
            width,
            after,
            tag=buffer,
        )
        writes.append(write)
    departures = Departures(
        frozenset({STATE_ONLY}) if gradients_stored else frozenset()
    )
    plan = replace(
        builder.plan(validate=False),
        storage_buffers=_buffer_bytes(max(builder.sizes), count, slots),
        departures=departures,
    )
    return replace(plan, remark=storage_summary(plan, workload)).validate(workload)


def _fastest_path(workload: Workload, machine: Machine, policy: Policy) -> int:
    """Return the number of the path that is used."""
    if not machine.storage:
        raise PolicyError(
            f"{policy.text!r} needs storage: measure it with `ebbtide calibrate "
            "--storage FOLDER`, or write its rates "
            "into the machine file"
        )
    number = min(
        range(len(machine.storage)), key=lambda index: machine.storage[index].s_per_byte
    )
    free = machine.storage[number].bytes
    gradient_bytes = MASTER_BYTES if policy.options["gradients"] == "storage" else 0
    needed = (workload.state_bytes + gradient_bytes) * workload.params
    if free is not None and needed > free:
        raise PolicyError(
            f"{policy.text!r} needs {bytes_text(needed)} of storage, and "
            f"{bytes_text(free)} are free"
        )
    return number


def _written_gradients(builder: PlanBuilder, count: int, path: int) -> dict[int, int]:
    """Copy gradients to buffers and write them.

    Return the index of the write of each subgroup's gradient.
    """
    writes: dict[int, int] = {}
    lane = numbered_lane("storage_write", path)
    for number, subgroup in enumerate(reversed(range(len(builder.sizes)))):
        # All buffers are full, and DeepSpeed waits until all are written.
        is_full = number > 0 and number % count == 0
        after = tuple(writes.values())[-count:] if is_full else ()
        copy = builder.gradient(
            subgroup, builder.workload.grad_bytes, after, blocking=is_full
        )
        after, point = (copy, *list(writes.values())[-1:]), builder.ops[copy].start
        writes[subgroup] = builder.add(
            "write", lane, subgroup, MASTER_BYTES, after, point
        )
    builder.clip_copied_gradients()
    return writes


def _before(indices: list[int], subgroup: int, distance: int) -> tuple[int, ...]:
    """Return the operation of the subgroup at a distance before this one; empty if
    there is none."""
    return (indices[subgroup - distance],) if subgroup >= distance else ()


def _buffer_bytes(largest: int, count: int, slots: int) -> tuple[float, ...]:
    """Return the bytes of the buffers of subgroups in host memory, and of the rest.

    Only gradients use the rest.
    """
    unused = float(MASTER_BYTES * largest * (count - BUFFERS_OF_SUBGROUP * slots))
    used = (float(BUFFERS_OF_SUBGROUP * MASTER_BYTES * largest),) * slots
    return (*used, unused) if unused else used


# Of each path one subgroup is read, one updated, one written; updates of state in
# memory are evenly spread.
_LAYOUT = StorageLayout("spread", 3)


@system("mlp-offload", SystemRun("mlp-offload", 90))
def mlp_offload(workload: Workload, machine: Machine, policy: Policy) -> Plan:
    """Keep the state that host memory does not hold on all paths of the storage at
    once, in proportion to their rates, as MLP-Offload does.

    Gradients stay in host memory. The CPU updates one subgroup after another at the
    step, while others are read and written. MLP-Offload updates in the opposite order
    in every second iteration, so that the last subgroups of one are the first of the
    next; here the same subgroups stay in memory in every iteration."""
    policy.reject_value()
    if available_host_bytes(workload, machine) is None:
        raise PolicyError(
            f"{policy.text!r} needs to know how much host memory there is: give it "
            "(--host-free-bytes 72GB, or "
            "host_memory_bytes in a machine file)"
        )
    builder = PlanBuilder(policy.text, workload)
    builder.gradients()
    previous: tuple[int, ...] = ()
    for subgroup in range(len(builder.sizes)):
        previous = (builder.on_cpu(subgroup, "blocking", previous),)
    plan = stored_in(builder.plan(), workload, machine, _LAYOUT)
    if not plan.storage_buffers:
        return plan
    # All within the step: nothing is read in the backward, or written in the next
    # forward.
    ops = tuple(
        op._replace(start=STEP, holds=None) if op.kind in ("read", "write") else op
        for op in plan.ops
    )
    return replace(plan, ops=ops, remark=storage_summary(plan, workload)).validate(
        workload
    )
