"""Monitor files of nvidia-smi, dmon and scripts."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from ebbtide.features.importers.importer import Hardware
from ebbtide.features.importers.load import import_trace
from ebbtide.features.importers.nvml_monitor.importer import (
    MonitorImporter,
    parse_monitor,
)
from ebbtide.features.importers.source import Source, SourceError
from ebbtide.profiler.trace import Trace
from ebbtide.profiler.trace.metadata import DeviceInfo, LinkInfo
from tests.conftest import slow, slow_case

MIB, GIB = 2**20, 2**30
SECOND = 10**9
# 2024-04-15 00:52:40 UTC
START = 1_713_142_360 * SECOND


def import_text(tmp_path: Path, text: str | bytes, **options: Any) -> Trace:
    file = tmp_path / "m.csv"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return import_trace([file], tmp_path / "m.ebb", force=True, **options)


def used(trace: Trace, rank: int = 0) -> list[tuple[float, float]]:
    """Return (seconds since START, MiB) of a rank's device."""
    rows = trace.memory(rank)
    assert set(rows["pool"]) <= {"device"}
    assert set(rows["device"]) <= {f"cuda:{rank}"}
    return [
        ((t - START) / 1e9, size / MIB)
        for t, size in zip(rows["t_ns"], rows["bytes"], strict=True)
    ]


def rates(
    trace: Trace, rank: int = 0
) -> list[tuple[float, float | None, float | None]]:
    """Return (seconds since START, h2d, d2h in MiB/s)."""
    rows = trace.link(rank)
    assert set(rows["source"]) <= {"nvml-throughput"}
    both = [
        [None if pd.isna(v) else v / MIB for v in rows[f"{direction}_bytes_per_s"]]
        for direction in ("h2d", "d2h")
    ]
    return [
        ((t - START) / 1e9, h2d, d2h)
        for t, h2d, d2h in zip(rows["t_ns"], *both, strict=True)
    ]


QUERY = """timestamp, index, memory.used [MiB], memory.total [MiB], pcie.link.gen.current, pcie.link.width.current, \
utilization.gpu [%]
2024/04/15 00:52:40.000, 0, 334 MiB, 81559 MiB, 5, 16, 0 %
2024/04/15 00:52:40.001, 1, 335 MiB, 81559 MiB, 1, 16, 3 %
2024/04/15 00:52:41.000, 0, 20334 MiB, 81559 MiB, 5, 16, 97 %
2024/04/15 00:52:41.001, 1, 0 MiB, 81559 MiB, 5, 16, 97 %
"""


@pytest.mark.parametrize(
    "text",
    [
        QUERY,
        slow_case(QUERY.replace(" MiB,", ",").replace(" %\n", "\n")),
        QUERY.replace("\n", "\r\n"),
        slow_case(QUERY.replace(", ", ",")),
        QUERY.replace(", ", ";"),
        slow_case("\ufeff" + QUERY),
        "Failed to initialize something\n\n" + QUERY,
        slow_case(QUERY + "\n\n"),
        slow_case(QUERY + QUERY.splitlines()[0] + "\n"),
        slow_case(QUERY.replace("index", "gpu_id")),
        slow_case(QUERY.replace("MiB]", "MB]")),
        slow_case(QUERY.replace(" [MiB]", "").replace(" MiB,", ",")),
        slow_case(QUERY.replace("334", "334.0").replace("2024/04/15 ", "2024-04-15T")),
        "\n".join('"' + line.replace(", ", '","') + '"' for line in QUERY.splitlines()),
        "\n".join(
            [
                "," + QUERY.splitlines()[0],
                *(f"{n},{row}" for n, row in enumerate(QUERY.splitlines()[1:])),
            ]
        ),
        slow_case("\n".join([QUERY.splitlines()[0], *QUERY.splitlines()[:0:-1]])),
    ],
)
def test_import_trace__reads_every_spelling_of_a_query(
    tmp_path: Path, text: str
) -> None:
    trace = import_text(tmp_path, text)
    assert trace.ranks == [0, 1]
    assert used(trace) == [(0.0, 334.0), (1.0, 20334.0)]
    assert used(trace, 1) == [(0.001, 335.0), (1.001, 0.0)]
    assert trace.rank(0).devices == (
        DeviceInfo(device="cuda:0", kind="cuda", capacity_bytes=81559 * MIB),
    )
    assert trace.link(0).empty
    assert trace.notes == [
        "m.csv has local times without a time zone: they are read as UTC",
        "m.csv has no PCIe figures (nvidia-smi dmon -s t records them): link "
        "throughput is not known",
    ]


