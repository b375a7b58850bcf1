"""Changes to a job: the least one with which it fits, or fits without offload."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice, product, starmap
from typing import Any

from ebbtide.features.advise.choice import (
    fits_memory,
    has_static_split,
    planned,
    without_offload,
)
from ebbtide.features.advise.job.memory import PlacedWorkload, place
from ebbtide.features.advise.job.training_job import TrainingJob, TunableSettings
from ebbtide.features.advise.present import NOT_KNOWN, Present
from ebbtide.interleave.model.workload import Workload
from ebbtide.interleave.policies import Policy
from ebbtide.interleave.replay.recorded_job import RecordedJob
from ebbtide.machines.machine import MAX_RANKS, Machine
from ebbtide.state_bytes import PARAM_BYTES, REMAINDER_STATE_BYTES

# Host memory that plans leave to the system: MemTotal is some 2 % less than what is
# installed, and other processes run.
SYSTEM_SHARE = 0.05
_OTHER_RESULTS = "other arithmetic, other results"
# Name, bytes per parameter, and what it does to the results.
_REMAINDER = (
    "InterleavedOptimizer(..., 'adamw-remainder') on bf16 parameters "
    f"({REMAINDER_STATE_BYTES} B a parameter)",
    float(REMAINDER_STATE_BYTES),
    "the same arithmetic; parameters differ where a master is exactly between two of "
    "them",
)
_SMALLER_STATE = (
    (
        "bf16 moments (8 B a parameter, rule='adamw-bf16' of InterleavedOptimizer)",
        8.0,
        _OTHER_RESULTS,
    ),
    ("8-bit moments (6 B a parameter)", 6.0, _OTHER_RESULTS),
)


def settings_in_order(job: TrainingJob) -> Iterator[TunableSettings]:
    """Return the settings to try, first those of the job, then by the cost of the
    change, the least first: offload of optimizer state, checkpointing, a micro-batch
    that divides the job's, twice as many ranks."""
    own, memory = job.settings, job.memory
    can_checkpoint = memory is not None and memory.checkpointed is not None
    batch = own.micro_batch or 0
    divisors: list[int | None] = [
        size for size in range(batch, 0, -1) if batch % size == 0
    ]
    choices = product(
        _doubled(own.ranks),
        divisors or [None],
        sorted({own.checkpointing, own.checkpointing or can_checkpoint}),
        sorted({own.offload, True}),
    )
    return starmap(TunableSettings, choices)


def share_host(
    machine: Machine, ranks: int, ranks_per_host: int | None = None
) -> Machine:
    """Return the machine with a rank's rates, without the system's share of host
    memory; see `Machine.for_ranks`."""
    return leave_system_share(
        machine.for_ranks(ranks_on_a_host(machine, ranks, ranks_per_host))
    )


def leave_system_share(machine: Machine) -> Machine:
    """Return a machine without the system's share of host memory."""
    host = machine.host_memory_bytes
    return (
        machine
        if host is None
        else replace(machine, host_memory_bytes=(1 - SYSTEM_SHARE) * host)
    )


def ranks_on_a_host(
    machine: Machine, ranks: int, ranks_per_host: int | None = None
) -> int:
    """Return how many ranks of a job share a host: `ranks_per_host`, or as many as the
    box of the machine has."""
    if ranks_per_host is not None:
        return ranks_per_host
    return min(ranks, machine.box.ranks) if machine.box is not None else 1


def least_settings(
    job: TrainingJob,
    machine: Machine,
    ranks_per_host: int | None = None,
    policies: Sequence[Policy] = (),
) -> TunableSettings | None:
    """Return the settings of the least change with which a job fits a machine under one
    of `policies` (empty: of all); None if no change helps."""
    own = machine.for_ranks(
        ranks_on_a_host(machine, job.settings.ranks, ranks_per_host)
    )
    if job.exceeds_host(own.host_memory_bytes):
        return None
    for settings in settings_in_order(job):
        shared = share_host(machine, settings.ranks, ranks_per_host)
        placed = place(job, settings, shared)
        if fits(settings, placed, shared, policies):
            return settings
    return None


def fits(
    settings: TunableSettings,
    placed: PlacedWorkload,
    machine: Machine,
    policies: Sequence[Policy] = (),
) -> bool:
    """Return whether some policy that the settings allow has enough memory on the
    device and on the host."""
    if placed.workload.missing_bytes > 0:
        return False
    if policies:
        allowed = [
            policy
            for policy in policies
            if settings.offload or policy.text == "gpu-only"
        ]
        candidates = planned(allowed, placed.workload, machine)
        return any(fits_memory(steps, machine) for steps in candidates)
    if not settings.offload or machine.unified_memory:
        return without_offload(placed.workload, machine) is not None
    if _exceeds_both(placed.workload, machine):
        return False
    return has_static_split(placed.workload, machine)


