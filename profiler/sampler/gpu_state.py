"""Reads utilization, power, clocks and temperature of one GPU, as far as the card gives them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from ebbtide.profiler.sampler.gpu import Gpu
from ebbtide.profiler.sampler.nvml import GpuLost, NvmlError, Unsupported

# A reading that fails so often in a row is given up.
_MAX_FAILURES = 10


class _Reading(NamedTuple):
    """Quantities that one call reads, and the calls that do so, the best one first."""

    quantities: tuple[str, ...]
    calls: tuple[Callable[[Gpu], tuple[int, ...]], ...]


def _read_utilization(gpu: Gpu) -> tuple[int, ...]:
    rates = gpu.call("nvmlDeviceGetUtilizationRates")
    return int(rates.gpu), int(rates.memory)


def _read_instant_power(gpu: Gpu) -> tuple[int, ...]:
    return tuple(gpu.read_fields("NVML_FI_DEV_POWER_INSTANT"))


def _read_power(gpu: Gpu) -> tuple[int, ...]:
    return (int(gpu.call("nvmlDeviceGetPowerUsage")),)


def _read_sm_clock(gpu: Gpu) -> tuple[int, ...]:
    return (int(gpu.call("nvmlDeviceGetClockInfo", gpu.constant("NVML_CLOCK_SM"))),)


def _read_memory_clock(gpu: Gpu) -> tuple[int, ...]:
    return (int(gpu.call("nvmlDeviceGetClockInfo", gpu.constant("NVML_CLOCK_MEM"))),)


def _read_temperature(gpu: Gpu) -> tuple[int, ...]:
    return (int(gpu.call("nvmlDeviceGetTemperature", gpu.constant("NVML_TEMPERATURE_GPU"))),)


def _read_event_reasons(gpu: Gpu) -> tuple[int, ...]:
    return (int(gpu.call("nvmlDeviceGetCurrentClocksEventReasons")),)


def _read_throttle_reasons(gpu: Gpu) -> tuple[int, ...]:
    return (int(gpu.call("nvmlDeviceGetCurrentClocksThrottleReasons")),)


# From Ampere on (except GA100) nvmlDeviceGetPowerUsage is a mean over 1 s, so the instantaneous value comes first.
# Drivers before 535 have the second name of the reasons only.
_READINGS = (
    _Reading(("utilization", "memory_utilization"), (_read_utilization,)),
    _Reading(("power",), (_read_instant_power, _read_power)),
    _Reading(("sm_clock",), (_read_sm_clock,)),
    _Reading(("memory_clock",), (_read_memory_clock,)),
    _Reading(("temperature",), (_read_temperature,)),
    _Reading(("throttle_reasons",), (_read_event_reasons, _read_throttle_reasons)),
)


class GpuStateReader:
    """Reads the state of one card. A quantity that the card refuses is not asked for again.

    Args:
        gpu: The card.

    Attributes:
        refused: Why the card does not give a quantity, by quantity.
    """

    def __init__(self, gpu: Gpu) -> None:
        self.refused: dict[str, str] = {}
        self._gpu = gpu
        self._readings = list(_READINGS)
        self._failures: Counter[tuple[str, ...]] = Counter()

    def read(self) -> dict[str, int]:
        """Read every quantity that the card gives now.

        Returns:
            Values by quantity, in the units of `GPU_QUANTITIES`; a quantity that could not be read is missing.

        Raises:
            GpuLost: The card is lost.
            Unsupported: The card gives none of the quantities, and never will.
        """
        values: dict[str, int] = {}
        for number, reading in enumerate(self._readings):
            remaining = self._read_one(reading, values)
            self._readings[number] = _Reading(reading.quantities, remaining)
        self._readings = [reading for reading in self._readings if reading.calls]
        if not self._readings:
            raise Unsupported(self._reasons())
        return values

    def refusals(self) -> str | None:
        """Return the quantities that the card does not give, with the reasons.

        None if it gives all, or none at all: then `read` has raised the reasons.
        """
        return self._reasons() if self.refused and self._readings else None

    def _reasons(self) -> str:
        """Return the refused quantities, each reason once."""
        by_reason: dict[str, list[str]] = {}
        for quantity, reason in self.refused.items():
            by_reason.setdefault(reason, []).append(quantity.replace("_", " "))
        return "; ".join(f"{', '.join(quantities)} ({reason})" for reason, quantities in by_reason.items())

    def _read_one(self, reading: _Reading, values: dict[str, int]) -> tuple[Callable[[Gpu], tuple[int, ...]], ...]:
        """Add the values of one reading to `values`, and return the calls that are left for it."""
        calls, reason = reading.calls, ""
        while calls:
            try:
                values.update(zip(reading.quantities, calls[0](self._gpu), strict=True))
                self._failures[reading.quantities] = 0
                return calls
            except GpuLost:
                raise
            except Unsupported as error:
                calls, reason = calls[1:], str(error)
            except NvmlError as error:
                # A failure that may pass: only the value is missing.
                self._failures[reading.quantities] += 1
                if self._failures[reading.quantities] < _MAX_FAILURES:
                    return calls
                calls, reason = (), str(error)
        self.refused.update(dict.fromkeys(reading.quantities, reason))
        return ()