def test_read_figures__distinguishes_missing_values_from_zero(tmp_path: Path) -> None:
    text = """timestamp, index, memory.used [MiB], memory.total [MiB]
2024/04/15 00:52:40.000, 0, [N/A], 81559 MiB
2024/04/15 00:52:41.000, 0, 0 MiB, [Not Supported]
2024/04/15 00:52:42.000, 0, [Unknown Error], [N/A]
2024/04/15 00:52:43.000, 0, , 81559 MiB
2024/04/15 00:52:44.000, 0, -5 MiB, 81559 MiB
2024/04/15 00:52:45.000, 0, 7 MiB, 81559 MiB
"""
    trace = import_text(tmp_path, text)
    assert used(trace) == [(1.0, 0.0), (5.0, 7.0)]
    assert not [note for note in trace.notes if "cannot be read" in note]
    without_values = (
        text.replace(" 0 MiB", "[N/A]")
        .replace(" 7 MiB", "[N/A]")
        .replace("81559 MiB", "N/A")
    )
    with pytest.raises(SourceError, match="no value of memory, link or state of a GPU"):
        import_text(tmp_path, without_values)


@pytest.mark.parametrize(
    ("columns", "values", "names"),
    [
        ("uuid", ("GPU-bb", "GPU-aa"), ("GPU-bb", "GPU-aa")),
        (
            "pci.bus_id",
            ("00000000:1B:00.0", "00000000:C3:00.0"),
            ("00000000:1B:00.0", "00000000:C3:00.0"),
        ),
    ],
)
def test_read_devices__numbers_devices_by_identifier(
    tmp_path: Path, columns: str, values: tuple[str, str], names: tuple[str, str]
) -> None:
    rows = [
        f"2024/04/15 00:52:4{n // 2}.000, {values[n % 2]}, {n} MiB" for n in range(4)
    ]
    rows.append("2024/04/15 00:52:49.000, , 9 MiB")
    trace = import_text(
        tmp_path, f"timestamp, {columns}, memory.used [MiB]\n" + "\n".join(rows)
    )
    assert (used(trace), used(trace, 1)) == (
        [(0.0, 0.0), (1.0, 2.0)],
        [(0.0, 1.0), (1.0, 3.0)],
    )
    key = {"uuid": "uuid", "pci.bus_id": "pci_bus_id"}[columns]
    assert [getattr(trace.rank(rank).devices[0], key) for rank in (0, 1)] == list(names)
    assert (
        f"m.csv identifies devices by {key}: they are numbered in order of appearance"
        in trace.notes
    )
    assert "m.csv has rows that cannot be read, which are left out: 1" in trace.notes


def test_read_devices__assumes_device_0(tmp_path: Path) -> None:
    trace = import_text(
        tmp_path, "timestamp, memory.used [MiB]\n2024/04/15 00:52:40.000, 5 MiB\n"
    )
    assert used(trace) == [(0.0, 5.0)]
    assert (
        "m.csv does not identify devices: all figures are assigned to device 0"
        in trace.notes
    )


