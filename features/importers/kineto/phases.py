"""Derives the phases of a rank from the marks in its Kineto trace."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd

from ebbtide.phases import PHASES
from ebbtide.profiler.agent.iteration_rule import IterationRule
from ebbtide.profiler.chrome_trace.events import Event, IntArray, IntTable, spans
from ebbtide.profiler.chrome_trace.gpu_activities import COMMUNICATION
from ebbtide.profiler.trace import RankBuilder
from ebbtide.profiler.trace.iterations import micro_steps

# The category of annotations of the host; annotations of the device have another.
ANNOTATION = "user_annotation"
OPS = frozenset({"cpu_op", "Operator", ANNOTATION})
CALLS = "python_function"
_MODULE = "nn.Module: "
_PROFILER_STEP = re.compile(r"ProfilerStep#[0-9]{1,18}")
# Separators of the words of an annotation: "## forward ##",
# "DistributedDataParallel.forward". The names "FSDP::pre_forward" and
# "alltoall_bwd_single" are only parts of a phase, so `_` separates no words.
_SEPARATORS = re.compile(r"[\s.:/#|+()\[\]-]+")


# The note on phases without times of the device, although it has work.
NO_LAUNCHES = (
    "it has no calls that launched the work: phases have the host's times, and those "
    "of the device are not known"
)


def no_launches(work: pd.DataFrame) -> bool:
    """Return whether there is work of a device without any call that launched it."""
    return len(work) > 0 and bool(work["launched"].isna().all())


class MarkKind(IntEnum):
    """Meaning of an annotation or op. The first three are the phases, in the order of
    `ebbtide.phases.PHASES`."""

    FORWARD = 0
    BACKWARD = 1
    UPDATE = 2
    PROFILER_STEP = 3
    OPTIMIZER_STEP = 4
    EVALUATED = 5
    NODE = 6
    OP = 7


_PREFIXES = {
    "Optimizer.step#": MarkKind.OPTIMIZER_STEP,
    "autograd::engine::evaluate_function: ": MarkKind.EVALUATED,
    "torch::autograd::": MarkKind.NODE,
    "aten::": MarkKind.OP,
    "Optimizer.zero_grad": MarkKind.OP,
}
# The process of the CPU in traces of torch.autograd.profiler without Kineto.
LEGACY_PROCESS = "CPU functions"
# The name of an op, `nll_loss`, is that of its node, NllLossBackward0, without these.
_PLAIN = re.compile(
    r"autograd::engine::evaluate_function: |torch::autograd::|aten::|backward\d*|_"
)
# The name of a node of the graph, as in NllLossBackward0.
_NODE = re.compile(r"\w+Backward\d*")
_WORDS = {
    MarkKind.FORWARD: re.compile(r"(forward|fwd)(_?(pass|step))?"),
    MarkKind.BACKWARD: re.compile(r"(backward|bwd)(_?(pass|step))?"),
    MarkKind.UPDATE: re.compile(r"(optimizer|optim)(_?(step|update))?"),
}


class Marks:
    """Collects the marks of a trace, each with its span in ns."""

    def __init__(self) -> None:
        self.steps = IntTable("start", "end", "number")
        self.words = IntTable("start", "end", "phase")
        self.updates = IntTable("start", "end", "optimizer")
        self.calls = IntTable("start", "end")
        self.ops = IntTable("start", "end", "sequence")
        self.has_ops = False  # Whether operations of the CPU were recorded.
        # Operations and nodes of the legacy profiler, which numbers neither.
        self.named_ops = IntTable("start", "end", "name")
        self._op_names: dict[str, int] = {}
        self.node_names: set[int] = set()
        self._functions = IntTable("start", "end", "sequence")
        self._nodes = IntTable("start", "end", "sequence")
        self._optimizers: dict[str, int] = {}

    @property
    def evaluated(self) -> pd.DataFrame:
        """Functions that the autograd engine evaluates, by the number of the op.

        MISSING: a gradient is accumulated. Versions of torch before 1.10 record only
        the nodes that these run.
        """
        functions = self._functions.table()
        return functions if len(functions) else self._nodes.table()

    def add_ops(self, events: list[Event]) -> None:
        """Add the marks among CPU ops and annotations."""
        by_kind: defaultdict[MarkKind, list[Event]] = defaultdict(list)
        self.has_ops |= any(event.cat != ANNOTATION for event in events[:1])
        for event in events:
            kind = _kind(event.name)
            is_legacy = event.pid == LEGACY_PROCESS
            if is_legacy:
                self._add_name(event, kind)
            elif (
                kind == MarkKind.NODE
                and event.name[0] != "t"
                and event.args.forward_thread <= 0
            ):
                kind = MarkKind.OP  # an op of the forward that is called so
            if kind != MarkKind.OP or event.args.sequence >= 0:
                by_kind[kind].append(event)
        for kind, marks in by_kind.items():
            if kind == MarkKind.PROFILER_STEP:
                self.steps.add(
                    *spans(marks),
                    [int(event.name.partition("#")[2]) for event in marks],
                )
            elif kind == MarkKind.OPTIMIZER_STEP:
                self.updates.add(
                    *spans(marks), [self._optimizer(event.name) for event in marks]
                )
            elif kind in (MarkKind.EVALUATED, MarkKind.NODE):
                table = self._functions if kind == MarkKind.EVALUATED else self._nodes
                table.add(*spans(marks), [event.args.sequence for event in marks])
            elif kind == MarkKind.OP:
                self.ops.add(*spans(marks), [event.args.sequence for event in marks])
            else:
                self.words.add(*spans(marks), [int(kind)] * len(marks))

    def add_calls(self, events: list[Event]) -> None:
        """Add the calls of modules among Python functions, which are recorded with
        stacks."""
        calls = [event for event in events if event.name.startswith(_MODULE)]
        if calls:
            self.calls.add(*spans(calls))

    def _add_name(self, event: Event, kind: MarkKind) -> None:
        """Keep the name of an op, or of the op whose gradient a node computes."""
        plain = _PLAIN.sub("", event.name.lower())
        number = self._op_names.setdefault(plain, len(self._op_names))
        if kind in (MarkKind.EVALUATED, MarkKind.NODE):
            self.node_names.add(number)
        elif kind == MarkKind.OP:
            (start,), (end,) = spans([event])
            self.named_ops.add([start], [end], [number])

    def _optimizer(self, name: str) -> int:
        return self._optimizers.setdefault(name, len(self._optimizers))


@lru_cache(maxsize=1 << 14)
def _kind(name: str) -> MarkKind:
    for prefix, kind in _PREFIXES.items():
        if name.startswith(prefix):
            return kind
    if _NODE.fullmatch(name):
        return MarkKind.NODE
    if _PROFILER_STEP.fullmatch(name):
        return MarkKind.PROFILER_STEP
    words = _SEPARATORS.split(name.lower())
    matching = [
        kind for kind, pattern in _WORDS.items() if any(map(pattern.fullmatch, words))
    ]
    return matching[0] if len(matching) == 1 else MarkKind.OP


def interval_index(
    times: pd.Series[int] | IntArray,
    starts: pd.Series[int] | IntArray,
    ends: pd.Series[int] | IntArray,
) -> IntArray:
    """Return the index of the interval that contains each time, or -1. Intervals are in
    order, and half open."""
    index = np.searchsorted(starts, times, side="right") - 1
    return np.where(times < np.append(ends, np.iinfo(np.int64).min)[index], index, -1)


def outermost(spans: pd.DataFrame) -> pd.DataFrame:
    """Return the intervals that are not inside another one, in order.

    One that begins in another begins at its end.
    """
    spans = spans.sort_values(
        ["start", "end"], ascending=[True, False], ignore_index=True
    )
    previous_end = spans["end"].cummax().shift(fill_value=np.iinfo(np.int64).min)
    spans = spans.assign(start=np.maximum(spans["start"], previous_end))
    return spans[spans["end"] > previous_end].reset_index(drop=True)


class _Launched(NamedTuple):
    """Work that was launched in intervals, an entry each."""

    starts: IntArray
    ends: IntArray
    streams: IntArray  # The number of the stream; -1 where not recorded.
    is_collective: npt.NDArray[np.bool_]
    intervals: IntArray  # The number of the interval.

    def latest(self, selected: npt.NDArray[np.bool_], count: int) -> IntArray:
        """Return the last end of selected work of each of `count` intervals; the least
        integer where there is none."""
        latest = np.full(count, _LEAST)
        np.maximum.at(latest, self.intervals[selected], self.ends[selected])
        return latest

    def on_main(self) -> npt.NDArray[np.bool_]:
        """Return which work is on the main stream.

        Also work of an interval that did not use the main stream.
        """
        counts = np.bincount(self.streams[self.streams >= 0])
        on_main = np.append(counts == counts.max(initial=-1), False)[self.streams]
        return on_main | ~np.isin(self.intervals, self.intervals[on_main])


_LEAST, _MOST = np.iinfo(np.int64).min, np.iinfo(np.int64).max


class DeviceTimes:
    """Times at which a device ran what the host launched in intervals."""

    def __init__(self, work: pd.DataFrame) -> None:
        work = work[work["launched"].notna()]
        self._launches = work["launched"].to_numpy(np.int64)
        self._starts, self._ends = (
            work[name].to_numpy(np.int64) for name in ("start", "end")
        )
        self._streams = (
            work.groupby(["device", "stream"], observed=True)
            .ngroup()
            .to_numpy(np.int64)
        )
        self._is_collective = (work["kind"] == COMMUNICATION).to_numpy(bool)

    def times(self, phases: pd.DataFrame) -> pd.DataFrame:
        """Compute when the device ran each phase: gpu_start_ns and gpu_end_ns.

        Phases (start_ns, end_ns) are in order and disjoint. The times are from the
        first start to the last end of the work launched in the phase; missing for a
        phase that launched nothing. Only work on the main stream, with the most
        launches, counts, if the phase used it: that stream waits for what the next
        phase needs, while copies on others extend into other phases. Collectives that
        run before the next phase count, too.
        """
        launched, count = (
            self._launched_in(phases["start_ns"], phases["end_ns"]),
            len(phases),
        )
        on_main = launched.on_main()
        starts, ends = np.full(count, _MOST), launched.latest(on_main, count)
        np.minimum.at(starts, launched.intervals[on_main], launched.starts[on_main])
        used = ends > _LEAST
        # Phases must not overlap, also if two streams were counted.
        latest_ends = np.maximum.accumulate(ends[used])
        starts[used] = np.maximum(starts[used], np.append(_LEAST, latest_ends)[:-1])
        collectives = launched.latest(launched.is_collective, count)[used]
        ends[used] = np.maximum(
            latest_ends, np.minimum(collectives, np.append(starts[used][1:], _MOST))
        )
        columns = {"gpu_start_ns": starts, "gpu_end_ns": ends}
        return pd.DataFrame(
            {
                name: pd.arrays.IntegerArray(times, ~used)
                for name, times in columns.items()
            }
        )

    def ends(self, steps: pd.DataFrame) -> pd.Series[int]:
        """Compute when the device finished each step.

        Steps (start, end) are in order and disjoint. It is the last end of the step's
        work on the main stream; of the last step, on any. Missing for a step that
        launched nothing.
        """
        launched, count = self._launched_in(steps["start"], steps["end"]), len(steps)
        ends = launched.latest(
            launched.on_main() | (launched.intervals == count - 1), count
        )
        return pd.Series(
            pd.arrays.IntegerArray(np.maximum.accumulate(ends), ends == _LEAST)
        )

    def _launched_in(self, starts: pd.Series[int], ends: pd.Series[int]) -> _Launched:
        intervals = interval_index(
            self._launches, starts.to_numpy(np.int64), ends.to_numpy(np.int64)
        )
        own = intervals >= 0
        return _Launched(
            self._starts[own],
            self._ends[own],
            self._streams[own],
            self._is_collective[own],
            intervals[own],
        )


_PHASE_NAMES = np.array(PHASES)


@dataclass(frozen=True)
class FoundPhases:
    """Phases and iterations of one rank. Times are ns after the trace's base."""

    # The columns of the table `phases` except the device times, in order and without
    # overlap.
    phases: pd.DataFrame
    # Columns number, start and end of the ProfilerStep annotations that are iterations;
    # empty if iterations are counted by updates. Without any phase they are all of
    # these annotations.
    steps: pd.DataFrame

    def add_to(
        self,
        entry: RankBuilder,
        times: pd.DataFrame,
        step_ends: pd.Series[int],
        base_ns: int,
    ) -> None:
        """Add them to a rank. `times`, `step_ends`: times of the device as
        `DeviceTimes` has them."""
        table, steps = self.phases.join(times), self.steps
        table[["start_ns", "end_ns", *times]] += base_ns
        entry.extend("phases", **table)
        if len(steps):
            entry.meta["first_iteration_start_ns"] = (
                int(steps["start"].iloc[0]) + base_ns
            )
            marks = {
                "start_ns": steps["start"],
                "end_ns": steps["end"],
                "gpu_end_ns": step_ends,
            }
            marks = {column: values + base_ns for column, values in marks.items()}
            entry.extend("iteration_marks", iteration=steps["number"], **marks)


