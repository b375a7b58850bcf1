"""Replays the job of a trace."""

from collections.abc import Sequence

from ebbtide.interleave.policies import Policy
from ebbtide.interleave.replay import inputs
from ebbtide.interleave.replay.recorded_job import recorded_job
from ebbtide.interleave.replay.replay import Replay, replay
from ebbtide.machines.catalog import MachineArgument
from ebbtide.profiler.trace import Trace
from ebbtide.units import ByteCount


def replay_trace(
    trace: Trace,
    machine: MachineArgument | None = None,
    policies: Sequence[Policy | str] | Policy | str | None = None,
    free_bytes: ByteCount | None = None,
    host_free_bytes: ByteCount | None = None,
) -> Replay:
    """Replay the job of a trace under some policies, as `ebbtide replay` does.

    By default it is on its own card's machine. Raises WorkloadError where parameters or
    iterations were not recorded, else as `replay`.
    """
    policies = [policies] if isinstance(policies, Policy | str) else policies or ()
    rates = inputs.share_box(
        inputs.resolve_machine(machine or inputs.own_preset(trace), trace), None, trace
    )
    workload = inputs.resolve_workload(
        trace, None, None, free_bytes, host_free_bytes, policies
    )
    workload = inputs.note_other_machine(workload, rates, trace, free_bytes is not None)
    return replay(workload, rates, policies, recorded_job(trace))
