"""Access to NVML for the whole of ebbtide. Every failure becomes a missing value or an NvmlError."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ebbtide.profiler.sampler.pcie import link_peak_bytes_per_s


class NvmlError(Exception):
    """NVML cannot answer, now or at all; the message says why."""


class GpuLost(NvmlError):
    """The card has fallen off the bus: nothing about it can be read any more."""


class Unsupported(NvmlError):
    """This card, driver or user will never get this value."""


@dataclass
class LinkState:
    """The current state of a PCIe link; None for what the card does not report.

    Attributes:
        generation: PCIe generation.
        width: Number of lanes.
    """

    generation: int | None
    width: int | None


class Gpu:
    """One card. Every method that reads a value raises NvmlError if the card does not give it.

    Attributes:
        index: NVML's number of the card.
    """

    def __init__(self, nvml: Nvml, index: int) -> None:
        self._nvml = nvml
        self._handle = nvml.call("nvmlDeviceGetHandleByIndex", index)
        self.index = index

    def describe(self) -> dict[str, Any]:
        """Return the description of the card for the trace's metadata; null for what it does not report."""
        try_call = self._try
        memory = try_call("nvmlDeviceGetMemoryInfo")
        pci = try_call("nvmlDeviceGetPciInfo")
        generation = try_call("nvmlDeviceGetMaxPcieLinkGeneration")
        width = try_call("nvmlDeviceGetMaxPcieLinkWidth")
        current = self.read_link()
        return {
            "index": self.index,
            "name": _text(try_call("nvmlDeviceGetName")),
            "uuid": _text(try_call("nvmlDeviceGetUUID")),
            "capacity_bytes": memory.total if memory is not None else None,
            "pci_bus_id": _text(pci.busId) if pci is not None else None,
            "link": {
                "generation": current.generation,
                "width": current.width,
                "max_generation": generation,
                "max_width": width,
                "peak_bytes_per_s": link_peak_bytes_per_s(generation, width),
            },
        }

    def read_used_bytes(self) -> int:
        """Return the bytes in use on the card, by all processes."""
        return int(self.call("nvmlDeviceGetMemoryInfo").used)

    def read_link(self) -> LinkState:
        """Return the current state of the card's link."""
        return LinkState(self._try("nvmlDeviceGetCurrPcieLinkGeneration"), self._try("nvmlDeviceGetCurrPcieLinkWidth"))

    def read_pcie_counters(self) -> tuple[int, int]:
        """Return (h2d, d2h) bytes counted by the card since some moment; they wrap. Field values 198 and 197."""
        received, sent = self.read_fields("NVML_FI_DEV_PCIE_COUNT_RX_BYTES", "NVML_FI_DEV_PCIE_COUNT_TX_BYTES")
        return received, sent

    def read_fields(self, *names: str) -> list[int]:
        """Return the values of fields, by the names of their constants in NVML."""
        fields = [self._nvml.constant(name) for name in names]
        return [self._field(value) for value in self.call("nvmlDeviceGetFieldValues", fields)]

    def read_pcie_throughput(self) -> tuple[float, float]:
        """Return (h2d, d2h) bytes/s over two windows of 20 ms, one after the other; blocks for about 42 ms."""
        library = self._nvml.library
        received = self.call("nvmlDeviceGetPcieThroughput", library.NVML_PCIE_UTIL_RX_BYTES)
        sent = self.call("nvmlDeviceGetPcieThroughput", library.NVML_PCIE_UTIL_TX_BYTES)
        return received * 1e3, sent * 1e3

    def take_gpm_sample(self) -> Any:
        """Take a snapshot of the performance monitor (Hopper or newer); free it with `free_gpm_sample`."""
        sample = self._nvml.call("nvmlGpmSampleAlloc")
        try:
            self.call("nvmlGpmSampleGet", sample)
        except NvmlError:
            self.free_gpm_sample(sample)
            raise
        return sample

    def free_gpm_sample(self, sample: Any) -> None:
        """Free a snapshot."""
        self._nvml.call("nvmlGpmSampleFree", sample)

    def read_gpm_rates(self, first: Any, second: Any) -> tuple[float, float]:
        """Return (h2d, d2h) bytes/s, the mean between two snapshots; NVML gives MiB/s."""
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

    def supports_gpm(self) -> bool:
        """Return whether the card has a performance monitor."""
        answer = self._try("nvmlGpmQueryDeviceSupport")
        return answer is not None and bool(answer.isSupportedDevice)

    def call(self, function: str, *arguments: Any) -> Any:
        """Call a function of NVML for this card."""
        return self._nvml.call(function, self._handle, *arguments)

    def constant(self, name: str) -> Any:
        """Return a constant of NVML. Raises Unsupported if this version does not have it."""
        return self._nvml.constant(name)

    def _try(self, function: str) -> Any:
        try:
            return self.call(function)
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
            raise Unsupported(f"a field of the unknown type {value.valueType}")
        return int(getattr(value.value, member))


class Nvml:
    """NVML, initialised.

    Args:
        library: The module `pynvml`, or a replacement with the same functions; None imports it.

    Attributes:
        library: The module.
        unavailable: One line for each card that cannot be opened, with the reason.

    Raises:
        NvmlError: If there is no driver, no library, or no access.
    """

    def __init__(self, library: Any = None) -> None:
        if library is None:
            import pynvml

            library = pynvml
        self.library = library
        self.unavailable: list[str] = []
        self.call("nvmlInit")

    def gpus(self) -> list[Gpu]:
        """Open the cards; those that cannot be opened are added to `unavailable`."""
        opened = []
        for index in range(self.call("nvmlDeviceGetCount")):
            try:
                opened.append(Gpu(self, index))
            except NvmlError as error:
                self.unavailable.append(f"GPU {index} is not sampled: {error}")
        return opened

    def driver(self) -> str | None:
        """Return the version of the driver; None if NVML does not give it."""
        try:
            return _text(self.call("nvmlSystemGetDriverVersion"))
        except NvmlError:
            return None

    def close(self) -> None:
        """Shut NVML down. Safe to call twice."""
        try:
            self.call("nvmlShutdown")
        except NvmlError:
            return

    def call(self, function: str, *arguments: Any) -> Any:
        """Call a function of NVML; its errors become NvmlError."""
        try:
            return getattr(self.library, function)(*arguments)
        except self.library.NVMLError as error:
            raise self._translated(error) from None
        except AttributeError:
            raise Unsupported(f"this version of nvidia-ml-py has no {function}") from None

    def constant(self, name: str) -> Any:
        """Return a constant of the library. Raises Unsupported if this version does not have it."""
        if not hasattr(self.library, name):
            raise Unsupported(f"this version of nvidia-ml-py has no {name}")
        return getattr(self.library, name)

    def check(self, code: int) -> None:
        """Raise NvmlError if a return code inside a structure is an error."""
        if code != self.library.NVML_SUCCESS:
            raise self._translated(self.library.NVMLError(code))

    def _translated(self, error: Any) -> NvmlError:
        code = getattr(error, "value", None)
        if code == self.library.NVML_ERROR_GPU_IS_LOST:
            return GpuLost(str(error))
        permanent = (
            self.library.NVML_ERROR_NOT_SUPPORTED,
            self.library.NVML_ERROR_NO_PERMISSION,
            self.library.NVML_ERROR_FUNCTION_NOT_FOUND,
            self.library.NVML_ERROR_INVALID_ARGUMENT,
        )
        return Unsupported(str(error)) if code in permanent else NvmlError(str(error))


def _text(value: Any) -> str | None:
    return value.decode() if isinstance(value, bytes) else value
