"""A fake of the module `pynvml`: its real errors, constants and structures, and
functions over fake cards."""

from __future__ import annotations

import ctypes
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pynvml

GIB = 2**30
_POWER = pynvml.NVML_FI_DEV_POWER_INSTANT
_RX, _TX = (
    pynvml.NVML_FI_DEV_PCIE_COUNT_RX_BYTES,
    pynvml.NVML_FI_DEV_PCIE_COUNT_TX_BYTES,
)
_MEMBERS = {
    pynvml.NVML_VALUE_TYPE_UNSIGNED_INT: "uiVal",
    pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG: "ulVal",
    pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG: "ullVal",
}


@dataclass
class FakeCard:
    """One card, by default without any source of link throughput; pairs are (to the
    card, from it)."""

    uuid: str = "GPU-a"
    name: Any = "Fake H100"
    used: int = 3 * GIB
    total: int = 80 * GIB
    generation: int = 5
    width: int = 16
    counters: list[int] | None = None  # bytes; moved by `step` at each reading
    step: tuple[int, int] = (1_000_000, 10_000)
    value_type: int = pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG
    bits: int = 64
    # the nvmlReturn of a field or of a GPM metric
    returns: dict[int, int] = field(default_factory=dict)
    gpm: tuple[float, float] | None = None  # MiB/s
    throughput: tuple[int, int] | None = None  # KB/s
    throughput_s: float = 0.0  # how long one reading blocks
    utilization: tuple[int, int] = (97, 41)  # %, of the GPU and of its memory
    instant_mw: int | None = 402_500
    power_mw: int = 399_000
    sm_mhz: int = 1980
    memory_mhz: int = 2619
    celsius: int = 61
    reasons: int = pynvml.nvmlClocksEventReasonSwPowerCap

    def __post_init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self._faults: list[tuple[str, int, int, float]] = []
        self._lock = threading.Lock()

    def fail(
        self, function: str, code: int, first: int = 1, last: float = float("inf")
    ) -> FakeCard:
        """Make the calls `first` to `last` of a function fail; `*` counts the calls of
        all functions together."""
        self._faults.append((function, code, first, last))
        return self

    def lose(self, first: int = 1) -> FakeCard:
        """Make the card fall off the bus at the `first` call."""
        return self.fail("*", pynvml.NVML_ERROR_GPU_IS_LOST, first)

    def called(self, function: str) -> None:
        with self._lock:
            self.calls[function] += 1
            self.calls["*"] += 1
            for name, code, first, last in self._faults:
                if name in (function, "*") and first <= self.calls[name] <= last:
                    raise pynvml.NVMLError(code)


def counting(**values: Any) -> FakeCard:
    """Return a card with byte counters."""
    return FakeCard(**{"counters": [0, 0], **values})


def hopper(**values: Any) -> FakeCard:
    """Return a card with a performance monitor and no counters."""
    return FakeCard(**{"gpm": (20_000.0, 5.0), "throughput": (1, 1), **values})


def older(**values: Any) -> FakeCard:
    """Return a card that has its throughput over 20 ms and nothing else."""
    return FakeCard(
        **{"throughput": (12_000_000, 3_000), "throughput_s": 0.005, **values}
    )