@pytest.mark.parametrize(
    "device", slow(["2", "cuda:2", "GPU 2", "gpu2", "2.0"], but=["GPU 2"])
)
def test_read_devices__reads_every_spelling_of_a_number(
    tmp_path: Path, device: str
) -> None:
    assert used(
        import_text(
            tmp_path, f"timestamp,gpu,mem_used\n{START},{device},{5 * MIB * 100}\n"
        ),
        2,
    ) == [(0.0, 500.0)]


DMON = """#Date       Time        gpu     fb   bar1   ccpm  rxpci  txpci
#YYYYMMDD   HH:MM:SS    Idx     MB     MB     MB   MB/s   MB/s
 20240415   00:52:40      0    334      2      0      1   2000
 20240415   00:52:40      1    335      2      0      -      0
#Date       Time        gpu     fb   bar1   ccpm  rxpci  txpci
#YYYYMMDD   HH:MM:SS    Idx     MB     MB     MB   MB/s   MB/s
 20240415   00:52:41      0      -      2      0      0      -
 20240415   00:52:41      1      0      2      0      -      -
"""


def no_units(text: str) -> str:
    return "".join(
        row for row in text.splitlines(keepends=True) if not row.startswith("#YYYY")
    )


def without(text: str, *names: str) -> str:
    """Return the same table without some columns."""
    lines = [line.lstrip("#").split() for line in text.splitlines()]
    keep = [n for n, name in enumerate(lines[0]) if name not in names]
    marks = ["#" if line.startswith("#") else "" for line in text.splitlines()]
    return "".join(
        f"{m}{'   '.join(line[n] for n in keep)}\n"
        for m, line in zip(marks, lines, strict=True)
    )


def commas(text: str) -> str:
    rows = [
        ("#" if line.startswith("#") else "") + ", ".join(line.lstrip("#").split())
        for line in text.splitlines()
    ]
    return "\n".join(rows) + "\n"


@pytest.mark.parametrize(
    "spell",
    [
        str,
        slow_case(commas),
        slow_case(no_units),
        lambda text: commas(no_units(text)),
        lambda text: commas(text).replace(", ", ";"),
        slow_case(lambda text: text.replace("#Date", "# Date")),
        lambda t: t + " 20240415  00:",
    ],
)
def test_import_trace__reads_dmon_with_dates(tmp_path: Path, spell: Any) -> None:
    trace = import_text(tmp_path, spell(DMON))
    mb = 1e6 / MIB
    assert used(trace) == [(0.0, 334.0)]
    assert used(trace, 1) == [(0.0, 335.0), (1.0, 0.0)]
    assert rates(trace) == [(0.0, 1 * mb, 2000 * mb), (1.0, 0.0, None)]
    assert rates(trace, 1) == [(0.0, None, 0.0)]
    assert (
        "m.csv has local times without a time zone: they are read as UTC" in trace.notes
    )
    assert any("cannot be read" in note for note in trace.notes) == spell(
        DMON
    ).endswith("00:")


def test_parse_monitor__sorts_rows_and_keeps_duplicates(tmp_path: Path) -> None:
    rows = [
        f"0,{START + n * SECOND},{size * GIB},{size}"
        for n, size in [(3, 4), (1, 2), (1, 3), (2, 5), (0, 1)]
    ]
    trace = import_text(
        tmp_path, "device_id,timestamp,mem_used,rxpci\n" + "\n".join(rows)
    )
    assert used(trace) == [(0, 1024), (1, 2048), (1, 3072), (2, 5120), (3, 4096)]
    assert [rate[1] for rate in rates(trace)] == [1, 2, 3, 5, 4]
    assert (
        "m.csv does not state the unit of its PCIe figures: MiB/s is assumed"
        in trace.notes
    )


