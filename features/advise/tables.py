"""The tables of plans."""

from collections.abc import Iterator, Sequence
from math import inf

from ebbtide.analysis.tables.table import Table, View, ms, text
from ebbtide.features.advise.changes import SYSTEM_SHARE
from ebbtide.features.advise.job.training_job import TrainingJob
from ebbtide.features.advise.levers.keys import TITLES, settings_text
from ebbtide.features.advise.levers.search import JobChange
from ebbtide.features.advise.machine_plan import JobPlans, MachinePlan
from ebbtide.features.advise.ranges import Range
from ebbtide.interleave.replay.inputs import NETWORK_NOTE
from ebbtide.interleave.replay.tables import FITS_TEXTS
from ebbtide.machines.accuracy import DATA_SHEETS
from ebbtide.machines.machine import SHARED_MEMORY, Machine
from ebbtide.units import NO_VALUE, count_text, counted

# From this share on host memory decides what fits.
_BINDING_SHARE = 0.75
# Ranges of iterations are in ms where the highest of the fastest is below this.
_MS_BELOW = 100.0
_PLACES = (
    "resident: on the device; parked: there while it is free; streamed: in and out"
)


def plan_view(answer: JobPlans, max_plans: int | None = None) -> View:
    """Return the answer for a machine, with remarks on it, the changes that help there,
    and the table of the first plans."""
    job, plans, here = answer.job, answer.ordered(), answer.here
    yield from _answer(job, plans, here)
    remarks = [*answer.remarks]
    if any(NETWORK_NOTE in plan.notes for plan in plans[:max_plans]):
        remarks.append(NETWORK_NOTE)
    if len(plans) == 1:
        remarks += [note for note in plans[0].notes if SHARED_MEMORY in note]
    remarks += [*_smallest_machine(plans, answer.smallest), _job_text(job)]
    remarks += [f"note: {note}" for note in job.notes]
    yield from (f"  {remark}" for remark in remarks)
    if here is not None and len(plans) == 1:
        yield _changes_table(here)
    yield _plans_table(plans, max_plans)


def _smallest_machine(
    plans: Sequence[MachinePlan], smallest: Machine | None
) -> Iterator[str]:
    """Yield the smallest machine that a job fits, as it is or with changes."""
    if smallest is not None:
        size = gib_text(smallest.gpu_memory_bytes)
        yield f"smallest machine that fits it as it is: {smallest.name} ({size} GiB)"
        return
    with_change = [plan for plan in plans if plan.change and not plan.fits]
    if len(plans) > 1 and with_change:
        plan = min(with_change, key=_ranks_and_memory)
        yield (
            f"smallest machine that fits it with changes: {plan.machine} "
            f"({fits_text(plan)})"
        )


def _ranks_and_memory(plan: MachinePlan) -> tuple[int, float]:
    """Return the ranks that are changed to, and the memory of the device."""
    return (plan.change or {}).get("ranks", 0), plan.device_capacity_bytes or 0.0


def _job_text(job: TrainingJob) -> str:
    """Return the parameters, the ranks and the batch of a job."""
    settings = job.settings
    trained = f"{count_text(job.workload.params)} parameters a rank"
    if job.facts.has_adapters:
        total = count_text(job.facts.total_params)
        trained = f"{count_text(job.workload.params)} trained of {total} parameters"
    parts = [trained, counted(settings.ranks, "rank")]
    if settings.micro_batch is not None:
        steps = f" x {job.micro_steps}" if job.micro_steps > 1 else ""
        parts.append(f"micro-batch {settings.micro_batch}{steps}")
    if settings.checkpointing:
        parts.append("checkpointing")
    if job.tokens is not None:
        parts.append(f"{job.tokens:,.0f} tokens an iteration")
    return ", ".join(parts)


def _plans_table(plans: Sequence[MachinePlan], max_plans: int | None) -> Table:
    """Return the table of plans.

    Host memory stands beside device memory where it decides what fits.
    """
    host = text("host GiB", lambda plan: _of(plan.host_bytes, plan.host_capacity_bytes))
    host_binds = any(
        (plan.host_bytes or 0) > _BINDING_SHARE * (plan.host_capacity_bytes or inf)
        for plan in plans[:max_plans]
    )
    device = text(
        "device GiB", lambda plan: _of(plan.device_bytes, plan.device_capacity_bytes)
    )
    fastest_ms = min(
        (plan.iteration.high for plan in plans if plan.iteration), default=inf
    )
    unit, unit_ms = ("ms", 1.0) if fastest_ms < _MS_BELOW else ("s", 1e3)
    columns = [
        text("machine", "machine"),
        text("needs", fits_text),
        device,
        text(f"{unit}/iteration", lambda plan: _range(plan, plan.iteration, unit_ms)),
        text("tokens/s", lambda plan: _range(plan, plan.tokens_per_s)),
        text("cost/1e9 tokens", lambda plan: _range(plan, plan.cost)),
        text("policy", "policy"),
        text("limited by", "limited_by"),
    ]
    columns.insert(3 if host_binds else 7, host)
    title = "The fastest plan for each machine"
    if any(plan.change for plan in plans):
        title += ", with ebbtide's offload where it does not fit"
    note = _plans_note(plans, host_binds)
    return Table("plans", title, columns, plans, note, "-v", max_plans)


