"""Output of `dcgmi dmon`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from ebbtide.features.importers.source import SourceError
from tests.conftest import slow_case
from tests.features.importers.nvml_monitor.made_monitors import (
    MIB,
    import_text,
    memory_rows,
    states,
)

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
def test_read_dcgmi__reads_the_columns_of_a_gpu(
    tmp_path: Path, stamp: Callable[[int], str], dated: bool
) -> None:
    lines = [
        f"{stamp(number // 4)}{line}\n"
        for number, line in enumerate(DCGMI.splitlines())
    ]
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
def test_read_dcgmi__reads_up_to_the_last_complete_line(
    tmp_path: Path, end: int
) -> None:
    trace = import_text(tmp_path, DCGMI[:end])
    assert states(trace, "power_w", 1) == [52.3]
    assert states(trace, "power_w") == [51.3, 53.3]
    assert "m.txt was cut off within its last line, which is left out" in trace.notes


def test_read_dcgmi__leaves_out_mig_instances(tmp_path: Path) -> None:
    trace = import_text(
        tmp_path, DCGMI + "GPU-I 3  70  80  1000  500  6000  7000  54.3  1980  0.8\n"
    )
    assert memory_rows(trace) == [(0.0, 800.0), (1.0, 850.0)]
    assert trace.ranks == [0, 1]
    assert "m.txt has figures of MIG instances, which are left out" in trace.notes


def test_read_dcgmi__refuses_files_without_figures(tmp_path: Path) -> None:
    with pytest.raises(
        SourceError, match="has no figure of a GPU: record fields such as 252"
    ):
        import_text(tmp_path, "#Entity   DRAMA\nID\nGPU 0     0.1\n")
