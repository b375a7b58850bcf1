"""Splits a log into the runs that were appended to it, and chooses one of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal, TypeVar

from ebbtide.features.importers.clocks import HOSTS_JITTER_NS, WallClock
from ebbtide.features.importers.logs.settings import JobSettings, SettingsReader
from ebbtide.features.importers.logs.text_log import LogLine, read_lines, zone_ns
from ebbtide.features.importers.source import Source, SourceError
from ebbtide.profiler.trace import TraceBuilder
from ebbtide.units import counted

ALL_RUNS: Literal["all"] = "all"
# The number of a run from 1, or all of them one after another; None: the last one.
RunChoice = int | Literal["all"] | None

# Lines that launchers and frameworks print once at the start of a job, by letters that
# stand in them: after iterations they begin another run.
_BANNERS = re.compile(
    r"WORLD INFO DICT|runner\.py.{0,60}\bcmd = |Initializing TorchBackend|"
    r"initializing torch distributed|-{3,} arguments -{3,}|using world size: \d|"
    r"DeepSpeed info: version="
)
_BANNER_LETTERS = (
    "WORLD INFO",
    "cmd = ",
    "nitializing ",
    "- arguments -",
    "using w",
    " info: v",
)
_SHOWN_RUNS = 4


class RunReader(SettingsReader):
    """Reads the settings of one run of a log, and its iterations."""

    first_line = 1
    last_line = 0
    # The offset of the log's clock from UTC in ns, by the first line that has one.
    zone: int | None = None
    # Whether the run reached its last iteration, as far as the log tells.
    is_complete = True

    def __init__(self, settings: JobSettings | None = None) -> None:
        super().__init__()
        self.settings = settings or self.settings
        self.clock = WallClock(HOSTS_JITTER_NS)

    @property
    def iterations(self) -> int:
        """Number of iterations so far, or of micro-steps."""
        raise NotImplementedError

    def restarts(self, line: LogLine) -> bool:
        """Return whether a line counts an iteration again that the run has had."""
        raise NotImplementedError


_Run = TypeVar("_Run", bound=RunReader)


def read_runs(
    source: Source, make: Callable[[JobSettings | None], _Run], choice: RunChoice
) -> list[_Run]:
    """Read a log as its runs, at least one; as one run if `choice` is all of them.

    `make` returns a reader that has the settings of the run before, if any: those of a
    run without lines of its own start.
    """
    runs = [make(None)]
    for number, line in enumerate(read_lines(source), 1):
        run = runs[-1]
        if run.iterations and choice != ALL_RUNS:
            begins = _is_banner(line.text)
            if begins or run.restarts(line):
                run = make(None if begins else run.settings)
                run.first_line = number
                runs.append(run)
        if run.zone is None:
            run.zone = zone_ns(line)
        run.feed(_mended(line, run))
        run.last_line = number
    return [run for run in runs if run.iterations] or runs[-1:]


def _mended(line: LogLine, run: RunReader) -> LogLine:
    """Return a line with its time on the clock with which its run began."""
    if line.t_ns is None:
        return line
    if line.unix_ns is not None and run.zone is not None:
        t_ns = line.unix_ns + run.zone
    else:
        t_ns = run.clock.mended(line.t_ns)
    return line if t_ns == line.t_ns else replace(line, t_ns=t_ns)


def _is_banner(text: str) -> bool:
    return any(letters in text for letters in _BANNER_LETTERS) and bool(
        _BANNERS.search(text)
    )


def chosen_run(
    source: Source, runs: Sequence[_Run], choice: RunChoice, builder: TraceBuilder
) -> _Run:
    """Return the chosen run, by default the last one that is complete. A note names the
    others. Raises SourceError for a number that no run has."""
    if isinstance(choice, int):
        if not 1 <= choice <= len(runs):
            raise SourceError(
                f"{source} has {counted(len(runs), 'run')}: there is no run {choice}"
            )
        number = choice
    else:
        complete = [n for n, run in enumerate(runs, 1) if run.is_complete]
        number = complete[-1] if complete else len(runs)
    if len(runs) > 1:
        listed = [
            f"run {n} (lines {run.first_line:,} to {run.last_line:,})"
            for n, run in enumerate(runs[:_SHOWN_RUNS], 1)
        ]
        more = f" and {len(runs) - _SHOWN_RUNS} more" if len(runs) > _SHOWN_RUNS else ""
        builder.note(
            f"{source.path.name} has {len(runs)} runs: {', '.join(listed)}{more}; run "
            f"{number} is imported (--run N or --run all imports others)"
        )
    chosen = runs[number - 1]
    for note in chosen.clock.notes:
        builder.note(f"{source.path.name} {note}")
    return chosen


class OneRank:
    """Selects the lines of the first rank among ranks that write to one stream."""

    def __init__(self) -> None:
        self._rank: int | None = None

    def has(self, line: LogLine) -> bool:
        """Return whether a line is of the rank, or does not say whose it is."""
        if line.rank is None:
            return True
        if self._rank is None:
            self._rank = line.rank
        return line.rank == self._rank
