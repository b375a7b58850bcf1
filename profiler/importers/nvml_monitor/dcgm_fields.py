"""The fields of NVIDIA's Data Center GPU Manager (DCGM) that describe memory, link and state of a GPU."""

from __future__ import annotations

from ebbtide.profiler.importers.nvml_monitor.table import Tool

# Field -> name and unit of the column here. Names of dcgm-exporter are upper-case `DCGM_FI_...` since version 2;
# the lower-case ones are those of version 1. Sources: dcgm_fields.h and etc/*.csv of dcgm-exporter.
# PROF_PCIE_*_BYTES are means in bytes/s, though early versions call them counters (dcgm-exporter issue 87). TX is data
# that the GPU sends, so device to host.
EXPORTER_FIELDS = {
    "DCGM_FI_DEV_FB_USED": ("memory.used", "mib"),
    "DCGM_FI_DEV_FB_FREE": ("memory.free", "mib"),
    "DCGM_FI_DEV_FB_TOTAL": ("memory.total", "mib"),
    "DCGM_FI_PROF_PCIE_RX_BYTES": ("pcie.rx", "b/s"),
    "DCGM_FI_PROF_PCIE_TX_BYTES": ("pcie.tx", "b/s"),
    "DCGM_FI_DEV_PCIE_RX_THROUGHPUT": ("rxpci", "kb/s"),
    "DCGM_FI_DEV_PCIE_TX_THROUGHPUT": ("txpci", "kb/s"),
    "DCGM_FI_DEV_PCIE_LINK_GEN": ("pcie.link.gen.current", ""),
    "DCGM_FI_DEV_PCIE_LINK_WIDTH": ("pcie.link.width.current", ""),
    "DCGM_FI_DEV_PCIE_MAX_LINK_GEN": ("pcie.link.gen.max", ""),
    "DCGM_FI_DEV_PCIE_MAX_LINK_WIDTH": ("pcie.link.width.max", ""),
    "DCGM_FI_DEV_GPU_UTIL": ("utilization.gpu", "%"),
    "DCGM_FI_DEV_MEM_COPY_UTIL": ("utilization.memory", "%"),
    "DCGM_FI_DEV_POWER_USAGE": ("power.draw", "w"),
    "DCGM_FI_DEV_POWER_USAGE_INSTANT": ("power.draw.instant", "w"),
    "DCGM_FI_DEV_SM_CLOCK": ("clocks.sm", "mhz"),
    "DCGM_FI_DEV_MEM_CLOCK": ("clocks.mem", "mhz"),
    "DCGM_FI_DEV_GPU_TEMP": ("temperature.gpu", "c"),
    "DCGM_FI_DEV_CLOCK_THROTTLE_REASONS": ("clocks_throttle_reasons.active", ""),
    "DCGM_FI_DEV_CLOCKS_EVENT_REASONS": ("clocks_throttle_reasons.active", ""),
    "dcgm_fb_used": ("memory.used", "mib"),
    "dcgm_fb_free": ("memory.free", "mib"),
    "dcgm_fi_prof_pcie_rx_bytes": ("pcie.rx", "b/s"),
    "dcgm_fi_prof_pcie_tx_bytes": ("pcie.tx", "b/s"),
    "dcgm_pcie_rx_throughput": ("rxpci", "kb/s"),
    "dcgm_pcie_tx_throughput": ("txpci", "kb/s"),
    "dcgm_gpu_utilization": ("utilization.gpu", "%"),
    "dcgm_mem_copy_utilization": ("utilization.memory", "%"),
    "dcgm_power_usage": ("power.draw", "w"),
    "dcgm_sm_clock": ("clocks.sm", "mhz"),
    "dcgm_memory_clock": ("clocks.mem", "mhz"),
    "dcgm_gpu_temp": ("temperature.gpu", "c"),
}
# Short names of the same fields in the header of `dcgmi dmon` (`dcgmi dmon -l` lists them).
DMON_FIELDS = {
    "FBUSD": "DCGM_FI_DEV_FB_USED",
    "FBFRE": "DCGM_FI_DEV_FB_FREE",
    "FBTTL": "DCGM_FI_DEV_FB_TOTAL",
    "PCIRX": "DCGM_FI_PROF_PCIE_RX_BYTES",
    "PCITX": "DCGM_FI_PROF_PCIE_TX_BYTES",
    "RXTPT": "DCGM_FI_DEV_PCIE_RX_THROUGHPUT",
    "TXTPT": "DCGM_FI_DEV_PCIE_TX_THROUGHPUT",
    "PCILG": "DCGM_FI_DEV_PCIE_LINK_GEN",
    "PCILW": "DCGM_FI_DEV_PCIE_LINK_WIDTH",
    "PCIMG": "DCGM_FI_DEV_PCIE_MAX_LINK_GEN",
    "PCIMW": "DCGM_FI_DEV_PCIE_MAX_LINK_WIDTH",
    "GPUTL": "DCGM_FI_DEV_GPU_UTIL",
    "MCUTL": "DCGM_FI_DEV_MEM_COPY_UTIL",
    "POWER": "DCGM_FI_DEV_POWER_USAGE",
    "POWINST": "DCGM_FI_DEV_POWER_USAGE_INSTANT",
    "SMCLK": "DCGM_FI_DEV_SM_CLOCK",
    "MMCLK": "DCGM_FI_DEV_MEM_CLOCK",
    "TMPTR": "DCGM_FI_DEV_GPU_TEMP",
    "DVCCTR": "DCGM_FI_DEV_CLOCK_THROTTLE_REASONS",
}
EXPORTER = Tool(
    link_source="dcgm",
    link_window_ns=None,
    time_hint="write them with `date +%s` before each scrape, or pipe the scrapes through ts '%Y-%m-%dT%H:%M:%.S'",
    link_hint="the fields DCGM_FI_PROF_PCIE_RX_BYTES and DCGM_FI_PROF_PCIE_TX_BYTES are",
)
DMON = Tool(
    link_source="dcgm",
    link_window_ns=None,
    time_hint="pipe dcgmi dmon through ts '%Y-%m-%dT%H:%M:%.S'",
    link_hint="dcgmi dmon -e 1009,1010 records them",
)
# Values at or above these mean "not supported" and the like (DCGM_INT32_BLANK, DCGM_FP64_BLANK, DCGM_INT64_BLANK).
_INT32_BLANKS = range(0x7FFFFFF0, 0x80000000)
_FP64_BLANK = 2.0**47


def is_blank(value: str) -> bool:
    """Return whether a value is one by which DCGM says that there is none."""
    try:
        number = float(value)
    except ValueError:
        return True
    return not number < _FP64_BLANK or (number.is_integer() and int(number) in _INT32_BLANKS)
