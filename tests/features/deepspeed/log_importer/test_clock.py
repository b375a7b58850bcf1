"""Time zone of a log's clock, and logs without dates."""

from __future__ import annotations

from pathlib import Path

import pytest

from ebbtide.features.importers.load import import_trace
from ebbtide.features.importers.source import SourceError
from ebbtide.profiler.trace.metadata import ClockInfo
from tests.features.deepspeed.log_importer.made_logs import (
    DATA,
    import_log,
    log_line,
    stamp_ns,
    step_lines,
    write_monitor,
)


def test_clock_offset__is_0_without_a_zone_also_beside_a_monitor(tmp_path: Path) -> None:
    start = stamp_ns(log_line(0, ""))
    trace = import_log(tmp_path, step_lines(60), write_monitor(tmp_path / "m.csv", start - 10**9, 70))
    assert trace.phases(0)["end_ns"].iloc[-1] == start + 60 * 10**9
    assert any("without a time zone" in note for note in trace.notes)


@pytest.mark.parametrize("seconds", [100, 9 * 3600])
def test_import_trace__refuses_a_log_and_a_monitor_that_share_no_time(tmp_path: Path, seconds: int) -> None:
    monitor = write_monitor(tmp_path / "m.csv", stamp_ns(log_line(0, "")) + seconds * 10**9, 30)
    with pytest.raises(SourceError, match=r"share no time.*--align start"):
        import_log(tmp_path, step_lines(60), monitor)


def test_import_trace__refuses_to_combine_files_without_dates(tmp_path: Path) -> None:
    own = DATA / "deepspeed-0.19.8-zero3-launcher.log"
    with pytest.raises(
        SourceError, match=r"launcher\.log has no dates, so it cannot be combined with other files.*\| ts"
    ):
        import_trace([own, write_monitor(tmp_path / "m.csv", 10**18, 5)], tmp_path / "x.ebb")
    (tmp_path / "d.txt").write_text("# gpu     fb\n# Idx     MB\n    0   1000\n")
    with pytest.raises(SourceError, match=r"d\.txt has no dates.*dmon -o DT"):
        import_log(tmp_path, step_lines(), tmp_path / "d.txt")
    unknown = ClockInfo(name="unknown")
    for number, file in enumerate((own, tmp_path / "d.txt")):
        assert import_trace([file], tmp_path / f"{number}.ebb").meta.clock == unknown
