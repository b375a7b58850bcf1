"""The pass over plans that keeps state in storage which host memory does not hold."""

from collections.abc import Mapping
from typing import ClassVar

from ebbtide.features.storage.policy import with_fitting_storage, with_storage
from ebbtide.interleave.model.plan import Plan
from ebbtide.interleave.model.workload import Workload
from ebbtide.interleave.policies.registry import Maker, Policy
from ebbtide.machines.machine import Machine


class StoragePass:
    """Keeps state in storage, as far as the machine has any, where host memory does not
    hold all state."""

    name: ClassVar[str] = "storage"
    position: ClassVar[int] = 20
    in_memory: ClassVar[bool] = False
    offers: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    options: ClassVar[Mapping[str, tuple[str, ...]]] = {}

    def plan(
        self, make: Maker, policy: Policy, workload: Workload, machine: Machine
    ) -> Plan:
        """Return the plan of a policy with the best layout of its state in storage."""
        return with_storage(make(policy, workload, machine), workload, machine)

    def complete(self, plan: Plan, workload: Workload, machine: Machine) -> Plan:
        """Return a plan with the default layout of its state in storage.

        If that does not fit, it has the smallest one.
        """
        return with_fitting_storage(plan, workload, machine)


STORAGE_PASS = StoragePass()
