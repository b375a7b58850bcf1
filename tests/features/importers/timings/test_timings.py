"""Logs with `timing_s/PART`: their steps are cycles."""

from __future__ import annotations

from pathlib import Path

import pytest

from ebbtide.features.importers.load import import_trace, recognize
from ebbtide.features.importers.source import Source
from ebbtide.features.importers.timings import IMPORTERS

LINE = (
    "(TaskRunner pid=4411) step:{step} - actor/pg_loss:0.012 - timing_s/update_actor:"
    "{update} - timing_s/gen:38.1 - timing_s/generate_sequences:35.0 - "
    "timing_s/old_log_prob:np.float64(9.6) - timing_s/step:{length} - perf/mfu:0.3\n"
)


def test_timings__make_cycles_in_the_order_of_the_job(tmp_path: Path) -> None:
    log = tmp_path / "verl.log"
    lines = [LINE.format(step=n, update=41.9, length=97.3) for n in range(4)]
    log.write_text("noise\n" + "".join(lines))
    assert recognize(Source(log)) == "timings"
    trace = import_trace([log], tmp_path / "x.ebb")
    marks = trace.marks(0)
    assert marks["name"].tolist()[0] == "step"
    marks = marks[marks["name"] != "step"]
    assert marks["name"].tolist()[:3] == ["gen", "old_log_prob", "update_actor"]
    lengths = (marks["end_ns"] - marks["start_ns"]) / 1e9
    assert lengths.tolist()[:3] == [38.1, 9.6, 41.9]
    assert trace.iteration_marks(0)["end_ns"].tolist()[-1] == 4 * 97_300_000_000


def test_timings__of_parts_within_parts_are_shortened_with_a_note(
    tmp_path: Path,
) -> None:
    log = tmp_path / "verl.log"
    log.write_text(LINE.format(step=1, update=41.9, length=44.8))
    trace = import_trace([log], tmp_path / "x.ebb")
    marks = trace.marks(0)
    assert marks["end_ns"].iloc[-1] == pytest.approx(44.8e9, abs=10)
    assert any("some contain others" in note for note in trace.notes)


@pytest.mark.parametrize("length", ["0", "1e30", "abc"])
def test_timings__without_a_length_are_none(tmp_path: Path, length: str) -> None:
    log = tmp_path / "verl.log"
    log.write_text(LINE.format(step=1, update=41.9, length=length))
    assert not IMPORTERS[0].matches(Source(log))
