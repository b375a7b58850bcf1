"""The clock of a dry run, which advances by the work of the job at assumed rates."""

from __future__ import annotations

from ebbtide.machines.machine import Machine

# Typical rates, for the order of magnitude: these times are not a prediction.
FLOPS_PER_S = 100e12
DEVICE_BYTES_PER_S = 1.5e12
LINK_BYTES_PER_S = 20e9
KERNEL_NS = 5_000


class VirtualClock:
    """A clock that stands still between operations.

    Args:
        machine: The machine, whose rates of the link are used where they are known.

    Attributes:
        now_ns: The time since the start of the job.
    """

    def __init__(self, machine: Machine | None = None) -> None:
        self.now_ns = 0
        self._h2d = (machine and machine.h2d_bytes_per_s) or LINK_BYTES_PER_S
        self._d2h = (machine and machine.d2h_bytes_per_s) or LINK_BYTES_PER_S

    def tick(self) -> int:
        """Advance by 1 ns, so that events keep their order, and return the time."""
        self.now_ns += 1
        return self.now_ns

    def run_kernel(self, flops: int, size: int) -> None:
        """Advance by a kernel that does `flops` operations and reads and writes `size` bytes."""
        self.now_ns += KERNEL_NS + round(1e9 * max(flops / FLOPS_PER_S, size / DEVICE_BYTES_PER_S))

    def run_copy(self, direction: str, size: int) -> None:
        """Advance by a copy of `size` bytes. direction: `h2d` or `d2h`."""
        self.now_ns += KERNEL_NS + round(1e9 * size / (self._h2d if direction == "h2d" else self._d2h))

    @property
    def description(self) -> str:
        """The assumed rates, in words."""
        return (
            f"{FLOPS_PER_S / 1e12:.0f} TFLOP/s, {DEVICE_BYTES_PER_S / 1e12:.1f} TB/s, {KERNEL_NS / 1e3:.0f} us per "
            f"kernel, {self._h2d / 1e9:.1f} GB/s to the device and {self._d2h / 1e9:.1f} GB/s from it"
        )
