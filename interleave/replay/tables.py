"""The tables of replays."""

from collections.abc import Iterator, Sequence
from operator import itemgetter

from ebbtide.analysis.tables.table import Table, View, ms, size, text
from ebbtide.interleave.model.operations import NO_OVERLAP
from ebbtide.interleave.replay.replay import AblationStep, Replay
from ebbtide.machines.accuracy import accuracy_of, updates_text
from ebbtide.machines.machine import Machine, unified_memory_text
from ebbtide.units import bytes_text, count_text, counted

# From this share on host memory decides what fits.
_BINDING_SHARE = 0.75
_PLACES = (
    "resident: on the device; parked: there while it is free; streamed: in and out"
)
FITS_TEXTS = {True: "yes", False: "no", None: "not known"}


def replay_view(replayed: Replay, baseline: str, verbose: bool) -> View:
    """Return the iteration of each policy and the lower bound.

    `baseline`: policy that speed-ups are relative to; `verbose`: also where the plans
    keep and update the state.
    """
    job = replayed.workload
    params = (
        f"{count_text(job.params)} parameters per rank in "
        f"{counted(len(job.subgroups), 'subgroup')}"
    )
    yield f"{job.name} on {replayed.machine.name}: {params}"
    notes = (*job.notes, unified_memory_text(replayed.machine))
    yield from (f"note: {note}" for note in notes if note)
    yield _policies(replayed, baseline)
    yield from replayed.layer_lines()
    yield from replayed.memory_lines()
    yield from replayed.simplest_lines()
    for one in _parts(replayed):
        for result, schedule in zip(one.results, one.schedules, strict=True):
            if verbose and schedule.plan.remark:
                yield f"{result.policy}: {schedule.plan.remark}"
            if result.note:
                yield (
                    f"{result.policy}{'' if result.exact else ' is not exact'}: "
                    f"{result.note}"
                )
    if verbose and any(
        "parked" in schedule.plan.remark for schedule in replayed.schedules
    ):
        yield f"  {_PLACES}"
    yield from _speculation(replayed)
    yield from _remainders(replayed)
    yield from _storage(replayed)
    yield from (
        f"left out: {name} ({reason})" for name, reason in replayed.skipped.items()
    )


def _parts(replayed: Replay) -> list[Replay]:
    return [replayed] if replayed.late is None else [replayed, replayed.late]


def _policies(replayed: Replay, baseline: str) -> Table:
    """Return the table of all policies, the bound below them."""
    baseline_ms = next(
        result.iteration_ms for result in replayed.results if result.policy == baseline
    )
    rows = []
    for one in _parts(replayed):
        rows += [
            vars(result) | {"fits": FITS_TEXTS[result.fits]} for result in one.results
        ]
        overlap = "" if one.overlap == NO_OVERLAP else f", overlap={one.overlap.name}"
        rows.append(
            dict.fromkeys(rows[0])
            | {
                "policy": f"bound{overlap}",
                "iteration_ms": one.overlap_bound.iteration_s * 1e3,
                "exposed_ms": one.overlap_bound.exposed_s * 1e3,
                "exact": True,
            }
        )
    columns = [
        text("policy", itemgetter("policy")),
        ms("iteration", itemgetter("iteration_ms")),
        text(
            "speed-up",
            lambda row: (
                f"{baseline_ms / row['iteration_ms']:.2f}x"
                if row["iteration_ms"]
                else None
            ),
        ),
        text("fits", itemgetter("fits")),
        size("device", itemgetter("peak_device_bytes")),
        *(ms(name, itemgetter(f"{name}_ms")) for name in ("update", "exposed")),
        text("limited by", itemgetter("limited_by")),
        ms("backward", itemgetter("backward_ms")),
    ]
    if not all(row["exact"] for row in rows):
        columns.insert(4, text("exact", lambda row: "yes" if row["exact"] else "no"))
    title = f"One iteration under each policy (speed-up over {baseline})"
    exact = "" if all(row["exact"] for row in rows) else "exact "
    but = ", but for the job's own optimizer" * any(
        schedule.workload.own_update_s for schedule in replayed.schedules
    )
    note = (
        f"No {exact}policy that fits is faster than the bound of its overlap (`bound`: "
        f"none){but}."
    )
    return Table("results", title, columns, rows, note, max_rows=None)


def _speculation(replayed: Replay) -> Iterator[str]:
    """Yield what is assumed of speculative updates, if any policy has them."""
    if not any(result.speculated_subgroups for result in replayed.results):
        return
    clipped = (
        f"{100 * replayed.workload.clip_active_share:.3g} % of the steps are clipped "
        "(clip_active_share)"
    )
    rate = ""
    if any(schedule.plan.updated_beside for schedule in replayed.schedules):
        origin = (
            "measured"
            if replayed.machine.cpu_out_of_place_share is not None
            else "assumed, not measured here"
        )
        rate = (
            f"; they run at {replayed.machine.out_of_place_share:.3g} of the CPU's "
            f"rate ({origin})"
        )
    yield (f"speculative updates: {clipped}{rate}")


def _remainders(replayed: Replay) -> Iterator[str]:
    """Yield the update rate of remainder masters, if the workload has them."""
    if replayed.workload.master != "remainder":
        return
    origin = (
        "measured"
        if replayed.machine.cpu_remainder_ratio is not None
        else "by bytes, not measured here"
    )
    ratio = (
        f"{replayed.machine.remainder_ratio:.3g} times the CPU's rate with fp32 masters"
    )
    yield (f"masters as remainders: updates on the CPU run at {ratio} ({origin})")


def _storage(replayed: Replay) -> Iterator[str]:
    """Yield the storage traffic of each policy, and how soon it wears drives out.

    Traffic is what it reads and writes.
    """
    paths = replayed.machine.storage
    for result in replayed.results:
        if not result.storage_written_bytes:
            continue
        per_day = result.storage_written_bytes_per_day
        parts = [
            f"{result.policy}: reads {bytes_text(result.storage_read_bytes)} from "
            "storage and writes "
            f"{bytes_text(result.storage_written_bytes)} per step, "
            f"{per_day / 1e12:,.4g} TB written per day of training"
        ]
        if all(path.bytes for path in paths):
            capacity = sum(path.bytes or 0.0 for path in paths)
            parts.append(
                f"{per_day / capacity:,.3g} drive writes per day of the free space"
            )
        if all(path.rated_write_bytes for path in paths):
            rated = sum(path.rated_write_bytes or 0.0 for path in paths)
            parts.append(
                f"the rated {rated / 1e12:,.4g} TB last {rated / per_day:,.3g} days"
            )
        else:
            parts.append(
                f"1,000 TB of rated endurance (TBW) last {1e15 / per_day:,.3g} days"
            )
        yield "; ".join(parts)


def accuracy_lines(machine: Machine) -> Iterator[str]:
    """Yield how many ranks a machine's rates are for, and the known accuracy of
    predictions from the machine."""
    if machine.box is not None:
        ranks = machine.box.ranks
        yield (
            f"rates: of one rank while {ranks} "
            f"{'rank updates' if ranks == 1 else 'ranks update'} on its host"
        )
    yield f"accuracy: {accuracy_of(machine).text()}; {updates_text()}"


def gains_table(steps: Sequence[AblationStep]) -> Table:
    """Return the gain of each mechanism."""
    columns = (
        text("mechanism", "mechanism"),
        ms("gain", "gain_ms"),
        ms("iteration", "iteration_ms"),
    )
    title = "Each mechanism, added to those above it"
    return Table("explain", title, (*columns, text("policy", "policy")), steps)
