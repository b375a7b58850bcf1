"""The memory that a job leaves free for state, and the policy that uses it."""

from __future__ import annotations

from ebbtide.errors import UserError
from ebbtide.features.run.driver.process import DrivenProcess
from ebbtide.interleave.engine.param_updater import ParamUpdater
from ebbtide.interleave.policies import as_policy

# Of the memory of an emulated device, beside half of the state.
_EXTRA_SUBGROUPS = 3
# Shares of the subgroups that static splits keep on the host.
_SPLITS = tuple(percent / 100 for percent in range(0, 100, 10))


def state_bytes(updater: ParamUpdater) -> float:
    """Return the bytes of the whole state of an optimizer."""
    return updater.workload.state_bytes * updater.workload.params


def free_for_state(process: DrivenProcess, updater: ParamUpdater) -> float:
    """Return the bytes of device memory that the state of an optimizer may use.

    It is the optimizer's part, by the size of its state, of what is free in all phases
    of an iteration. It is never more than what torch's own state would take, so that a
    job that survives without ebbtide survives with it.
    """
    own = state_bytes(updater)
    updaters = [driver.updater for driver in process.drivers.values()]
    everything = sum(state_bytes(one) for one in updaters if one is not None)
    total = process.options.memory_budget
    if total is None:
        total = updater.device.free_bytes()
    if total is None:
        # An emulated device has no memory of its own: half of the state fits, and three
        # subgroups.
        job = updater.workload
        return own / 2 + _EXTRA_SUBGROUPS * job.state_bytes * job.subgroup_params
    return min(total * own / everything, own) if own else 0.0


def choose_policy(name: str, updater: ParamUpdater, free: float) -> str:
    """Let an engine go on under a policy, and return its text.

    `static` is the static split with the most state on the device that fits. Raises
    UserError if the policy has no plan; the plan before stays.
    """
    if name != "static":
        updater.use_policy(as_policy(name), free)
        return name
    for share in _SPLITS:
        text = f"twin-flow:{share:g}"
        try:
            updater.use_policy(as_policy(text), free)
        except UserError:
            continue
        return text
    return "zero-offload"
