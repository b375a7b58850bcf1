"""Values of one GPU, or of a MIG device on one GPU, through NVML."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from ebbtide.profiler.sampler.nvml import GpuLost, Nvml, NvmlError, Unsupported, as_text
from ebbtide.profiler.sampler.pcie import link_peak_bytes_per_s

# The number of MIG device `m` of card `n` is `n + (m + 1) * _CARDS`.
_CARDS = 256
# Names of GPUs that are one module with a CPU of NVIDIA: GH200, GB200, GB300, GB10.
_GRACE = re.compile(r"\bG[HB]\d+\b")
# A reading that fails so often in a row is given up.
_MAX_FAILURES = 10


@dataclass
class LinkState:
    """The current state of a PCIe link; None for what the card does not report."""

    generation: int | None
    width: int | None


class Gpu:
    """One card, or its MIG device `mig_device`.

    A MIG device has a name, a UUID and memory of its own; everything else is its
    card's. Every method that reads a value raises NvmlError if NVML does not give it.
    """

    def __init__(self, nvml: Nvml, card: int, mig_device: int | None = None) -> None:
        self._nvml = nvml
        self._card = self._handle = nvml.call("nvmlDeviceGetHandleByIndex", card)
        # The number of the card in traces is NVML's own; the number of a MIG device is
        # unique as well.
        self.index, self.title = card, f"GPU {card}"
        self._is_mig_device = mig_device is not None
        if mig_device is not None:
            self._handle = self.call("nvmlDeviceGetMigDeviceHandleByIndex", mig_device)
            self.index += (mig_device + 1) * _CARDS
            self.title += f" MIG device {mig_device}"

    def describe(self) -> dict[str, Any]:
        """Return the description of the card for the trace's metadata.

        Values are null for what it does not report.
        """
        memory = self._try("nvmlDeviceGetMemoryInfo", self._handle)
        pci = self._try("nvmlDeviceGetPciInfo")
        generation = self._try("nvmlDeviceGetMaxPcieLinkGeneration")
        width = self._try("nvmlDeviceGetMaxPcieLinkWidth")
        current = self.read_link()
        description = {
            "index": self.index,
            "name": as_text(self._try("nvmlDeviceGetName", self._handle)),
            "uuid": self.read_uuid(),
            "capacity_bytes": memory.total if memory is not None else None,
            "pci_bus_id": as_text(pci.busId) if pci is not None else None,
            "link": {
                "generation": current.generation,
                "width": current.width,
                "max_generation": generation,
                "max_width": width,
                # The peak of a link that copies do not use says nothing about them.
                "peak_bytes_per_s": None
                if self._copies_over_c2c()
                else link_peak_bytes_per_s(generation, width),
            },
        }
        if self._is_mig_device:
            description["parent_uuid"] = self.read_card_uuid()
        return description

    def read_uuid(self) -> str | None:
        """Return the UUID, `GPU-...` or `MIG-...`; None if NVML does not give it."""
        return as_text(self._try("nvmlDeviceGetUUID", self._handle))

    def read_card_uuid(self) -> str | None:
        """Return the UUID of the card, also where this is a MIG device of it; None if
        NVML does not give it."""
        return as_text(self._try("nvmlDeviceGetUUID"))

    def mig_devices(self) -> list[Gpu]:
        """Return the MIG devices of the card that this user may see.

        Return an empty list if it is not partitioned.
        """
        if not self._is_partitioned():
            return []
        devices = []
        for number in range(self._try("nvmlDeviceGetMaxMigDeviceCount") or 0):
            try:
                devices.append(Gpu(self._nvml, self.index, number))
            except GpuLost:
                raise
            except NvmlError:
                continue  # there is none of this number, or it is another user's
        return devices

    def link_obstacle(self) -> str | None:
        """Return why PCIe counters say nothing about copies of this GPU.

        Return None where they count them.
        """
        if self._copies_over_c2c():
            return "copies go over NVLink-C2C, which PCIe counters do not count"
        if self._is_mig_device or self._is_partitioned():
            return "PCIe counters are those of the whole card, not of a MIG device"
        return None

    def read_used_bytes(self) -> int:
        """Return the bytes in use on the card or MIG device, by all processes."""
        return int(self._nvml.call("nvmlDeviceGetMemoryInfo", self._handle).used)

    def read_link(self) -> LinkState:
        return LinkState(
            self._try("nvmlDeviceGetCurrPcieLinkGeneration"),
            self._try("nvmlDeviceGetCurrPcieLinkWidth"),
        )

    def read_pcie_counters(self) -> tuple[int, int]:
        """Return (h2d, d2h) bytes counted by the card since some moment; they wrap.
        Field values 198 and 197."""
        received, sent = self.read_fields(
            "NVML_FI_DEV_PCIE_COUNT_RX_BYTES", "NVML_FI_DEV_PCIE_COUNT_TX_BYTES"
        )
        return received, sent

    def read_fields(self, *names: str, scope: int = 0) -> list[int]:
        """Return the values of fields, by the names of their constants in NVML.

        `scope`: the link that they are of.
        """
        fields = [(self._nvml.constant(name), scope) for name in names]
        return [
            self._field(value)
            for value in self.call("nvmlDeviceGetFieldValues", fields)
        ]

    def read_pcie_throughput(self) -> tuple[float, float]:
        """Return (h2d, d2h) bytes/s over two windows of 20 ms.

        The windows come one after the other; blocks for about 42 ms.
        """
        library = self._nvml.library
        received = self.call(
            "nvmlDeviceGetPcieThroughput", library.NVML_PCIE_UTIL_RX_BYTES
        )
        sent = self.call("nvmlDeviceGetPcieThroughput", library.NVML_PCIE_UTIL_TX_BYTES)
        return received * 1e3, sent * 1e3

    def take_gpm_sample(self) -> Any:
        """Take a snapshot of the performance monitor (Hopper or newer).

        Free it with `free_gpm_sample`.
        """
        sample = self._nvml.call("nvmlGpmSampleAlloc")
        try:
            self.call("nvmlGpmSampleGet", sample)
        except NvmlError:
            self.free_gpm_sample(sample)
            raise
        return sample

    def free_gpm_sample(self, sample: Any) -> None:
        self._nvml.call("nvmlGpmSampleFree", sample)

    def read_gpm_rates(self, first: Any, second: Any) -> tuple[float, float]:
        """Return (h2d, d2h) bytes/s, the mean between two snapshots.

        NVML gives MiB/s.
        """
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
        """Call an NVML function for this card, also where this is a MIG device of
        it."""
        return self._nvml.call(function, self._card, *arguments)

    def constant(self, name: str) -> Any:
        """Return a constant of NVML. Raises Unsupported if this version does not have
        it."""
        return self._nvml.constant(name)

    def _is_partitioned(self) -> bool:
        mode = self._try("nvmlDeviceGetMigMode")
        return mode is not None and bool(mode[0])

    def _copies_over_c2c(self) -> bool:
        """Return whether a link of NVLink-C2C to the host is active.

        Where drivers do not say, the card's name decides.
        """
        try:
            (links,) = self.read_fields("NVML_FI_DEV_C2C_LINK_COUNT")
            return any(
                self.read_fields("NVML_FI_DEV_C2C_LINK_GET_STATUS", scope=link) == [1]
                for link in range(links)
            )
        except GpuLost:
            raise
        except NvmlError:
            return (
                _GRACE.search(as_text(self._try("nvmlDeviceGetName")) or "") is not None
            )

    def _try(self, function: str, handle: Any = None) -> Any:
        """Call a function for the card, or for `handle`.

        Return None if NVML refuses it.
        """
        try:
            return self._nvml.call(function, self._card if handle is None else handle)
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


class OpenedGpus(NamedTuple):
    """Result of `open_gpus`: the cards and MIG devices, and a line for each card that
    cannot be opened."""

    gpus: list[Gpu]
    unavailable: list[str]


def open_gpus(nvml: Nvml, visible: str = "") -> OpenedGpus:
    """Open all cards, or their MIG devices.

    Of MIG devices, only those that `visible`, CUDA_VISIBLE_DEVICES, names are opened.
    """
    named = tuple(
        name for name in map(str.strip, visible.split(",")) if name.startswith("MIG-")
    )
    gpus: list[Gpu] = []
    chosen: list[Gpu] = []
    unavailable = []
    for index in range(nvml.call("nvmlDeviceGetCount")):
        try:
            card = Gpu(nvml, index)
            of_card = card.mig_devices() or [card]
            chosen += [
                gpu
                for gpu in of_card
                if any(same_gpu(name, gpu.read_uuid()) for name in named)
            ]
            gpus += of_card
        except NvmlError as error:
            unavailable.append(f"GPU {index} is not sampled: {error}")
    return OpenedGpus(chosen or gpus, unavailable)


def same_gpu(first: str | None, second: str | None) -> bool:
    """Return whether two UUIDs name one GPU. CUDA gives them without the prefix that
    tells a card from a MIG device."""
    return first is not None and second is not None and _bare(first) == _bare(second)


def _bare(uuid: str) -> str:
    return uuid.removeprefix("GPU-").removeprefix("MIG-").lower()


_Call = Callable[[Gpu], tuple[int, ...]]


def _read_utilization(gpu: Gpu) -> tuple[int, ...]:
    rates = gpu.call("nvmlDeviceGetUtilizationRates")
    return int(rates.gpu), int(rates.memory)


def _number(function: str, *constants: str) -> _Call:
    """Return a call of an NVML function that gives one number.

    `constants` are names of its further arguments.
    """
    return lambda gpu: (int(gpu.call(function, *map(gpu.constant, constants))),)


# Quantities that are read together, and the calls that do so, the best one first.
# From Ampere on (except GA100) nvmlDeviceGetPowerUsage is a mean over 1 s, so the
# instantaneous value comes first. Drivers before 535 have the second name of the
# reasons only.
_READINGS: dict[tuple[str, ...], tuple[_Call, ...]] = {
    ("utilization", "memory_utilization"): (_read_utilization,),
    ("power",): (
        lambda gpu: tuple(gpu.read_fields("NVML_FI_DEV_POWER_INSTANT")),
        _number("nvmlDeviceGetPowerUsage"),
    ),
    ("sm_clock",): (_number("nvmlDeviceGetClockInfo", "NVML_CLOCK_SM"),),
    ("memory_clock",): (_number("nvmlDeviceGetClockInfo", "NVML_CLOCK_MEM"),),
    ("temperature",): (_number("nvmlDeviceGetTemperature", "NVML_TEMPERATURE_GPU"),),
    ("throttle_reasons",): (
        _number("nvmlDeviceGetCurrentClocksEventReasons"),
        _number("nvmlDeviceGetCurrentClocksThrottleReasons"),
    ),
}


class GpuStateReader:
    """Reads the state of one card. A quantity that the card refuses is not asked for
    again."""

    def __init__(self, gpu: Gpu) -> None:
        self.refused: dict[str, str] = {}
        self._gpu = gpu
        self._calls = dict(_READINGS)  # Those that are left for quantities.
        self._failures: Counter[tuple[str, ...]] = Counter()

    def read(self) -> dict[str, int]:
        """Read every quantity that the card gives now. Raises Unsupported if it gives
        none, and never will."""
        values: dict[str, int] = {}
        for quantities in list(self._calls):
            self._read_together(quantities, values)
        if not self._calls:
            raise Unsupported(self._reasons())
        return values

    def refusals(self) -> str | None:
        """Return the quantities that the card refuses, with reasons.

        Return None if none, or if `read` has raised them.
        """
        return self._reasons() if self.refused and self._calls else None

    def _reasons(self) -> str:
        """Return the refused quantities, each reason once."""
        by_reason: dict[str, list[str]] = {}
        for quantity, reason in self.refused.items():
            by_reason.setdefault(reason, []).append(quantity.replace("_", " "))
        return "; ".join(
            f"{', '.join(quantities)} ({reason})"
            for reason, quantities in by_reason.items()
        )

    def _read_together(
        self, quantities: tuple[str, ...], values: dict[str, int]
    ) -> None:
        """Add the values of some quantities to `values`.

        Drop the calls that the card refuses.
        """
        calls, reason = self._calls[quantities], ""
        while calls:
            try:
                values.update(zip(quantities, calls[0](self._gpu), strict=True))
                self._failures[quantities] = 0
                break
            except GpuLost:
                raise
            except Unsupported as error:
                calls, reason = calls[1:], str(error)
            except NvmlError as error:
                # A failure that may pass: only the value is missing.
                self._failures[quantities] += 1
                if self._failures[quantities] < _MAX_FAILURES:
                    break
                calls, reason = (), str(error)
        if calls:
            self._calls[quantities] = calls
        else:
            del self._calls[quantities]
            self.refused.update(dict.fromkeys(quantities, reason))
