"""Imports the steps of logs that have times of steps and no phases."""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

import numpy as np
import pandas as pd

from ebbtide.features.explain import formats
from ebbtide.features.explain.pasted import (
    PastedLine,
    PastedText,
    clean_lines,
    decoded,
)
from ebbtide.features.explain.readers.step_logs import StepLog, read_step_logs
from ebbtide.features.explain.record import Record
from ebbtide.features.explain.step_parts import add_parts
from ebbtide.features.importers.importer import (
    Importer,
    ImportOptions,
    Recognition,
    Stage,
)
from ebbtide.features.importers.other_kinds import other_kind
from ebbtide.features.importers.source import Source, SourceError
from ebbtide.profiler.trace import RankBuilder, TraceBuilder
from ebbtide.units import counted

FORMAT = "steps"
# Programs that print the time of each step, in the words of `other_kind`.
_KINDS = frozenset({"a log of torchtitan", "a log of NeMo", "a log of verl"})
_POOLS = {formats.ALLOCATED: "allocated", formats.RESERVED: "reserved"}
# As torchtitan prints memory.
_SHARE = re.compile(r"memory: *([\d.]+)GiB\(([\d.]+)%\)")
_NS = 1e9
_MAX_STEP_S = 1e7
_MAX_NS = 1 << 60  # Longer than any job.


class StepSeriesImporter:
    """Importer of the steps of a training program's log."""

    format = FORMAT
    recognition = Recognition.WORDS
    stage = Stage.JOB

    def matches(self, source: Source) -> bool:
        kind = other_kind(source)
        if kind is None or kind.name not in _KINDS:
            return False
        logs = _timed(read_step_logs(_pasted(source, source.head_text)))
        return any(len(_timed_steps(log)) > 1 for log in logs)

    def import_into(
        self, builder: TraceBuilder, sources: Sequence[Source], options: ImportOptions
    ) -> list[Source]:
        """Add the steps of each rank as iterations. Their times begin at 0."""
        for source in sources:
            with source.open() as file:
                text = _pasted(source, decoded(file.read()))
            logs = list(_timed(read_step_logs(text)))
            if not logs:
                raise SourceError(f"{source} has no times of steps")
            for rank, log in _chosen(builder, source, logs, options).items():
                entry = builder.rank(rank)
                capacity_bytes = _capacity(text.lines)
                device = {"device": "cuda:0", "kind": "cuda"}
                devices = [{**device, "capacity_bytes": capacity_bytes}]
                entry.meta.update(imported_from=source.path.name, devices=devices)
                _note_parts(builder, log, _add_steps(entry, log))
        return list(sources)


IMPORTERS: tuple[Importer, ...] = (StepSeriesImporter(),)


def _pasted(source: Source, text: str) -> PastedText:
    return PastedText(str(source), tuple(clean_lines(text)))


def _timed(records: Iterable[Record]) -> Iterator[StepLog]:
    for log in records:
        if isinstance(log, StepLog) and not _timed_steps(log).empty:
            yield log


def _timed_steps(log: StepLog) -> pd.DataFrame:
    """Return the steps with a number and a time, in the order of their numbers."""
    columns = [formats.STEP, formats.STEP_S]
    if not {*columns} <= {*log.steps}:
        return log.steps.iloc[:0]
    steps = log.steps.dropna(subset=columns)
    steps = steps[steps[formats.STEP_S].between(0, _MAX_STEP_S, inclusive="neither")]
    return steps.drop_duplicates(formats.STEP, keep="last").sort_values(formats.STEP)


def _chosen(
    builder: TraceBuilder,
    source: Source,
    logs: Sequence[StepLog],
    options: ImportOptions,
) -> dict[int, StepLog]:
    """Return the log of the chosen run of each rank, the last one by default."""
    by_rank: defaultdict[int, list[StepLog]] = defaultdict(list)
    for log in logs:
        by_rank[log.rank or 0].append(log)
    runs = max(map(len, by_rank.values()))
    number = runs if options.run is None else options.run
    if number == "all" or not 1 <= number <= runs:
        raise SourceError(
            f"{source} has {counted(runs, 'run')}, each with its own numbers of steps: "
            f"choose one with --run 1 to {runs}"
        )
    if runs > 1:
        builder.note(
            f"{source.path.name}: of {runs} runs run {number} is imported (--run N)"
        )
    return {rank: own[min(number, len(own)) - 1] for rank, own in by_rank.items()}


def _note_parts(builder: TraceBuilder, log: StepLog, too_long: int) -> None:
    """Note what is not known of the parts of steps."""
    if log.parts():
        builder.note(
            "the log has lengths alone: parts follow each other from the start of a "
            "step on"
        )
    if too_long:
        builder.note(
            f"in {too_long} steps the parts take longer than the step, so some contain "
            "others: all were shortened alike"
        )


def _add_steps(entry: RankBuilder, log: StepLog) -> int:
    """Add the steps of a log, each as long as it says, in the order of their numbers,
    their parts, and memory at their ends. Return the number of steps whose parts take
    longer than the step."""
    steps = _timed_steps(log)
    numbers = steps[formats.STEP].to_numpy(np.int64)
    lengths = np.maximum(1, steps[formats.STEP_S].to_numpy(float) * _NS)
    # Steps that were not printed take as long as the next one that was.
    unprinted = np.array(
        [0, *(after - before - 1 for before, after in pairwise(numbers))]
    )
    ends = np.cumsum(np.minimum(lengths * (1 + unprinted), _MAX_STEP_S * _NS))
    ends = np.minimum(ends, _MAX_NS).astype(np.int64)
    starts = ends - lengths.astype(np.int64)
    entry.extend("iteration_marks", iteration=numbers, start_ns=starts, end_ns=ends)
    entry.meta["first_iteration_start_ns"] = int(starts[0])
    for column, pool in _POOLS.items():
        if column in steps:
            sizes = steps[column].to_numpy(float)
            is_known = np.isfinite(sizes)
            entry.extend(
                "memory",
                t_ns=ends[is_known],
                bytes=sizes[is_known].astype(np.int64),
                pool=pool,
                device="cuda:0",
            )
    if not log.parts():
        return 0
    return add_parts(entry, steps.assign(start_ns=starts, end_ns=ends))


def _capacity(lines: Sequence[PastedLine]) -> int | None:
    """Return the memory of the device, of which lines print bytes and a share; None:
    they do not."""
    shares = [match for line in lines if (match := _SHARE.search(line.text))]
    sizes = [float(match[1]) / float(match[2]) for match in shares if float(match[2])]
    return round(float(np.median(sizes)) * 100 * formats.GIB) if sizes else None