def changed(
    before: TunableSettings, after: TunableSettings, policy: str
) -> dict[str, Any] | None:
    """Return what differs between settings, by name; None if nothing does."""
    change: dict[str, Any] = {}
    if after.offload and not before.offload:
        change["policy"] = policy
    if after.checkpointing and not before.checkpointing:
        change["activation_checkpointing"] = True
    if after.micro_batch != before.micro_batch:
        change["micro_batch"] = after.micro_batch
    if after.ranks != before.ranks:
        change["ranks"] = after.ranks
    return change or None


def _exceeds_both(workload: Workload, machine: Machine) -> bool:
    """Return whether device and host together cannot hold the state at all times: a
    bound that needs no plan."""
    if machine.host_memory_bytes is None or workload.min_free_bytes is None:
        return False
    on_host = workload.params - workload.min_free_bytes / workload.state_bytes
    return on_host * workload.state_bytes > machine.host_memory_bytes


def _doubled(ranks: int) -> Iterator[int]:
    yield ranks
    while (ranks := 2 * ranks) <= MAX_RANKS:
        yield ranks


def alternatives(
    workload: Workload, machine: Machine, job: RecordedJob, present: Present = NOT_KNOWN
) -> tuple[str, ...]:
    """Return sentences on the least accumulation, batch and state with which all state
    fits without offload, and with which the job is faster than it is."""

    def helps(changed: Workload) -> bool:
        on_gpu = without_offload(changed, machine)
        return on_gpu is not None and present.is_slower_than(on_gpu)

    kinds = (
        _without_accumulation(workload, job),
        _smaller_batches(workload, job),
        _smaller_states(workload),
    )
    fitting = ((text for changed, text in kind if helps(changed)) for kind in kinds)
    return tuple(text for texts in fitting for text in islice(texts, 1))


def _without_accumulation(
    workload: Workload, job: RecordedJob
) -> Iterator[tuple[Workload, str]]:
    """With one micro-step, gradients take the memory of the activations that the
    backward releases."""
    free = workload.min_free_bytes
    if workload.accumulates and free is not None:
        state, gradients = (
            workload.state_bytes * workload.params,
            workload.grad_bytes * workload.params,
        )
        yield (
            replace(workload, accumulates=False),
            f"with 1 micro-step an update instead of {job.micro_steps} nothing would "
            "have to be offloaded: gradients "
            f"({gradients / 1e9:.1f} GB) would not stay beside activations, and the "
            f"state ({state / 1e9:.1f} GB) "
            f"fits into the {free / 1e9:.1f} GB that are always free",
        )


def _smaller_batches(
    workload: Workload, job: RecordedJob
) -> Iterator[tuple[Workload, str]]:
    """The memory that varies over an iteration is taken to be in proportion to the
    micro-batch."""
    batch, steps = job.micro_batch or 0, workload.gpu_free or ()
    most = max((size for _, size in steps), default=0.0)
    varying = most - (workload.min_free_bytes or 0.0)
    needed = (workload.state_bytes + workload.grad_bytes) * workload.params
    for size in range(batch - 1, 0, -1) if steps else ():
        free = tuple(
            (time, most - (most - least) * size / batch) for time, least in steps
        )
        yield (
            # The number of samples in an update stays.
            replace(workload, gpu_free=free, accumulates=True),
            f"with a micro-batch of {size} instead of {batch} nothing would have to be "
            "offloaded: of the "
            f"{varying / 1e9:.1f} GB that vary over an iteration "
            f"{varying * size / batch / 1e9:.1f} GB would "
            "remain (an estimate, in proportion to the batch), and state and "
            f"gradients take {needed / 1e9:.1f} "
            f"GB of {most / 1e9:.1f} GB",
        )


def _smaller_states(workload: Workload) -> Iterator[tuple[Workload, str]]:
    """Yield optimizers with fewer bytes of state than now, those with most first."""
    is_half = workload.param_bytes == PARAM_BYTES
    for name, state_bytes, results in (
        *((_REMAINDER,) if is_half else ()),
        *_SMALLER_STATE,
    ):
        if state_bytes < workload.state_bytes:
            size = f"{state_bytes * workload.params / 1e9:.1f} GB"
            text = (
                f"with {name}, {size}, nothing would have to be offloaded ({results})"
            )
            yield replace(workload, state_bytes=state_bytes), text
