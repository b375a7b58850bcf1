"""The share of a data sheet's peak that jobs reach, with its uncertainty. docs/machines.md derives each value."""

from __future__ import annotations

from typing import NamedTuple


class Estimate(NamedTuple):
    """An estimated quantity.

    Attributes:
        value: The most likely value.
        factor: The factor within which it is: one standard error, normal in the logarithm.
    """

    value: float
    factor: float


# Host memory under updates and copies: share of the peak of the channels. By kind, since memory on the package of the
# CPU reaches more.
HOST_MEMORY = {"ddr4": Estimate(0.6, 1.3), "ddr5": Estimate(0.6, 1.3), "lpddr5x": Estimate(0.75, 1.3)}
# Passes of the CPU over memory (update, cast, norm): share of the host memory rate.
CPU_PASS = Estimate(0.87, 1.3)
# What a core does at most, parameters/s, where memory is not the limit.
CORE_UPDATE_PARAMS_PER_S = 0.5e9
CORE_CAST_PARAMS_PER_S = 1.4e9
CORE_NORM_PARAMS_PER_S = 2.5e9
# Pinned copies: share of the link's peak by direction.
PCIE_H2D = PCIE_D2H = Estimate(0.8, 1.2)
C2C_H2D, C2C_D2H = Estimate(0.83, 1.2), Estimate(0.66, 1.2)
# Both directions at once: share of the sum.
DUPLEX = Estimate(0.85, 1.2)
# Pageable copies: one thread of the driver copies, bytes/s; to the device also at most this share of host memory.
PAGEABLE_H2D, PAGEABLE_D2H = Estimate(16e9, 2.0), Estimate(4e9, 3.0)
PAGEABLE_MEMORY_SHARE = 0.5
# Updates and casts on the GPU: share of the peak of its memory.
GPU_PASS = Estimate(0.8, 1.5)
STEP_OVERHEAD_S = Estimate(0.06, 2.0)
OPERATION_S = Estimate(1e-4, 3.0)
