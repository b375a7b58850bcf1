"""Imports the logs and traces among the texts, as `ebbtide import` does."""

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ebbtide.analysis.findings import Findings, find
from ebbtide.errors import UserError
from ebbtide.features.explain.formats import STEP_S
from ebbtide.features.explain.pasted import STDIN, PastedText
from ebbtide.features.explain.readers.step_logs import StepLog
from ebbtide.features.explain.record import Place, Record
from ebbtide.features.explain.series import FORMAT
from ebbtide.features.importers.load import import_trace, recognize
from ebbtide.features.importers.source import Source
from ebbtide.profiler.trace import Trace
from ebbtide.units import counted

# Programs whose lines an importer reads.
_IMPORTED_PROGRAMS = ("Megatron-LM core 0.14",)


@dataclass(frozen=True, kw_only=True)
class ImportedTrace(Record):
    """A log or a trace of another tool that was imported.

    `path`: the trace; None if it was not kept.
    """

    format: str
    iterations: int
    ranks: int
    path: str | None
    # Median times of an iteration and of its phases, in s.
    times_s: dict[str, float]
    findings: Findings = field(repr=False)

    @property
    def title(self) -> str:
        iterations = counted(self.iterations, "iteration")
        return f"{iterations} of {counted(self.ranks, 'rank')}, as {self.format}"

    def as_json(self) -> dict[str, Any]:
        names = ("format", "iterations", "ranks", "path", "times_s")
        figures = {name: getattr(self, name) for name in names}
        place = {key: getattr(self.place, key) for key in Place.__annotations__}
        return {
            "kind": type(self).__name__,
            "title": self.title,
            "place": place,
            "figures": {**figures, "findings": self.findings.as_json()},
        }


def imported_traces(
    path: Path, text: PastedText, output: Path | None
) -> Iterator[ImportedTrace]:
    """Yield the trace of a text if an importer recognizes it; it is kept where `output`
    names a place."""
    with tempfile.TemporaryDirectory(prefix="ebbtide-explain-") as name:
        folder = Path(name)
        cleaned = folder / "text.log"
        cleaned.write_text("\n".join(line.text for line in text.lines))
        # A file of a tool is read as it is; a text around a log, without decoration.
        files = [cleaned] if path == STDIN else [path, cleaned]
        for file in files:
            try:
                format = recognize(Source(file))
                if format == FORMAT:
                    return
                trace = import_trace([file], output or folder / "trace.ebb")
            except UserError:
                continue
            ranks = trace.ranks
            iterations = trace.phases(ranks[0])["iteration"].nunique()
            findings = find(trace)
            if not iterations and not findings.findings:
                continue
            yield ImportedTrace(
                place=Place(
                    text_name=text.name,
                    first_line=text.lines[0].number,
                    last_line=text.lines[-1].number,
                ),
                format=format,
                iterations=iterations,
                ranks=len(ranks),
                path=None if output is None else str(output),
                times_s=_times_of(trace),
                findings=findings,
            )
            return


def _times_of(trace: Trace) -> dict[str, float]:
    """Return the median times of an iteration and of its phases, in s."""
    rows = trace.phases(trace.ranks[0])
    seconds = (rows["end_ns"] - rows["start_ns"]) / 1e9
    by_phase = seconds.groupby([rows["iteration"], rows["phase"]]).sum().unstack()
    if not len(by_phase):
        return {}
    medians = by_phase.fillna(0).median()
    times_s = {"iteration": float(by_phase.sum(axis=1).median())}
    return times_s | {str(phase): float(time) for phase, time in medians.items()}


def without_repeats(
    records: Sequence[Record], imported: Sequence[ImportedTrace]
) -> Iterator[Record]:
    """Yield the records without the steps that a trace has, too."""
    names = {trace.place.text_name for trace in imported}
    for record in records:
        is_log = (
            isinstance(record, StepLog)
            and record.program in _IMPORTED_PROGRAMS
            and STEP_S in record.steps
        )
        if not (is_log and record.place.text_name in names):
            yield record
