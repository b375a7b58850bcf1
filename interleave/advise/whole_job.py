"""The plan of all that may move of a job on a machine: weights and activations of layers, and the optimizer's state."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from ebbtide.interleave.advise.job.layers import layered_workload
from ebbtide.interleave.advise.job.training_job import TrainingJob
from ebbtide.interleave.advise.replay import WHOLE_JOB, PolicyResult, replay
from ebbtide.machines.machine import Machine
from ebbtide.units import ms_text


@dataclass(frozen=True)
class WholeJobPlan:
    """The plan of a job on a machine. Tokens are those of the GPU; `bound_ms` is the shortest iteration of any plan."""

    machine: str
    result: PolicyResult
    bound_ms: float
    tokens_per_s: float | None

    def as_json(self) -> dict[str, Any]:
        """Return an object of `whole_job` of `ebbtide plan --json`."""
        return asdict(self)

    @property
    def text(self) -> str:
        """The plan in a line."""
        if not self.result.fits:
            return f"{self.machine}, also with weights and activations that move: does not fit"
        speed = "" if self.tokens_per_s is None else f", {self.tokens_per_s:,.0f} tokens/s"
        return f"{self.machine}, {self.result.layers_text}: {ms_text(self.result.iteration_ms)}{speed}"


def plan_whole_job(job: TrainingJob, machine: Machine) -> WholeJobPlan:
    """Return the plan of all that may move of a job of known shape on a machine."""
    replayed = replay(layered_workload(job, machine), machine, [WHOLE_JOB])
    (result,) = replayed.results
    tokens = None if job.tokens is None else job.tokens / (result.iteration_ms / 1e3)
    return WholeJobPlan(machine.name, result, replayed.bound.iteration_s * 1e3, tokens)


def workload_file(job: TrainingJob, machine: Machine) -> str:
    """Return the text of a workload file with the layers of a job of known shape on a machine."""
    return json.dumps(layered_workload(job, machine).as_json(), indent=1) + "\n"
