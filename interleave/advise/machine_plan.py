"""The plan of a job for one machine: what fits, under which policy, how fast (as a range), and at which cost."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from ebbtide.interleave.advise.changes import changed, least_settings, ranks_on_a_host, share_host
from ebbtide.interleave.advise.choice import PolicyChoice, choose_among, choose_policy, fits_memory, unified_memory_text
from ebbtide.interleave.advise.job.inputs import NETWORK_NOTE
from ebbtide.interleave.advise.job.memory import PlacedWorkload, place
from ebbtide.interleave.advise.job.training_job import ComputeTimes, TrainingJob, TunableSettings
from ebbtide.interleave.advise.levers.effects import Variant
from ebbtide.interleave.advise.levers.search import JobChange, cheapest_change, needed_bytes, single_changes
from ebbtide.interleave.advise.lines.setups import LinesToPaste, PasteContext, lines_to_paste
from ebbtide.interleave.advise.replay import limiting_resource
from ebbtide.interleave.advise.schedule_to_trace import device_memory
from ebbtide.interleave.model.schedule import Schedule
from ebbtide.interleave.policies import parse
from ebbtide.interleave.simulation.simulator import Steps, simulate_steps
from ebbtide.json_files import section
from ebbtide.machines.accuracy import accuracy_of, uncertainty_of
from ebbtide.machines.machine import Machine
from ebbtide.profiler.dryrun.time.efficiency import DEVIATIONS_OF_RANGE

# Updates of published runs were predicted within about this factor by machines fitted to others (docs/validation.md).
_MODEL_FACTOR = 1.02
# Policies whose updates consist of the same operations.
_SAME_OPERATIONS = {"twin-flow": "zero-offload"}


@dataclass(frozen=True)
class PolicyTime:
    """The iteration of a policy, and the range that has it with a probability of 80 %, ms."""

    policy: str
    iteration_ms: float
    iteration_low_ms: float
    iteration_high_ms: float


def policy_time(steps: Steps, machine: Machine, compute_factor: float) -> PolicyTime:
    """Return the range of a policy's mean iteration on the machine that it was simulated on. The plan is simulated
    again with each uncertain rate, and the compute (within `compute_factor`), a standard error lower and higher.
    Changes of the logarithm are summed as squares, each direction apart, and extended to the 10th and the 90th
    percentile. A fit to runs of the policy has its residuals instead."""
    likely = steps.iteration_s
    squares = {True: math.log(_MODEL_FACTOR) ** 2, False: math.log(_MODEL_FACTOR) ** 2}
    for iteration_s in _varied(steps, machine, compute_factor) if likely > 0 else ():
        change = math.log(iteration_s / likely)
        squares[change > 0] += change**2
    shorter, longer = (math.exp(DEVIATIONS_OF_RANGE * math.sqrt(squares[side])) for side in (False, True))
    return PolicyTime(steps.plan.policy, likely * 1e3, likely * 1e3 / shorter, likely * 1e3 * longer)


def residual_factor(policy: str, machine: Machine) -> float | None:
    """Return the factor (root mean square) within which a fit to such updates explains them; None without one."""
    if accuracy_of(machine).largest_error is None:
        return None
    policies, residuals = (section(section(machine.extra, "fit"), key) for key in ("policies", "residuals"))
    name, blocks = _operations(policy)
    fitted = {_operations(text) for text in policies.values() if isinstance(text, str)}
    errors = [float(value) for value in residuals.values() if isinstance(value, int | float)]
    # Blocking copies of gradients are operations of their own; the update after them is the same.
    if not any(other == name and (other_blocks or not blocks) for other, other_blocks in fitted):
        return None
    return 1 + max(_MODEL_FACTOR - 1, math.sqrt(sum(error**2 for error in errors) / len(errors)))


def _operations(text: str) -> tuple[str, bool]:
    """Return what the operations of a policy follow from: its name, and whether copies of gradients block."""
    name = text.partition(",")[0].partition(":")[0]
    return _SAME_OPERATIONS.get(name, name), "grads=blocking" in text


def _varied(steps: Steps, machine: Machine, compute_factor: float) -> Iterator[float]:
    """Yield the iteration with each uncertain value one standard error lower and higher."""
    plan, workload = steps.plan, steps.valid.workload
    factor = residual_factor(plan.policy, machine)
    if factor is not None:
        exposed_s = steps.mean("exposed_s")
        yield steps.iteration_s + exposed_s * (factor - 1)
        yield steps.iteration_s - exposed_s * (1 - 1 / factor)
    for key, error in uncertainty_of(machine).items() if factor is None else ():
        value = getattr(machine, key, None)
        if isinstance(value, int | float) and value:
            for changed in (value * error, value / error):
                changes: dict[str, Any] = {key: changed}
                yield simulate_steps(plan, workload, replace(machine, **changes)).iteration_s
    for scale in (compute_factor, 1 / compute_factor):
        scaled = replace(
            workload,
            forward_s=workload.forward_s * scale,
            backward_s=workload.backward_s * scale,
            other_s=workload.other_s * scale,
        )
        yield simulate_steps(plan, scaled, machine).iteration_s


_MS_PER_HOUR = 3.6e6
_BILLION = 1e9
# Shorter intervals, as a share of the iteration, are rounding errors.
_SHORTEST_SHARE = 1e-9
# If the optimizer adds less than this share of the iteration, forward and backward limit it.
_SMALL_SHARE = 0.1
_CHANGES = {
    "policy": "offload",
    "activation_checkpointing": "checkpointing",
    "micro_batch": "micro-batch {}",
    "ranks": "{} ranks",
}
_RESOURCE_NAMES = {"cpu": "cpu update", "gpu": "gpu update"}


@dataclass(frozen=True)
class MachinePlan:
    """The plan of a job for one machine. Bytes are per rank; figures are with the change, None where nothing fits."""

    machine: str
    fits: bool  # Whether the job fits as it is.
    # The least change that makes it fit, by setting; None where it fits, or no change helps.
    change: dict[str, Any] | None
    policy: str | None = None
    device_bytes: float | None = None  # Largest device memory at any time, of the job and its optimizer state.
    device_capacity_bytes: float | None = None
    host_bytes: float | None = None
    host_capacity_bytes: float | None = None
    iteration_ms: float | None = None
    iteration_low_ms: float | None = None  # Low end of the range that has it with a probability of 80 %.
    iteration_high_ms: float | None = None
    tokens_per_s: float | None = None
    tokens_per_s_low: float | None = None
    tokens_per_s_high: float | None = None
    cost_per_billion_tokens: float | None = None
    cost_low: float | None = None
    cost_high: float | None = None
    limited_by: str | None = None
    code: str | None = None  # Lines of Python for the script.
    lines: LinesToPaste | None = None
    settings: TunableSettings | None = None
    ranks_per_host: int | None = None
    hosts: int | None = None
    policies: tuple[PolicyTime, ...] = ()  # The best variant of each policy that fits, fastest first.
    accuracy: str = ""
    notes: tuple[str, ...] = ()
    # Largest device memory of the job as it is, all state on the device; None where it fits.
    needed_bytes: float | None = None
    # The cheapest changes in the framework's own settings that make it fit; None where it fits or none do.
    cheapest: JobChange | None = None
    alone: tuple[JobChange, ...] = ()  # What each of these changes does alone, the cheapest first; none where it fits.

    def changes_text(self) -> list[str]:
        """Return the changes that make it fit, in few words; the offload of state is the first."""
        return [_CHANGES[key].format(value) for key, value in (self.change or {}).items()]

    def as_json(self) -> dict[str, Any]:
        """Return the object of `plans` of `ebbtide plan --json`."""
        return {**asdict(self), "action": self.cheapest.action if self.cheapest is not None else None}


@dataclass(frozen=True)
class PlanRequest:
    """The request for a plan, beside the job and the machine."""

    machine_source: str | None = None
    policies: Sequence[str] = ()  # Policies to choose from; empty: all.
    ranks_per_host: int | None = None  # Ranks on a host; None: as many as the box of the machine has.
    price_per_hour: float | None = None


def plan_for_machine(job: TrainingJob, machine: Machine, request: PlanRequest | None = None) -> MachinePlan:
    """Return the plan of a job for a machine, with the rates of its file. Raises MachineError for a missing rate, and
    PolicyError for a requested policy that does not exist."""
    asked = request or PlanRequest()
    for policy in asked.policies:
        # Policies that cannot plan a job are skipped below; those that do not exist are an error.
        parse(policy)
    solution = least_settings(job, machine, asked.ranks_per_host, asked.policies)
    if solution is None:
        return _with_changes(_without_solution(job, machine, asked), job, machine, asked)
    settings, placed, shared = solution
    own_s = placed.times.own_update_s
    recorded = replace(job.recorded, micro_steps=job.micro_steps_of(settings), own_update_s=own_s)
    if asked.policies:
        choice = choose_among(asked.policies, placed.workload, shared)
    else:
        choice = choose_policy(placed.workload, shared, recorded)
    policy, schedule = choice.steps.plan.policy, choice.steps.valid
    change = changed(job.settings, settings, policy)
    times = _policy_times(choice, shared, placed)
    own = next(time for time in times if time.policy == policy)
    per_host = ranks_on_a_host(machine, settings.ranks, asked.ranks_per_host)
    hosts = -(-settings.ranks // per_host)
    tokens = job.tokens_of(settings)
    hourly = asked.price_per_hour * hosts if asked.price_per_hour is not None else None
    # A job with a configuration of its own has the lines for what it checkpoints.
    has_lines = bool(recorded.section("zero_optimization")) and job.settings.checkpointing
    pasted = replace(settings, checkpointing=settings.checkpointing and not has_lines)
    lines = lines_to_paste(choice, PasteContext(recorded, shared, asked.machine_source), pasted)
    plan = MachinePlan(
        machine=machine.name,
        fits=change is None,
        change=change,
        **vars(own),
        device_bytes=_device_bytes(schedule, shared),
        device_capacity_bytes=shared.gpu_memory_bytes,
        host_bytes=schedule.host_bytes(),
        host_capacity_bytes=machine.for_ranks(per_host).host_memory_bytes,
        tokens_per_s=_rate(tokens, own.iteration_ms),
        tokens_per_s_low=_rate(tokens, own.iteration_high_ms),
        tokens_per_s_high=_rate(tokens, own.iteration_low_ms),
        cost_per_billion_tokens=_cost(hourly, tokens, own.iteration_ms),
        cost_low=_cost(hourly, tokens, own.iteration_low_ms),
        cost_high=_cost(hourly, tokens, own.iteration_high_ms),
        limited_by=_limiting_part(schedule, shared, placed.times),
        code=lines.python,
        lines=lines,
        settings=settings,
        ranks_per_host=per_host,
        hosts=hosts,
        policies=times,
        accuracy=accuracy_of(machine).text(),
        notes=_notes(placed, machine, per_host, hosts),
    )
    return plan if plan.fits else _with_changes(plan, job, machine, asked)


def _with_changes(plan: MachinePlan, job: TrainingJob, machine: Machine, asked: PlanRequest) -> MachinePlan:
    """Return the plan of a job that does not fit with the changes of its framework's settings that help."""
    if job.memory is None or machine.gpu_memory_bytes is None:
        return plan
    return replace(
        plan,
        needed_bytes=needed_bytes(Variant(job, job.settings), machine, asked.ranks_per_host)[0],
        cheapest=cheapest_change(job, machine, asked.ranks_per_host),
        alone=single_changes(job, machine, asked.ranks_per_host),
    )


