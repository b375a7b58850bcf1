"""Reads the figures of the steps that a training program has printed."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd

from ebbtide.analysis.timeseries.step_functions import Floats
from ebbtide.features.explain import formats
from ebbtide.features.explain.pasted import PastedLine, PastedText
from ebbtide.features.explain.record import Place, Record, reader

# As slime names a step: `perf 12: {...}`.
_NUMBERED = re.compile(r"\b(?:perf|rollout|train|step) (\d{1,9}): \{")
_NUMBER = r"[-+]?(?:\d[\d,]*\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
# Behind a number may be its unit, unless it is the next key.
_UNIT = (
    r"(?P<unit>(?:[um]?s|secs?|seconds|min|[kKmMgGtT]i?[bB]|[kKmMgG])\b"
    r"(?![\w/]{0,60}\s?[:=])|%)"
)
_VALUE = rf"(?P<value>{_NUMBER})['\"]?(?:/[\d.]+)?(?: ?\(?{_UNIT})?"
# A key is what stands before a colon or an equals sign, behind a separator; or a word
# before a number, between commas.
_PAIR = re.compile(
    r"(?:^|[|{},;•\s])\s*['\"]?(?P<key>[A-Za-z][\w ./()%-]{0,60}?)['\"]?"
    rf"\s*[:=]\s*['\"]?{_VALUE}"
)
_WORD_PAIR = re.compile(rf"[,:] (?P<key>[a-z/]{{2,12}}) {_VALUE}(?=,|$)")
# As torch's example of ImageNet prints figures: `Time 0.470 (1.206)`, the mean of all.
_MEANED_PAIR = re.compile(
    rf"(?:^|\s)(?P<key>[A-Z][\w@]{{1,20}})\s+{_VALUE}\s?\(\s*[\d.e+-]{{1,16}}\)"
)
_RATE = re.compile(
    r"[\s,(](?P<value>\d{1,9}(?:\.\d{1,9})?) ?(?P<unit>s|secs?|seconds|ms)/"
    r"(?:it|iter|itr|step|batch)\b"
)
_STEP = re.compile(
    r"(?:^|[\s\[|(_{,'\"])(?<!ccumulation )(?<!ptimization )(?<!armup )(?<!save )"
    r"(?<!of )(?<!logging_)(?<!save_)(?<!eval_)(?<!max_)(?<!warmup_)(?<!lation_)"
    r"(?<!delay_)(?<!per_)(?<!num_)(?:global[_ ]?)?"
    r"(?:step|iter(?:ation)?|itr|it(?= ?\d{1,9}/))s?"
    r"(?:\[?(?:global_step)?/max_steps\]?)?['\"]?\s*[:=#]?\s*[\['\"]?"
    r"(\d{1,9})(?:\.0+\b)?(?:\s*/\s*(\d{1,9}))?(?![\w.]*\d|\.\d)",
    re.IGNORECASE,
)
_BATCH = re.compile(r"\bEpoch:?\s?\[\d+\]\s?\[\s*(\d{1,9})/(\d{1,9})\]")
# Of a line that counts both, as litgpt's: steps of several iterations.
_UPDATE = re.compile(r"\biter \d{1,9}\s?(?:\||,)? ?step (\d{1,9})\b")
# Programs that scale the loss skip steps in which it overflows: those have no update.
_OVERFLOW = re.compile(r"OVERFLOW!.{0,40}Skipping step|overflow.{0,10}Skipping step")
# Bars of other work than training.
_OTHER_WORK = re.compile(
    r"load|map|filter|token|saving|download|generat|resolv|process|eval|valid|predict"
    r"|test|writ|pack|creat|convert|fetch|cast|extract|sampl|cach|render|capturing",
    re.IGNORECASE,
)
_BAR = re.compile(
    r"(?P<done>\d{1,9})/(?P<total>\d{1,9}|\?) \[?(?P<elapsed>[\d:]{4,10})"
    r"(?:<[^,\]]{1,20},| • \S{1,12})"
    r"\s*(?P<rate>[\d.]+) ?(?P<unit>s/it|it/s|s/step|step/s|s/batch|batch/s)"
)
_RANK = re.compile(r"\[?\brank[ _:=]?(\d{1,6})\b\]?:?", re.IGNORECASE)
_CLOCK = re.compile(
    r"(?:\d{2,4}[-/]\d\d(?:[-/]\d{2,4})?[T ]|\b[IWEF]\d{4} |^)"
    r"(\d\d):(\d\d):(\d\d)(?:[.,](\d{1,6}))?\b"
)
_DAY_S = 86400
_RETRIES = re.compile(r"(\d+) CUDA memory allocation retries")
_MEMORY_USAGE = re.compile(
    r"MA (?P<ma>[\d.]+) GB {1,2}Max_MA (?P<max_ma>[\d.]+) GB {1,2}CA (?P<ca>[\d.]+) GB "
    r" ?Max_CA (?P<max_ca>[\d.]+) GB"
)
_HOST_USAGE = re.compile(
    r"CPU Virtual Memory:\s+used = (?P<used>[\d.]+) GB"
    r"(?:, percent = (?P<share>[\d.]+)%)?"
)
_MAX_LINE_CHARS = 4096
_BLANKS = re.compile(r"\s{3,}")
_FIGURE = re.compile(r"[:=] ?['\"\[]?[-+.]?\d|\d ?[a-zA-Z/]{1,9}(?:[,\s\])]|$)|\d \(")
_MAX_LINES_OF_STEP = 20
_CLOCK_COLUMN, _ELAPSED_COLUMN, _SECONDS_COLUMN = "clock_s", "elapsed_s", "seconds"
_UPDATE_COLUMN = "update"
_HIDDEN = (_CLOCK_COLUMN, _ELAPSED_COLUMN, _SECONDS_COLUMN, _UPDATE_COLUMN)
# A progress bar prints a smoothed rate, and whole seconds: over so many of them the
# seconds tell more.
_MIN_ELAPSED_S = 10.0


@dataclass(frozen=True, kw_only=True)
class StepLog(Record):
    """The steps of a log of one program.

    Attributes:
        program: The program whose keys its lines have.
        rank: The rank that the lines name; None where they name none.
        steps: A row per step that was printed; columns as in `formats`, in s, bytes,
            and per s.
        unknown: The names of figures that no program is known to print.
        total_steps: Number of steps of the whole job; None if it is not printed.
    """

    program: str
    rank: int | None
    steps: pd.DataFrame = field(repr=False)
    unknown: tuple[str, ...] = ()
    total_steps: int | None = None

    @property
    def title(self) -> str:
        rank = "" if self.rank is None else f" of rank {self.rank}"
        return f"{len(self.steps)} steps{rank} in the format of {self.program}"

    def as_json(self) -> dict[str, Any]:
        rows = self.steps.astype(object).where(self.steps.notna(), None)
        printed = super().as_json()
        printed["figures"]["steps"] = rows.to_dict("records")
        return printed

    def values(self, column: str) -> Floats:
        """Return the figures of a column that are there, in the order of the steps."""
        if column not in self.steps:
            return np.empty(0)
        values: Floats = self.steps[column].dropna().to_numpy(dtype=float)
        return values

    def parts(self) -> dict[str, float]:
        """Return the median time in s of each part of a step."""
        names = [name for name in self.steps if name.startswith(formats.PART)]
        return {
            name.removeprefix(formats.PART): float(self.steps[name].median())
            for name in names
        }


@dataclass
class _Group:
    """The lines of one program and rank."""

    rows: list[dict[str, float]] = field(default_factory=list)
    programs: dict[str, int] = field(default_factory=dict)
    unknown: dict[str, None] = field(default_factory=dict)
    numbers: list[int] = field(default_factory=list)
    total_steps: int | None = None


@reader
def read_step_logs(text: PastedText) -> Iterator[StepLog]:
    groups: dict[tuple[str, int | None], _Group] = {}
    retries: float | None = None
    is_skipped = has_overflow = False
    for line in text.lines:
        if match := _RETRIES.search(line.text):
            retries = float(match[1])
            continue
        row = _row_of(line)
        is_skipped |= has_overflow
        has_overflow = _OVERFLOW.search(line.text) is not None
        if row is None:
            continue
        if retries is not None and row.layout == "keys":
            row.figures[formats.RETRIES] = retries
        if is_skipped and formats.STEP in row.figures:
            row.figures[formats.SKIPPED], is_skipped = 1, False
        group = groups.setdefault((row.layout, row.rank), _Group())
        _add(group, row, line.number)
    for (_, rank), group in groups.items():
        for run in _runs(group):
            log = _log_of(text, rank, run)
            if log is not None:
                yield log


def _runs(group: _Group) -> Iterator[_Group]:
    """Yield the lines of each run of a program, whose steps count from the begin."""
    starts = [0]
    before = (-1.0, 0.0)
    for index, row in enumerate(group.rows):
        step = row.get(formats.STEP)
        if step is not None:
            elapsed_s = row.get(_ELAPSED_COLUMN, 0.0)
            if step < before[0] or elapsed_s < before[1]:
                starts.append(index)
            before = step, elapsed_s
    for start, end in pairwise([*starts, len(group.rows)]):
        rows, numbers = group.rows[start:end], group.numbers[start:end]
        yield replace(group, rows=rows, numbers=numbers)


@dataclass
class _Row:
    layout: str
    rank: int | None
    figures: dict[str, float]
    programs: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    total_steps: int | None = None


def _row_of(line: PastedLine) -> _Row | None:
    text = _BLANKS.sub("  ", line.text)
    if len(text) > _MAX_LINE_CHARS or not _FIGURE.search(text):
        return None
    bar = _BAR.search(text)
    # Behind a bar stands what another part of the program wrote.
    rank_match = _RANK.search(text, 0, len(text) if bar is None else bar.start())
    rank = None if rank_match is None else int(rank_match[1])
    if bar is not None:
        is_other = _OTHER_WORK.search(text, max(bar.start() - 120, 0), bar.start())
        return None if is_other else _bar_row(bar, text, rank)
    if rank_match is not None:
        text = text.replace(rank_match[0], " ", 1)
    usage = _MEMORY_USAGE.search(text)
    if usage is not None:
        figures = {
            formats.ALLOCATED: float(usage["max_ma"]) * formats.GIB,
            formats.RESERVED: float(usage["max_ca"]) * formats.GIB,
        }
        program = "DeepSpeed 0.19 (see_memory_usage)"
        return _Row("see_memory_usage", rank, figures, [program])
    host = _HOST_USAGE.search(text)
    if host is not None:
        figures = {formats.HOST: float(host["used"]) * formats.GIB}
        if host["share"] is not None:
            figures[formats.HOST_SHARE] = float(host["share"]) / 100
        return _Row("see_memory_usage", rank, figures)
    return _keyed_row(text, rank)


def _bar_row(bar: re.Match[str], text: str, rank: int | None) -> _Row:
    rate = float(bar["rate"])
    is_time = bar["unit"].startswith("s/")
    figures = {
        formats.STEP: float(bar["done"]),
        _ELAPSED_COLUMN: _elapsed_s(bar["elapsed"]),
    }
    if rate > 0:
        figures[formats.STEP_S] = rate if is_time else 1 / rate
    keyed = _pairs_of(text[bar.end() :])
    figures = {**keyed.figures, **figures}
    total = None if bar["total"] == "?" else int(bar["total"])
    program = "a progress bar"
    return _Row(f"bar of {total}", rank, figures, [program], keyed.unknown, total)


def _elapsed_s(text: str) -> float:
    seconds = 0.0
    for part in text.split(":"):
        seconds = seconds * 60 + float(part or 0)
    return seconds


def _keyed_row(text: str, rank: int | None) -> _Row | None:
    clock = _CLOCK.search(text)
    if clock is not None:
        text = text.replace(clock[0], " ", 1)
    row = _pairs_of(text)
    row.rank = rank
    step = _BATCH.search(text) or _STEP.search(text)
    numbered = _NUMBERED.search(text)
    update = _UPDATE.search(text)
    if update is not None:
        row.figures[_UPDATE_COLUMN] = float(update[1])
    rate = _RATE.search(text) if "/" in text else None
    if rate is not None:
        scale = formats.UNITS[rate["unit"]]
        row.figures.setdefault(formats.STEP_S, float(rate["value"]) * scale)
    if step is not None:
        row.figures[formats.STEP] = float(step[1])
        row.total_steps = None if step[2] is None else int(step[2])
    elif numbered is not None:
        row.figures[formats.STEP] = float(numbered[1])
    is_dictionary = text.lstrip().startswith("{") and len(row.unknown) >= 2
    has_figures = row.unknown or rate is not None
    if not (row.programs or (step is not None and has_figures) or is_dictionary):
        return None
    if clock is not None:
        column = _SECONDS_COLUMN if clock[4] is None else _CLOCK_COLUMN
        row.figures[column] = _seconds_of(clock)
    return row


def _pairs_of(text: str) -> _Row:
    patterns = (_PAIR, _WORD_PAIR, *((_MEANED_PAIR,) if "(" in text else ()))
    matches = [match for pattern in patterns for match in pattern.finditer(text)]
    keys = [match["key"].rpartition(" - ")[2].strip() for match in matches]
    program = formats.program_of(keys)
    row = _Row("keys", None, {})
    for key, match in zip(keys, matches, strict=True):
        value = float(match["value"].replace(",", ""))
        column = formats.column_of(program, key)
        if column is None:
            if not _STEP.fullmatch(f"{key} 1"):
                row.unknown.append(key)
                row.figures.setdefault(key, value)
            continue
        name, scale = column
        figure = formats.scaled(name, value, match["unit"] or "", scale)
        is_rounded = scale is not None and scale < 0 and _is_one_digit(match["value"])
        is_better = name != formats.IGNORED and name not in row.figures
        if figure is not None and is_better and not is_rounded:
            row.figures[name] = figure
            row.programs.append(program.name)
    return row


def _is_one_digit(number: str) -> bool:
    """Return whether a number has one digit: 0.1 steps/s may be 7 or 20 s a step."""
    return len(number.replace(".", "").strip("0")) < 2 and not number.endswith("00")


def _seconds_of(clock: re.Match[str]) -> float:
    hours, minutes, seconds, fraction = clock.groups()
    whole = (int(hours) * 60 + int(minutes)) * 60 + int(seconds)
    return whole + float(f"0.{fraction or 0}")


def _add(group: _Group, row: _Row, number: int) -> None:
    """Add a line to a group: to its last step where it has the same number."""
    step = row.figures.get(formats.STEP)
    last = group.rows[-1] if group.rows else {}
    is_later = row.figures.get(_ELAPSED_COLUMN, 0) >= last.get(_ELAPSED_COLUMN, 0)
    is_same = step is not None and last.get(formats.STEP) == step and is_later
    # Some programs print a step in several lines.
    is_near = bool(group.numbers) and number - group.numbers[-1] <= _MAX_LINES_OF_STEP
    is_rest = step is None and is_near and not last.keys() & row.figures.keys()
    if group.rows and (is_same or is_rest):
        last.update(row.figures)
        group.numbers[-1] = number
    else:
        group.rows.append(row.figures)
        group.numbers.append(number)
    for program in row.programs:
        group.programs[program] = group.programs.get(program, 0) + 1
    group.unknown.update(dict.fromkeys(row.unknown))
    if row.total_steps is not None:
        group.total_steps = row.total_steps


def _log_of(text: PastedText, rank: int | None, group: _Group) -> StepLog | None:
    steps = pd.DataFrame(group.rows)
    figures = {*steps} - {*group.unknown} - {formats.STEP, *_HIDDEN}
    if not figures and len(steps) < 2:
        return None
    _add_step_times(steps)
    programs = sorted(group.programs, key=lambda name: -group.programs[name])
    return StepLog(
        place=Place(
            text_name=text.name,
            first_line=group.numbers[0],
            last_line=group.numbers[-1],
        ),
        program=programs[0] if programs else formats.OTHERS.name,
        rank=rank,
        steps=_updates_of(steps).drop(columns=[*_HIDDEN], errors="ignore"),
        unknown=tuple(group.unknown),
        total_steps=group.total_steps,
    )


def _updates_of(steps: pd.DataFrame) -> pd.DataFrame:
    """Return a row for each update, where a program prints its iterations."""
    if _UPDATE_COLUMN not in steps or formats.STEP_S not in steps:
        return steps
    groups = steps.groupby(_UPDATE_COLUMN)
    counts = groups[formats.STEP_S].count()
    whole = counts.index[counts == counts.max()]
    if counts.max() < 2 or len(whole) < 2:
        return steps
    updates = groups.last().loc[whole]
    updates[formats.STEP_S] = groups[formats.STEP_S].sum()
    updates[formats.STEP] = whole
    return updates.reset_index()


def _add_step_times(steps: pd.DataFrame) -> None:
    """Add the times of steps where the clocks of lines tell them best."""
    if formats.STEP not in steps:
        return
    count = steps[formats.STEP].diff()
    if _ELAPSED_COLUMN in steps:
        measured_s = _times_of(steps[_ELAPSED_COLUMN].diff(), count, _MIN_ELAPSED_S)
        # A bar may print a rate of nothing alone.
        printed_s = steps.get(formats.STEP_S, measured_s)
        steps[formats.STEP_S] = measured_s.fillna(printed_s)
    elif _CLOCK_COLUMN in steps and formats.STEP_S not in steps:
        seconds = steps[_CLOCK_COLUMN].diff() % _DAY_S
        steps[formats.STEP_S] = _times_of(seconds, count, 1e-6)
    elif _SECONDS_COLUMN in steps and formats.STEP_S not in steps:
        seconds = steps[_SECONDS_COLUMN].diff() % _DAY_S
        times_s = _times_of(seconds, count, _MIN_ELAPSED_S)
        total_s, total = seconds.sum(), count[count > 0].sum()
        if times_s.notna().any():
            steps[formats.STEP_S] = times_s
        elif total_s >= _MIN_ELAPSED_S and total > 0:
            steps[formats.MEAN_STEP_S] = total_s / total
    if formats.SKIPPED in steps and formats.STEP_S in steps:
        is_skipped = steps[formats.SKIPPED].fillna(0) > 0
        steps[formats.STEP_S] = steps[formats.STEP_S].mask(is_skipped)


def _times_of(seconds: pd.Series, count: pd.Series, least_s: float) -> pd.Series:
    """Return the times of steps over spans that are long enough."""
    return (seconds / count).where((seconds >= least_s) & (count > 0))
