"""The exceptions of ebbtide."""


class UserError(Exception):
    """Bad input: the message is one line that says what is wrong and what to do.
    Commands exit with 2."""


class SizeError(UserError, ValueError):
    """Something is no number of bytes."""


class MissingPackageError(UserError):
    """A package of an extra is not installed: the message names the extra."""


class TraceError(UserError):
    """A trace cannot be read, or cannot be written to the given path."""


class MachineError(UserError):
    """A machine is invalid, or lacks a rate that is needed."""


class WorkloadError(UserError):
    """A workload is invalid, or cannot be derived from a trace."""


class PolicyError(UserError):
    """A policy does not exist, or has an invalid option."""


class PlanError(Exception):
    """A plan is invalid: an error of its policy, not of the user's input."""