def find_phases(marks: Marks, notes: list[str]) -> FoundPhases:
    """Derive the phases from marks. Forward and backward are the outermost annotations
    that name them. Without these, forward is the outermost calls of modules in
    training, if recorded, or else from the first to the last op that is differentiated
    later; backward from the first to the last function that the autograd engine
    evaluates. A mark that begins inside a phase belongs to it. `notes` receives a line
    for each kind of mark that is missing, with the call that adds it."""
    spans = outermost(_marked_spans(marks))
    steps = _numbered_steps(marks.steps.table(), notes)
    spans["step"] = interval_index(spans["start"], steps["start"], steps["end"])
    same = spans[["phase", "part_of", "step"]].to_numpy(np.int64)
    begins = np.append(True, (same[1:] != same[:-1]).any(axis=1))[: len(same)]
    if not spans["phase"].eq(MarkKind.BACKWARD).any():
        # There was a backward between two updates, although the trace does not show it.
        begins[:] = True
    first = np.flatnonzero(begins)
    last = np.append(first[1:], len(spans))[: len(first)] - 1
    phases = (
        spans.iloc[first]
        .reset_index(drop=True)
        .rename(columns={"start": "start_ns", "part_of": "optimizer"})
    )
    phases["end_ns"] = spans["end"].to_numpy(np.int64)[last]
    iterations = steps.iloc[:0] if len(phases) else steps
    if _steps_are_iterations(phases):
        phases["iteration"] = pd.array([*steps["number"], None], dtype="Int64")[
            phases["step"]
        ]
        iterations = steps[steps.index.isin(phases["step"])].reset_index(drop=True)
    else:
        phases["iteration"] = _iterations_by_updates(phases)
        if phases["iteration"].notna().any():
            notes.append(
                "iterations are counted by optimizer steps: to mark them, give "
                "torch.profiler a schedule= and call "
                "prof.step() once per iteration"
            )
        elif len(phases):
            notes.append(
                "it does not mark iterations: give torch.profiler a schedule= and call "
                "prof.step() once per iteration"
            )
    notes += _missing_marks(phases["phase"], marks.has_ops)
    phases["phase"] = _PHASE_NAMES[phases["phase"].to_numpy(np.int64)]
    columns = phases[["iteration", "phase", "start_ns", "end_ns"]]
    return FoundPhases(columns.assign(micro_step=micro_steps(phases)), iterations)


