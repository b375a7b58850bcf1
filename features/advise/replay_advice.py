"""The recommendation of `ebbtide replay --recommend`."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

from ebbtide.cli.printing import echo_line
from ebbtide.errors import MachineError, WorkloadError
from ebbtide.features.advise.changes import leave_system_share
from ebbtide.features.advise.machine_plan import place_as_it_is
from ebbtide.features.advise.printing import print_recommendation, print_setups
from ebbtide.features.advise.recommendation import (
    Framework,
    Recommendation,
    recommend,
)
from ebbtide.interleave.model.workload import Workload
from ebbtide.interleave.replay.recorded_job import RecordedJob
from ebbtide.machines.machine import Machine
from ebbtide.profiler.trace import Trace

__all__ = ["print_recommendation", "print_setups"]  # For the seam.


class AdvisedJob(NamedTuple):
    """A job to advise, on a machine without the system's share of its memory."""

    workload: Workload
    machine: Machine
    settings: RecordedJob | None


def advised_job(
    job: Workload, machine: Machine, settings: RecordedJob | None
) -> AdvisedJob:
    """Return a job on the machine that a rank shares, without the system's share of
    host memory."""
    return AdvisedJob(job, leave_system_share(machine), settings)


def place_recording(
    recording: Trace,
    machine: Machine,
    ranks_per_host: int | None,
    notes: Sequence[str],
    own_notes: Sequence[str],
) -> AdvisedJob | None:
    """Return the job of a trace on another machine as `plan` places it; None if it
    cannot: its times are that one's."""
    with suppress(MachineError, WorkloadError):
        placed = place_as_it_is(recording, machine, ranks_per_host)
        first, *others = (note for note in notes if note not in own_notes)
        scaled = f"{first.partition(':')[0]}; {placed.placed.times.note}"
        workload = replace(placed.placed.workload, notes=(*own_notes, scaled, *others))
        return AdvisedJob(workload, placed.shared, placed.recorded)
    return None


def recommend_for(
    job: AdvisedJob, machine_source: str | None, baseline: str
) -> Recommendation:
    """Return the recommendation for a replayed job; `baseline` stands for its policy
    where neither that nor its iteration is known."""
    workload, machine, settings = job
    uses_deepspeed = settings is None or bool(settings.section("zero_optimization"))
    framework: Framework = "deepspeed" if uses_deepspeed else "script"
    settings = settings or RecordedJob()
    if settings.policy is not None or settings.recorded_s(machine) is not None:
        advised = recommend(workload, machine, settings, machine_source)
        return replace(advised, framework=framework)
    settings = replace(settings, policy=baseline)
    advised = recommend(workload, machine, settings, machine_source)
    return replace(advised, framework=framework, baseline=baseline)


def print_next(advised: Recommendation, recording: Trace | None) -> None:
    """Print the command that finds changes, where the recommendation does not fit."""
    if advised.warnings and recording is not None:
        source = advised.context.machine_source
        target = f" --machine {source}" if source else ""
        echo_line(
            f"next: ebbtide plan {recording.path}{target} (the changes that make it "
            "fit)"
        )
