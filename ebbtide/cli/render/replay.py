"""Prints predicted iterations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ebbtide.cli.printing import echo
from ebbtide.cli.render.tables import print_table
from ebbtide.interleave.model.overlap import NO_OVERLAP
from ebbtide.machines.accuracy import accuracy_of
from ebbtide.units import bytes_text, ms_text

if TYPE_CHECKING:
    from ebbtide.interleave.replay.ablation import AblationStep
    from ebbtide.interleave.replay.results import Replay
    from ebbtide.machines.machine import Machine


def print_replay(replayed: Replay, baseline: str) -> None:
    """Print the iteration of each policy and the lower bound; `baseline`: policy that speed-ups are relative to."""
    job, bound = replayed.workload, replayed.overlap_bound
    params = f"{job.params / 1e9:.3g} G parameters per rank in {len(job.subgroups):,} subgroups"
    echo(f"{job.name} on {replayed.machine.name}: {params}")
    for note in job.notes:
        echo(f"note: {note}")
    some_inexact = not all(result.exact for result in replayed.results)
    baseline_ms = next(result.iteration_ms for result in replayed.results if result.policy == baseline)
    rows = [
        [
            result.policy,
            ms_text(result.iteration_ms),
            f"{baseline_ms / result.iteration_ms:.2f}x" if result.iteration_ms else "-",
            ms_text(result.backward_ms),
            ms_text(result.update_ms),
            ms_text(result.exposed_ms),
            result.limited_by,
            bytes_text(result.peak_device_bytes),
            {True: "yes", False: "no", None: "not known"}[result.fits],
            *(["yes" if result.exact else "no"] if some_inexact else []),
        ]
        for result in replayed.results
    ]
    bound_ms = bound.iteration_s * 1e3
    speed_up = f"{baseline_ms / bound_ms:.2f}x" if bound_ms else "-"
    overlap = "" if replayed.overlap == NO_OVERLAP else f", overlap={replayed.overlap.name}"
    blank = [""] * (4 if some_inexact else 3)
    rows.append([f"bound{overlap}", ms_text(bound_ms), speed_up, "", "", ms_text(bound.exposed_s * 1e3), *blank])
    times = ["iteration", "speed-up", "backward", "update", "exposed"]
    columns = ["policy", *times, "update limited by", "device memory", "fits", *(["exact"] if some_inexact else [])]
    print_table(f"One iteration under each policy (speed-up over {baseline})", columns, rows)
    for result, schedule in zip(replayed.results, replayed.schedules, strict=True):
        if schedule.plan.remark:
            echo(f"{result.policy}: {schedule.plan.remark}")
        if result.note:
            echo(f"{result.policy} is not exact: {result.note}")
    _print_speculation(replayed)
    _print_remainders(replayed)
    _print_storage(replayed)
    for name, reason in replayed.skipped.items():
        echo(f"left out: {name} ({reason})")


def _print_speculation(replayed: Replay) -> None:
    """Print what is assumed of speculative updates, if any policy has them."""
    if not any(result.speculated_subgroups for result in replayed.results):
        return
    clipped = f"{100 * replayed.workload.clip_active_share:.3g} % of the steps are clipped (clip_active_share)"
    rate = ""
    if any(schedule.plan.updated_beside for schedule in replayed.schedules):
        origin = "measured" if replayed.machine.cpu_out_of_place_share is not None else "assumed, not measured here"
        rate = f"; they run at {replayed.machine.out_of_place_share:.3g} of the CPU's rate ({origin})"
    echo(f"speculative updates: {clipped}{rate}")


def _print_remainders(replayed: Replay) -> None:
    """Print at which rate masters as remainders are updated, if the workload has them."""
    if replayed.workload.master != "remainder":
        return
    origin = "measured" if replayed.machine.cpu_remainder_ratio is not None else "by bytes, not measured here"
    ratio = f"{replayed.machine.remainder_ratio:.3g} times the CPU's rate with fp32 masters"
    echo(f"masters as remainders: updates on the CPU run at {ratio} ({origin})")


def _print_storage(replayed: Replay) -> None:
    """Print what each policy reads from and writes to storage, and how soon that wears drives out."""
    paths = replayed.machine.storage
    for result in replayed.results:
        if not result.storage_written_bytes:
            continue
        per_day = result.storage_written_bytes_per_day
        parts = [
            f"{result.policy}: reads {bytes_text(result.storage_read_bytes)} from storage and writes "
            f"{bytes_text(result.storage_written_bytes)} per step, {per_day / 1e12:,.4g} TB written per day of training"
        ]
        if all(path.bytes for path in paths):
            capacity = sum(path.bytes or 0.0 for path in paths)
            parts.append(f"{per_day / capacity:,.3g} drive writes per day of the free space")
        if all(path.rated_write_bytes for path in paths):
            rated = sum(path.rated_write_bytes or 0.0 for path in paths)
            parts.append(f"the rated {rated / 1e12:,.4g} TB last {rated / per_day:,.3g} days")
        else:
            parts.append(f"1,000 TB of rated endurance (TBW) last {1e15 / per_day:,.3g} days")
        echo("; ".join(parts))


def print_accuracy(machine: Machine) -> None:
    """Print how many ranks the rates of a machine are for, and how accurate predictions from it are known to be."""
    if machine.box is not None:
        ranks = machine.box.ranks
        echo(f"rates: of one rank while {ranks} {'rank updates' if ranks == 1 else 'ranks update'} on its host")
    echo(f"accuracy: {accuracy_of(machine).text()}")


def print_ablation(steps: Sequence[AblationStep]) -> None:
    """Print the gain of each mechanism."""
    rows = [[step.mechanism, step.policy, ms_text(step.iteration_ms), ms_text(step.gain_ms)] for step in steps]
    print_table("Each mechanism, added to those above it", ["mechanism", "policy", "iteration", "gain"], rows)