def _numbered_steps(steps: pd.DataFrame, notes: list[str]) -> pd.DataFrame:
    """Return the marks of steps in order of time, with numbers that ascend."""
    steps = outermost(steps)
    numbers = steps["number"]
    if numbers.gt(numbers.shift(fill_value=-1)).all():
        return steps
    notes.append("the numbers of its steps do not ascend: they are counted from 0")
    return steps.assign(number=np.arange(len(steps)))


def _marked_spans(marks: Marks) -> pd.DataFrame:
    """Return start, end, phase (a MarkKind) and part_of of all spans of phases, in any
    order.

    Adjacent spans of a phase with the same part_of are one phase."""
    words = marks.words.table()
    annotated = {
        kind: _separate(words[words["phase"] == kind], kind)
        for kind in (MarkKind.FORWARD, MarkKind.BACKWARD, MarkKind.UPDATE)
    }
    engine = outermost(marks.evaluated).assign(phase=int(MarkKind.BACKWARD), part_of=0)
    trained = _differentiated_ops(marks, engine).assign(
        phase=int(MarkKind.FORWARD), part_of=0
    )
    calls = _separate(marks.calls.table(), MarkKind.FORWARD)
    steps = (
        marks.updates.table()
        .assign(phase=int(MarkKind.UPDATE))
        .rename(columns={"optimizer": "part_of"})
    )
    spans = [
        _first_with_rows(
            _in_training(annotated[MarkKind.FORWARD], trained),
            _in_training(calls, trained),
            trained,
        ),
        _first_with_rows(annotated[MarkKind.BACKWARD], engine),
        _first_with_rows(steps, annotated[MarkKind.UPDATE].assign(part_of=0)),
    ]
    return pd.concat(
        [table[["start", "end", "phase", "part_of"]] for table in spans],
        ignore_index=True,
    )


