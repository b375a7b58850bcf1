"""Time zone of a log's clock, and logs without dates."""

from __future__ import annotations

from pathlib import Path

import pytest

from ebbtide.profiler.importers.load import import_trace
from ebbtide.profiler.importers.source import SourceError
from ebbtide.profiler.trace.metadata import ClockInfo
from tests.profiler.importers.deepspeed.made_logs import DATA, import_log, log_line, stamp_ns, step_lines, write_monitor


@pytest.mark.parametrize("hours", [-9.5, -4.0, 0.0, 1.0, 5.75, 12.75])
def test_clock_offset__follows_from_the_monitor(tmp_path: Path, hours: float) -> None:
    start = stamp_ns(log_line(0, "")) - int(hours * 3.6e12)
    trace = import_log(tmp_path, step_lines(60), write_monitor(tmp_path / "m.csv", start - 10**9, 70))
    last = trace.phases(0)["end_ns"].iloc[-1]
    assert last == start + 60 * 10**9
    notes = [note for note in trace.notes if "is assumed to be" in note]
    assert bool(notes) == (hours != 0)
    assert all(f"UTC{hours:+.4g} h" in note for note in notes)
    assert not any("without a time zone" in note for note in trace.notes)


def test_clock_offset__notes_a_guess_if_several_zones_fit(tmp_path: Path) -> None:
    start = stamp_ns(log_line(0, ""))
    csv_file = write_monitor(tmp_path / "m.csv", start - 8 * 3600 * 10**9, 14 * 3600, step=60, devices=[0])
    trace = import_log(tmp_path, step_lines(60), csv_file)
    assert [note for note in trace.notes if "the time zone of the log is a guess (UTC+0 h)" in note]
    assert trace.phases(0)["end_ns"].iloc[-1] == start + 60 * 10**9


def test_clock_offset__notes_a_monitor_that_covers_only_a_part(tmp_path: Path) -> None:
    unix_line = log_line(0, f"<<<TIMER:step_start,{stamp_ns(log_line(0, ''))}>>>")
    start = stamp_ns(log_line(0, ""))
    trace = import_log(tmp_path, [unix_line, *step_lines(60)], write_monitor(tmp_path / "m.csv", start, 30))
    assert [note for note in trace.notes if "m.csv covers only 49% of the time of the log" in note]
    with pytest.raises(SourceError, match="do not overlap in time"):
        import_log(tmp_path, [unix_line, *step_lines(60)], write_monitor(tmp_path / "m.csv", start + 100 * 10**9, 30))


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
