"""The plan of a job for one machine: what fits, under which policy, how fast, and at which cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from ebbtide.interleave.model.schedule import Schedule
from ebbtide.interleave.policies import parse
from ebbtide.interleave.provisioning.changes import changed, least_settings, ranks_on_a_host, share_host
from ebbtide.interleave.provisioning.limits import limiting_part
from ebbtide.interleave.provisioning.lines_to_paste import LinesToPaste, lines_to_paste
from ebbtide.interleave.provisioning.ranges import IterationRange, iteration_range
from ebbtide.interleave.provisioning.training_job import TrainingJob, TunableSettings
from ebbtide.interleave.provisioning.workload_on_machine import PlacedWorkload, place
from ebbtide.interleave.replay.recommend.choice import PolicyChoice, choose_among, choose_policy, fits_memory
from ebbtide.machines.accuracy import accuracy_of
from ebbtide.machines.machine import Machine

_S_PER_HOUR = 3600.0
_BILLION = 1e9


@dataclass(frozen=True)
class PolicyTime:
    """The iteration of a policy, and the range that has it with a probability of 80 %, ms."""

    policy: str
    iteration_ms: float
    iteration_low_ms: float
    iteration_high_ms: float


@dataclass(frozen=True)
class MachinePlan:
    """The plan of a job for one machine. Bytes are per rank; figures are with the change, None where nothing fits.

    Attributes:
        machine: Name of the machine.
        fits: Whether the job fits as it is.
        change: The least change that makes it fit, by setting; None where it fits, or no change helps.
        policy: The best policy.
        device_bytes: Largest device memory at any time, of the job and its optimizer state.
        device_capacity_bytes: Device memory of a rank.
        host_bytes: Host memory of optimizer state, gradients and parameters.
        host_capacity_bytes: A rank's part of the host memory.
        iteration_ms: Iteration time.
        iteration_low_ms: Low end of the range that has it with a probability of 80 %.
        iteration_high_ms: High end of it.
        tokens_per_s: Tokens of all ranks per second; None where the tokens of an iteration are not known.
        tokens_per_s_low: The same at the high end of the iteration.
        tokens_per_s_high: The same at the low end of the iteration.
        cost_per_billion_tokens: Price of 1e9 tokens; None without a price.
        cost_low: The same at the low end of the iteration.
        cost_high: The same at the high end of the iteration.
        limited_by: What limits the iteration.
        code: Lines of Python for the script.
        lines: The same for each framework.
        settings: Ranks, micro-batch, checkpointing and offload, with the change.
        ranks_per_host: Ranks on a host.
        hosts: Hosts that the ranks need.
        policies: The best variant of each policy that fits, fastest first.
        accuracy: The known accuracy of the machine's rates, in a sentence.
        notes: Sources of figures, for people.
    """

    machine: str
    fits: bool
    change: dict[str, Any] | None
    policy: str | None = None
    device_bytes: float | None = None
    device_capacity_bytes: float | None = None
    host_bytes: float | None = None
    host_capacity_bytes: float | None = None
    iteration_ms: float | None = None
    iteration_low_ms: float | None = None
    iteration_high_ms: float | None = None
    tokens_per_s: float | None = None
    tokens_per_s_low: float | None = None
    tokens_per_s_high: float | None = None
    cost_per_billion_tokens: float | None = None
    cost_low: float | None = None
    cost_high: float | None = None
    limited_by: str | None = None
    code: str | None = None
    lines: LinesToPaste | None = None
    settings: TunableSettings | None = None
    ranks_per_host: int | None = None
    hosts: int | None = None
    policies: tuple[PolicyTime, ...] = ()
    accuracy: str = ""
    notes: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Return the object of `plans` of `ebbtide plan --json`."""
        return asdict(self)


@dataclass(frozen=True)
class PlanRequest:
    """The request for a plan, beside the job and the machine.

    Attributes:
        machine_source: The file or preset of the machine, for the lines of Python.
        policies: Policies to choose from; empty: all.
        ranks_per_host: Ranks on a host; None: as many as the box of the machine has.
        price_per_hour: Price of a host; None: not known.
    """

    machine_source: str | None = None
    policies: Sequence[str] = ()
    ranks_per_host: int | None = None
    price_per_hour: float | None = None