def _first_with_rows(*tables: pd.DataFrame) -> pd.DataFrame:
    """Return the first table that has rows, or the last table if none has."""
    return next((table for table in tables if len(table)), tables[-1])


def _separate(spans: pd.DataFrame, kind: MarkKind) -> pd.DataFrame:
    return spans.assign(phase=int(kind), part_of=np.arange(len(spans)))


def _differentiated_ops(marks: Marks, engine: pd.DataFrame) -> pd.DataFrame:
    """Return the ops that the engine evaluates later.

    Ops that the engine itself runs to recompute are left out.
    """
    ops = marks.ops.table()
    if ops.empty:
        return _ops_by_name(marks, engine)
    ops = ops[interval_index(ops["start"], engine["start"], engine["end"]) < 0]
    evaluated = marks.evaluated.groupby("sequence", as_index=False)["start"].max()
    ops = ops.merge(evaluated, on="sequence", suffixes=("", "_of_engine"))
    ops = ops[ops["start"] < ops["start_of_engine"]]
    # An op has the number of the next op to be differentiated. The last op with a
    # number is that op.
    return ops.sort_values("start").drop_duplicates("sequence", keep="last")


def _ops_by_name(marks: Marks, engine: pd.DataFrame) -> pd.DataFrame:
    """Return the ops before a backward that have the name of a node that it runs."""
    ops = marks.named_ops.table()
    ops = ops[ops["name"].isin(marks.node_names)]
    outside = interval_index(ops["start"], engine["start"], engine["end"]) < 0
    return ops[outside & (ops["start"] < engine["start"].max())]


