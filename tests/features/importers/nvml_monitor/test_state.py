"""Utilization, power, clocks and temperature in monitor files; system metrics of
Weights & Biases."""

from __future__ import annotations

from pathlib import Path

import pytest

from ebbtide.features.importers.load import import_trace
from ebbtide.features.importers.source import SourceError
from tests.conftest import slow_case
from tests.features.importers.nvml_monitor.made_monitors import (
    MIB,
    SECOND,
    import_text,
    memory_rows,
    states,
)

# Real output of `nvidia-smi dmon`, with two GPUs and a repeated header.
DMON = """# gpu    pwr  gtemp  mtemp     sm    mem    enc    dec    jpg    ofa   mclk   pclk
# Idx      W      C      C      %      %      %      %      %      %    MHz    MHz
    0     86     33      -     30     27      0      0      0      0   6250   1710
    1     28     30      -      0      0      0      0      0      0      -    208
# gpu    pwr  gtemp  mtemp     sm    mem    enc    dec    jpg    ofa   mclk   pclk
# Idx      W      C      C      %      %      %      %      %      %    MHz    MHz
    0    267     39      -    100     95      0      0      0      0   6250   1710
    1      -     30      -      0      0      0      0      0      0      -    208
"""
ALL_SETS = """#Date Time gpu pwr gtemp mtemp sm mem enc dec jpg ofa mclk pclk pviol tviol fb bar1 ccpm sbecc dbecc pci \
rxpci txpci
#YYYYMMDD HH:MM:SS Idx W C C % % % % % % MHz MHz % bool MB MB MB errs errs errs MB/s MB/s
 20261122   10:00:00 0 300 40 45 97 50 0 0 0 0 2619 1980 0 0 70000 5 0 0 0 3 1000 2000
"""


def test_read_dmon__without_memory_and_link_has_the_state(tmp_path: Path) -> None:
    trace = import_text(tmp_path, DMON)
    assert trace.memory(0).empty
    assert trace.link(0).empty
    gpu = trace.table(0, "gpu")
    assert gpu["t_ns"].tolist() == [0, SECOND]
    assert gpu.drop(
        columns=["t_ns", "device", "throttle_reasons"]
    ).to_numpy().tolist() == [
        [30.0, 27.0, 86.0, 1710.0, 6250.0, 33.0],
        [100.0, 95.0, 267.0, 1710.0, 6250.0, 39.0],
    ]
    assert states(trace, "power_w", 1) == [28.0, None]
    assert states(trace, "memory_clock_mhz", 1) == [None, None]
    assert states(trace, "utilization_percent", 1) == [0.0, 0.0]
    assert "m.txt has no memory figures" in trace.notes


def test_read_dmon__reads_all_sets_of_columns_at_once(tmp_path: Path) -> None:
    trace = import_text(tmp_path, ALL_SETS)
    assert memory_rows(trace) == [(0.0, 70000.0)]
    (link,) = trace.link(0).to_dict("records")
    assert (link["h2d_bytes_per_s"], link["d2h_bytes_per_s"], link["source"]) == (
        1e9,
        2e9,
        "nvml-throughput",
    )
    for column, value in [
        ("utilization_percent", 97.0), ("memory_utilization_percent", 50.0), ("power_w", 300.0),
        ("sm_clock_mhz", 1980.0), ("memory_clock_mhz", 2619.0), ("temperature_celsius", 40.0),
    ]:  # fmt: skip
        assert states(trace, column) == [value]
    assert trace.memory(0)["t_ns"].tolist() == [1_795_341_600 * SECOND]


def test_read_dmon__reads_rates_of_the_performance_monitor(tmp_path: Path) -> None:
    text = (
        "#Date       Time        gpu    pwr     pcitx     pcirx\n"
        "#YYYYMMDD   HH:MM:SS    Idx      W GPM:MiB/s GPM:MiB/s\n"
        " 20261122   10:00:00      0     70         -         -\n"
        " 20261122   10:00:02      0     70         5         6\n"
        " 20261122   10:00:04      0     70         7         8\n"
    )
    link = import_text(tmp_path, text).link(0)
    assert link["d2h_bytes_per_s"].tolist() == [5 * MIB, 7 * MIB]
    assert link["h2d_bytes_per_s"].tolist() == [6 * MIB, 8 * MIB]
    assert set(link["source"]) == {"gpm"}
    assert set(link["window_ns"]) == {2 * SECOND}


QUERY = """timestamp, index, utilization.gpu [%], power.draw [W], clocks.current.sm [MHz], temperature.gpu, \
clocks_event_reasons.active
2026/11/22 10:00:00.000, 0, 97 %, 299.93 W, 1980 MHz, 60, 0x0000000000000004
2026/11/22 10:00:01.000, 0, 0 %, [N/A], 345 MHz, 40, 0x0000000000000001
"""


def test_read_query__reads_the_state(tmp_path: Path) -> None:
    trace = import_text(tmp_path, QUERY)
    assert states(trace, "utilization_percent") == [97.0, 0.0]
    assert states(trace, "power_w") == [299.93, None]
    assert states(trace, "sm_clock_mhz") == [1980.0, 345.0]
    assert states(trace, "temperature_celsius") == [60.0, 40.0]
    assert states(trace, "throttle_reasons") == [4.0, 1.0]
    milliwatts = QUERY.replace("power.draw [W]", "power.draw [mW]").replace(
        "299.93 W", "299930"
    )
    assert states(import_text(tmp_path, milliwatts), "power_w") == [299.93, None]


@pytest.mark.parametrize(
    ("last", "kept"),
    [
        ("2026/11/22 10:00:02.000, 0, 20344 MiB", True),
        slow_case("2026/11/22 10:00:02.000, 0, 20344", False),
        ("2026/11/22 10:00:02.000, 0, 20", False),
        slow_case("2026/11/22 10:00:02.000, 0", False),
    ],
)
def test_read_query__leaves_out_a_cut_last_line(
    tmp_path: Path, last: str, kept: bool
) -> None:
    rows = "".join(f"2026/11/22 10:00:0{n}.000, 0, 2033{n} MiB\n" for n in range(2))
    trace = import_text(tmp_path, "timestamp, index, memory.used [MiB]\n" + rows + last)
    assert (
        memory_rows(trace)
        == [(0.0, 20330.0), (1.0, 20331.0), (2.0, 20344.0)][: 2 + kept]
    )
    assert (
        "m.txt has rows that cannot be read, which are left out: 1" in trace.notes
    ) != kept


def test_import_trace__state_may_be_in_two_files(tmp_path: Path) -> None:
    """Both `dmon -s pt` and a query may have the power; two hosts that have the state
    alone are refused."""
    with_memory = QUERY.replace("temperature.gpu", "memory.used [MiB]")
    (tmp_path / "query.csv").write_text(with_memory)
    (tmp_path / "all.txt").write_text(ALL_SETS.replace(" fb ", " none "))
    (tmp_path / "state.csv").write_text(QUERY)
    (tmp_path / "other.csv").write_text(QUERY)
    trace = import_trace(
        [tmp_path / "query.csv", tmp_path / "all.txt"], tmp_path / "run.ebb"
    )
    assert (len(trace.table(0, "gpu")), len(trace.link(0)), len(trace.memory(0))) == (
        3,
        1,
        2,
    )
    with pytest.raises(SourceError, match="cover the same devices at the same time"):
        import_trace(
            [tmp_path / "state.csv", tmp_path / "other.csv"], tmp_path / "x.ebb"
        )
