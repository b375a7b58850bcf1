"""Reads optimizers, modules and parameters that frameworks keep in their own ways.

The agent of a feature knows the objects of its framework: its module `hooks` has a
`READER`.
"""

from __future__ import annotations

import functools
from typing import Any

from .feature_agents import feature_hooks


class FrameworkReader:
    """Reads the objects of a framework, without a call of the job. All methods return
    None of other objects."""

    def inner_optimizers(self, optimizer: Any) -> Any:
        """Return the torch optimizers in an optimizer."""

    def masters(self, optimizer: Any) -> Any:
        """Return the flat fp32 parameters of each subgroup that this rank updates."""

    def subgroup_sizes(self, optimizer: Any) -> Any:
        """Return this rank's parameters in each subgroup, with padding."""

    def state_device(self, optimizer: Any) -> Any:
        """Return where the state is if this process has no tensors of it: `nvme`, or
        `cpu` for another process."""

    def gradients(self, optimizer: Any) -> Any:
        """Return tensors, or containers of tensors, with gradients beside the gradients
        of parameters."""

    def content(self, module: Any) -> Any:
        """Return the module that a wrapper contains."""

    def local_tensor(self, parameter: Any) -> Any:
        """Return this rank's part of a parameter."""

    def total_elements(self, parameter: Any) -> Any:
        """Return the number of elements of a parameter over all ranks."""

    def describe(self, engine: Any, recomputes: bool) -> Any:
        """Return the section of meta.json on an engine after a step.

        `recomputes` says whether the engine's modules were seen to run again.
        """


@functools.cache
def _readers() -> list[FrameworkReader]:
    return [module.READER for module in feature_hooks() if hasattr(module, "READER")]


def _first(method: Any, *values: Any) -> Any:
    """Return the answer of the first reader that has one; None if none has."""
    answers = (getattr(reader, method.__name__)(*values) for reader in _readers())
    return next((answer for answer in answers if answer is not None), None)


def torch_optimizers(optimizer: Any) -> Any:
    """Return the torch optimizers with the state: those inside of an optimizer of a
    framework, or the optimizer itself."""
    inner = _first(FrameworkReader.inner_optimizers, optimizer)
    return [optimizer] if inner is None else inner


def fp32_masters(optimizer: Any) -> Any:
    """Return the flat fp32 parameters of each subgroup that this rank updates.

    Return None if it has no subgroups.
    """
    return _first(FrameworkReader.masters, optimizer)


def subgroup_sizes(optimizer: Any) -> Any:
    """Return this rank's parameters in each subgroup, with padding.

    Return None if it has no subgroups.
    """
    return _first(FrameworkReader.subgroup_sizes, optimizer)


def state_device(optimizer: Any) -> Any:
    """Return where the state is if this process has no tensors of it.

    Return None if it has some.
    """
    return _first(FrameworkReader.state_device, optimizer)


def further_gradients(optimizer: Any) -> Any:
    """Return tensors, or containers of tensors, with gradients beside the gradients of
    parameters; None if there are none."""
    return _first(FrameworkReader.gradients, optimizer)


def content(module: Any) -> Any:
    """Return the module that a framework's wrapper contains; None if this is none."""
    return _first(FrameworkReader.content, module)


def local_tensor(parameter: Any) -> Any:
    """Return this rank's part of a model's parameter: a partition, or the local tensor
    of a DTensor."""
    part = _first(FrameworkReader.local_tensor, parameter)
    return getattr(parameter, "_local_tensor", parameter) if part is None else part


def total_elements(parameter: Any) -> int:
    """Return the number of elements of a model's parameter over all ranks."""
    return int(_first(FrameworkReader.total_elements, parameter) or parameter.numel())


def describe_engine(engine: Any, recomputes: bool) -> Any:
    """Return the section of meta.json on a framework's engine after a step.

    Return None for other objects.
    """
    return _first(FrameworkReader.describe, engine, recomputes)


def own_state(optimizer: Any) -> Any:
    """Return the attribute `state` of an optimizer; {} where it has none.

    Where ebbtide has the state, reading the attribute may copy all of it.
    """
    if hasattr(optimizer, "ebbtide_state"):
        return getattr(optimizer, "__dict__", {}).get("state", {})
    return getattr(optimizer, "state", {})
