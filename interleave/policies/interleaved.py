"""Interleaved updates at a fixed stride, the policy of Deep Optimizer States."""

from collections.abc import Iterable, Sequence

from ebbtide.errors import PolicyError
from ebbtide.interleave.model.plan import Plan
from ebbtide.interleave.model.workload import Workload
from ebbtide.interleave.policies.plan_builder import PlanBuilder
from ebbtide.interleave.policies.registry import (
    GRADS,
    PARAMS,
    DefaultRun,
    Policy,
    policy,
)
from ebbtide.machines.machine import Machine

# One subgroup is fetched while another is updated or flushed.
BUFFERS = 2


@policy(
    "interleaved",
    DefaultRun("interleaved:2", position=40),
    grads=GRADS,
    takes=("overlap",),
    params=PARAMS,
)
def interleaved(workload: Workload, machine: Machine, policy: Policy) -> Plan:
    """Fetch every K-th subgroup, update it on the GPU and flush it while the CPU
    updates the others; K@R does so within the share R that is offloaded, and keeps the
    rest resident."""
    stride_text, _, share_text = (policy.value or "").partition("@")
    stride = policy.number("the stride", None, 1, 1e9, stride_text)
    if stride != int(stride):
        raise PolicyError(
            f"{policy.text!r}: the stride is {stride_text!r}; it must be a whole number"
        )
    share = policy.number("the offloaded share", 1.0, 0.0, 1.0, share_text)
    builder = PlanBuilder(policy.text, workload, policy.options["grads"] == "blocking")
    resident = workload.split.resident(share, len(workload.subgroups))
    offloaded = [
        subgroup for subgroup in range(len(builder.sizes)) if subgroup not in resident
    ]
    on_gpu = offloaded[int(stride) - 1 :: int(stride)]
    builder.gradients(
        keep=frozenset(resident) | keepable_gradients(workload, resident, on_gpu)
    )
    on_cpu = sorted(set(offloaded) - set(on_gpu))
    last: tuple[int, ...] = ()
    if resident.start:
        # The loop of a framework that keeps the last subgroups resident comes to them
        # at the end.
        last = _interleave(builder, on_cpu, on_gpu, policy.options["params"])
    for subgroup in resident:
        builder.resident(subgroup, last)
    if not resident.start:
        _interleave(builder, on_cpu, on_gpu, policy.options["params"])
    return builder.plan()


def _interleave(
    builder: PlanBuilder, on_cpu: Sequence[int], on_gpu: Sequence[int], params: str
) -> tuple[int, ...]:
    """Stream `on_gpu` through the buffers, with fetches ahead, while the CPU updates
    `on_cpu`, evenly mixed.

    Return the index of the last upload, if there is one.
    """
    flushes: list[int] = []
    previous_upload: tuple[int, ...] = ()

    def stream(count: int) -> None:
        while len(flushes) < min(count, len(on_gpu)):
            buffer_freed = (flushes[-BUFFERS],) if len(flushes) >= BUFFERS else ()
            flushes.append(builder.through_gpu(on_gpu[len(flushes)], buffer_freed))

    for number, subgroup in enumerate(on_cpu):
        stream(len(on_gpu) * number // len(on_cpu) + BUFFERS)
        upload = builder.on_cpu(subgroup, params, previous_upload)
        previous_upload = (upload,) if params == "blocking" else ()
    stream(len(on_gpu))
    return (upload,) if on_cpu else ()


def keepable_gradients(
    workload: Workload, resident: Iterable[int], on_gpu: Iterable[int]
) -> frozenset[int]:
    """Return the streamed subgroups whose gradients fit on the device until the update.

    They fit beside resident state, its gradients and the buffers; all fit if the free
    memory is not known. Others are copied down and back up."""
    sizes = workload.subgroups
    streamed = list(on_gpu)
    if workload.gpu_free is None or workload.gradients_held_until_step or not streamed:
        return frozenset(streamed)
    free = min(
        size for _, size in workload.gpu_free_from(workload.kept_gradients_begin_s)
    )
    free -= (workload.state_bytes + workload.grad_bytes) * sum(
        sizes[subgroup] for subgroup in resident
    )
    fetched_bytes = workload.state_bytes + workload.returned_gradient_bytes
    free -= BUFFERS * fetched_bytes * max(sizes[subgroup] for subgroup in streamed)
    kept = set()
    for subgroup in streamed:
        free -= workload.grad_bytes * sizes[subgroup]
        if free >= 0:
            kept.add(subgroup)
    return frozenset(kept)