def plan_for_machine(job: TrainingJob, machine: Machine, request: PlanRequest | None = None) -> MachinePlan:
    """Return the plan of a job for a machine.

    Args:
        job: The job.
        machine: The machine, with the rates of its file.
        request: Restrictions, the price, and the source of the machine.

    Raises:
        MachineError: The machine lacks a rate.
        PolicyError: A requested policy does not exist.
    """
    asked = request or PlanRequest()
    for policy in asked.policies:
        # Policies that cannot plan a job are skipped below; those that do not exist are an error.
        parse(policy)
    solution = least_settings(job, machine, asked.ranks_per_host, asked.policies)
    if solution is None:
        return _without_solution(job, machine, asked)
    settings, placed, shared = solution
    recorded = replace(job.recorded, micro_steps=job.micro_steps_of(settings))
    if asked.policies:
        choice = choose_among(asked.policies, placed.workload, shared)
    else:
        choice = choose_policy(placed.workload, shared)
    schedule = choice.best
    change = changed(job.settings, settings, schedule.plan.policy)
    span = iteration_range(schedule, shared, placed.times.factor)
    per_host = ranks_on_a_host(machine, settings.ranks, asked.ranks_per_host)
    hosts = -(-settings.ranks // per_host)
    tokens = job.tokens_of(settings)
    hourly = asked.price_per_hour * hosts if asked.price_per_hour is not None else None
    lines = lines_to_paste(schedule, recorded, settings, shared, asked.machine_source)
    return MachinePlan(
        machine=machine.name,
        fits=change is None,
        change=change,
        policy=schedule.plan.policy,
        device_bytes=_device_bytes(schedule, shared),
        device_capacity_bytes=shared.gpu_memory_bytes,
        host_bytes=schedule.host_bytes(),
        host_capacity_bytes=shared.host_memory_bytes,
        iteration_ms=span.likely_s * 1e3,
        iteration_low_ms=span.low_s * 1e3,
        iteration_high_ms=span.high_s * 1e3,
        tokens_per_s=_rate(tokens, span.likely_s),
        tokens_per_s_low=_rate(tokens, span.high_s),
        tokens_per_s_high=_rate(tokens, span.low_s),
        cost_per_billion_tokens=_cost(hourly, tokens, span.likely_s),
        cost_low=_cost(hourly, tokens, span.low_s),
        cost_high=_cost(hourly, tokens, span.high_s),
        limited_by=limiting_part(schedule, shared, placed.times),
        code=lines.python,
        lines=lines,
        settings=settings,
        ranks_per_host=per_host,
        hosts=hosts,
        policies=_policy_times(schedule, span, choice, shared, placed),
        accuracy=accuracy_of(machine).text(),
        notes=_notes(placed, machine, per_host, hosts),
    )


def _notes(placed: PlacedWorkload, machine: Machine, per_host: int, hosts: int) -> tuple[str, ...]:
    notes = [placed.times.note]
    if machine.box is not None and per_host < machine.box.ranks:
        notes.append(f"uses {per_host} of {machine.box.ranks} GPUs of a host, whose price counts in full")
    if hosts > 1:
        notes.append("the network between hosts is not known: ranks exchange as fast as within a host")
    return tuple(notes)


def _without_solution(job: TrainingJob, machine: Machine, asked: PlanRequest) -> MachinePlan:
    shared = share_host(machine, job.settings.ranks, asked.ranks_per_host)
    missing = place(job, job.settings, shared).workload.missing_bytes
    what = f"{missing / 1e9:.1f} GB of device memory are missing" if missing else "the host has too little memory"
    return MachinePlan(
        machine=machine.name,
        fits=False,
        change=None,
        device_capacity_bytes=shared.gpu_memory_bytes,
        host_capacity_bytes=shared.host_memory_bytes,
        accuracy=accuracy_of(machine).text(),
        notes=(f"{what}, and none of the changes helps: policy, checkpointing, micro-batch, ranks",),
    )


def _policy_times(
    schedule: Schedule, span: IterationRange, choice: PolicyChoice, machine: Machine, placed: PlacedWorkload
) -> tuple[PolicyTime, ...]:
    spans = {schedule.plan.policy: span}
    for other in choice.others:
        if other.plan.policy not in spans and fits_memory(other, machine):
            spans[other.plan.policy] = iteration_range(other, machine, placed.times.factor)
    times = [
        PolicyTime(policy, span.likely_s * 1e3, span.low_s * 1e3, span.high_s * 1e3) for policy, span in spans.items()
    ]
    return tuple(sorted(times, key=lambda time: time.iteration_ms))


def _device_bytes(schedule: Schedule, machine: Machine) -> float | None:
    """Return the largest device memory of the job and the plan together at any time."""
    free = schedule.free_memory_line()
    if free is None or machine.gpu_memory_bytes is None:
        return None
    used_times, used = schedule.device_memory_line()
    free_times, sizes = free
    times = np.union1d(used_times, free_times)

    def at(changes: np.ndarray, values: np.ndarray) -> np.ndarray:
        return values[np.maximum(np.searchsorted(changes, times, side="right") - 1, 0)]

    return float((machine.gpu_memory_bytes - at(free_times, sizes) + at(used_times, used)).max())


def _rate(tokens: float | None, iteration_s: float) -> float | None:
    return tokens / iteration_s if tokens is not None and iteration_s > 0 else None


def _cost(price_per_hour: float | None, tokens: float | None, iteration_s: float) -> float | None:
    if price_per_hour is None or tokens is None:
        return None
    return price_per_hour / _S_PER_HOUR * iteration_s / tokens * _BILLION