def _in_training(forward: pd.DataFrame, trained: pd.DataFrame) -> pd.DataFrame:
    """Return the forwards with ops that are differentiated later, without evaluations;
    all if none has such ops."""
    starts = np.sort(trained["start"])
    trains = np.searchsorted(starts, forward["end"]) > np.searchsorted(
        starts, forward["start"]
    )
    return forward[trains] if len(trained) else forward


def _steps_are_iterations(phases: pd.DataFrame) -> bool:
    """Return whether ProfilerStep annotations mark iterations. If most have no update,
    they mark micro-steps."""
    inside = phases[phases["step"] >= 0]
    updated, differentiated = (
        inside.loc[inside["phase"] == kind, "step"].nunique()
        for kind in (MarkKind.UPDATE, MarkKind.BACKWARD)
    )
    return len(inside) > 0 and (updated == 0 or 2 * updated > differentiated)


class _Optimizer:
    """An optimizer of the job, as an object for the iteration rule.

    The rule keeps weak references.
    """


def _iterations_by_updates(phases: pd.DataFrame) -> pd.api.extensions.ExtensionArray:
    """Number the iteration of each phase by the trace's rule, as far as names
    distinguish optimizers."""
    rule, optimizers = (
        IterationRule(),
        {number: _Optimizer() for number in phases["optimizer"]},
    )
    backwards = phases["phase"].eq(MarkKind.BACKWARD)
    if not backwards.any():
        backwards = phases["phase"].eq(MarkKind.UPDATE)
    begun = backwards.cumsum()
    last_rows: dict[int, int] = {}
    for row in phases[phases["phase"] == MarkKind.UPDATE].itertuples():
        iteration = rule.add_update([optimizers[row.optimizer]], begun[row.Index])
        if iteration is not None:
            last_rows[iteration] = row.Index
    return pd.array([*last_rows, None], dtype="Int64")[
        np.searchsorted([*last_rows.values()], phases.index)
    ]


def _missing_marks(kinds: pd.Series, has_ops: bool) -> list[str]:
    """Return a line for each phase that is not marked, with the call that marks it."""
    if kinds.empty:
        record = "" if has_ops else "record the CPU too (ProfilerActivity.CPU), or "
        names = 'record_function("forward"), ("backward") and ("optimizer")'
        return [f"it does not mark phases: {record}mark phases with {names}"]
    lines = []
    for name in _PHASE_NAMES[
        [
            kind
            for kind in (MarkKind.FORWARD, MarkKind.BACKWARD)
            if not kinds.eq(kind).any()
        ]
    ]:
        lines.append(
            f"it has no {name}: if the job has one, mark it with "
            f'record_function("{name}")'
        )
    if not kinds.eq(MarkKind.UPDATE).any():
        lines.append(
            "it has no step of a torch optimizer: mark the update with "
            'record_function("optimizer")'
        )
    return lines
