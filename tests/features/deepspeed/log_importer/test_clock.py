"""Time zone of a log's clock, and logs without dates."""

from __future__ import annotations

from pathlib import Path

import pytest

from ebbtide.features.importers.source import SourceError
from tests.features.deepspeed.log_importer.made_logs import (
    import_log,
    log_line,
    stamp_ns,
    step_lines,
    write_monitor,
)


def test_clock_offset__is_0_without_a_zone_also_beside_a_monitor(
    tmp_path: Path,
) -> None:
    start = stamp_ns(log_line(0, ""))
    trace = import_log(
        tmp_path, step_lines(60), write_monitor(tmp_path / "m.csv", start - 10**9, 70)
    )
    assert trace.phases(0)["end_ns"].iloc[-1] == start + 60 * 10**9
    assert any("without a time zone" in note for note in trace.notes)


@pytest.mark.parametrize("seconds", [100, 9 * 3600])
def test_import_trace__refuses_a_log_and_a_monitor_that_share_no_time(
    tmp_path: Path, seconds: int
) -> None:
    monitor = write_monitor(
        tmp_path / "m.csv", stamp_ns(log_line(0, "")) + seconds * 10**9, 30
    )
    with pytest.raises(SourceError, match=r"share no time.*--align start"):
        import_log(tmp_path, step_lines(60), monitor)
