"""Changes a workload: another number of parameters, other subgroups, other free memory of device or host."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ebbtide.errors import WorkloadError
from ebbtide.interleave.model.workload import FreeMemorySteps, Workload

# With more of them one replay takes minutes and gigabytes.
_MAX_SUBGROUPS = 100_000


@dataclass(frozen=True)
class Scenario:
    """Changes to a workload; the defaults leave it as it is.

    Attributes:
        scale_params: Factor for the number of parameters. Forward and backward times grow by the same factor (the same
            operations per parameter and token); free memory shrinks by the half-precision parameters; activations stay.
        free_bytes: Lowest value of the free device memory, as a longer sequence or a larger batch would change it. Used
            memory at other times is scaled by the same factor, so that windows remain (see `with_min_free`).
        subgroup_params: Parameters per subgroup.
        host_free_bytes: Host memory that a plan may use; the state beyond it is in storage, where the machine has some.
    """

    scale_params: float = 1.0
    free_bytes: float | None = None
    subgroup_params: int | None = None
    host_free_bytes: float | None = None

    def apply_to(self, workload: Workload) -> Workload:
        """Return the changed workload.

        Raises:
            WorkloadError: The change is not possible.
        """
        if self.scale_params != 1:
            workload = _scaled(workload, self.scale_params, shrink_free=self.free_bytes is None)
        if self.free_bytes is not None:
            workload = replace(workload, gpu_free=with_min_free(workload.gpu_free, self.free_bytes))
        if self.subgroup_params is not None:
            workload = replace(workload, sizes=None, subgroup_params=min(self.subgroup_params, workload.params))
        if self.host_free_bytes is not None:
            workload = replace(workload, host_free_bytes=self.host_free_bytes)
        if workload.params / workload.subgroup_params > _MAX_SUBGROUPS:
            raise WorkloadError(f"more than {_MAX_SUBGROUPS:,} subgroups: choose larger ones")
        return workload


def with_min_free(free: FreeMemorySteps | None, min_bytes: float) -> FreeMemorySteps:
    """Return a step function of free memory whose lowest value is `min_bytes`.

    The highest value stays: it is the memory that the job never uses. The memory in use beyond that is scaled. A
    function that is None, or never higher than `min_bytes`, becomes constant.
    """
    sizes = [size for _, size in free or ()]
    low, high = min(sizes, default=min_bytes), max(sizes, default=min_bytes)
    if free is None or min_bytes >= high or low == high:
        return ((0.0, min_bytes),)
    factor = (high - min_bytes) / (high - low)
    # The lowest value is exact, regardless of rounding.
    return tuple(
        (start_s, max(min_bytes, high - (high - size) * factor) if size > low else min_bytes) for start_s, size in free
    )


def _scaled(workload: Workload, factor: float, shrink_free: bool) -> Workload:
    """Scale the number of parameters; `shrink_free`: subtract the additional parameters from the free memory."""
    params = round(workload.params * factor)
    if params < 1:
        raise WorkloadError(f"{factor:g} times {workload.params:,} parameters is less than one parameter")
    # Recorded subgroups are whole tensors: after scaling, each gets their mean number of parameters.
    mean_params = (
        -(-workload.params // len(workload.subgroups)) if workload.sizes is not None else workload.subgroup_params
    )
    added_bytes = (params - workload.params) * workload.param_bytes if shrink_free else 0.0
    free = workload.gpu_free
    if free is not None:
        free = tuple((_scaled_time(start_s, workload, factor), size - added_bytes) for start_s, size in free)
        missing_bytes = -min(size for _, size in free)
        if missing_bytes > 0:
            raise WorkloadError(
                f"{factor:g} times the parameters do not fit: they need {missing_bytes / 1e9:.3g} GB more device memory"
            )
    return replace(
        workload,
        params=params,
        subgroup_params=min(mean_params, params),
        sizes=None,
        forward_s=workload.forward_s * factor,
        backward_s=workload.backward_s * factor,
        gpu_free=free,
    )


def _scaled_time(time_s: float, workload: Workload, factor: float) -> float:
    """Return a time of the iteration in s after forward and backward have become `factor` times as long."""
    in_compute_s = min(max(time_s - workload.other_s, 0.0), workload.forward_s + workload.backward_s)
    return time_s + in_compute_s * (factor - 1)
