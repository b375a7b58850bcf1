"""The table of the critical path of an iteration."""

from ebbtide.analysis.metrics.critical_path.critical_path import DEVICE_KINDS, CriticalPath, RankPath
from ebbtide.analysis.tables.activity import short_name
from ebbtide.analysis.tables.table import Table, View, ms, number, share, text
from ebbtide.profiler.trace import Trace
from ebbtide.units import ms_text

_MAX_ROWS = 12
_SOURCE = "ebbtide summary --by activity --critical-path --json"


def path_line(path: CriticalPath) -> str:
    """Return the sentence on the length of a path and what it is made of."""
    device = path.kind_ms(*DEVICE_KINDS)
    others = {"in launches": "launch", "in other code of the host": "host", "in waits": "wait"}
    parts = ", ".join(f"{ms_text(path.kind_ms(kind))} {name}" for name, kind in others.items())
    length = f"{ms_text(device)} of {ms_text(path.length_ms)} on the device"
    return f"Critical path of iteration {path.iteration}: {length}, {parts}."


def path_table(path: CriticalPath) -> Table:
    """Return the table of the parts of a path."""
    columns = (
        text("part", lambda row: short_name(row.name)),
        text("kind", "kind"),
        number("times", "count"),
        ms("time", "ms"),
        share("share", lambda row: row.ms / path.length_ms if path.length_ms else None, digits=1),
    )
    note = f"By phase: {', '.join(f'{phase} {ms_text(time)}' for phase, time in path.phases.items())}."
    if len(path.ranks) > 1:
        note += f" By rank: {', '.join(f'{rank}: {ms_text(time)}' for rank, time in path.ranks.items())}."
    return Table("critical-path", "Critical path by part", columns, path.parts, note, _SOURCE, _MAX_ROWS)


def path_view(trace: Trace, result: RankPath) -> View:
    """Return the critical path of the median iteration, or why there is none."""
    if result.path is None:
        lines = result.activity.missing or ["no steady iteration was recorded as a whole"]
        yield from (f"{trace.path}: {line}" for line in lines)
        return
    yield path_line(result.path)
    yield path_table(result.path)