def test_import_trace__takes_the_link_from_the_file_or_the_user(tmp_path: Path) -> None:
    text = (
        "timestamp, index, pcie.link.gen.max, pcie.link.width.max, "
        "pcie.link.gen.current, pcie.link.width.current, "
        "rxpci\n"
        f"{START}, 0, 4, 16, 1, 8, 3\n{START + SECOND}, 0, 4, 16, [N/A], 8, 4\n"
    )
    link = import_text(tmp_path, text).rank(0).devices[0].link
    assert (link.generation, link.width) == (4, 16)
    assert link.peak_bytes_per_s == pytest.approx(31.5e9, rel=1e-3)
    rows = import_text(tmp_path, text).link(0)
    assert [v if v is not pd.NA else None for v in rows["generation"]] == [1, None]
    trace = import_text(tmp_path, text, hardware=Hardware(80 * 10**9, (5, 8)))
    given = trace.rank(0).devices[0]
    assert "--link 5x8 replaces the 4x16 that the files state" in trace.notes
    assert (given.capacity_bytes, given.link.generation, given.link.width) == (
        80 * 10**9,
        5,
        8,
    )
    unknown = import_text(
        tmp_path, text.replace("gen.max", "x").replace(", 4, 16", ", 4, 16")
    )
    assert unknown.rank(0).devices[0].link == LinkInfo()
    assert any("import with --link" in note for note in unknown.notes)


def test_import_trace__notes_a_capacity_that_contradicts_the_file(
    tmp_path: Path,
) -> None:
    text = (
        f"timestamp, index, memory.used [MiB], memory.total [MiB]\n{START}, 0, 9000 "
        "MiB, 40960 MiB\n"
    )
    notes = [
        import_text(tmp_path, text, hardware=Hardware(size * GIB)).notes
        for size in (80, 40)
    ]
    replaced = "--capacity 80.00 GiB replaces the 40.00 GiB that the files state"
    assert [replaced in of_size for of_size in notes] == [True, False]
    assert not any("--capacity" in note for note in notes[1])
    with pytest.raises(
        SourceError,
        match=(
            r"--capacity 8\.00 GiB is less than the 8\.79 GiB that were in use on "
            r"cuda:0"
        ),
    ):
        import_text(tmp_path, text, hardware=Hardware(8 * GIB))


def test_parse_monitor__derives_used_from_total_and_free(tmp_path: Path) -> None:
    trace = import_text(
        tmp_path,
        "gpu,timestamp,memory.free [MiB],memory.total "
        f"[MiB]\n0,{START},30,100\n0,{START + 1},,100\n",
    )
    assert used(trace) == [(0.0, 70.0)]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "".join(QUERY.splitlines(keepends=True)[1:]),
            "has no header with a timestamp",
        ),
        (QUERY.splitlines()[0] + "\n", "has a header and no rows"),
        (QUERY.splitlines()[0], "has a header and no rows"),
        (
            "timestamp, index, memory.used [MiB]\nnever, 0, 5 MiB\n",
            "has no row with a time",
        ),
        (
            "timestamp, index, memory.used [MiB]\n2024/04/15 00:52:40.000, x, 5 MiB\n",
            "has no row with a time",
        ),
        (
            "# gpu   pid  type    sm  command\n# Idx     #   C/G     %  name\n  0  "
            "123  C  5  python\n",
            "lists processes, not devices: record it with `nvidia-smi dmon`",
        ),
        (f"timestamp, pid, memory.used\n{START}, 5, 6\n", "lists processes"),
        (
            f"timestamp;index;memory.used\n{START};0;6,5\n",
            r"commas in numbers \(memory.used: 6,5\): save it",
        ),
        ("timestamp;gpu;fb\n2024/04/15 00:52:40,000;0;6\n", "has commas in numbers"),
        ("# gpu   fb\n# Idx   MB\n  0  6,5\n", "has commas in numbers"),
        (
            "".join(QUERY.replace(", ", ";").splitlines(keepends=True)[1:]),
            "has no header with a timestamp",
        ),
        (
            "# gpu  mtemp\n# Idx      C\n    0     45\n",
            "has no column of memory, link or state",
        ),
        ("# gpu     fb\n# Idx     MB\n", "has a header and no rows"),
        (QUERY + "\1" * 100, "has no format"),
        (f"timestamp,gpu,fb\n{10**18},0,5\n{'9' * 19},0,6\n", None),
        (f"timestamp,gpu,fb\n{'9' * 19},0,6\n", "has no row with a time"),
        ("timestamp,gpu,fb\n9999-12-31 23:59:59,0,6\n", "has no row with a time"),
        (f"timestamp,gpu,fb\n{START},99999,6\n", "has no row with a time"),
        (f"timestamp,gpu,fb\n{START},0,6,7\n", "has no row with a time"),
    ],
)
def test_parse_monitor__refuses_files_without_usable_figures(
    tmp_path: Path, text: str, says: str | None
) -> None:
    if says is None:
        assert len(import_text(tmp_path, text).memory(0)) == 1
        return
    with pytest.raises(SourceError, match=says) as error:
        import_text(tmp_path, text)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "m.ebb").exists()


