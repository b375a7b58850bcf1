"""The choice of a policy: the best one that a machine has memory for, with updates
beside the step, and the others."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, partial
from operator import attrgetter
from types import MappingProxyType
from typing import Any, NamedTuple

from ebbtide.analysis.metrics.advice import MIN_GAIN
from ebbtide.errors import MachineError, PolicyError
from ebbtide.features.advise.present import Present
from ebbtide.interleave.model.workload import Workload
from ebbtide.interleave.policies import Policy, as_policy
from ebbtide.interleave.replay.recorded_job import RecordedJob, own_job
from ebbtide.interleave.replay.replay import memory_excess
from ebbtide.interleave.simulation.simulator import Steps, simulate_steps
from ebbtide.machines.machine import Machine

# The widest overlap that InterleavedAdamW takes, and `enable` for DeepSpeed.
OPTIMIZER_OVERLAP = "auto"
DEEPSPEED_OVERLAP = "forward"
_MAX_STRIDE = 10
# Splits are compared, and asked whether one fits, for the same workload in turn.
_REMEMBERED = 16
_ROUNDED_SUBGROUPS = 2
_RATING = attrgetter("rating_s")


@dataclass(frozen=True)
class OverlapChoice:
    """A policy (its string without overlap) with updates beside the step, compared with
    the same policy without."""

    policy: str
    option: str
    steps: Steps
    without_s: float

    @property
    def most_clipped(self) -> float | None:
        """The share of clipped steps up to which the plan is no slower than without
        overlap; None: whatever it is.

        A plan that is made for another share speculates as much as pays there."""
        valid_s = self.steps.valid.iteration_s
        redone_s = (
            self.steps.redone.iteration_s if self.steps.redone is not None else valid_s
        )
        return (
            None
            if redone_s <= self.without_s
            else max(0.0, (self.without_s - valid_s) / (redone_s - valid_s))
        )

    def as_json(self) -> dict[str, Any]:
        """Return the figures of the choice, for `ebbtide replay --json`."""
        return {
            "policy": self.policy,
            "overlap": self.option,
            "iteration_ms": self.steps.iteration_s * 1e3,
            "without_overlap_ms": self.without_s * 1e3,
            "speculated_subgroups": len(self.steps.plan.speculated),
            "most_clipped_share": self.most_clipped,
        }

    def text(self) -> str:
        """Return the gain in a sentence without an end."""
        gain_s = self.without_s - self.steps.iteration_s
        plan = self.steps.plan
        kinds = {
            "under the next forward": plan.has_late_updates,
            "inside the backward": bool(plan.speculated),
        }
        where = " and ".join(kind for kind, is_used in kinds.items() if is_used)
        percent = 100 * gain_s / self.without_s
        text = (
            f"updates {where} win {gain_s * 1e3:,.0f} ms ({percent:.0f} %) over "
            f"{self.policy} alone"
        )
        if not plan.speculated:
            return text
        share = self.steps.valid.workload.clip_active_share
        text += f" if {100 * share:.0f} % of the steps are clipped"
        if self.most_clipped is not None:
            text += f", and something up to {100 * self.most_clipped:.0f} %"
        return text


class Alternatives(NamedTuple):
    """Policies beside the chosen one."""

    # The best static split, which DeepSpeed has by itself; None if none fits, or
    # nothing is offloaded.
    split: Steps | None = None
    # The best variant of each other policy that fits, or may fit, fastest first.
    others: tuple[Steps, ...] = ()
    # Policies that there is too little memory for, and why.
    left_out: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True)
class PolicyChoice:
    """The policies of a workload on a machine, of which all advice is made."""

    best: Steps  # The chosen policy, without overlap.
    # What memory is too small for it, in words; None if it suffices or is not known.
    excess: str | None = None
    # Plans the other policies, which few readers need.
    find_alternatives: Callable[[], Alternatives] = Alternatives
    # The widest overlap that the job can run; None if that gains little.
    overlap: OverlapChoice | None = None
    # Searches for the widest overlap that `enable` takes, which only lines for
    # DeepSpeed need.
    find_deepspeed_overlap: Callable[[], OverlapChoice | None] = lambda: None
    present: Present = field(default_factory=Present)

    @cached_property
    def alternatives(self) -> Alternatives:
        """The policies beside the chosen one."""
        return self.find_alternatives()

    @property
    def split(self) -> Steps | None:
        """The best static split."""
        return self.alternatives.split

    @property
    def others(self) -> tuple[Steps, ...]:
        """The best variants of other policies."""
        return self.alternatives.others

    @property
    def left_out(self) -> Mapping[str, str]:
        """Policies that there is too little memory for, and why."""
        return self.alternatives.left_out

    @cached_property
    def deepspeed_overlap(self) -> OverlapChoice | None:
        """The widest overlap that `enable` takes; None if that gains little."""
        return self.find_deepspeed_overlap()

    @property
    def steps(self) -> Steps:
        """The chosen policy with its overlap."""
        return self.best if self.overlap is None else self.overlap.steps

    @property
    def gains(self) -> bool:
        """Whether the chosen policy fits and is worth a change of what the job has."""
        return self.excess is None and self.present.is_slower_than(self.steps)


def choose_policy(
    workload: Workload, machine: Machine, job: RecordedJob | None = None
) -> PolicyChoice:
    """Choose a policy: no offload if all state fits or GPU and CPU share one memory,
    else `adaptive`, or `interleaved:2` where the free memory is unknown; `job`: what
    DeepSpeed runs takes less overlap. Its own policy stays where it fits and no other
    one is worth a change."""
    present = present_of(workload, machine, job or RecordedJob())
    choice = replace(_choose_freely(workload, machine, job), present=present)
    if present.steps is None or choice.excess is not None or choice.gains:
        return choice

    def find_alternatives() -> Alternatives:
        candidates = (choice.best, *choice.others)
        others = [one for one in candidates if not present.has(one.plan.policy)]
        return choice.alternatives._replace(others=tuple(others))

    return replace(
        choice,
        best=present.steps,
        find_alternatives=find_alternatives,
        overlap=None,
        find_deepspeed_overlap=lambda: None,
    )


def present_of(workload: Workload, machine: Machine, job: RecordedJob) -> Present:
    """Return a job as it is on a machine."""
    recorded_s = job.recorded_s(machine)
    recorded_ms = None if recorded_s is None else recorded_s * 1e3
    policy = job.policy if job.state_bytes is None else "gpu-only"
    if policy is None:
        return Present(recorded_ms=recorded_ms)
    own = own_job(workload, job) if policy == "gpu-only" else workload
    try:
        steps = steps_of(as_policy(policy), own, machine)
    except PolicyError:  # One of the job's own, which is not registered here.
        steps = None
    # What was recorded there did fit.
    is_known = steps is not None and (
        recorded_ms is not None or fits_memory(steps, machine)
    )
    return Present(steps if is_known else None, recorded_ms)


def _choose_freely(
    workload: Workload, machine: Machine, job: RecordedJob | None
) -> PolicyChoice:
    """Choose a policy, whatever the job has."""
    on_gpu = all_on_device(own_job(workload, job), machine)
    if on_gpu is not None:
        return PolicyChoice(on_gpu, memory_excess(on_gpu.valid, machine))
    policy = (
        Policy.make("adaptive")
        if workload.gpu_free is not None
        else Policy.make("interleaved", 2)
    )
    # A rate that is missing is an error here.
    best = simulate_steps(policy.plan(workload, machine), workload, machine)
    excess = memory_excess(best.valid, machine)
    find_alternatives = partial(_alternatives, best, workload, machine)
    if excess is not None or not best.settles:
        split, others, left_out = find_alternatives()
        if others and (excess is not None or others[0].settles):
            if excess is None:
                others = (*others, best)
            else:
                left_out, excess = {**left_out, best.plan.policy: excess}, None
            best, *rest = others
            others = tuple(rest)
        find_alternatives = partial(Alternatives, split, others, left_out)
    option = (
        OPTIMIZER_OVERLAP if job is None or job.stage is None else DEEPSPEED_OVERLAP
    )
    overlap = choose_overlap(best, option, workload, machine)
    find_deepspeed_overlap = partial(
        choose_overlap, best, DEEPSPEED_OVERLAP, workload, machine
    )
    return PolicyChoice(
        best, excess, find_alternatives, overlap, find_deepspeed_overlap
    )


def _alternatives(best: Steps, workload: Workload, machine: Machine) -> Alternatives:
    """Return the policies beside the best one."""
    split = best_static_split(workload, machine)
    is_short = split is not None and not fits_memory(split, machine)
    # There are policies with storage in the place of a split that is short of memory.
    offered = None if is_short and best.plan.stored else split
    others, left_out = [], {}
    for steps in _other_policies(best, offered, workload, machine):
        excess = memory_excess(steps.valid, machine)
        if excess is None:
            others.append(steps)
        else:
            left_out[steps.plan.policy] = excess
    return Alternatives(None if is_short else split, tuple(others), left_out)


def choose_among(
    policies: Sequence[Policy],
    workload: Workload,
    machine: Machine,
    job: RecordedJob | None = None,
) -> PolicyChoice:
    """Choose the fastest of some policies: of those that the device and the host have
    memory for, if there are any."""
    candidates = [
        simulate_steps(policy.plan(workload, machine), workload, machine)
        for policy in policies
    ]
    excess = {
        steps.plan.policy: memory_excess(steps.valid, machine) for steps in candidates
    }
    best, *others = sorted(
        candidates, key=lambda steps: (bool(excess[steps.plan.policy]), steps.rating_s)
    )
    left_out = {policy: text for policy, text in excess.items() if text is not None}
    present = present_of(workload, machine, job or RecordedJob())
    alternatives = Alternatives(None, tuple(others), left_out)
    return PolicyChoice(
        best, excess[best.plan.policy], lambda: alternatives, present=present
    )


def choose_overlap(
    best: Steps, option: str, workload: Workload, machine: Machine
) -> OverlapChoice | None:
    """Return the overlap of a policy; None if the policy has no such option, does not
    fit with it, or gains little."""
    policy = Policy.of_plan(best.plan)
    if option not in policy.registered.options.get("overlap", ()) or option == "none":
        return None
    # No iteration is shorter than its compute, beside which updates would run: a search
    # could gain too little.
    if not workload.compute_s or workload.compute_s * (1 + MIN_GAIN) >= best.rating_s:
        return None
    steps = steps_of(policy.with_options(overlap=option), workload, machine)
    if steps is None:
        return None
    exceeds_device, exceeds_host, rating_s = steps.cost(machine)
    fits = not (exceeds_device or exceeds_host)
    if fits and rating_s * (1 + MIN_GAIN) < best.rating_s:
        return OverlapChoice(policy.text, option, steps, best.iteration_s)
    return None


def steps_of(policy: Policy, workload: Workload, machine: Machine) -> Steps | None:
    """Return a policy's schedules; None if the machine lacks a rate or the policy
    cannot plan the workload."""
    try:
        return simulate_steps(policy.plan(workload, machine), workload, machine)
    except (MachineError, PolicyError):
        return None


def planned(
    policies: Iterable[Policy], workload: Workload, machine: Machine
) -> list[Steps]:
    """Return the schedules of the policies that can plan the workload on a machine."""
    each = (steps_of(policy, workload, machine) for policy in policies)
    return [steps for steps in each if steps is not None]


def fastest(candidates: Iterable[Steps]) -> Steps | None:
    """Return the fastest schedules, the first of equals; None without any."""
    return min(candidates, key=_RATING, default=None)


def without_offload(workload: Workload, machine: Machine) -> Steps | None:
    """Return the schedule with all state on the device; None if it is not known to fit,
    or a rate is missing."""
    if workload.gpu_free is None:
        return None
    on_gpu = planned([Policy.make("gpu-only")], workload, machine)
    capacity = machine.gpu_memory_bytes
    return fastest(steps for steps in on_gpu if steps.valid.fits_device(capacity))


def all_on_device(workload: Workload, machine: Machine) -> Steps | None:
    """Return the schedule with all state on the device if it is known to fit there, or
    if offload frees no memory."""
    if machine.unified_memory and workload.gpu_free is not None:
        return steps_of(Policy.make("gpu-only"), workload, machine)
    return without_offload(workload, machine)


def best_static_split(workload: Workload, machine: Machine) -> Steps | None:
    """Return the fastest static split without storage that fits the device, the largest
    of equals; None without."""
    # If the free memory is not known, only a plan that needs no device memory is sure
    # to fit.
    return fastest(
        steps
        for steps in _static_splits(workload, machine)
        if steps.valid.fits_device(machine.gpu_memory_bytes)
    )


def has_static_split(workload: Workload, machine: Machine) -> bool:
    """Return whether device and host have memory for a static split without storage."""
    return any(
        steps.valid.fits_device(machine.gpu_memory_bytes)
        and fits_memory(steps, machine)
        for steps in _each_static_split(workload, machine)
    )


@lru_cache(maxsize=_REMEMBERED)
def _static_splits(workload: Workload, machine: Machine) -> list[Steps]:
    return [*_each_static_split(workload, machine)]


def _each_static_split(workload: Workload, machine: Machine) -> Iterator[Steps]:
    """Yield static splits without storage, the ones with most state on the host first.

    A split whose resident state exceeds what the device always has free is left out."""
    machine = replace(machine, storage=())
    shares = [
        share / 20 for share in range(19, -1, -1) if _may_keep(workload, 1 - share / 20)
    ]
    splits = (Policy.make("twin-flow", f"{share:g}") for share in shares)
    for policy in (Policy.make("zero-offload"), *splits):
        steps = steps_of(policy, workload, machine)
        if steps is not None:
            yield steps


def _may_keep(workload: Workload, share: float) -> bool:
    """Return whether the state of a share of the parameters may fit the device all the
    time. It is a few subgroups more or less, as versions of DeepSpeed round."""
    if workload.min_free_bytes is None:
        return True
    params = share * workload.params - _ROUNDED_SUBGROUPS * max(workload.subgroups)
    return params * workload.state_bytes <= workload.min_free_bytes


def _other_policies(
    best: Steps, split: Steps | None, workload: Workload, machine: Machine
) -> list[Steps]:
    """Return the best variant of each other policy that may fit, fastest first."""

    def may_fit(steps: Steps) -> bool:
        return steps.valid.fits_device(machine.gpu_memory_bytes) is not False

    strides = range(1, _MAX_STRIDE + 1) if workload.gpu_free is not None else (2,)
    interleaved = planned(
        (Policy.make("interleaved", stride) for stride in strides), workload, machine
    )
    fixed = map(Policy.make, ("zero-offload", "pipelined"))
    candidates = [
        *planned(fixed, workload, machine),
        fastest(filter(may_fit, interleaved)),
        split,
    ]
    if workload.gpu_free is None and not fits_memory(best, machine):
        # Where the host is too small for the best policy, a split may fit: what the
        # device has free is not known.
        splits = _static_splits(workload, machine)
        candidates.append(
            fastest(steps for steps in splits if fits_memory(steps, machine))
        )
    # A split may be zero-offload, and the best policy one of these.
    by_policy = {steps.plan.policy: steps for steps in candidates if steps is not None}
    others = [
        steps
        for policy, steps in by_policy.items()
        if policy != best.plan.policy and may_fit(steps)
    ]
    return sorted(others, key=_RATING)


def fits_memory(steps: Steps, machine: Machine) -> bool:
    """Return whether a policy fits device and host, as far as that is known."""
    return memory_excess(steps.valid, machine) is None
