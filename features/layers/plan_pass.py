"""The pass over plans that also moves weights and activations of layers."""

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

from ebbtide.errors import PolicyError
from ebbtide.features.layers.layer_choice import LAYER_OPTIONS, plan_with_layers
from ebbtide.interleave.model.plan import Plan
from ebbtide.interleave.model.workload import Workload
from ebbtide.interleave.policies.registry import Maker, Policy
from ebbtide.machines.machine import Machine

# The option `overlap` without the updates that end in the next forward.
_WITHOUT_LATE = {"forward": "none", "both": "backward", "auto": "backward"}


class LayersPass:
    """Plans the layers of a workload with some, and the state with what they leave."""

    name: ClassVar[str] = "layers"
    position: ClassVar[int] = 10
    in_memory: ClassVar[bool] = False
    offers: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    options: ClassVar[Mapping[str, tuple[str, ...]]] = LAYER_OPTIONS

    def plan(
        self, make: Maker, policy: Policy, workload: Workload, machine: Machine
    ) -> Plan:
        """Return the plan of a policy for the state, and for layers.

        Layers move as the policy's options say.
        """
        if workload.layers and not workload.layer_memory:
            plan = plan_with_layers(
                workload,
                machine,
                policy.options,
                lambda placed, late: make(
                    policy if late else _without_late(policy), placed, machine
                ),
                lambda placed, _: make(
                    _quick(policy, placed, machine), placed, machine
                ),
            )
            return replace(plan, policy=policy.text)
        moved = policy.changed(LAYER_OPTIONS)
        if moved and not workload.layers:
            raise PolicyError(
                f"{policy.text!r}: {moved[0]} is for workloads with layers, and "
                f"{workload.name} has none"
            )
        return make(policy, workload, machine)

    def complete(self, plan: Plan, workload: Workload, machine: Machine) -> Plan:
        """Return a plan as it is."""
        return plan


LAYER_PASS = LayersPass()


def _quick(policy: Policy, placed: Workload, machine: Machine) -> Policy:
    """Return a policy whose plans are made quickly: this one, but for `adaptive` one
    that keeps as much state on the device as there is memory for, and interleaves the
    rest."""
    if not policy.is_adaptive:
        return _without_late(policy)
    if machine.gpu_update_params_per_s is None:
        return Policy.make("pipelined")
    state_bytes = (placed.state_bytes + placed.grad_bytes) * placed.params
    share = max(0.0, 1 - (placed.min_free_bytes or 0.0) / state_bytes)
    return Policy.make("interleaved", f"2@{share:.6f}")


def _without_late(policy: Policy) -> Policy:
    """Return a policy with updates that end with the step."""
    overlap = _WITHOUT_LATE.get(policy.overlap)
    return policy if overlap is None else policy.with_options(overlap=overlap)
