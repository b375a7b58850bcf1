"""Counts what a job does on a faked device, as a backend reports it, in numbers and
strings: it knows no torch."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from ebbtide.features.dryrun.memory.caching_allocator import CachingAllocator
from ebbtide.features.dryrun.memory.device_memory import DeviceMemory
from ebbtide.features.dryrun.memory.host_memory import HostMemory
from ebbtide.features.dryrun.time.clock import VirtualClock
from ebbtide.features.dryrun.time.phase_tracker import PhaseTracker
from ebbtide.machines.kernels import time_priors as priors
from ebbtide.machines.kernels.rates import KernelWork
from ebbtide.machines.kernels.time_priors import PriorRange
from ebbtide.machines.machine import Machine


class Charge(NamedTuple):
    """The cost of an operation: a kernel that takes `list_tensors` as lists, or
    `host_bytes` to move; neither: a view.

    `is_free`: it takes no time of the host, which runs compiled code."""

    work: KernelWork | None = None
    list_tensors: int = 0
    host_bytes: int | None = None
    is_free: bool = False


class Sink:
    """The clock, the memory and the phases of a dry run.

    A storage has a number of its own as its key; a call stack is a number of
    `CallStacks`.
    """

    def __init__(
        self,
        machine: Machine | None,
        new_allocator: Callable[[], CachingAllocator],
        on_update: Callable[[], None],
        on_iteration: Callable[[int], None],
    ) -> None:
        self.clock = VirtualClock(machine)
        self.memory = DeviceMemory(self.clock, new_allocator)
        self.host_memory = HostMemory(self.clock)
        self.phases = PhaseTracker(self.clock, on_update, on_iteration)

    @property
    def module(self) -> str | None:
        """Name of the innermost module that runs; None outside of modules."""
        names = self.phases.module_names
        return names[-1] if names else None

    def op(self, charge: Charge, in_backward: bool = False) -> None:
        """Advance by an operation.

        Args:
            in_backward: Whether a backward runs; modules that run in it are recomputed
                by Python.
        """
        if charge.work is not None:
            in_engine = in_backward and not self.phases.module_names
            if not charge.is_free:
                self.clock.run_host(_launch_cost(charge.list_tensors, in_engine))
            self.clock.run_kernel(charge.work)
        elif charge.is_free:
            return
        elif charge.host_bytes is None:
            self.clock.run_host(priors.VIEW_NS)
        elif self.clock.in_job and charge.host_bytes:
            # Once the job trains, large tensors of the host are optimizer state.
            self.clock.run_host(self.clock.rates.host_ns(charge.host_bytes))

    def alloc(self, key: int, size: int, stack: int) -> None:
        """Allocate device memory for a new storage."""
        self.memory.add(key, size, stack, self.module)

    def free(self, key: int) -> None:
        """Release the device memory of a storage."""
        self.memory.free(key)

    @contextmanager
    def phase(self, code: int) -> Iterator[None]:
        """Make a block a phase, or a part of the phase that is open."""
        outermost = self.phases.enter(code)
        try:
            yield
        finally:
            if outermost:
                self.phases.leave()


def _launch_cost(list_tensors: int, in_engine: bool) -> PriorRange:
    cost = priors.ENGINE_OPERATION_NS if in_engine else priors.PYTHON_OPERATION_NS
    if not list_tensors:
        return cost
    return PriorRange(
        *(
            own + list_tensors * each
            for own, each in zip(cost, priors.LIST_TENSOR_NS, strict=True)
        )
    )
