"""Scrapes of dcgm-exporter and output of `dcgmi dmon`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from ebbtide.profiler.importers.source import SourceError
from tests.conftest import slow_case
from tests.profiler.importers.nvml_monitor.made_monitors import (
    MIB,
    SECOND,
    START,
    import_text,
    memory_rows,
    scrape,
    scrapes,
    series,
    states,
)

UNIX = START // SECOND


@pytest.mark.parametrize(
    "text",
    [
        scrapes(3, lambda n: f"{UNIX + n}\n"),
        slow_case(scrapes(3, lambda n: f"{UNIX + n}.000000000\n")),
        slow_case(scrapes(3, lambda n: f"# 2026-11-22T10:00:0{n}Z\n")),
        slow_case(scrapes(3, lambda n: f"date: 2026-11-22 10:00:0{n}\n\n")),
        scrapes(3, lambda n: f"Sun Nov 22 10:00:0{n} UTC 2026\n"),
        slow_case(scrapes(3, lambda n: f"Sun Nov 22 10:00:0{n} AM UTC 2026\n")),
        slow_case("".join(scrape(n, before=f"2026-11-22T10:00:0{n}.000Z ") for n in range(3))),
        slow_case("".join(scrape(n, before=f"{UNIX + n} ") for n in range(3))),
        "".join(scrape(n, after=f" {(UNIX + n) * 1000}") for n in range(3)),
    ],
)
def test_read_exporter__reads_scrapes_with_every_kind_of_time(tmp_path: Path, text: str) -> None:
    trace = import_text(tmp_path, text)
    assert trace.ranks == [0, 1]
    assert trace.memory(0)["t_ns"].tolist() == [START + n * SECOND for n in range(3)]
    assert memory_rows(trace) == [(0.0, 100.0), (1.0, 101.0), (2.0, 102.0)]
    assert memory_rows(trace, 1) == [(0.0, 110.0), (1.0, 111.0), (2.0, 112.0)]
    link = trace.link(0)
    # TX is what the GPU sends: device to host.
    assert link["d2h_bytes_per_s"].tolist() == [5.0, 6.0, 7.0]
    assert link["h2d_bytes_per_s"].tolist() == [7.0, 8.0, 9.0]
    assert set(link["source"]) == {"dcgm"}
    assert set(link["window_ns"]) == {SECOND}
    assert states(trace, "utilization_percent", 1) == [90.0, 91.0, 92.0]
    assert states(trace, "power_w") == [316.365] * 3
    assert states(trace, "sm_clock_mhz") == [1980.0] * 3
    assert states(trace, "temperature_celsius") == [31.0] * 3
    assert states(trace, "memory_clock_mhz") == [None] * 3
    (device,) = trace.rank(1).devices
    assert (device.device, device.capacity_bytes) == ("cuda:1", 1000 * MIB)
    assert (device.name, device.uuid, device.pci_bus_id) == ("NVIDIA L4", "GPU-c2f76b33-1", "00000000:31:00.0")
    assert trace.meta.clock.name == "unix"


def test_read_exporter__scrapes_without_times_are_not_dated(tmp_path: Path) -> None:
    trace = import_text(tmp_path, scrapes(2))
    assert memory_rows(trace) == [(0.0, 100.0), (1.0, 101.0)]
    assert trace.meta.clock.name == "unknown"
    assert any("has no times (write them with `date +%s` before each scrape" in note for note in trace.notes)
    single = import_text(tmp_path, scrape(0, gpus=1))
    assert (memory_rows(single), single.link(0)["window_ns"].tolist()) == ([(0.0, 100.0)], [SECOND])


def test_read_exporter__knows_the_units_and_names_of_versions(tmp_path: Path) -> None:
    lines = [
        series("DCGM_FI_DEV_FB_TOTAL", 46068),
        series("DCGM_FI_DEV_FB_USED", "1.5"),
        series("DCGM_FI_DEV_PCIE_RX_THROUGHPUT", 488),
        series("DCGM_FI_DEV_POWER_USAGE", "9.2233720368547748e+18"),
        series("DCGM_FI_DEV_GPU_TEMP", 2147483632),
        series("DCGM_FI_DEV_CLOCK_THROTTLE_REASONS", 4),
    ]
    trace = import_text(tmp_path, f"{UNIX}\n" + "".join(lines))
    assert memory_rows(trace) == [(0.0, 1.5)]
    assert trace.rank(0).devices[0].capacity_bytes == 46068 * MIB
    assert trace.link(0)["h2d_bytes_per_s"].tolist() == [488_000.0]
    assert trace.link(0)["d2h_bytes_per_s"].isna().all()
    # Values that mean "not supported" are no figures.
    assert states(trace, "power_w") == states(trace, "temperature_celsius") == [None]
    assert states(trace, "throttle_reasons") == [4.0]
    old = 'dcgm_fb_used{gpu="0",UUID="GPU-1"} 7\ndcgm_fi_prof_pcie_tx_bytes{gpu="0",UUID="GPU-1"} 9\n'
    trace = import_text(tmp_path, f"{UNIX}\n{old}")
    assert (memory_rows(trace), trace.link(0)["d2h_bytes_per_s"].tolist()) == ([(0.0, 7.0)], [9.0])


def test_read_exporter__pods_that_share_a_gpu_are_one_sample(tmp_path: Path) -> None:
    shared = "".join(series("DCGM_FI_DEV_FB_USED", 7, more=f',pod="{pod}"') for pod in "ab")
    assert memory_rows(import_text(tmp_path, f"{UNIX}\n{shared}{UNIX + 1}\n{shared}")) == [(0.0, 7.0), (1.0, 7.0)]


def test_read_exporter__leaves_out_mig_instances(tmp_path: Path) -> None:
    mig = series("DCGM_FI_DEV_FB_USED", 3, more=',GPU_I_PROFILE="1g.10gb",GPU_I_ID="7"')
    trace = import_text(tmp_path, f"{UNIX}\n{scrape(0)}{mig}")
    assert memory_rows(trace) == [(0.0, 100.0)]
    assert "m.txt has figures of MIG instances, which are left out" in trace.notes
    with pytest.raises(SourceError, match="has no figure of a GPU: record fields such as DCGM_FI_DEV_FB_USED"):
        import_text(tmp_path, mig)


def test_read_exporter__refuses_several_hosts(tmp_path: Path) -> None:
    other = series("DCGM_FI_DEV_FB_USED", 3, host="node-2")
    with pytest.raises(SourceError, match=r"GPUs of several hosts \(node-1, node-2\)"):
        import_text(tmp_path, scrape(0) + other)


@pytest.mark.parametrize("end", [slow_case(-2), slow_case(-3), -40, slow_case(-200)])
def test_read_exporter__reads_up_to_the_last_complete_line(tmp_path: Path, end: int) -> None:
    text = "".join(scrape(n, after=f" {(UNIX + n) * 1000}") for n in range(3))
    trace = import_text(tmp_path, text[:end])
    assert memory_rows(trace, 1) == [(0.0, 110.0), (1.0, 111.0), (2.0, 112.0)]
    assert trace.link(1)["h2d_bytes_per_s"].tolist()[:2] == [7.0, 8.0]
    assert trace.link(1)["h2d_bytes_per_s"].iloc[2:].isna().all()
    assert "m.txt was cut off within its last line, which is left out" in trace.notes


DCGMI = """#Entity   GPUTL   MCUTL   FBTTL   FBUSD   PCIRX        PCITX        POWER   SMCLK   DRAMA
ID
GPU 0     10      20      1000    800     N/A          5000         51.3    1980    0.1
GPU 1     30      40      1000    900     6000         7000         52.3    1980    N/A
#Entity   GPUTL   MCUTL   FBTTL   FBUSD   PCIRX        PCITX        POWER   SMCLK   DRAMA
ID
GPU 0     50      60      1000    850     6000         5000         53.3    1980    0.9
GPU 1     70      80      1000    2147483632  6000     7000         54.3    1980    0.8
"""


@pytest.mark.parametrize(
    ("stamp", "dated"),
    [
        (lambda n: "", False),
        slow_case(lambda n: f"2026-11-22T10:00:0{n}.000 ", True),
        (lambda n: f"[2026-11-22 10:00:0{n}] ", True),
    ],
)
def test_read_dcgmi__reads_the_columns_of_a_gpu(tmp_path: Path, stamp: Callable[[int], str], dated: bool) -> None:
    lines = [f"{stamp(number // 4)}{line}\n" for number, line in enumerate(DCGMI.splitlines())]
    trace = import_text(tmp_path, "".join(lines))
    assert memory_rows(trace) == [(0.0, 800.0), (1.0, 850.0)]
    assert memory_rows(trace, 1) == [(0.0, 900.0)]
    assert trace.rank(1).devices[0].capacity_bytes == 1000 * MIB
    assert trace.link(0)["h2d_bytes_per_s"].isna().tolist() == [True, False]
    assert trace.link(0)["d2h_bytes_per_s"].tolist() == [5000.0, 5000.0]
    assert states(trace, "utilization_percent", 1) == [30.0, 70.0]
    assert states(trace, "memory_utilization_percent") == [20.0, 60.0]
    assert states(trace, "power_w") == [51.3, 53.3]
    assert (trace.meta.clock.name == "unix") == dated


@pytest.mark.parametrize("end", [slow_case(-2), slow_case(-4), -30])
def test_read_dcgmi__reads_up_to_the_last_complete_line(tmp_path: Path, end: int) -> None:
    trace = import_text(tmp_path, DCGMI[:end])
    assert states(trace, "power_w", 1) == [52.3]
    assert states(trace, "power_w") == [51.3, 53.3]
    assert "m.txt was cut off within its last line, which is left out" in trace.notes
