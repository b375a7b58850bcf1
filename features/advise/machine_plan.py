"""The plan of a job for one machine: what fits, under which policy, how fast (as a
range), and at which cost."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from typing import Any, Literal

import msgspec
import numpy as np

from ebbtide.analysis.metrics.advice import Advice
from ebbtide.features.advise.advice import policy_advice
from ebbtide.features.advise.block_swap import BlockSwap
from ebbtide.features.advise.changes import (
    changed,
    least_settings,
    ranks_on_a_host,
    share_host,
)
from ebbtide.features.advise.choice import (
    PolicyChoice,
    choose_among,
    choose_policy,
    fits_memory,
)
from ebbtide.features.advise.job.memory import PlacedWorkload, place
from ebbtide.features.advise.job.sources import BatchSettings, job_of_trace
from ebbtide.features.advise.job.training_job import (
    ComputeTimes,
    TrainingJob,
    TunableSettings,
    Variant,
)
from ebbtide.features.advise.levers.search import (
    JobChange,
    cheapest_change,
    needed_bytes,
    single_changes,
    smallest_machine,
)
from ebbtide.features.advise.lines.setups import (
    LinesToPaste,
    PasteContext,
    lines_to_paste,
)
from ebbtide.features.advise.ranges import PolicyTime, Range, policy_time
from ebbtide.features.advise.whole_job import WholeJobPlan
from ebbtide.interleave.model.operations import BOTH
from ebbtide.interleave.model.schedule import Schedule
from ebbtide.interleave.policies import Policy
from ebbtide.interleave.replay.inputs import (
    NETWORK_NOTE,
    PlanTarget,
    with_recorded_memory,
)
from ebbtide.interleave.replay.recorded_job import RecordedJob
from ebbtide.interleave.replay.replay import limiting_resource
from ebbtide.interleave.replay.schedule_to_trace import device_memory
from ebbtide.interleave.simulation.bound import min_iteration_s
from ebbtide.interleave.simulation.simulator import Steps
from ebbtide.machines.accuracy import accuracy_of
from ebbtide.machines.catalog import MachineArgument, find_machine, preset, presets
from ebbtide.machines.evidence import EvidenceRange
from ebbtide.machines.machine import Machine, unified_memory_text
from ebbtide.profiler.trace import Trace

_MS_PER_HOUR = 3.6e6
_BILLION = 1e9
# Shorter intervals, as a share of the iteration, are rounding errors.
_SHORTEST_SHARE = 1e-9
# If the optimizer adds less than this share of the iteration, forward and backward
# limit it.
_SMALL_SHARE = 0.1
_CHANGES = {
    "policy": "offload",
    "activation_checkpointing": "checkpointing",
    "micro_batch": "micro-batch {}",
    "ranks": "{} ranks",
}
_RESOURCE_NAMES = {"cpu": "cpu update", "gpu": "gpu update"}
# What the table of plans is sorted by.
SortKey = Literal["iteration", "cost"]
# Keys in the JSON of a plan of a likely value, and of the ends of its range.
_RANGES = {
    "iteration": ("iteration_ms", "iteration_low_ms", "iteration_high_ms"),
    "tokens_per_s": ("tokens_per_s", "tokens_per_s_low", "tokens_per_s_high"),
    "cost": ("cost_per_billion_tokens", "cost_low", "cost_high"),
}


@dataclass(frozen=True)
class PlanRequest:
    """The request for a plan, beside the job and the machine."""

    machine_source: str | None = None
    policies: Sequence[Policy] = ()  # Policies to choose from; empty: all.
    # Ranks on a host; None: as many as the box of the machine has.
    ranks_per_host: int | None = None
    price_per_hour: float | None = None


@dataclass(frozen=True)
class PlacedJob:
    """A job on a machine, with the least change that makes it fit, without a policy."""

    job: TrainingJob
    machine: Machine
    request: PlanRequest
    # Whether any change makes it fit; else the settings stay.
    has_memory: bool
    settings: TunableSettings
    placed: PlacedWorkload
    shared: Machine  # The machine with the rates of a rank.

    def share(self, machine: Machine) -> Machine:
        """Return a machine with the rates of a rank of the job as it is."""
        ranks = self.job.settings.ranks
        return share_host(machine, ranks, self.request.ranks_per_host)

    @property
    def variant(self) -> Variant:
        """The job with its settings here."""
        return Variant(self.job, self.settings)

    def time(self, steps: Steps) -> PolicyTime:
        """Return the range of a policy's iteration here."""
        times = self.placed.times
        return policy_time(steps, self.shared, times.factor, times.evidence)

    @property
    def ranks_per_host(self) -> int:
        """Ranks on a host."""
        return ranks_on_a_host(
            self.machine, self.settings.ranks, self.request.ranks_per_host
        )

    @property
    def hosts(self) -> int:
        """Hosts of the job."""
        return -(-self.settings.ranks // self.ranks_per_host)

    @property
    def recorded(self) -> RecordedJob:
        """The recorded job with the micro-steps and the update of the settings; a job
        that has to be changed has no policy and iteration of its own there."""
        job = replace(
            self.job.recorded,
            micro_steps=self.variant.micro_steps,
            own_update_s=self.placed.times.own_update_s,
        )
        if self.settings == self.job.settings:
            return job
        return replace(job, policy=None, iteration_s=None)

    @property
    def context(self) -> PasteContext:
        """The job and the machine that lines to paste are for."""
        return PasteContext(self.recorded, self.shared, self.request.machine_source)

    @property
    def needs_search(self) -> bool:
        """Whether the best policy is searched for, which takes long."""
        return (
            self.has_memory
            and self.settings.offload
            and not self.shared.unified_memory
            and not self.request.policies
            and self.placed.workload.gpu_free is not None
        )

    def least(self, by: SortKey) -> float:
        """Return a lower bound of the iteration, ms, or of its cost, of a policy that
        is searched for."""
        least_ms = min_iteration_s(self.placed.workload, self.shared, BOTH) * 1e3
        if by == "iteration":
            return least_ms
        cost = self.cost(Range(least_ms, least_ms, least_ms))
        return 0.0 if cost is None else cost.likely

    def cost(self, ms: Range) -> Range | None:
        """Return the price of a billion tokens; None: not known."""
        price, tokens = self.request.price_per_hour, self.variant.tokens
        if price is None or tokens is None:
            return None
        per_ms = price * self.hosts / _MS_PER_HOUR
        return ms.map(lambda length: per_ms * length / tokens * _BILLION)


@dataclass(frozen=True)
class MachinePlan:
    """The plan of a job for one machine. Bytes are per rank; figures are with the
    change, None where nothing fits. Properties, which few readers need, are computed
    when they are first used."""

    placed: PlacedJob
    choice: PolicyChoice | None  # None where nothing fits, or the plan has no times.
    machine: str
    fits: bool  # Whether the job fits as it is.
    # The least change that makes it fit, by setting; None where it fits, or no change
    # helps.
    change: dict[str, Any] | None
    policy: str | None = None
    # Largest device memory at any time, of the job and its optimizer state.
    device_bytes: float | None = None
    device_capacity_bytes: float | None = None
    host_bytes: float | None = None
    host_capacity_bytes: float | None = None
    iteration: Range | None = None  # ms
    tokens_per_s: Range | None = None
    cost: Range | None = None  # The price of a billion tokens.
    limited_by: str | None = None
    settings: TunableSettings | None = None
    ranks_per_host: int | None = None
    hosts: int | None = None
    accuracy: str = ""
    notes: tuple[str, ...] = ()

    @cached_property
    def advice(self) -> Advice | None:
        """The setting to change; None where nothing gains, or fits."""
        if self.choice is None:
            return None
        return policy_advice(self.choice, self.placed.context)

    @cached_property
    def lines(self) -> LinesToPaste | None:
        """The lines to paste; None where nothing fits."""
        if self.choice is None:
            return None
        own, pasted = self.placed, self.placed.settings
        is_configured = bool(own.recorded.section("zero_optimization"))
        if is_configured and own.job.settings.checkpointing:
            # Its configuration has the lines for what it checkpoints.
            pasted = replace(pasted, checkpointing=False)
        return lines_to_paste(self.choice, own.context, pasted)

    @property
    def evidence(self) -> EvidenceRange | None:
        """The evidence of the range of the iteration; None: its times were measured."""
        return self.placed.placed.times.evidence

    @property
    def is_guess(self) -> bool:
        """Whether the range of the iteration is a guess."""
        return self.evidence is not None and self.evidence.is_guess

    @property
    def code(self) -> str | None:
        """Lines of Python for the script; None where nothing fits."""
        return None if self.lines is None else self.lines.python

    @cached_property
    def policies(self) -> tuple[PolicyTime, ...]:
        """The best variant of each policy that fits, fastest first."""
        if self.choice is None:
            return ()
        own, choice = self.placed, self.choice
        candidates = [
            choice.steps,
            choice.best,
            *(steps for steps in choice.others if fits_memory(steps, own.shared)),
        ]
        by_policy = {steps.plan.policy: steps for steps in candidates}
        ordered = sorted(by_policy.values(), key=lambda steps: steps.rating_s)
        return tuple(map(own.time, ordered))

    @property
    def needed_bytes(self) -> float | None:
        """Largest device memory of the job as it is, all state on the device; None
        where it fits."""
        own = self.placed
        if not self._needs_changes:
            return None
        one = Variant(own.job, own.job.settings)
        return needed_bytes(one, own.machine, own.request.ranks_per_host)[0]

    @cached_property
    def cheapest(self) -> JobChange | None:
        """The cheapest changes in the framework's own settings that make it fit; None
        where it fits or none do."""
        return cheapest_change(*self._search) if self._needs_changes else None

    @cached_property
    def alone(self) -> tuple[JobChange, ...]:
        """The effect of each of these changes alone, the cheapest first; none where it
        fits."""
        return single_changes(*self._search) if self._needs_changes else ()

    @property
    def _search(self) -> tuple[TrainingJob, Machine, int | None]:
        """The job, its machine and the ranks on a host that changes are for."""
        own = self.placed
        return own.job, own.machine, own.request.ranks_per_host

    @property
    def exceeds_host(self) -> bool:
        """Whether a rank takes more host memory than it has, whatever its settings."""
        return self.placed.job.exceeds_host(self.host_capacity_bytes)

    @property
    def _needs_changes(self) -> bool:
        own = self.placed
        if self.fits or own.job.memory is None or self.exceeds_host:
            return False
        return own.machine.gpu_memory_bytes is not None

    def changes_text(self) -> list[str]:
        """Return the changes that make it fit, in few words; the offload of state is
        the first."""
        return [
            _CHANGES[key].format(value) for key, value in (self.change or {}).items()
        ]

    def sort_key(self, by: SortKey) -> tuple[bool, float]:
        """Return the middle of a range, after whether it is not known."""
        span = self.iteration if by == "iteration" else self.cost
        return span is None, 0.0 if span is None else span.middle

    def as_json(self) -> dict[str, Any]:
        """Return the object of `plans` of `ebbtide plan --json`."""
        values: dict[str, Any] = {}
        for attribute in fields(self)[2:]:
            value = getattr(self, attribute.name)
            keys = _RANGES.get(attribute.name)
            if keys is None:
                values[attribute.name] = value
            else:
                values |= zip(keys, value or [None] * len(keys), strict=True)
        values |= {
            "advice": self.advice and self.advice.as_json(),
            "evidence": self.evidence and self.evidence.text,
            "is_guess": self.is_guess,
            "trust": self.evidence and self.evidence.as_json(),
            "code": self.code,
            "lines": self.lines,
            "policies": [time.as_json() for time in self.policies],
            "needed_bytes": self.needed_bytes,
            "cheapest": self.cheapest,
            "alone": self.alone,
            "action": self.cheapest and self.cheapest.action,
        }
        plain: dict[str, Any] = msgspec.to_builtins(values)
        return plain


def place_job(
    job: TrainingJob, machine: MachineArgument, request: PlanRequest | None = None
) -> PlacedJob:
    """Find the least change with which a job fits a machine, with the rates of its
    file. Raises MachineError for a missing rate."""
    asked, machine = request or PlanRequest(), find_machine(machine)
    if job.memory is not None:
        machine = with_recorded_memory(machine, job.memory.capacity_bytes)
    settings = least_settings(job, machine, asked.ranks_per_host, asked.policies)
    if settings is None:
        return _placed(job, machine, asked, job.settings, has_memory=False)
    return _placed(job, machine, asked, settings, has_memory=True)


def _placed(
    job: TrainingJob,
    machine: Machine,
    request: PlanRequest,
    settings: TunableSettings,
    *,
    has_memory: bool,
) -> PlacedJob:
    shared = share_host(machine, settings.ranks, request.ranks_per_host)
    placed = place(job, settings, shared)
    return PlacedJob(job, machine, request, has_memory, settings, placed, shared)


def place_on(
    job: TrainingJob,
    targets: Sequence[PlanTarget],
    request: PlanRequest,
    *,
    per_box: bool,
) -> list[PlacedJob]:
    """Place a job on machines; `per_box`: all ranks of a box are on a host, unless the
    request states how many."""
    placed = []
    for target in targets:
        own, ranks = target.machine, request.ranks_per_host
        if per_box and ranks is None and own.box is not None:
            ranks = own.box.ranks
        asked = replace(
            request,
            machine_source=target.source,
            ranks_per_host=ranks,
            price_per_hour=target.price_per_hour,
        )
        placed.append(place_job(job, own, asked))
    return placed


def place_as_it_is(
    trace: Trace, machine: Machine, ranks_per_host: int | None = None
) -> PlacedJob:
    """Place the job of a trace on another machine for advice on its policy alone: with
    the least change of `place_job` where that is offload, else as it is. Raises as
    `place_job`, and WorkloadError as `job_of_trace`."""
    job = job_of_trace(trace, BatchSettings())
    request = PlanRequest(ranks_per_host=ranks_per_host)
    own = place_job(job, machine, request)
    offloaded = replace(job.settings, offload=True)
    if own.settings in (job.settings, offloaded):
        return own
    return _placed(job, own.machine, request, offloaded, has_memory=False)


def plan_for_machine(
    job: TrainingJob, machine: MachineArgument, request: PlanRequest | None = None
) -> MachinePlan:
    """Return the plan of a job for a machine. Raises as `place_job`."""
    return plan_placed(place_job(job, machine, request))


def plan_placed(own: PlacedJob, *, has_times: bool = True) -> MachinePlan:
    """Return the plan of a job that has been placed on its machine; without
    `has_times`, it has no policy and no times."""
    change = changed(own.job.settings, own.settings, "")
    plan = MachinePlan(
        own,
        None,
        machine=own.machine.name,
        fits=own.has_memory and change is None,
        change=change,
        device_capacity_bytes=own.shared.gpu_memory_bytes,
        host_capacity_bytes=own.machine.for_ranks(own.ranks_per_host).host_memory_bytes,
        accuracy=accuracy_of(own.machine).text(),
    )
    if not own.has_memory:
        return replace(plan, notes=(_missing_text(own, plan.host_capacity_bytes),))
    plan = replace(
        plan,
        settings=own.settings,
        ranks_per_host=own.ranks_per_host,
        hosts=own.hosts,
        notes=_notes(own),
    )
    if not has_times:
        return plan
    choose = choose_policy
    if own.request.policies:
        choose = partial(choose_among, own.request.policies)
    choice = choose(own.placed.workload, own.shared, own.recorded)
    schedule, policy = choice.steps.valid, choice.steps.plan.policy
    time, tokens = own.time(choice.steps), own.variant.tokens
    return replace(
        plan,
        choice=choice,
        change=changed(own.job.settings, own.settings, policy),
        policy=policy,
        iteration=time.ms,
        device_bytes=_device_bytes(schedule, own.shared),
        host_bytes=schedule.host_bytes(),
        tokens_per_s=_rates(tokens, time.ms) if tokens else None,
        cost=own.cost(time.ms),
        limited_by=_limiting_part(schedule, own.shared, own.placed.times),
    )


def _missing_text(own: PlacedJob, host_bytes: float | None) -> str:
    """Return why nothing makes a job fit."""
    if own.job.exceeds_host(host_bytes):
        sizes = [size or 0.0 for size in (own.job.host_peak_bytes, host_bytes)]
        needed, limit = (f"{size / 2**30:.1f}" for size in sizes)
        return (
            f"a rank takes {needed} of {limit} GiB of host memory while it loads or "
            "trains: load in parts, onto the device (safetensors, device_map), or with "
            "more host memory"
        )
    missing_bytes = own.placed.workload.missing_bytes
    what = "the host has too little memory"
    if missing_bytes:
        what = f"{missing_bytes / 1e9:.1f} GB of device memory are missing"
    return (
        f"{what}, and none of the changes helps: policy, checkpointing, micro-batch, "
        "ranks"
    )


def fastest_plans(
    placed: Sequence[PlacedJob],
    by: SortKey,
    count: int | None = None,
    as_json: bool = False,
    update: Callable[[str, int, int], None] = lambda text, done, total: None,
) -> list[MachinePlan]:
    """Plan for the machines in their order. Plans that need a search, and are surely
    not among the first `count` in the order of `by`, have no policy and no times; None:
    all have. `as_json`: with all that JSON has."""
    # The middle of a range is no shorter than the likely iteration: what slows it down
    # counts for more.
    least = [own.least(by) if own.needs_search else 0.0 for own in placed]
    total = len(placed)
    first = count or total
    keys: list[tuple[bool, float]] = []
    plans: dict[int, MachinePlan] = {}
    for number in sorted(range(total), key=least.__getitem__):
        is_later = len(keys) >= first and (False, least[number]) > keys[first - 1]
        plan = plan_placed(placed[number], has_times=not is_later)
        plans[number] = plan
        if as_json:
            # At once, while the searches for the lines to paste are remembered.
            plan.as_json()
        keys = sorted([*keys, plan.sort_key(by)])
        update(f"{len(keys)} of {total} machines", len(keys), total)
    return [plans[number] for number in range(total)]


@dataclass(frozen=True)
class JobPlans:
    """The plans of a job for some machines, in their order."""

    job: TrainingJob
    plans: Sequence[MachinePlan]
    by: SortKey = "iteration"
    # Whether machines were named: then the first one is what the answer is about.
    is_named: bool = True
    # The plan of layers and state on the first machine; None: layers are not known.
    whole: WholeJobPlan | None = None
    limits: Sequence[str] = ()  # Limits of rates of the first machine, in words.
    # The frozen layers to swap there; None: it fits, or no layers are frozen.
    block_swap: BlockSwap | None = None

    @cached_property
    def smallest(self) -> Machine | None:
        """The smallest preset that the job fits as it is; None without one."""
        return smallest_machine(self.job, map(preset, presets()))

    @property
    def remarks(self) -> list[str]:
        """Remarks on the first machine."""
        parts = (self.block_swap, self.whole)
        texts = [part.text for part in parts if part is not None]
        return [*texts, *(f"note: {limit}" for limit in self.limits)]

    def as_json(self) -> dict[str, Any]:
        """Return the object that `ebbtide plan --json` prints."""
        return {
            "job": self.job.as_json(),
            "plans": [plan.as_json() for plan in self.plans],
            "smallest_machine": self.smallest and self.smallest.name,
            "block_swap": self.block_swap and self.block_swap.as_json(),
            "whole_job": [] if self.whole is None else [self.whole.as_json()],
        }

    @property
    def here(self) -> MachinePlan | None:
        """The plan that the answer is about; None where it is about all machines."""
        return self.plans[0] if self.is_named else None

    def ordered(self) -> list[MachinePlan]:
        """Return the plans in the order of the table, without times at the end."""
        return sorted(self.plans, key=lambda plan: plan.sort_key(self.by))


def _notes(own: PlacedJob) -> tuple[str, ...]:
    notes = [own.placed.times.note]
    box, per_host = own.machine.box, own.ranks_per_host
    if box is not None and per_host < box.ranks:
        notes.append(
            f"uses {per_host} of {box.ranks} GPUs of a host, whose price counts in full"
        )
    if own.hosts > 1 and (box is None or box.network_bytes_per_s is None):
        notes.append(NETWORK_NOTE)
    return tuple(filter(None, (*notes, unified_memory_text(own.machine))))


def _limiting_part(schedule: Schedule, machine: Machine, times: ComputeTimes) -> str:
    """Return what limits an iteration: what limits the update, or `compute` or
    `collectives`, the longer one, if nothing is offloaded or the optimizer adds less
    than a tenth."""
    if (
        schedule.plan.policy == "gpu-only"
        or schedule.exposed_s < _SMALL_SHARE * schedule.iteration_s
    ):
        compute_s = (
            times.forward_s + times.backward_s + times.other_s - times.collectives_s
        )
        return "collectives" if times.collectives_s > max(compute_s, 0.0) else "compute"
    resource = limiting_resource(schedule, machine)
    return _RESOURCE_NAMES.get(resource, resource)


def _device_bytes(schedule: Schedule, machine: Machine) -> float | None:
    """Return the largest device memory of the job and the plan together; intervals of
    rounding errors do not count."""
    if schedule.workload.gpu_free is None or machine.gpu_memory_bytes is None:
        return None
    times, sizes = device_memory(schedule, machine)
    lasting = (
        np.diff(np.append(times, schedule.iteration_s))
        > _SHORTEST_SHARE * schedule.iteration_s
    )
    return float(sizes[lasting].max())


def _rates(tokens: float, ms: Range) -> Range | None:
    """Return the tokens per second: most where the iteration takes least."""
    if ms.likely <= 0:
        return None
    return Range(*(tokens / length * 1e3 for length in (ms.likely, ms.high, ms.low)))
