"""Operations and bytes of the kernels of a trace, and the time that they take on a GPU by the roofline model."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ebbtide.machines.gpu_compute import GpuCompute
from ebbtide.profiler.trace import Trace

_TYPES = ("bfloat16", "float16", "tf32", "float32")


@dataclass(frozen=True)
class RecordedKernels:
    """The kernels of a job.

    Attributes:
        flops: Operations of each kernel.
        bytes: Bytes of device memory that it reads and writes.
        element_bytes: Bytes per parameter, by which the type of matrix products is chosen.
    """

    flops: npt.NDArray[np.float64]
    bytes: npt.NDArray[np.float64]
    element_bytes: float

    def time_ratio(self, before: GpuCompute, after: GpuCompute) -> float | None:
        """Return the time of all kernels on one GPU over that on another; None if a rate is not known.

        A kernel takes the longer of its operations at the peak of matrix products and its bytes at the peak of memory
        (Williams et al. 2009, "Roofline"). Efficiencies are taken to be alike on both.
        """
        times = [self._seconds(gpu) for gpu in (before, after)]
        if times[0] is None or times[1] is None or not times[0]:
            return None
        return times[1] / times[0]

    def _seconds(self, gpu: GpuCompute) -> float | None:
        names = _TYPES if self.element_bytes == 2 else _TYPES[2:]
        peak = next((gpu.flops_per_s[name] for name in names if name in gpu.flops_per_s), None)
        if peak is None or gpu.memory_bytes_per_s is None:
            return None
        return float(np.maximum(self.flops / peak, self.bytes / gpu.memory_bytes_per_s).sum())


def recorded_kernels(trace: Trace, element_bytes: float) -> RecordedKernels | None:
    """Return the work of the kernels of a trace's first rank; None where it was not recorded.

    Args:
        trace: The trace.
        element_bytes: Bytes per parameter of the job.
    """
    kernels = trace.kernels(trace.ranks[0])
    counted = kernels[kernels["flops"].notna() & kernels["bytes"].notna()]
    if not len(counted):
        return None
    flops, size = (counted[name].to_numpy(np.float64) for name in ("flops", "bytes"))
    return RecordedKernels(flops, size, element_bytes)
