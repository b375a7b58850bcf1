"""What policies gain on machines that were fitted on published runs."""

from __future__ import annotations

from dataclasses import replace

from published import Job, ran
from tables import table

from ebbtide.interleave.model.workload import Workload
from ebbtide.interleave.replay.ablation import explain
from ebbtide.interleave.simulation.bound import bound
from ebbtide.machines.machine import Machine

GB = 1e9
# Where it is not known what is free on the device, or all of it is: the least that is taken to be.
ASSUMED_FREE = (5 * GB, 10 * GB, 20 * GB)


def speed_up(job: Job) -> None:
    """The published one, where everything is offloaded: measured, and simulated for one job, the static run's."""
    measured = [job.blocking[job.static], job.runs[job.static], job.runs[job.interleaved()]]
    policies = [run.sample.policy for run in measured]
    workload = job.runs[job.static].sample.workload
    box = job.machine(job.runs, job.blocking)
    elsewhere = [name for name in job.runs if name not in (job.static, job.interleaved())]
    apart = job.machine(elsewhere, [name for name in job.blocking if name != job.static])
    columns = [[(run.iteration_s, run.sample.update_s) for run in measured]]
    for machine in (apart, box):
        schedules = [ran(policy, workload, machine) for policy in policies]
        columns.append([(schedule.iteration_s, schedule.update_s) for schedule in schedules])
    rows = [
        [f"iteration, s: `{policy}`", *(f"{column[at][0]:.3f}" for column in columns)]
        for at, policy in enumerate(policies)
    ]
    for title, before, which in (
        ("iteration, asynchronous gradients", 0, 0),
        ("iteration, interleaving", 1, 0),
        ("update, interleaving", 1, 1),
    ):
        rows.append([title, *(f"{column[before][which] / column[before + 1][which]:.2f}x" for column in columns)])
    table(["", "measured", "simulated, fitted on the other ratios alone", "simulated, fitted on all runs"], rows)
    rows = [
        [step.mechanism, f"`{step.policy}`", f"{step.iteration_ms / 1e3:.3f}", f"{step.gain_ms / 1e3:.3f}"]
        for step in explain(workload, box)
    ]
    table(["mechanism, added to those above", "policy", "iteration, s", "gain, s"], rows)


def lowered(workload: Workload, least: float, known: bool) -> Workload:
    """Of the device the rest taken, by a larger model or batch: its line with this as its least where it is known, else
    so much at all times."""
    line = workload.gpu_free if known else None
    if line is None:
        return replace(workload, gpu_free=((0.0, least),))
    less = min(size for _, size in line) - least
    return replace(workload, gpu_free=tuple((at, size - less) for at, size in line))


def gain_row(what: str, workload: Workload, machine: Machine) -> list[str]:
    before, ours = (ran(policy, workload, machine) for policy in ("interleaved:2", "adaptive"))
    least = bound(workload, machine)
    line = [size / GB for _, size in workload.gpu_free or ()]
    return [
        what,
        f"{min(line):.1f} to {max(line):.1f}",
        f"{before.update_s:.3f}" + ("" if before.fits_device(None) else " (does not fit)"),
        f"{ours.update_s:.3f}",
        f"{before.iteration_s / ours.iteration_s:.2f}x",
        f"{max(ours.exposed_s, 1e-3) / max(least.exposed_whole_s, 1e-3):.3f}",
        ours.plan.remark or "",
    ]


def gains(job: Job) -> None:
    static = job.runs[job.static].sample.workload
    machine = job.machine(job.runs, job.blocking)
    rows = []
    if job.free_known:
        rows += [gain_row(f"{run}, as it is", found.sample.workload, machine) for run, found in job.runs.items()]
    for least in ASSUMED_FREE:
        workload = lowered(static, least, job.free_known)
        rows.append(gain_row(f"{job.static}, {least / GB:.0f} GB assumed", workload, machine))
    head = "workload | free, GB | update, s: `interleaved:2` | `adaptive` | iteration, gain | exposed / bound | plan"
    table(head.split(" | "), rows)
