"""Deep Optimizer States."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ebbtide.errors import PolicyError
from ebbtide.interleave.model.plan import Plan
from ebbtide.interleave.model.workload import Workload
from ebbtide.interleave.policies.plan_builder import PlanBuilder
from ebbtide.interleave.policies.registry import GRADS, PARAMS, Choice, policy, to_number
from ebbtide.interleave.policies.twin_flow import resident_count
from ebbtide.machines.machine import Machine

# One subgroup comes while another is updated or goes.
BUFFERS = 2


@policy("interleaved", grads=GRADS, params=PARAMS)
def interleaved(workload: Workload, machine: Machine, choice: Choice) -> Plan:
    """Every K-th subgroup is fetched, updated on the GPU and flushed while the CPU works on the others; K@R does so
    within the share R that is offloaded, the rest resident."""
    stride_text, _, share_text = (choice.value or "").partition("@")
    stride = to_number(choice.text, stride_text, "the stride", None, 1, 1e9)
    if stride != int(stride):
        raise PolicyError(f"{choice.text!r}: the stride is {stride_text!r}; it must be a whole number")
    share = to_number(choice.text, share_text or None, "the offloaded share", 1.0, 0.0, 1.0)
    builder = PlanBuilder(choice.text, workload, choice.knobs["grads"] == "blocking")
    resident = resident_count(len(builder.sizes), share)
    offloaded = range(resident, len(builder.sizes))
    on_gpu = offloaded[int(stride) - 1 :: int(stride)]
    builder.gradients(keep=frozenset(range(resident)) | keepable(workload, range(resident), on_gpu))
    for subgroup in range(resident):
        builder.resident(subgroup)
    on_cpu = sorted(set(offloaded) - set(on_gpu))
    interleave(builder, on_cpu, on_gpu, choice.knobs["params"] == "blocking")
    return builder.plan()


def interleave(builder: PlanBuilder, on_cpu: Sequence[int], on_gpu: Sequence[int], blocking: bool = False) -> None:
    """Stream `on_gpu` through a few buffers while the CPU updates `on_cpu`, evenly mixed, fetches ahead."""
    flushes: list[int] = []
    before: tuple[int, ...] = ()

    def stream(count: int) -> None:
        while len(flushes) < min(count, len(on_gpu)):
            room = (flushes[-BUFFERS],) if len(flushes) >= BUFFERS else ()
            flushes.append(builder.through_gpu(on_gpu[len(flushes)], room))

    for number, subgroup in enumerate(on_cpu):
        stream(len(on_gpu) * number // len(on_cpu) + BUFFERS)
        upload = builder.on_cpu(subgroup, blocking, before)
        before = (upload,) if blocking else ()
    stream(len(on_gpu))


def keepable(workload: Workload, resident: Iterable[int], on_gpu: Iterable[int]) -> frozenset[int]:
    """Subgroups whose gradients stay on the device until the update, as far as there is room beside resident state,
    its gradients and the buffers (all of them where it is not known what is free); the others go down and come back."""
    sizes = workload.subgroups
    streamed = list(on_gpu)
    if workload.gpu_free is None or workload.gradients_stay or not streamed:
        return frozenset(streamed)
    begin = workload.compute_s - workload.backward_s
    room = min(size for at, size in workload.gpu_free_from(begin))
    room -= (workload.state_bytes + workload.grad_bytes) * sum(sizes[subgroup] for subgroup in resident)
    room -= BUFFERS * workload.state_bytes * max(sizes[subgroup] for subgroup in streamed)
    kept = set()
    for subgroup in streamed:
        room -= workload.grad_bytes * sizes[subgroup]
        if room >= 0:
            kept.add(subgroup)
    return frozenset(kept)
