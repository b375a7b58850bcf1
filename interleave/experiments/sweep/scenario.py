"""What if: a workload with another size, other subgroups, or other free memory."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ebbtide.errors import WorkloadError
from ebbtide.interleave.model.workload import FreeLine, Workload

# With more of them one replay takes minutes and gigabytes.
_MOST_SUBGROUPS = 100_000


@dataclass(frozen=True)
class Scenario:
    """What is asked of a workload; 1 and None: as it is.

    scale_params: times as many parameters. Forward and backward scale alike (the same operations per parameter and
    token); free memory is less by the half-precision parameters that come with it; activations stay.
    free_bytes: device memory that is free where the iteration leaves least, as a longer sequence or a larger batch
    would change it: what is taken at other times scales alike, so that windows stay windows (`with_least`).
    subgroup_params: parameters of a subgroup.
    """

    scale_params: float = 1.0
    free_bytes: float | None = None
    subgroup_params: int | None = None

    def of(self, workload: Workload) -> Workload:
        """The workload as asked for. Raises WorkloadError where it cannot be."""
        if self.scale_params != 1:
            workload = _scaled(workload, self.scale_params, self.free_bytes is None)
        if self.free_bytes is not None:
            workload = replace(workload, gpu_free=with_least(workload.gpu_free, self.free_bytes))
        if self.subgroup_params is not None:
            workload = replace(workload, sizes=None, subgroup_params=min(self.subgroup_params, workload.params))
        if workload.params / workload.subgroup_params > _MOST_SUBGROUPS:
            raise WorkloadError(f"more than {_MOST_SUBGROUPS:,} subgroups: choose larger ones")
        return workload


def with_least(line: FreeLine | None, least: float) -> FreeLine:
    """A free line (bytes) whose lowest value is `least`. The highest one stays: there nothing is taken but what always
    is; what is taken beyond that is scaled. A line that is not known, or never as high, becomes flat."""
    sizes = [size for _, size in line or ()]
    low, high = min(sizes, default=least), max(sizes, default=least)
    if line is None or least >= high or low == high:
        return ((0.0, least),)
    factor = (high - least) / (high - low)
    # The lowest is met exactly, whatever rounding does.
    return tuple((at, max(least, high - (high - size) * factor) if size > low else least) for at, size in line)


def _scaled(workload: Workload, factor: float, follows: bool) -> Workload:
    """follows: whether what is free follows from the parameters, and is not asked for otherwise."""
    params = round(workload.params * factor)
    if params < 1:
        raise WorkloadError(f"{factor:g} times {workload.params:,} parameters are none")
    # Recorded subgroups are whole tensors: of another size as many parameters in each, in the mean.
    each = -(-workload.params // len(workload.subgroups)) if workload.sizes is not None else workload.subgroup_params
    taken = (params - workload.params) * workload.param_bytes if follows else 0.0
    line = workload.gpu_free
    if line is not None:
        line = tuple((_stretched(at, workload, factor), size - taken) for at, size in line)
        short = -min(size for _, size in line)
        if short > 0:
            raise WorkloadError(
                f"{factor:g} times the parameters do not fit: they alone need {short / 1e9:.3g} GB more than there is"
            )
    return replace(
        workload,
        params=params,
        subgroup_params=min(each, params),
        sizes=None,
        forward_s=workload.forward_s * factor,
        backward_s=workload.backward_s * factor,
        gpu_free=line,
    )


def _stretched(at: float, workload: Workload, factor: float) -> float:
    """Where a time of the iteration (s) comes to lie when forward and backward take `factor` times as long."""
    inside = min(max(at - workload.other_s, 0.0), workload.forward_s + workload.backward_s)
    return at + inside * (factor - 1)