class FakeNvml:
    """The fake module.

    Args:
        cards: Its cards.
        init_error: The error code of nvmlInit; None: it succeeds.
        without: Names that this version of it does not have.
    """

    def __init__(
        self,
        *cards: FakeCard,
        init_error: int | None = None,
        without: tuple[str, ...] = (),
    ) -> None:
        self.cards = cards
        self.init_error = init_error
        self.without = without
        self.open = False
        self.samples: dict[int, FakeCard | None] = {}  # GPM samples that were not freed
        self._sample = 0

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("nvml") and name in self.without:
            raise AttributeError(name)
        return super().__getattribute__(name)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("nvml") or name in self.without:
            raise AttributeError(f"module 'pynvml' has no attribute {name!r}")
        return getattr(pynvml, name)

    def nvmlInit(self) -> None:
        if self.init_error is not None:
            raise pynvml.NVMLError(self.init_error)
        self.open = True

    def nvmlShutdown(self) -> None:
        self._checked()
        self.open = False

    def nvmlSystemGetDriverVersion(self) -> str:
        self._checked()
        return "570.86.15"

    def nvmlDeviceGetCount(self) -> int:
        self._checked()
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> FakeCard:
        return self._checked(self.cards[index], "nvmlDeviceGetHandleByIndex")

    def nvmlDeviceGetName(self, card: FakeCard) -> Any:
        return self._checked(card, "nvmlDeviceGetName").name

    def nvmlDeviceGetUUID(self, card: FakeCard) -> str:
        return self._checked(card, "nvmlDeviceGetUUID").uuid

    def nvmlDeviceGetPciInfo(self, card: FakeCard) -> Any:
        self._checked(card, "nvmlDeviceGetPciInfo")
        return pynvml.nvmlPciInfo_t(
            busId=f"0000000{self.cards.index(card)}:1B:00.0".encode()
        )

    def nvmlDeviceGetMemoryInfo(self, card: FakeCard) -> Any:
        self._checked(card, "nvmlDeviceGetMemoryInfo")
        return pynvml.c_nvmlMemory_t(
            total=card.total, free=card.total - card.used, used=card.used
        )

    def nvmlDeviceGetCurrPcieLinkGeneration(self, card: FakeCard) -> int:
        return self._checked(card, "nvmlDeviceGetCurrPcieLinkGeneration").generation

    def nvmlDeviceGetMaxPcieLinkGeneration(self, card: FakeCard) -> int:
        return self._checked(card, "nvmlDeviceGetMaxPcieLinkGeneration").generation

    def nvmlDeviceGetCurrPcieLinkWidth(self, card: FakeCard) -> int:
        return self._checked(card, "nvmlDeviceGetCurrPcieLinkWidth").width

    def nvmlDeviceGetMaxPcieLinkWidth(self, card: FakeCard) -> int:
        return self._checked(card, "nvmlDeviceGetMaxPcieLinkWidth").width

    def nvmlDeviceGetFieldValues(
        self, card: FakeCard, scoped_fields: list[tuple[int, int]]
    ) -> Any:
        fields = [number for number, _ in scoped_fields]
        if fields == [_POWER]:
            return self._instant_power(card)
        if fields == [pynvml.NVML_FI_DEV_C2C_LINK_COUNT]:
            return (pynvml.c_nvmlFieldValue_t * 1)(
                pynvml.c_nvmlFieldValue_t(nvmlReturn=pynvml.NVML_ERROR_NOT_SUPPORTED)
            )
        self._checked(card, "nvmlDeviceGetFieldValues")
        answers = (pynvml.c_nvmlFieldValue_t * len(fields))()
        for answer, number in zip(answers, fields, strict=True):
            answer.fieldId = number
            missing = (
                pynvml.NVML_SUCCESS
                if card.counters
                else pynvml.NVML_ERROR_NOT_SUPPORTED
            )
            answer.nvmlReturn = card.returns.get(number, missing)
            answer.valueType = card.value_type
            if answer.nvmlReturn == pynvml.NVML_SUCCESS and card.counters:
                setattr(
                    answer.value,
                    _MEMBERS.get(card.value_type, "dVal"),
                    card.counters[(_RX, _TX).index(number)],
                )
        if card.counters:
            card.counters = [
                (n + step) % 2**card.bits
                for n, step in zip(card.counters, card.step, strict=True)
            ]
        return answers

    def _instant_power(self, card: FakeCard) -> Any:
        """Answer for the field of the instantaneous power; `fail` has a name of its own
        for it."""
        self._checked(card, "instant power")
        (answer,) = answers = (pynvml.c_nvmlFieldValue_t * 1)()
        answer.fieldId, answer.valueType = _POWER, pynvml.NVML_VALUE_TYPE_UNSIGNED_INT
        if card.instant_mw is None:
            answer.nvmlReturn = pynvml.NVML_ERROR_NOT_SUPPORTED
        else:
            answer.value.uiVal = card.instant_mw
        return answers

    def nvmlDeviceGetUtilizationRates(self, card: FakeCard) -> Any:
        gpu, memory = self._checked(card, "nvmlDeviceGetUtilizationRates").utilization
        return pynvml.c_nvmlUtilization_t(gpu=gpu, memory=memory)

    def nvmlDeviceGetPowerUsage(self, card: FakeCard) -> int:
        return self._checked(card, "nvmlDeviceGetPowerUsage").power_mw

    def nvmlDeviceGetClockInfo(self, card: FakeCard, clock: int) -> int:
        self._checked(card, "nvmlDeviceGetClockInfo")
        return {
            pynvml.NVML_CLOCK_SM: card.sm_mhz,
            pynvml.NVML_CLOCK_MEM: card.memory_mhz,
        }[clock]

    def nvmlDeviceGetTemperature(self, card: FakeCard, sensor: int) -> int:
        assert sensor == pynvml.NVML_TEMPERATURE_GPU
        return self._checked(card, "nvmlDeviceGetTemperature").celsius

    def nvmlDeviceGetCurrentClocksEventReasons(self, card: FakeCard) -> int:
        return self._checked(card, "nvmlDeviceGetCurrentClocksEventReasons").reasons

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, card: FakeCard) -> int:
        return self._checked(card, "nvmlDeviceGetCurrentClocksThrottleReasons").reasons

    def nvmlDeviceGetPcieThroughput(self, card: FakeCard, counter: int) -> int:
        self._checked(card, "nvmlDeviceGetPcieThroughput")
        if card.throughput is None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        time.sleep(card.throughput_s)
        return card.throughput[
            (pynvml.NVML_PCIE_UTIL_RX_BYTES, pynvml.NVML_PCIE_UTIL_TX_BYTES).index(
                counter
            )
        ]

    def nvmlGpmQueryDeviceSupport(self, card: FakeCard) -> Any:
        self._checked(card, "nvmlGpmQueryDeviceSupport")
        return pynvml.c_nvmlGpmSupport_t(isSupportedDevice=card.gpm is not None)

    def nvmlGpmSampleAlloc(self) -> Any:
        self._checked()
        self._sample += 1
        self.samples[self._sample] = None
        return ctypes.cast(self._sample, pynvml.c_nvmlGpmSample_t)

    def nvmlGpmSampleFree(self, sample: Any) -> None:
        self._checked()
        del self.samples[_address(sample)]  # KeyError: freed twice

    def nvmlGpmSampleGet(self, card: FakeCard, sample: Any) -> Any:
        self.samples[_address(sample)] = self._checked(card, "nvmlGpmSampleGet")
        return sample

    def nvmlGpmMetricsGet(self, request: Any) -> Any:
        card = self.samples[_address(request.sample1)]
        assert card is not None
        assert card is self.samples[_address(request.sample2)]
        assert card.gpm is not None
        assert (request.version, request.numMetrics) == (
            pynvml.NVML_GPM_METRICS_GET_VERSION,
            2,
        )
        self._checked(card, "nvmlGpmMetricsGet")
        order = (
            pynvml.NVML_GPM_METRIC_PCIE_RX_PER_SEC,
            pynvml.NVML_GPM_METRIC_PCIE_TX_PER_SEC,
        )
        for metric in request.metrics[0], request.metrics[1]:
            metric.nvmlReturn = card.returns.get(metric.metricId, pynvml.NVML_SUCCESS)
            if metric.nvmlReturn == pynvml.NVML_SUCCESS:
                metric.value = card.gpm[order.index(metric.metricId)]
        return request

    def _checked(self, card: Any = None, function: str = "") -> Any:
        if not self.open:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_UNINITIALIZED)
        if card is not None:
            card.called(function)
        return card


def _address(sample: Any) -> int:
    return ctypes.cast(sample, ctypes.c_void_p).value or 0
