"""Replays the job of a trace."""

from collections.abc import Sequence
from pathlib import Path

from ebbtide.interleave.replay import inputs
from ebbtide.interleave.replay.recorded_job import recorded_job
from ebbtide.interleave.replay.replay import Replay, replay
from ebbtide.interleave.replay.workload_from_trace import workload_of
from ebbtide.machines.machine import Machine
from ebbtide.profiler.trace import Trace


def replay_trace(
    trace: Trace, machine: str | Path | Machine | None = None, policies: Sequence[str] | str | None = None
) -> Replay:
    """Replay the job of a trace under some policies, as `ebbtide replay` does; by default on its own card's machine.
    Raises WorkloadError where parameters or iterations were not recorded, else as `replay`."""
    policies = [policies] if isinstance(policies, str) else policies
    rates = inputs.share_box(inputs.resolve_machine(machine or inputs.own_preset(trace), trace), None, trace)
    return replay(inputs.note_other_machine(workload_of(trace), rates, trace), rates, policies, recorded_job(trace))
