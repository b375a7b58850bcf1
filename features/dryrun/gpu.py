"""The GPU that a job of a dry run sees."""

from dataclasses import dataclass

from ebbtide.features.dryrun.memory.kernel_buffers import (
    Multiprocessors,
    multiprocessors,
)
from ebbtide.machines.machine import GpuCompute
from ebbtide.machines.sheets import GPU_SHEETS

# Memory of the device where no capacity is stated: as an 80 GB card.
DEFAULT_CAPACITY_BYTES = 80 * 10**9
# Where no GPU is named: that of an H100.
_DEFAULT_CAPABILITY = "9.0"


def capability_of(name: str, gpu: GpuCompute | None = None) -> tuple[int, int]:
    """Return the compute capability of a device, by which jobs and torch choose
    kernels.

    `gpu`: its rates; None: those of the preset, or of an H100 for other names."""
    if gpu is None and name in GPU_SHEETS:
        gpu = GPU_SHEETS[name].compute
    major, minor = ((gpu and gpu.compute_capability) or _DEFAULT_CAPABILITY).split(".")
    return int(major), int(minor)


@dataclass(frozen=True)
class FakedGpu:
    """A GPU as torch reports it to the job."""

    name: str
    capability: tuple[int, int]
    capacity_bytes: int = DEFAULT_CAPACITY_BYTES

    @property
    def multiprocessors(self) -> Multiprocessors:
        return multiprocessors(self.name, self.capability)