def test_read_figures__treats_huge_values_as_missing(tmp_path: Path) -> None:
    text = "timestamp,gpu,mem_used,rxpci\n"
    text += "".join(
        f"{START + n},0,{value},{value}\n"
        for n, value in enumerate(["9" * 400, "1e300", "1e5", "1e", "nan"])
    )
    trace = import_text(tmp_path, text)
    assert [size * MIB for _, size in used(trace)] == pytest.approx([1e5 * MIB, MIB])
    assert [rate[1] for rate in rates(trace)] == pytest.approx([1e5, 1])


def test_import_trace__combines_files_of_one_host_only(tmp_path: Path) -> None:
    link, memory = tmp_path / "link.txt", tmp_path / "memory.csv"
    link.write_text(without(DMON, "fb"))
    memory.write_text(QUERY)
    trace = import_trace([link, memory], tmp_path / "m.ebb")
    assert used(trace) == [(0.0, 334.0), (1.0, 20334.0)]
    assert len(rates(trace)) == 2
    # Of two hosts nothing tells which ranks the second has.
    (tmp_path / "other.csv").write_text(QUERY)
    with pytest.raises(
        SourceError,
        match=r"memory\.csv and .*other\.csv cover the same devices at the same time",
    ):
        import_trace([memory, tmp_path / "other.csv"], tmp_path / "x.ebb")
    later = tmp_path / "later.csv"
    later.write_text(QUERY.replace("00:52", "01:52"))
    assert len(used(import_trace([later, memory], tmp_path / "y.ebb"))) == 4


def test_matches__decides_by_content(tmp_path: Path) -> None:
    file = tmp_path / "x"
    for text, expected in [
        (QUERY, True),
        (DMON, True),
        ("".join(QUERY.splitlines(keepends=True)[1:]), True),
        ("device_id,timestamp,txpci,rxpci,gpu_util,mem_util,mem_used,mem_free\n", True),
        ("timestamp, price\n1, 2\n", False),
        ("index, memory.used [MiB]\n0, 5 MiB\n", False),
        ("# a heading\ntime, money\n", False),
    ]:
        file.write_text(text)
        assert MonitorImporter().matches(Source(file)) is expected


@pytest.mark.parametrize(
    "text",
    [
        "a" + " " * 30_000 + "[b",
        "," * 30_000,
        "[" * 30_000,
        "# " * 15_000,
        "timestamp,fb\n" + '"' * 30_000,
    ],
)
def test_matches__takes_linear_time_for_any_header(tmp_path: Path, text: str) -> None:
    """A header four times as long must not take sixteen times as long; quadratic
    patterns took hours."""

    def seconds(size: int) -> float:
        file = tmp_path / "x.csv"
        file.write_text(text[:size] + "\n")
        spent = []
        for _ in range(3):
            begin = time.process_time()
            MonitorImporter().matches(Source(file))
            with pytest.raises(SourceError):
                parse_monitor(Source(file))
            spent.append(time.process_time() - begin)
        return min(spent)

    assert seconds(len(text)) < 10 * seconds(len(text) // 4) + 0.05
