"""The results of a replay: the simulated plan of each policy, the bound, and the gain
of each mechanism."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from operator import itemgetter
from typing import Any

from ebbtide.analysis.dataframes import TabularResult
from ebbtide.analysis.metrics.device_fit import MemoryNeed
from ebbtide.errors import MachineError, PolicyError
from ebbtide.interleave.model.operations import NO_OVERLAP, Overlap
from ebbtide.interleave.model.plan import STORAGE_RESOURCES, Plan
from ebbtide.interleave.model.schedule import Schedule, available_host_bytes
from ebbtide.interleave.model.workload import Workload
from ebbtide.interleave.policies import BUILT_IN, Policy, as_policies, as_policy
from ebbtide.interleave.replay.recorded_job import RecordedJob, own_job
from ebbtide.interleave.simulation.bound import Bound, bound
from ebbtide.interleave.simulation.simulator import Steps, simulate_steps
from ebbtide.machines.accuracy import accuracy_of
from ebbtide.machines.catalog import MachineArgument, find_machine
from ebbtide.machines.machine import Machine
from ebbtide.phases import OTHER, PHASES
from ebbtide.units import bytes_text, ms_text

# Above these shares a resource counts as what limits the update.
_LIMITING_MEMORY_SHARE = 0.95
_LIMITING_BUSY_SHARE = 0.75
_DAY_S = 86400.0
# The policy of late updates, which is replayed by default beside `default_policies`,
# with a bound of its own.
LATE = "adaptive,overlap=forward"
# The policy of all that may move, of workloads with layers.
WHOLE_JOB = "adaptive,weights=auto,activations=auto"


@dataclass(frozen=True)
class PolicyResult:
    """The iteration of one policy. Bytes are per iteration and rank."""

    policy: str
    iteration_ms: float
    forward_ms: float
    backward_ms: float
    update_ms: float
    other_ms: float
    exposed_ms: float  # Time that the optimizer adds to the iteration.
    h2d_bytes: float
    d2h_bytes: float
    busy: dict[str, float]  # Busy share of each resource during the update.
    peak_device_bytes: float
    host_bytes: float
    fits: bool | None  # Whether both memories suffice; None if it is not known.
    # What limits the update: a resource, "host memory" (its bandwidth), "storage",
    # "dependencies" or "nothing".
    limited_by: str
    # Subgroups that are updated before it is known whether clipping changes them.
    speculated_subgroups: int
    # Iteration time of a step that clipping changes; None if nothing is speculated.
    # Times above are the mean over all steps, other figures are of a step that clipping
    # does not change.
    redone_iteration_ms: float | None
    storage_read_bytes: float
    storage_written_bytes: float
    storage_written_bytes_per_day: float
    # By path: the shares of the iteration during which it reads and writes.
    storage_busy: list[dict[str, float]]
    stored_subgroups: int
    # Whether each step gives the results that the workload asks for.
    exact: bool
    # How the results differ where they are not exact, and the iterations where they do.
    note: str | None
    # Layers that are resident and streamed; None without layers. So are the next two.
    weights: dict[str, int] | None
    # Layers of each of ACTIVATION_KINDS, by most of their activations.
    activations: dict[str, int] | None
    # Largest device memory of the layers and of what the plan puts there.
    job_peak_device_bytes: float | None

    @property
    def layers_text(self) -> str:
        """The kinds of layers and their memory in words; empty without layers."""
        counts = [*(self.weights or {}).items(), *(self.activations or {}).items()]
        kinds = ", ".join(f"{count} {kind}" for kind, count in counts if count)
        return (
            f"layers {kinds}, {bytes_text(self.job_peak_device_bytes or 0.0)} with "
            "state"
            if kinds
            else ""
        )


# The bytes of a result by their kind, from its fields.
RESULT_BYTES: dict[str, Callable[[Mapping[str, Any]], float]] = {
    "device memory": itemgetter("peak_device_bytes"),
    "host memory": itemgetter("host_bytes"),
    "storage traffic": lambda fields: (
        fields["storage_read_bytes"] + fields["storage_written_bytes"]
    ),
}


@dataclass(frozen=True, repr=False)
class Replay(TabularResult, table="results"):
    """The results of all policies, in the order requested."""

    workload: Workload
    machine: Machine
    results: list[PolicyResult]
    schedules: list[Schedule]
    bound: Bound  # Lower bounds of any exact policy without overlap.
    overlap: Overlap  # The overlap of all exact policies together.
    # Lower bounds of any policy with that overlap or a part of that overlap.
    overlap_bound: Bound
    skipped: dict[str, str]  # Built-in policies that were left out, and why.
    # The replay of `adaptive` with updates under the next forward; None where policies
    # were named.
    late: Replay | None = None

    def simplest_lines(self) -> Iterator[str]:
        """Yield why no offload is recommended where an offloading policy is faster.

        See `choose_policy`.
        """
        results = [*self.results, *(self.late.results if self.late else ())]
        fitting = {
            one.policy: one.iteration_ms for one in results if one.fits and one.exact
        }
        fastest = min(fitting, key=lambda policy: fitting[policy], default="gpu-only")
        if "gpu-only" in fitting and fastest != "gpu-only":
            share = f"{100 * (fitting['gpu-only'] / fitting[fastest] - 1):.1f} %"
            yield (
                f"{fastest}: {ms_text(fitting[fastest])}, but gpu-only is within "
                f"{share}: the simpler one wins"
            )

    def layer_lines(self) -> Iterator[str]:
        """Yield how many layers are streamed, and the forms of activations, under each
        policy that moves any."""
        for result, schedule in zip(self.results, self.schedules, strict=True):
            layers = schedule.plan.layers
            if layers is not None and (
                layers.streamed or any(one.moves for one in layers.activations)
            ):
                yield f"{result.policy}: {result.layers_text}"

    def memory_lines(self) -> Iterator[str]:
        """Yield which memory is too small for the policies that do not fit.

        Before them, yield the policies whose state has another size.
        """
        policies_of: dict[str, list[str]] = {}
        for schedule in self.schedules:
            if (own := schedule.workload.state_bytes) != (
                others := self.workload.state_bytes
            ):
                yield (
                    f"{schedule.plan.policy} has the job's own state of {own:g} B a "
                    f"parameter, others {others:g} B"
                )
            if (excess := memory_excess(schedule, self.machine)) is not None:
                policies_of.setdefault(excess, []).append(schedule.plan.policy)
        for excess, policies in policies_of.items():
            yield (
                f"{', '.join(policies)} {'does' if len(policies) == 1 else 'do'} not "
                f"fit: {excess}"
            )

    def as_json(self) -> dict[str, Any]:
        """Return the object that `ebbtide replay --json` prints."""
        return {
            "workload": self.workload.as_json(),
            "machine": self.machine.as_json(),
            "results": [asdict(result) for result in self.results],
            "bound": {
                "update_ms": self.bound.update_s * 1e3,
                "iteration_ms": self.bound.iteration_s * 1e3,
                "exposed_ms": self.bound.exposed_s * 1e3,
                "exposed_whole_subgroups_ms": self.bound.exposed_whole_s * 1e3,
                "overlap": self.overlap.name,
                "overlap_iteration_ms": self.overlap_bound.iteration_s * 1e3,
                "overlap_exposed_ms": self.overlap_bound.exposed_s * 1e3,
                "overlap_exposed_whole_subgroups_ms": self.overlap_bound.exposed_whole_s
                * 1e3,
            },
            "skipped": self.skipped,
            "late": None
            if self.late is None
            else {key: self.late.as_json()[key] for key in ("results", "bound")},
            "accuracy": accuracy_of(self.machine).as_json(),
        }


def default_policies(workload: Workload) -> list[str]:
    """Return the policies that are replayed where the user names none."""
    return [*BUILT_IN, *[WHOLE_JOB] * bool(workload.layers)]


def replay(
    workload: Workload,
    machine: MachineArgument,
    policies: Sequence[Policy | str] | None = None,
    job: RecordedJob | None = None,
) -> Replay:
    """Simulate a workload under some policies.

    Among them, `systems` stands for all other systems; None: all built-in ones that the
    rates suffice for. Raises PolicyError if a policy cannot plan it, MachineError for a
    missing rate.
    """
    machine = find_machine(machine)
    results, schedules, replayed = [], [], []
    skipped, named = {}, {*map(str, policies or ())}
    for policy in as_policies(policies or default_policies(workload)):
        try:
            keeps_state = policy.registered.keeps_state
            own = own_job(workload, job) if keeps_state else workload
            steps = simulate_steps(policy.plan(own, machine), own, machine)
        except (MachineError, PolicyError) as error:
            if policy.text in named:
                raise
            skipped[policy.text] = str(error)
            continue
        schedules.append(steps.valid)
        results.append(_result(policy.text, steps, machine))
        replayed.append(policy)
    if not results and skipped:
        raise MachineError(next(iter(skipped.values())))
    without_overlap, overlap = (
        bound(workload, machine),
        _overlap_of_all(replayed, schedules),
    )
    overlap_bound = (
        without_overlap if overlap == NO_OVERLAP else bound(workload, machine, overlap)
    )
    late = None
    if not policies and "adaptive" not in skipped:
        with suppress(MachineError, PolicyError):
            late = replay(workload, machine, [LATE])
    return Replay(
        workload,
        machine,
        results,
        schedules,
        without_overlap,
        overlap,
        overlap_bound,
        skipped,
        late,
    )


def _overlap_of_all(policies: list[Policy], schedules: list[Schedule]) -> Overlap:
    """Return the overlap that any policy asks for, or its plan has if it is exact."""
    asked = [policy.widest_overlap for policy in policies]
    plans = [schedule.plan for schedule in schedules if schedule.plan.is_exact]
    return Overlap(
        forward=any(overlap.forward for overlap in asked)
        or any(plan.has_late_updates for plan in plans),
        backward=any(overlap.backward for overlap in asked)
        or any(plan.speculated for plan in plans),
    )


def _result(text: str, steps: Steps, machine: Machine) -> PolicyResult:
    schedule = steps.valid
    host = schedule.host_bytes()
    fits = schedule.fits_device(machine.gpu_memory_bytes)
    if memory_excess(schedule, machine) is not None:
        fits = False
    elif available_host_bytes(schedule.workload, machine) is None:
        fits = None
    layers = schedule.plan.layers
    counts = (
        layers.counts(len(schedule.workload.chunk_shares))
        if layers is not None
        else (None, None)
    )
    iteration_s, written = (
        steps.mean("iteration_s"),
        schedule.moved_bytes("storage_write"),
    )
    return PolicyResult(
        policy=text,
        **{
            f"{part}_ms": steps.mean(f"{part}_s") * 1e3
            for part in ("iteration", *PHASES, OTHER, "exposed")
        },
        h2d_bytes=schedule.moved_bytes("h2d"),
        d2h_bytes=schedule.moved_bytes("d2h"),
        busy=schedule.busy_shares(),
        peak_device_bytes=schedule.peak_device_bytes,
        host_bytes=host,
        fits=fits,
        limited_by=limiting_resource(schedule, machine),
        speculated_subgroups=len(schedule.plan.speculated),
        redone_iteration_ms=None
        if steps.redone is None
        else steps.redone.iteration_s * 1e3,
        storage_read_bytes=schedule.moved_bytes("storage_read"),
        storage_written_bytes=written,
        storage_written_bytes_per_day=written / iteration_s * _DAY_S
        if written
        else 0.0,
        storage_busy=schedule.storage_busy_shares(),
        stored_subgroups=len(schedule.plan.stored),
        exact=schedule.plan.is_exact,
        note="; ".join(filter(None, (schedule.plan.departures.consequence, steps.note)))
        or None,
        weights=counts[0],
        activations=counts[1],
        job_peak_device_bytes=schedule.peak_job_bytes(),
    )


def limiting_resource(schedule: Schedule, machine: Machine) -> str:
    """Return what limits the update: host memory bandwidth, else the busiest resource,
    else dependencies."""
    if schedule.update_s <= 0:
        return "nothing"
    shares = schedule.busy_shares()
    busiest = max(shares, key=lambda name: shares[name])
    traffic = schedule.host_traffic_in_update()
    memory_share = (
        traffic / schedule.update_s / (machine.host_memory_bytes_per_s or float("inf"))
    )
    if memory_share > _LIMITING_MEMORY_SHARE:
        return "host memory"
    if shares[busiest] <= _LIMITING_BUSY_SHARE:
        return "dependencies"
    return "storage" if busiest in STORAGE_RESOURCES else busiest


@dataclass(frozen=True)
class AblationStep:
    """A mechanism, added to those before it."""

    mechanism: str
    policy: str
    iteration_ms: float
    gain_ms: float


def explain(workload: Workload, machine: Machine) -> list[AblationStep]:
    """Add one mechanism at a time, and return the gain of each, from ZeRO-Offload with
    blocking gradients to the adaptive policy with overlap.

    At last, where state is in storage, comes enough host memory. Mechanisms that need
    what is not known are left out."""
    steps: list[AblationStep] = []
    plan: Plan | None = None

    def add(
        mechanism: str,
        policy: str,
        workload: Workload = workload,
        rates: Machine = machine,
    ) -> None:
        nonlocal plan
        with suppress(MachineError, PolicyError):
            plan = as_policy(policy).plan(workload, rates)
            iteration_ms = (
                simulate_steps(plan, workload, rates).mean("iteration_s") * 1e3
            )
            gain_ms = steps[-1].iteration_ms - iteration_ms if steps else 0.0
            steps.append(AblationStep(mechanism, policy, iteration_ms, gain_ms))

    add("ZeRO-Offload with blocking gradients", "zero-offload,grads=blocking")
    add("asynchronous gradients", "zero-offload")
    add("pipelined conversions and copies", "pipelined")
    add("interleaving, every second subgroup on the GPU", "interleaved:2")
    min_free = workload.min_free_bytes
    if min_free is not None:
        without_windows = replace(workload, gpu_free=((0.0, min_free),))
        add(
            "shares and residents from the rates, in memory that is always free",
            "adaptive",
            without_windows,
        )
        if len(workload.gpu_free or ()) > 1:
            add("windows: state parked in memory that is free for a while", "adaptive")
        add("late updates, under the next forward", "adaptive,overlap=forward")
        if workload.clipping and not workload.copies_at_step:
            add("speculative updates, inside the backward", "adaptive,overlap=both")
    if plan is not None and plan.stored:
        in_memory, rates = (
            replace(workload, host_free_bytes=None),
            replace(machine, host_memory_bytes=None),
        )
        add(
            "host memory for all state, instead of storage",
            steps[-1].policy,
            in_memory,
            rates,
        )
    return steps


def memory_needs(schedule: Schedule, machine: Machine) -> tuple[MemoryNeed, ...]:
    """Return what a plan needs of the device, of the host and of its pinned memory, by
    the byte counts of the framework that the workload names."""
    available = available_host_bytes(schedule.workload, machine)
    return (
        schedule.device_need(machine.gpu_memory_bytes),
        MemoryNeed("host", schedule.host_bytes(), available),
        MemoryNeed("pinned", schedule.pinned_bytes(), machine.pinned_memory_bytes),
    )


def memory_excess(schedule: Schedule, machine: Machine) -> str | None:
    """Return in words by how much memory is too small.

    Return None if it suffices or is not known.
    """
    if schedule.workload.missing_bytes:
        return (
            "without any optimizer state "
            f"{bytes_text(schedule.workload.missing_bytes)} of device memory are "
            "missing"
        )
    excess = next(
        (need for need in memory_needs(schedule, machine) if not need.fits), None
    )
    if excess is None:
        return None
    if excess.memory == "device":
        return (
            f"it needs {bytes_text(schedule.peak_device_bytes)} of device memory, more "
            "than is free"
        )
    needed, free = bytes_text(excess.needed_bytes), bytes_text(excess.free_bytes or 0)
    if excess.memory == "host":
        return f"it needs {needed} of host memory, and a rank has {free}"
    return f"it needs {needed} of pinned host memory, and a rank may pin {free}"
