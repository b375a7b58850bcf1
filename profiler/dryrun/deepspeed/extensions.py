"""Stand-ins for the C++ extensions that DeepSpeed compiles: they compute nothing, and take time."""

from __future__ import annotations

from typing import Any

from ebbtide.profiler.dryrun import time_priors as priors
from ebbtide.profiler.dryrun.clock import VirtualClock
from ebbtide.profiler.dryrun.errors import CannotFakeError
from ebbtide.profiler.dryrun.kernel_work import KernelWork
from ebbtide.profiler.dryrun.time_priors import PriorRange, WorkClass

# Of a kernel of `multi_tensor_adam`: tensors of one launch (depth_to_max_tensors in csrc/adam/multi_tensor_apply.cuh).
_TENSORS_PER_LAUNCH = 36
# An update on the CPU reads gradient, master and moments, and writes master and moments: 7 values of 4 B.
_UPDATE_BYTES = 28


class _CpuAdam:
    """Stands in for the extension `cpu_adam`, whose updates run on the threads of the host."""

    def __init__(self, clock: VirtualClock, params_per_s: float | None) -> None:
        self._clock, self._params_per_s = clock, params_per_s

    def create_adam(self, *_options: Any) -> int:
        """Create nothing."""
        return 0

    def destroy_adam(self, _number: int) -> int:
        """Release nothing."""
        return 0

    def adam_update(self, _number: int, _step: int, *values: Any) -> int:
        """Update a subgroup: `values` ends with parameters, gradients and the two moments."""
        elements = values[-1].numel()
        if self._params_per_s is None:
            self._clock.run_host(self._clock.rates.host_ns(_UPDATE_BYTES * elements))
        else:
            time_ns = 1e9 * elements / self._params_per_s
            self._clock.run_host(PriorRange(*(time_ns / share for share in priors.COPY_EFFICIENCY)))
        return 0

    adam_rollback = adam_update


class _FusedAdam:
    """Stands in for the extension `fused_adam`, which updates lists of tensors in place on the device."""

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock

    def multi_tensor_adam(self, _chunk: int, _flag: Any, lists: list[list[Any]], *_options: Any) -> None:
        """Update the parameters. lists: gradients, parameters, first and second moments."""
        gradients, *others = lists
        size = sum(tensor.numel() * tensor.element_size() for tensor in gradients)
        size += 2 * sum(tensor.numel() * tensor.element_size() for tensors in others for tensor in tensors)
        launches = -(-len(gradients) // _TENSORS_PER_LAUNCH)
        self._clock.run_host(priors.PYTHON_OPERATION_NS)
        work = KernelWork("deepspeed::multi_tensor_adam", "compute", WorkClass.FOREACH, 0, size, launches=launches)
        self._clock.run_kernel(work)


def extension(name: str, clock: VirtualClock, cpu_update_params_per_s: float | None) -> Any:
    """Return the stand-in for an extension.

    Args:
        name: DeepSpeed's name of it.
        clock: The clock, which its work advances.
        cpu_update_params_per_s: Parameters that a rank updates on the CPU per second; None: by the host's memory.

    Raises:
        CannotFakeError: There is none.
    """
    if name == "cpu_adam":
        return _CpuAdam(clock, cpu_update_params_per_s)
    if name == "fused_adam":
        return _FusedAdam(clock)
    raise CannotFakeError(
        f"cannot dry-run DeepSpeed's extension {name}: only those of Adam are known; choose AdamW, and offload to "
        "the CPU in place of NVMe"
    )
