"""Compares policies on the user's own job: `ebbtide compare -- CMD`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ebbtide.errors import UserError
from ebbtide.features.run.comparison.comparison import JobComparison, params_of_run
from ebbtide.features.run.comparison.emulation import scaled_link
from ebbtide.features.run.comparison.equality import (
    Distance,
    distance,
    first_difference,
    reason_not_comparable,
)
from ebbtide.features.run.comparison.job_runs import JobRun, JobRuns
from ebbtide.features.run.options import LINK_BYTES_PER_S, WINDOW_STEPS, RunOptions
from ebbtide.interleave.compare.testbed import find_testbed
from ebbtide.interleave.policies import as_policy
from ebbtide.machines.catalog import find_machine

POLICIES = ("zero-offload", "static", "adaptive")
BARE, OTHER_KERNELS = "as it is", "torch's other kernels"
# Fewer leave none after the windows and the warm-up.
MIN_STEPS = WINDOW_STEPS + 3
_SUBGROUPS = 10
# Rates are measured with so many parameters at the least.
_LEAST_PARAMS = 1_000_000


def compare_job(
    words: Sequence[str],
    folder: Path,
    policies: Sequence[str] | None,
    options: RunOptions,
    link: float | None,
    machine: str | None,
    progress: Callable[[str, int, int], None],
) -> JobComparison:
    """Run a job as it is and under policies, one after the other.

    Without a GPU the device is emulated, with a link of this rate or the machine's.
    Traces and outputs are written into a folder. Raises UserError if the job fails, or
    a policy is not valid.
    """
    names = list(dict.fromkeys(policies or POLICIES))
    for name in names:
        if name != "static":
            as_policy(name).refuse_simulation_only()
    if options.steps is not None and options.steps < MIN_STEPS:
        raise UserError(
            f"--steps must be at least {MIN_STEPS}: the first {WINDOW_STEPS} show the "
            "job's windows"
        )
    total = len(names) + 2
    link_of, emulated_link = None, None
    if not torch.cuda.is_available():
        emulated_link = link or LINK_BYTES_PER_S
        if machine is not None and link is None:
            own = find_machine(machine)
            link_of, emulated_link = own.name, scaled_link(own)
        options = replace(options, link_bytes_per_s=emulated_link)
    jobs = JobRuns(words, folder, replace(options, compares=True))

    progress(BARE, 0, total)
    bare = jobs.run(BARE, policy="none")
    if not bare.logs:
        raise UserError(
            "nothing was compared: no Adam, AdamW, SGD or Muon of torch has stepped in "
            "this job"
        )
    progress(OTHER_KERNELS, 1, total)
    other = _with_other_kernels(jobs)
    jobs.options = replace(
        jobs.options, **_rates(bare, folder, options, emulated_link, machine)
    )
    runs = [bare]
    for number, name in enumerate(names):
        progress(name, number + 2, total)
        runs.append(jobs.run(name, policy=name))
    return _compared(jobs, runs, other, emulated_link, link_of)


def _with_other_kernels(jobs: JobRuns) -> JobRun | None:
    """Run the job with torch's other kernels, None if they cannot update it."""
    try:
        return jobs.run(OTHER_KERNELS, policy="none", other_kernels=True)
    except UserError:
        return None


def _rates(
    bare: JobRun,
    folder: Path,
    options: RunOptions,
    link: float | None,
    machine: str | None,
) -> dict[str, Any]:
    """Return options with the rates to plan with: of the machine that was named, on a
    GPU, or of this one, measured."""
    params = max(_LEAST_PARAMS, params_of_run(bare))
    budget = options.memory_budget or 8.0 * params
    named = find_machine(machine) if machine is not None and link is None else None
    testbed = find_testbed(params, -(-params // _SUBGROUPS), budget, link, named)
    path = folder / "machine.json"
    # The budget of each policy is its own.
    replace(testbed.machine, gpu_memory_bytes=None).save(path)
    device_rate = testbed.machine.gpu_update_params_per_s
    return {
        "machine": str(path),
        "gpu_params_per_s": device_rate if testbed.emulated else None,
    }


def _compared(
    jobs: JobRuns,
    runs: list[JobRun],
    other: JobRun | None,
    emulated_link: float | None,
    link_of: str | None,
) -> JobComparison:
    bare, *driven = runs
    reason = reason_not_comparable(runs) or _reason_of_plans(driven)
    difference = self_difference = None
    if reason is None:
        for run in driven[1:]:
            difference = first_difference(driven[0], run)
            if difference is not None:
                difference = f"{driven[0].name} and {run.name} differ in {difference}"
                again = jobs.run(f"{driven[0].name} again", policy=driven[0].name)
                self_difference = first_difference(driven[0], again)
                break
    to_bare = [distance(bare, run) for run in driven]
    return JobComparison(
        command=jobs.words,
        steps=max(bare.logs[0].values("loss", "step"), default=0) + 1,
        runs=runs,
        emulated_link=emulated_link,
        link_of=link_of,
        difference=difference,
        self_difference=self_difference,
        reason=reason,
        to_bare=Distance(
            max(one.loss for one in to_bare), max(one.params for one in to_bare)
        ),
        of_kernels=distance(bare, other) if other else None,
        is_in_place=jobs.is_in_place,
    )


def _reason_of_plans(driven: Sequence[JobRun]) -> str | None:
    """Return why equal losses would show nothing, None if plans differ."""
    for run in driven:
        if not any(end["steps"] for end in run.ends):
            reasons = {end["left"] for end in run.ends if end["left"]}
            return f"no optimizer was driven: {', '.join(sorted(reasons)) or 'none'}"
    if len(driven) > 1 and all(run.plans == driven[0].plans for run in driven):
        failures = [text for run in driven for text in run.failures]
        detail = f" ({failures[0]})" if failures else ""
        return f"all policies had the same plan{detail}: equal losses show nothing"
    return None
