"""The plan of all that may move of a job on a machine: weights and activations of layers, and the optimizer's state."""

from dataclasses import asdict, dataclass
from typing import Any

from ebbtide.interleave.advise.job.inputs import note_other_machine
from ebbtide.interleave.advise.job.layers import layered_workload
from ebbtide.interleave.advise.job.trace_layers import with_trace_layers
from ebbtide.interleave.advise.job.training_job import TrainingJob
from ebbtide.interleave.advise.job.workload_from_trace import workload_of
from ebbtide.interleave.advise.replay import WHOLE_JOB, PolicyResult, replay
from ebbtide.interleave.model.workload import Workload
from ebbtide.machines.machine import Machine
from ebbtide.profiler.trace import Trace
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


def plan_whole_job(workload: Workload, tokens: float | None, machine: Machine) -> WholeJobPlan:
    """Return the plan of all that may move of a workload with layers on a machine; `tokens` are those of an iteration
    of the GPU."""
    replayed = replay(workload, machine, [WHOLE_JOB])
    (result,) = replayed.results
    speed = None if tokens is None else tokens / (result.iteration_ms / 1e3)
    return WholeJobPlan(machine.name, result, replayed.bound.iteration_s * 1e3, speed)


def layers_of_job(job: TrainingJob, trace: Trace | None, machine: Machine) -> Workload | None:
    """Return the workload with layers of a job: that of its trace on the trace's own machine, or of its known shape.

    None where layers are not known."""
    if trace is None:
        return layered_workload(job, machine)
    recorded = workload_of(trace)
    layered = with_trace_layers(recorded, trace)
    # On another machine other kernels take other times: a dry run for it has them.
    is_own = note_other_machine(recorded, machine, trace) == recorded
    return layered if layered.layers and is_own else None
