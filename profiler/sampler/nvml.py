"""The one door to NVML. Everything that can go wrong behind it comes out as a missing value or an NvmlError."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

# Bytes per second and lane in one direction, by PCIe generation: transfer rate times line code (8b/10b up to
# generation 2, 128b/130b from 3 to 5, 242B/256B flits in 6). PCI-SIG base specifications 1.0 to 6.0.
_LANE_BYTES_PER_S = {
    1: 2.5e9 / 8 * 8 / 10,
    2: 5e9 / 8 * 8 / 10,
    3: 8e9 / 8 * 128 / 130,
    4: 16e9 / 8 * 128 / 130,
    5: 32e9 / 8 * 128 / 130,
    6: 64e9 / 8 * 242 / 256,
}


def link_peak_bytes_per_s(generation: int | None, width: int | None) -> float | None:
    """The most a PCIe link carries in one direction, before packet headers; None where it cannot be known."""
    lane = _LANE_BYTES_PER_S.get(generation or 0)
    return lane * width if lane and width else None


class NvmlError(Exception):
    """NVML cannot answer, now or at all; the message says why."""


class GpuLost(NvmlError):
    """The card has fallen off the bus: nothing about it can be read any more."""


class Unsupported(NvmlError):
    """This card, driver or user will never get this value."""


@dataclass
class Link:
    """A PCIe link as it is now; None for what the card does not tell."""

    generation: int | None
    width: int | None


class Gpu:
    """One card. Every reading raises NvmlError where there is none."""

    def __init__(self, nvml: Nvml, index: int) -> None:
        self._nvml = nvml
        self._handle = nvml.call("nvmlDeviceGetHandleByIndex", index)
        self.index = index

    def describe(self) -> dict[str, Any]:
        """The card's facts for the trace's meta; null for what it does not tell."""
        try_call = self._try
        memory = try_call("nvmlDeviceGetMemoryInfo")
        pci = try_call("nvmlDeviceGetPciInfo")
        generation = try_call("nvmlDeviceGetMaxPcieLinkGeneration")
        width = try_call("nvmlDeviceGetMaxPcieLinkWidth")
        now = self.link()
        return {
            "index": self.index,
            "name": _text(try_call("nvmlDeviceGetName")),
            "uuid": _text(try_call("nvmlDeviceGetUUID")),
            "capacity_bytes": memory.total if memory is not None else None,
            "pci_bus_id": _text(pci.busId) if pci is not None else None,
            "link": {
                "generation": now.generation,
                "width": now.width,
                "max_generation": generation,
                "max_width": width,
                "peak_bytes_per_s": link_peak_bytes_per_s(generation, width),
            },
        }

    def memory_used(self) -> int:
        """Bytes in use on the card, by everyone."""
        return int(self._call("nvmlDeviceGetMemoryInfo").used)

    def link(self) -> Link:
        return Link(self._try("nvmlDeviceGetCurrPcieLinkGeneration"), self._try("nvmlDeviceGetCurrPcieLinkWidth"))

    def pcie_counters(self) -> tuple[int, int]:
        """(h2d, d2h) bytes counted by the card since some moment; they wrap. Field values 198 and 197."""
        fields = [self._nvml.constant(f"NVML_FI_DEV_PCIE_COUNT_{way}_BYTES") for way in ("RX", "TX")]
        values = self._call("nvmlDeviceGetFieldValues", fields)
        received, sent = (self._field(value) for value in values)
        return received, sent

    def pcie_throughput(self) -> tuple[float, float]:
        """(h2d, d2h) bytes/s over the last 20 ms of two windows, one after the other; blocks for about 42 ms."""
        library = self._nvml.library
        received = self._call("nvmlDeviceGetPcieThroughput", library.NVML_PCIE_UTIL_RX_BYTES)
        sent = self._call("nvmlDeviceGetPcieThroughput", library.NVML_PCIE_UTIL_TX_BYTES)
        return received * 1e3, sent * 1e3

    def gpm_sample(self) -> Any:
        """A snapshot of the performance monitor (Hopper or newer), for `gpm_rates`; give it back to `gpm_free`."""
        sample = self._nvml.call("nvmlGpmSampleAlloc")
        try:
            self._call("nvmlGpmSampleGet", sample)
        except NvmlError:
            self.gpm_free(sample)
            raise
        return sample

    def gpm_free(self, sample: Any) -> None:
        self._nvml.call("nvmlGpmSampleFree", sample)

    def gpm_rates(self, first: Any, second: Any) -> tuple[float, float]:
        """(h2d, d2h) bytes/s, the mean between two samples; NVML gives MiB/s."""
        library = self._nvml.library
        request = library.c_nvmlGpmMetricsGet_t()
        request.version = library.NVML_GPM_METRICS_GET_VERSION
        request.numMetrics = 2
        request.sample1, request.sample2 = first, second
        request.metrics[0].metricId = library.NVML_GPM_METRIC_PCIE_RX_PER_SEC
        request.metrics[1].metricId = library.NVML_GPM_METRIC_PCIE_TX_PER_SEC
        self._nvml.call("nvmlGpmMetricsGet", request)
        for metric in request.metrics[0], request.metrics[1]:
            self._nvml.check(metric.nvmlReturn)
        return request.metrics[0].value * 2**20, request.metrics[1].value * 2**20

    def gpm_supported(self) -> bool:
        answer = self._try("nvmlGpmQueryDeviceSupport")
        return answer is not None and bool(answer.isSupportedDevice)

    def _call(self, function: str, *arguments: Any) -> Any:
        return self._nvml.call(function, self._handle, *arguments)

    def _try(self, function: str) -> Any:
        try:
            return self._call(function)
        except GpuLost:
            raise
        except NvmlError:
            return None

    def _field(self, value: Any) -> int:
        self._nvml.check(value.nvmlReturn)
        library = self._nvml.library
        member = {
            library.NVML_VALUE_TYPE_UNSIGNED_INT: "uiVal",
            library.NVML_VALUE_TYPE_UNSIGNED_LONG: "ulVal",
            library.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG: "ullVal",
        }.get(value.valueType)
        if member is None:
            raise Unsupported(f"a counter of the unknown type {value.valueType}")
        return int(getattr(value.value, member))


class Nvml:
    """NVML, initialised. Raises NvmlError where there is no driver, no library, or no access.

    library: the module `pynvml`, or one that looks like it.
    """

    def __init__(self, library: Any = None) -> None:
        if library is None:
            import pynvml

            library = pynvml
        self.library = library
        self.refused: list[str] = []
        self.call("nvmlInit")

    def gpus(self) -> list[Gpu]:
        """The cards that can be opened; `refused` says of the others why not."""
        found = []
        for index in range(self.call("nvmlDeviceGetCount")):
            try:
                found.append(Gpu(self, index))
            except NvmlError as error:
                self.refused.append(f"GPU {index} is not sampled: {error}")
        return found

    def driver(self) -> str | None:
        try:
            return _text(self.call("nvmlSystemGetDriverVersion"))
        except NvmlError:
            return None

    def close(self) -> None:
        try:
            self.call("nvmlShutdown")
        except NvmlError:
            return

    def call(self, function: str, *arguments: Any) -> Any:
        """Call a function of NVML, with its errors translated."""
        try:
            return getattr(self.library, function)(*arguments)
        except self.library.NVMLError as error:
            raise self._translated(error) from None
        except AttributeError:
            raise Unsupported(f"this version of nvidia-ml-py has no {function}") from None

    def constant(self, name: str) -> Any:
        if not hasattr(self.library, name):
            raise Unsupported(f"this version of nvidia-ml-py has no {name}")
        return getattr(self.library, name)

    def check(self, code: int) -> None:
        """Raise what a return code inside a structure means."""
        if code != self.library.NVML_SUCCESS:
            raise self._translated(self.library.NVMLError(code))

    def _translated(self, error: Any) -> NvmlError:
        code = getattr(error, "value", None)
        if code == self.library.NVML_ERROR_GPU_IS_LOST:
            return GpuLost(str(error))
        never = (
            self.library.NVML_ERROR_NOT_SUPPORTED,
            self.library.NVML_ERROR_NO_PERMISSION,
            self.library.NVML_ERROR_FUNCTION_NOT_FOUND,
            self.library.NVML_ERROR_INVALID_ARGUMENT,
        )
        return Unsupported(str(error)) if code in never else NvmlError(str(error))


def _text(value: Any) -> str | None:
    return value.decode() if isinstance(value, bytes) else value