def _notes(placed: PlacedWorkload, machine: Machine, per_host: int, hosts: int) -> tuple[str, ...]:
    notes = [placed.times.note]
    if machine.box is not None and per_host < machine.box.ranks:
        notes.append(f"uses {per_host} of {machine.box.ranks} GPUs of a host, whose price counts in full")
    if hosts > 1:
        notes.append(NETWORK_NOTE)
    return tuple(filter(None, (*notes, unified_memory_text(machine))))


def _without_solution(job: TrainingJob, machine: Machine, asked: PlanRequest) -> MachinePlan:
    shared = share_host(machine, job.settings.ranks, asked.ranks_per_host)
    per_host = ranks_on_a_host(machine, job.settings.ranks, asked.ranks_per_host)
    missing = place(job, job.settings, shared).workload.missing_bytes
    what = f"{missing / 1e9:.1f} GB of device memory are missing" if missing else "the host has too little memory"
    return MachinePlan(
        machine=machine.name,
        fits=False,
        change=None,
        device_capacity_bytes=shared.gpu_memory_bytes,
        host_capacity_bytes=machine.for_ranks(per_host).host_memory_bytes,
        accuracy=accuracy_of(machine).text(),
        notes=(f"{what}, and none of the changes helps: policy, checkpointing, micro-batch, ranks",),
    )


