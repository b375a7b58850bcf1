"""What goes wrong with machines, workloads and policies that a user gave."""

from ebbtide.profiler.trace import UserError


class MachineError(UserError):
    """A machine that is no machine, or lacks a rate that is needed."""


class WorkloadError(UserError):
    """A workload that cannot be, or a trace that makes none."""


class PolicyError(UserError):
    """A policy that does not exist, or knobs that it does not have."""


class PlanError(Exception):
    """A plan that is not sound: a policy's fault, not a user's."""
