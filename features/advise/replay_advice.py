"""The recommendation of `ebbtide replay --recommend`."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

from ebbtide.cli.printing import echo_line
from ebbtide.errors import MachineError, WorkloadError
from ebbtide.features.advise.changes import leave_system_share
from ebbtide.features.advise.machine_plan import place_as_it_is
from ebbtide.features.advise.printing import (
    Framework,
    print_recommendation,
    print_setups,
)
from ebbtide.features.advise.recommendation import Recommendation, recommend
from ebbtide.interleave.model.workload import Workload
from ebbtide.interleave.replay.recorded_job import RecordedJob
from ebbtide.machines.machine import Machine
from ebbtide.profiler.trace import Trace


class AdvisedJob(NamedTuple):
    """A job to give advice for: on a machine without the system's share of its
    memory."""

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


class ReplayAdvice:
    """The recommendation for a replayed job, and its screen."""

    def __init__(
        self, job: AdvisedJob, machine_name: str | None, baseline: str
    ) -> None:
        settings = job.settings or RecordedJob()
        is_known = (
            settings.policy is not None or settings.recorded_s(job.machine) is not None
        )
        if not is_known:
            settings = replace(settings, policy=baseline)
        self._job = job
        self._name = machine_name
        self._baseline = None if is_known else baseline
        self.recommendation: Recommendation = recommend(
            job.workload, job.machine, settings, machine_name
        )

    def print(self, framework: Framework | None) -> None:
        """Print the recommendation with lines for a framework, by default for the
        trace's own, else for DeepSpeed."""
        settings = self._job.settings
        is_deepspeed = settings is None or bool(settings.section("zero_optimization"))
        print_recommendation(
            self.recommendation,
            framework or ("deepspeed" if is_deepspeed else "script"),
            self._baseline,
        )

    def print_next(self, recording: Trace | None) -> None:
        """Print the command that finds changes, where the recommendation does not
        fit."""
        if self.recommendation.warnings and recording is not None:
            target = f" --machine {self._name}" if self._name else ""
            echo_line(
                f"next: ebbtide plan {recording.path}{target} (the changes that make "
                "it fit)"
            )

    def print_setups(self) -> None:
        """Print what to paste for each policy that fits."""
        print_setups(self.recommendation)