def _policy_times(choice: PolicyChoice, machine: Machine, placed: PlacedWorkload) -> tuple[PolicyTime, ...]:
    """Return the iteration of each policy that fits, fastest first."""
    candidates = [choice.steps, choice.best, *(steps for steps in choice.others if fits_memory(steps, machine))]
    by_policy = {steps.plan.policy: steps for steps in candidates}
    times = [policy_time(steps, machine, placed.times.factor) for steps in by_policy.values()]
    return tuple(sorted(times, key=lambda time: time.iteration_ms))


def _limiting_part(schedule: Schedule, machine: Machine, times: ComputeTimes) -> str:
    """Return what limits an iteration: what limits the update, or `compute` or `collectives`, the longer one, if
    nothing is offloaded or the optimizer adds less than a tenth."""
    if schedule.plan.policy == "gpu-only" or schedule.exposed_s < _SMALL_SHARE * schedule.iteration_s:
        compute_s = times.forward_s + times.backward_s + times.other_s - times.collectives_s
        return "collectives" if times.collectives_s > max(compute_s, 0.0) else "compute"
    resource = limiting_resource(schedule, machine)
    return _RESOURCE_NAMES.get(resource, resource)


def _device_bytes(schedule: Schedule, machine: Machine) -> float | None:
    """Return the largest device memory of the job and the plan together; intervals of rounding errors do not count."""
    if schedule.workload.gpu_free is None or machine.gpu_memory_bytes is None:
        return None
    times, sizes = device_memory(schedule, machine)
    lasting = np.diff(np.append(times, schedule.iteration_s)) > _SHORTEST_SHARE * schedule.iteration_s
    return float(sizes[lasting].max())


def _rate(tokens: float | None, iteration_ms: float) -> float | None:
    return tokens / iteration_ms * 1e3 if tokens is not None and iteration_ms > 0 else None


def _cost(price_per_hour: float | None, tokens: float | None, iteration_ms: float) -> float | None:
    if price_per_hour is None or tokens is None:
        return None
    return price_per_hour / _MS_PER_HOUR * iteration_ms / tokens * _BILLION
