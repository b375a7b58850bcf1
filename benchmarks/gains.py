"""Gains of policies on machines that were fitted to published runs."""

from __future__ import annotations

from dataclasses import replace

from published import PublishedJob, simulated
from tables import table

from ebbtide.interleave.model.workload import Workload
from ebbtide.interleave.replay.replay import explain
from ebbtide.interleave.simulation.bound import bound
from ebbtide.machines.machine import Machine

GB = 1e9
# The assumed minimum of free device memory, if it is not known or all of the device is
# free.
ASSUMED_FREE = (5 * GB, 10 * GB, 20 * GB)


def speed_up(job: PublishedJob) -> None:
    """Print the published speed-up with everything offloaded: measured, and simulated
    for one job, the static run's."""
    measured = [
        job.blocking[job.static],
        job.runs[job.static],
        job.runs[job.interleaved()],
    ]
    policies = [run.sample.policy for run in measured]
    workload = job.runs[job.static].sample.workload
    on_all_runs = job.machine(job.runs, job.blocking)
    other_ratios = [
        name for name in job.runs if name not in (job.static, job.interleaved())
    ]
    on_other_ratios = job.machine(
        other_ratios, [name for name in job.blocking if name != job.static]
    )
    columns = [[(run.iteration_s, run.sample.update_s) for run in measured]]
    for machine in (on_other_ratios, on_all_runs):
        schedules = [simulated(policy, workload, machine) for policy in policies]
        columns.append(
            [(schedule.iteration_s, schedule.update_s) for schedule in schedules]
        )
    rows = [
        [
            f"iteration, s: `{policy}`",
            *(f"{column[index][0]:.3f}" for column in columns),
        ]
        for index, policy in enumerate(policies)
    ]
    for title, before, which in (
        ("iteration, asynchronous gradients", 0, 0),
        ("iteration, interleaving", 1, 0),
        ("update, interleaving", 1, 1),
    ):
        rows.append(
            [
                title,
                *(
                    f"{column[before][which] / column[before + 1][which]:.2f}x"
                    for column in columns
                ),
            ]
        )
    table(
        [
            "",
            "measured",
            "simulated, fitted on the other ratios alone",
            "simulated, fitted on all runs",
        ],
        rows,
    )
    rows = [
        [
            step.mechanism,
            f"`{step.policy}`",
            f"{step.iteration_ms / 1e3:.3f}",
            f"{step.gain_ms / 1e3:.3f}",
        ]
        for step in explain(workload, on_all_runs)
    ]
    table(
        ["mechanism, added to those above", "policy", "iteration, s", "gain, s"], rows
    )


def with_less_free(workload: Workload, min_free: float, free_known: bool) -> Workload:
    """Return the workload with less free device memory, as a larger model or batch
    would leave.

    If the free memory is known, it is lowered until its minimum is `min_free`;
    otherwise it is `min_free` at all times.
    """
    steps = workload.gpu_free if free_known else None
    if steps is None:
        return replace(workload, gpu_free=((0.0, min_free),))
    reduction = min(size for _, size in steps) - min_free
    return replace(
        workload, gpu_free=tuple((time, size - reduction) for time, size in steps)
    )


def gain_row(title: str, workload: Workload, machine: Machine) -> list[str]:
    interleaved, adaptive = (
        simulated(policy, workload, machine) for policy in ("interleaved:2", "adaptive")
    )
    limits = bound(workload, machine)
    free_gb = [size / GB for _, size in workload.gpu_free or ()]
    return [
        title,
        f"{min(free_gb):.1f} to {max(free_gb):.1f}",
        f"{interleaved.update_s:.3f}"
        + ("" if interleaved.fits_device(None) else " (does not fit)"),
        f"{adaptive.update_s:.3f}",
        f"{interleaved.iteration_s / adaptive.iteration_s:.2f}x",
        f"{max(adaptive.exposed_s, 1e-3) / max(limits.exposed_whole_s, 1e-3):.3f}",
        adaptive.plan.remark or "",
    ]


def gains(job: PublishedJob) -> None:
    static = job.runs[job.static].sample.workload
    machine = job.machine(job.runs, job.blocking)
    rows = []
    if job.free_known:
        rows += [
            gain_row(f"{name}, as it is", run.sample.workload, machine)
            for name, run in job.runs.items()
        ]
    for min_free in ASSUMED_FREE:
        workload = with_less_free(static, min_free, job.free_known)
        rows.append(
            gain_row(f"{job.static}, {min_free / GB:.0f} GB assumed", workload, machine)
        )
    head = (
        "workload | free, GB | update, s: `interleaved:2` | `adaptive` | iteration, "
        "gain | exposed / bound | plan"
    )
    table(head.split(" | "), rows)
