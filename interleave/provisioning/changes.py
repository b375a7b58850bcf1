"""Changes to a job, from the least to the greatest, and whether the job fits with them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ebbtide.interleave.model.workload import Workload
from ebbtide.interleave.provisioning.training_job import TrainingJob, TunableSettings
from ebbtide.interleave.provisioning.workload_on_machine import PlacedWorkload, place
from ebbtide.interleave.replay.recommend.candidates import best_static_split, simulated
from ebbtide.interleave.replay.recommend.choice import fits_memory, without_offload
from ebbtide.machines.box import MAX_RANKS
from ebbtide.machines.machine import Machine


def settings_in_order(job: TrainingJob) -> Iterator[TunableSettings]:
    """Yield the settings to try: first those of the job, then greater and greater changes.

    More ranks are the greatest change, since they cost hardware; then a smaller micro-batch with more micro-steps, then
    activation checkpointing, which costs a forward; the offload of optimizer state is the least. Ranks are doubled,
    micro-batches are divisors of that of the job.
    """
    own = job.settings
    for ranks in _doubled(own.ranks):
        for micro_batch in _divisors(own.micro_batch):
            for checkpointing in dict.fromkeys((own.checkpointing, own.checkpointing or _can_checkpoint(job))):
                for offload in dict.fromkeys((own.offload, True)):
                    yield TunableSettings(ranks, micro_batch, checkpointing, offload)


def share_host(machine: Machine, ranks: int, ranks_per_host: int | None = None) -> Machine:
    """Return the machine with the rates of one of the ranks of a job.

    Args:
        machine: The machine.
        ranks: Ranks of the job.
        ranks_per_host: Ranks on a host; None: as many as the box of the machine has, at most those of the job.

    Raises:
        MachineError: The machine has no box, and several ranks on a host are requested.
    """
    return machine.for_ranks(ranks_on_a_host(machine, ranks, ranks_per_host))


def ranks_on_a_host(machine: Machine, ranks: int, ranks_per_host: int | None = None) -> int:
    """Return how many ranks of a job share a host (see `share_host`)."""
    if ranks_per_host is not None:
        return ranks_per_host
    return min(ranks, machine.box.ranks) if machine.box is not None else 1


def least_settings(
    job: TrainingJob, machine: Machine, ranks_per_host: int | None = None, policies: Sequence[str] = ()
) -> tuple[TunableSettings, PlacedWorkload, Machine] | None:
    """Return the least change with which a job fits a machine, its workload, and the machine's rates for one rank.

    Args:
        job: The job.
        machine: The machine.
        ranks_per_host: Ranks on a host; None: as many as the box of the machine has, at most those of the job.
        policies: Policies to choose from; empty: all.

    Returns:
        None if the job fits with none of the changes.

    Raises:
        MachineError: The machine lacks a rate.
    """
    for settings in settings_in_order(job):
        shared = share_host(machine, settings.ranks, ranks_per_host)
        placed = place(job, settings, shared)
        if fits(settings, placed, shared, policies):
            return settings, placed, shared
    return None


def fits(settings: TunableSettings, placed: PlacedWorkload, machine: Machine, policies: Sequence[str] = ()) -> bool:
    """Return whether some policy that the settings allow has enough memory on the device and on the host."""
    if placed.workload.missing_bytes > 0:
        return False
    if policies:
        allowed = [policy for policy in policies if settings.offload or policy == "gpu-only"]
        schedules = [simulated(policy, placed.workload, machine) for policy in allowed]
        return any(schedule is not None and fits_memory(schedule, machine) for schedule in schedules)
    if not settings.offload:
        return without_offload(placed.workload, machine) is not None
    if _exceeds_both(placed.workload, machine):
        return False
    split = best_static_split(placed.workload, machine)
    return split is not None and fits_memory(split, machine)


def changed(before: TunableSettings, after: TunableSettings, policy: str) -> dict[str, Any] | None:
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
    """Return whether the state is more than the device's free memory and the host together can hold.

    It is a bound that needs no plan: what the device cannot hold at all times is in host memory.
    """
    if machine.host_memory_bytes is None or workload.min_free_bytes is None:
        return False
    on_host = workload.params - workload.min_free_bytes / workload.state_bytes
    return on_host * workload.state_bytes > machine.host_memory_bytes


def _can_checkpoint(job: TrainingJob) -> bool:
    return job.memory is not None and job.memory.checkpointed is not None


def _doubled(ranks: int) -> Iterator[int]:
    yield ranks
    while (ranks := 2 * ranks) <= MAX_RANKS:
        yield ranks


def _divisors(micro_batch: int | None) -> list[int | None]:
    if micro_batch is None:
        return [None]
    return [size for size in range(micro_batch, 0, -1) if micro_batch % size == 0]
