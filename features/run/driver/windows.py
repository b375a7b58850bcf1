"""The memory that a job leaves free for state, and the policy that uses it."""

from __future__ import annotations

from ebbtide import host_limits
from ebbtide.errors import UserError
from ebbtide.features.run.driver.process import DrivenProcess
from ebbtide.interleave.engine.options import Budget
from ebbtide.interleave.engine.param_updater import ParamUpdater
from ebbtide.interleave.policies import Policy, as_policy

# Free host memory over the state's, for updates beside the old state.
_HOST_FACTOR = 2
# Of the memory of an emulated device, beside half of the state.
_EXTRA_SUBGROUPS = 3
# Shares of the subgroups that static splits keep on the host.
_SPLITS = tuple(percent / 100 for percent in range(0, 100, 10))


def state_bytes(updater: ParamUpdater) -> float:
    """Return the bytes of the whole state of an optimizer."""
    job = updater.workload
    return job.state_bytes * job.params


def free_bytes(process: DrivenProcess, updater: ParamUpdater) -> float:
    """Return the bytes that the state of an optimizer may use in all phases: its part,
    by the size of its state, of what the job leaves free at its peak."""
    total = process.options.memory_budget
    if total is None:
        total = updater.device.free_bytes()
    if total is None:
        # An emulated device has no memory of its own: half of the state fits, and three
        # subgroups.
        job = updater.workload
        params = job.params / 2 + _EXTRA_SUBGROUPS * job.subgroup_params
        return job.state_bytes * params
    return total * _share(process, updater)


def budget_by_phase(process: DrivenProcess, updater: ParamUpdater) -> Budget:
    """Return the bytes that the state may use in each phase.

    In phases in which the job needs less, it is more. It is never more than what
    torch's own state would take, so that a job that survives without ebbtide survives
    with it.
    """
    own, free = state_bytes(updater), free_bytes(process, updater)
    spare = {} if process.memory is None else process.memory.spare_bytes()
    if not spare or process.options.memory_budget is not None:
        return min(free, own)
    share = _share(process, updater)
    return {phase: min(free + share * more, own) for phase, more in spare.items()}


def _share(process: DrivenProcess, updater: ParamUpdater) -> float:
    updaters = [driver.updater for driver in process.drivers.values()]
    everything = sum(state_bytes(one) for one in updaters if one is not None)
    return state_bytes(updater) / everything if everything else 1.0


def policy_of(name: str, nbytes: float) -> Policy:
    """Return the policy of a text, for a state of this size.

    One that plans by rates may update inside the backward, unless the text says
    otherwise, or the host has no room for the new state beside the old one.
    """
    policy = as_policy(name)
    available = host_limits.available_bytes()
    has_room = available is None or available > _HOST_FACTOR * nbytes
    if not policy.is_adaptive or policy.states("overlap") or not has_room:
        return policy
    return policy.with_options(overlap="backward")


def choose_policy(name: str, updater: ParamUpdater, budget: Budget) -> str:
    """Let an engine go on under a policy, and return its text.

    `static` is the static split with the most state on the device that fits. Raises
    UserError if the policy has no plan; the plan before stays.
    """
    if name != "static":
        updater.use_policy(policy_of(name, state_bytes(updater)), budget)
        return name
    for share in _SPLITS:
        text = f"twin-flow:{share:g}"
        try:
            updater.use_policy(as_policy(text), budget)
        except UserError:
            continue
        return text
    return "zero-offload"