def _plans_note(plans: Sequence[MachinePlan], host_binds: bool) -> str:
    """Return what the figures of the table are of, and how far they hold."""
    evidence = plans[0].evidence
    basis = "by the uncertainty of rates" if evidence is None else evidence.text
    if evidence is not None and len(plans) > 1:
        basis = f"{plans[0].machine}: {basis}"
    note = f"80 % range; {basis}. Memory is that of a rank."
    if len(plans) > 1 and any(plan.is_guess for plan in plans):
        note += " ?: a guess, fewer than 3 projects are like it."
    if host_binds:
        note += f" Of host memory {100 * SYSTEM_SHARE:.0f} % stays for the system."
    on_host = sorted({plan.ranks_per_host for plan in plans if plan.ranks_per_host})
    if on_host:
        numbers = f"{on_host[0]} to " if len(on_host) > 1 else ""
        numbers += counted(on_host[-1], "rank")
        note += f" Rates are those with {numbers} on a host."
    if any(DATA_SHEETS in plan.accuracy for plan in plans):
        note += " Rates of data sheets are not validated."
    return note


def _answer(
    job: TrainingJob, plans: Sequence[MachinePlan], here: MachinePlan | None
) -> Iterator[str]:
    """Yield whether the job fits here, and the settings of the cheapest changes that
    make it fit."""
    if here is not None and here.exceeds_host:
        needed, capacity = (
            gib_text(size, 1)
            for size in (job.host_peak_bytes, here.host_capacity_bytes)
        )
        yield (
            f"{job.workload.name}: does not fit the host of {here.machine} ({needed} "
            f"of {capacity} GiB of a rank, while it loads or trains)"
        )
        return
    if here is None or here.fits or here.needed_bytes is None:
        yield f"{job.workload.name}: {_where_it_fits(plans)}"
        return
    needed, capacity = (
        gib_text(size, 1) for size in (here.needed_bytes, here.device_capacity_bytes)
    )
    yield (
        f"{job.workload.name}: does not fit on {here.machine} ({needed} of {capacity} "
        "GiB)"
    )
    if here.cheapest is None:
        yield "  no change of its settings makes it fit there"
        return
    change = here.cheapest
    if job.settings.ranks == 1 < change.ranks:
        yield f"  not on one card, whatever else is changed: on {change.ranks}"
    kind = change.action["kind"]
    framework = TITLES[kind] + " with ebbtide's optimizer" * (
        kind == "torch" and "offload" in change.levers
    )
    size = gib_text(change.device_bytes, 1)
    yield f"  cheapest change that fits ({framework}, {size} GiB): {change.text}"
    yield f"  {settings_text(change.action['settings'])}"


def _changes_table(plan: MachinePlan) -> Table:
    """Return what each change of settings does alone; LoRA also with checkpointing."""
    columns = (
        text("change", "text"),
        text("device GiB", lambda change: gib_text(change.device_bytes, 1)),
        text("fits", _change_fits),
        text("costs", lambda change: "; ".join(change.costs)),
    )
    return Table(
        "changes",
        "Each change alone; those that train other weights are last",
        columns,
        plan.alone,
    )


def _change_fits(change: JobChange) -> str:
    """Return whether a job fits with a change, and whether the host is too small."""
    answer = FITS_TEXTS[change.fits]
    return f"{answer} (host)" if change.reason and "host" in change.reason else answer


def gib_text(size: float | None, digits: int = 0) -> str:
    """Return a size in GiB, without the unit."""
    return NO_VALUE if size is None else f"{size / 2**30:,.{digits}f}"


def digits_of(value: float) -> int:
    """Return the digits behind the point with which a figure has three."""
    return 0 if value >= 100 else 1 if value >= 10 else 2


def _where_it_fits(plans: Sequence[MachinePlan]) -> str:
    fitting = sum(plan.fits for plan in plans)
    if fitting == len(plans):
        place = plans[0].machine if len(plans) == 1 else "each machine"
        return f"fits on {place} as it is"
    if fitting:
        return f"fits as it is on {fitting} of {len(plans)} machines"
    can_change = any(plan.change is not None for plan in plans)
    if can_change:
        return "fits nowhere as it is"
    return "does not fit, whatever is changed"


def policies_table(plan: MachinePlan) -> Table:
    """Return the iteration of all policies that fit, and its range."""
    columns = (
        text("policy", "policy"),
        ms("iteration", "ms.likely"),
        ms("from", "ms.low"),
        ms("to", "ms.high"),
    )
    return Table(
        "policies",
        f"Other policies that fit{': ranges are guesses' * plan.is_guess}",
        columns,
        plan.policies if len(plan.policies) > 1 else (),
    )


def fits_text(plan: MachinePlan) -> str:
    """Return the change that makes a plan's job fit."""
    if plan.change is not None:
        return ", ".join(plan.changes_text())
    return "nothing" if plan.fits else "does not fit"


def _range(plan: MachinePlan, span: Range | None, scale: float = 1.0) -> str | None:
    """Return a range with three digits at its high end, marked if it is a guess."""
    if span is None:
        return None
    high = span.high / scale
    digits = digits_of(high)
    mark = "?" * plan.is_guess
    return f"{span.low / scale:,.{digits}f}-{high:,.{digits}f}{mark}"


def _of(size: float | None, capacity: float | None) -> str | None:
    return None if size is None else f"{gib_text(size)}/{gib_text(capacity)}"
