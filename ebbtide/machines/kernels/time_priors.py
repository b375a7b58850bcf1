"""Stated priors for the times of a dry run.

Each has a fast, a typical and a slow value.

They are not fitted to a job. Their sources are measurements that others published:

- Memory: copies and element-wise kernels on 4 GiB reach 91 % on H100-class cards; layer
  norms of PyTorch reach 72 to 80 % of an H100's (published comparisons with Triton).
  Short rows and scattered accesses reach less.
- Host: one operation issued from Python takes 4.2 us on a current host without
  autograd. In traces/a100-torch-profiler.ebb the median time between two launches is 33
  us in forwards and 17 us in backwards, under a profiler that about doubles it, and no
  kernel starts sooner than 7 us after the start of its launching call.
"""

from enum import Enum
from typing import NamedTuple


class PriorRange(NamedTuple):
    """Values of a quantity in the three cases, with the indices of `CASES`."""

    fast: float
    typical: float
    slow: float

    def scaled(self, factor: float) -> "PriorRange":
        """Return the values times a factor."""
        return PriorRange(*(factor * value for value in self))

    def times(self, other: "PriorRange") -> "PriorRange":
        """Return the products of the values in each case."""
        return PriorRange(*(a * b for a, b in zip(self, other, strict=True)))


CASES = PriorRange._fields
TYPICAL = CASES.index("typical")


class WorkClass(Enum):
    """Classes of kernels that differ in the share of the peak rates that they reach."""

    MATRIX = "matrix products"
    CONVOLUTION = "convolutions"
    DEPTHWISE = "convolutions with one channel a filter"
    ATTENTION = "fused attention"
    ATTENTION_BACKWARD = "backward of fused attention"
    ELEMENTWISE = "element-wise operations"
    REDUCTION = "reductions and norms"
    FOREACH = "operations on lists of tensors"
    INDEXED = "gathers and scatters"
    COLLECTIVE = "collectives"


# Shares of the peak that products outside of the matrix units reach; those in them, and
# attention, are in `efficiency`.
FLOAT32_EFFICIENCY = PriorRange(0.9, 0.8, 0.65)
# Convolutions over products of their size: ResNet-50 on A100 (NVIDIA
# DeepLearningExamples, PyTorch/Classification/ConvNets: 2,470 images/s in mixed
# precision and channels-last, 938 in tf32 and not).
CONVOLUTION_OF_PRODUCT = PriorRange(0.85, 0.7, 0.5)
# Depthwise convolutions, forward and gradients: EfficientNet-B0 and B4 on A100 (the
# same source, 2,489 and 331 images/s in mixed precision).
DEPTHWISE_EFFICIENCY = PriorRange(0.12, 0.06, 0.03)
# Shares of the rate of device memory.
MEMORY_EFFICIENCY = {
    WorkClass.MATRIX: PriorRange(0.92, 0.8, 0.65),
    WorkClass.CONVOLUTION: PriorRange(0.9, 0.75, 0.55),
    WorkClass.DEPTHWISE: PriorRange(0.9, 0.75, 0.55),
    WorkClass.ATTENTION: PriorRange(0.9, 0.75, 0.55),
    WorkClass.ATTENTION_BACKWARD: PriorRange(0.85, 0.65, 0.45),
    WorkClass.ELEMENTWISE: PriorRange(0.93, 0.83, 0.7),
    WorkClass.REDUCTION: PriorRange(0.88, 0.75, 0.58),
    WorkClass.FOREACH: PriorRange(0.92, 0.82, 0.68),
    WorkClass.INDEXED: PriorRange(0.7, 0.4, 0.2),
}
# Share of the rate between GPUs that a collective of many bytes reaches.
COLLECTIVE_EFFICIENCY = PriorRange(0.85, 0.7, 0.5)
# Device time of a kernel beside its work: start, end, and the gap to the next one.
KERNEL_NS = PriorRange(1_500, 2_500, 4_000)
COLLECTIVE_NS = PriorRange(10_000, 25_000, 60_000)
# From a launch to the earliest start of its kernel.
LAUNCH_NS = PriorRange(3_000, 5_000, 8_000)
# Host time of an operation: called from Python, called by the autograd engine, and one
# without a kernel.
PYTHON_OPERATION_NS = PriorRange(5_000, 9_000, 16_000)
ENGINE_OPERATION_NS = PriorRange(3_500, 6_000, 11_000)
VIEW_NS = PriorRange(700, 1_500, 3_000)
# Of each tensor in a list, in addition.
LIST_TENSOR_NS = PriorRange(150, 300, 600)
# Copies between host and device: share of the machine's rates, and where a machine
# states none, rates.
COPY_EFFICIENCY = PriorRange(1.1, 1.0, 0.85)
PINNED_BYTES_PER_S = 20e9
PAGEABLE_SHARE = 0.4
COPY_NS = PriorRange(5_000, 8_000, 12_000)
# Operations on tensors of the host: bytes read and written per second, and the share of
# a machine's rate (benchmarks/cpu_updates.py).
HOST_BYTES_PER_S = 20e9
HOST_EFFICIENCY = PriorRange(1.0, 0.6, 0.3)
# Launches that CUDA queues at most; the host waits at the next one.
MAX_QUEUED = 1024
