"""The cheapest changes of a job's settings with which it fits a machine, and what each
of them does alone."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import compress
from typing import Any

from ebbtide.features.advise.changes import ranks_on_a_host, share_host
from ebbtide.features.advise.choice import steps_of
from ebbtide.features.advise.job.memory import most_bytes, own_bytes, passed, place
from ebbtide.features.advise.job.training_job import TrainingJob, Variant
from ebbtide.features.advise.levers.effects import LEVERS, Lever
from ebbtide.features.advise.levers.keys import KEYS, settings_for
from ebbtide.interleave.policies import Policy
from ebbtide.interleave.replay.replay import memory_excess
from ebbtide.machines.machine import Machine
from ebbtide.units import bytes_text

# Changes that move state to the memory of the host.
_TO_THE_HOST = {"offload", "paged optimizer"}
_RANKS, _CHECKPOINTING = "ranks", "checkpointing"
_ADAPTERS = ("LoRA", "QLoRA")
_NO_RATES = "a rate of the machine is not known, or there is no plan of this job"


@dataclass(frozen=True)
class JobChange:
    """Changes of a job's settings, the cheapest first, and what they do."""

    levers: tuple[str, ...]  # Names of the changes.
    # Settings to apply: `kind` is the framework, `settings` are its keys.
    action: dict[str, Any]
    device_bytes: float  # Largest device memory of a rank with them.
    fits: bool
    reason: str | None  # Why it does not fit; None: it does.
    costs: tuple[str, ...]  # What each costs beside memory, in words.
    ranks: int  # Ranks of the changed job.

    @property
    def text(self) -> str:
        """The changes in few words."""
        return " + ".join(
            f"{self.ranks} ranks" if name == _RANKS else name for name in self.levers
        )


def cheapest_change(
    job: TrainingJob, machine: Machine, ranks_per_host: int | None = None
) -> JobChange | None:
    """Return the cheapest changes with which a job fits a machine; None if none helps,
    or its memory is not known. Sets are compared by the number of GPUs, then by their
    dearest change, then by the next: no part of one fits."""
    own, possible = Variant(job, job.settings), _possible(job, machine)
    levers = [lever for lever in possible if lever.name != _RANKS]
    by_ranks = [lever for lever in possible if lever.name == _RANKS]
    with_ranks = [one for lever in by_ranks for one in lever.apply(own)]
    for shared in (own, *with_ranks):
        added = [] if shared is own else by_ranks
        for number in range(0 if added else 1, 1 << len(levers)):
            bits = (number >> bit & 1 for bit in range(len(levers)))
            chosen = [*compress(levers, bits)]
            for one in _variants(shared, chosen):
                change = _change(one, chosen + added, machine, ranks_per_host)
                if change.fits:
                    return change
    return None


def single_changes(
    job: TrainingJob, machine: Machine, ranks_per_host: int | None = None
) -> tuple[JobChange, ...]:
    """Return what each change does alone, the least that fits, else the greatest;
    adapters also with checkpointing."""
    changes: list[JobChange] = []
    possible = _possible(job, machine)

    def least(levers: list[Lever]) -> JobChange | None:
        variants = _variants(Variant(job, job.settings), levers)
        each = [_change(one, levers, machine, ranks_per_host) for one in variants]
        return next(
            (change for change in each if change.fits), each[-1] if each else None
        )

    for lever in possible:
        alone = least([lever])
        changes += [alone] if alone else []
        if lever.name in _ADAPTERS and not (alone and alone.fits):
            both = least(
                [one for one in possible if one.name in (lever.name, _CHECKPOINTING)]
            )
            changes += [both] if both and both.fits else []
    return tuple(changes)


def smallest_machine(job: TrainingJob, machines: Iterable[Machine]) -> Machine | None:
    """Return the machine with the least device memory that a job fits, offloaded if it
    offloads; None if none does."""
    if job.memory is None:
        return None
    one = Variant(job, job.settings, "offloaded" if job.settings.offload else "device")
    by_memory = sorted(
        machines, key=lambda machine: (machine.gpu_memory_bytes or 0.0, machine.name)
    )
    return next(
        (machine for machine in by_memory if needed_bytes(one, machine)[1] is None),
        None,
    )


def needed_bytes(
    one: Variant, machine: Machine, ranks_per_host: int | None = None
) -> tuple[float, str | None]:
    """Return the largest device memory of a rank, and why it does not fit; None: it
    does. Offload is of the parts that do not fit."""
    shared = share_host(machine, one.settings.ranks, ranks_per_host)
    capacity = shared.gpu_memory_bytes or 0.0
    workload = place(one.job, one.settings, shared).workload
    used = own_bytes(one)
    own = most_bytes(used)
    state = workload.state_bytes * workload.params
    # State on the host of a machine with unified memory takes the same memory.
    if one.state == "offloaded" and not shared.unified_memory:
        steps = steps_of(Policy.make("zero-offload"), workload, shared)
        excess = _NO_RATES if steps is None else memory_excess(steps.valid, shared)
        return own, excess
    if not workload.gradients_held_until_step:
        # Those of a plan without offload, which have no part in the job's own, stay
        # until the update.
        share = 1.0 if one.job.memory is None else one.job.memory.gradient_share
        streamed = one.gradient_bytes * share
        own = max(size + streamed * passed(point, 2) for point, size in used)
    host = shared.host_memory_bytes
    if one.state != "paged":
        own += state
    elif host is not None and state > host:
        return own, f"state of {bytes_text(state)} exceeds the host's memory"
    short = own + workload.gpu_slack_bytes - capacity
    return (
        own,
        f"{bytes_text(short)} of device memory are missing" if short > 0 else None,
    )


def _possible(job: TrainingJob, machine: Machine) -> list[Lever]:
    """Return the changes that the framework has, and that a machine allows."""
    if job.memory is None:
        return []
    names = KEYS[_framework(job)].keys() - (
        _TO_THE_HOST if machine.unified_memory else set()
    )
    return [lever for lever in LEVERS if lever.name in names]


def _framework(job: TrainingJob) -> str:
    return job.facts.framework if job.facts.framework in KEYS else "torch"


def _variants(one: Variant, levers: list[Lever]) -> Iterator[Variant]:
    """Yield the job with all of some changes. LoRA is applied last, whose effects
    depend on others."""
    if not levers:
        yield one
        return
    for changed in levers[0].apply(one):
        yield from _variants(changed, levers[1:])


def _change(
    one: Variant, levers: list[Lever], machine: Machine, ranks_per_host: int | None
) -> JobChange:
    framework = _framework(one.job)
    per_host = ranks_on_a_host(machine, one.settings.ranks, ranks_per_host)
    values = {
        "micro_batch": one.settings.micro_batch or 1,
        "micro_steps": one.micro_steps,
        "ranks": per_host,
        "hosts": -(-one.settings.ranks // per_host),
    }
    names = [lever.name for lever in levers]
    device_bytes, reason = needed_bytes(one, machine, ranks_per_host)
    return JobChange(
        levers=tuple(names),
        action={"kind": framework, "settings": settings_for(framework, names, values)},
        device_bytes=device_bytes,
        fits=reason is None,
        reason=reason,
        costs=tuple(lever.cost for lever in levers),
        ranks=one.settings.ranks,
    )
