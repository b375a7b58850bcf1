"""Derives the phases of a rank from the marks in its Kineto trace."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from ebbtide.phases import PHASES
from ebbtide.profiler.agent.iterations import IterationRule
from ebbtide.profiler.importers.kineto.intervals import interval_index, outermost
from ebbtide.profiler.importers.kineto.marks import MarkKind, Marks
from ebbtide.profiler.trace.micro_steps import micro_steps

_PHASE_NAMES = np.array(PHASES)


@dataclass(frozen=True)
class FoundPhases:
    """Phases and iterations of one rank. Times are ns after the trace's base.

    Attributes:
        phases: The columns of the table `phases` except the device times, in order and without overlap.
        steps: Columns number, start and end of the ProfilerStep annotations that are iterations; empty if iterations
            are counted by updates.
    """

    phases: pd.DataFrame
    steps: pd.DataFrame


def find_phases(marks: Marks, notes: list[str]) -> FoundPhases:
    """Derive the phases from marks.

    Forward and backward are the outermost annotations that name them. Without annotations, forward is the outermost
    calls of modules in training, if calls were recorded, or else extends from the first to the last op that is
    differentiated later; backward extends from the first to the last function that the autograd engine evaluates. A
    mark that begins inside a phase belongs to that phase.

    Args:
        marks: The marks of one rank.
        notes: Receives a line for each kind of mark that is missing, with the call that adds it.
    """
    spans = outermost(_marked_spans(marks))
    steps = marks.steps.table().sort_values("start", ignore_index=True)
    spans["step"] = interval_index(spans["start"], steps["start"], steps["end"])
    same = spans[["phase", "part_of", "step"]]
    begins = same.ne(same.shift()).any(axis=1)
    if not spans["phase"].eq(MarkKind.BACKWARD).any():
        begins |= True  # There was a backward between two updates, although the trace does not show it.
    phases = spans.groupby(begins.cumsum()).agg(
        phase=("phase", "first"), start_ns=("start", "first"), end_ns=("end", "last"),
        step=("step", "first"), optimizer=("part_of", "first"),
    ).reset_index(drop=True)  # fmt: skip
    iterations = steps.iloc[:0]
    if _steps_are_iterations(phases):
        phases["iteration"] = pd.array([*steps["number"], None], dtype="Int64")[phases["step"]]
        iterations = steps[steps.index.isin(phases["step"])].reset_index(drop=True)
    else:
        phases["iteration"] = _iterations_by_updates(phases)
        if phases["iteration"].notna().any():
            notes.append("iterations are counted by optimizer steps: call prof.step() once per iteration to mark them")
        elif len(phases):
            notes.append("it does not mark iterations: call prof.step() once per iteration")
    notes += _missing_marks(phases["phase"])
    phases["phase"] = _PHASE_NAMES[phases["phase"].to_numpy(np.int64)]
    columns = phases[["iteration", "phase", "start_ns", "end_ns"]]
    return FoundPhases(columns.assign(micro_step=micro_steps(phases)), iterations)


def _marked_spans(marks: Marks) -> pd.DataFrame:
    """Return all spans that belong to a phase, in any order.

    Returns:
        Columns start, end, phase (a MarkKind) and part_of. Adjacent spans of a phase with the same part_of are one
        phase.
    """
    words = marks.words.table()
    annotated = {
        kind: _separate(words[words["phase"] == kind], kind)
        for kind in (MarkKind.FORWARD, MarkKind.BACKWARD, MarkKind.UPDATE)
    }
    engine = outermost(marks.evaluated.table()).assign(phase=int(MarkKind.BACKWARD), part_of=0)
    trained = _differentiated_ops(marks, engine).assign(phase=int(MarkKind.FORWARD), part_of=0)
    calls = _separate(marks.calls.table(), MarkKind.FORWARD)
    steps = marks.updates.table().assign(phase=int(MarkKind.UPDATE)).rename(columns={"optimizer": "part_of"})
    spans = [
        _first_with_rows(_in_training(annotated[MarkKind.FORWARD], trained), _in_training(calls, trained), trained),
        _first_with_rows(annotated[MarkKind.BACKWARD], engine),
        _first_with_rows(steps, annotated[MarkKind.UPDATE].assign(part_of=0)),
    ]
    return pd.concat([table[["start", "end", "phase", "part_of"]] for table in spans], ignore_index=True)


def _first_with_rows(*tables: pd.DataFrame) -> pd.DataFrame:
    """Return the first table that has rows, or the last table if none has."""
    return next((table for table in tables if len(table)), tables[-1])


def _separate(spans: pd.DataFrame, kind: MarkKind) -> pd.DataFrame:
    """Return the spans with one phase for each of them."""
    return spans.assign(phase=int(kind), part_of=np.arange(len(spans)))


def _differentiated_ops(marks: Marks, engine: pd.DataFrame) -> pd.DataFrame:
    """Return the ops that the engine evaluates later, without those that the engine itself runs to recompute."""
    ops = marks.ops.table()
    ops = ops[interval_index(ops["start"], engine["start"], engine["end"]) < 0]
    evaluated = marks.evaluated.table().groupby("sequence", as_index=False)["start"].max()
    ops = ops.merge(evaluated, on="sequence", suffixes=("", "_of_engine"))
    ops = ops[ops["start"] < ops["start_of_engine"]]
    # An op has the number of the next op to be differentiated. The last op with a number is that op.
    return ops.sort_values("start").drop_duplicates("sequence", keep="last")


def _in_training(forward: pd.DataFrame, trained: pd.DataFrame) -> pd.DataFrame:
    """Return the forwards without evaluations.

    Args:
        forward: Spans of forwards.
        trained: Ops that are differentiated later; empty if no such op is recorded, and then all forwards are kept.
    """
    starts = np.sort(trained["start"])
    trains = np.searchsorted(starts, forward["end"]) > np.searchsorted(starts, forward["start"])
    return forward[trains] if len(trained) else forward


def _steps_are_iterations(phases: pd.DataFrame) -> bool:
    """Return whether ProfilerStep annotations mark iterations. If most have no update, they mark micro-steps."""
    inside = phases[phases["step"] >= 0]
    updated, differentiated = (
        inside.loc[inside["phase"] == kind, "step"].nunique() for kind in (MarkKind.UPDATE, MarkKind.BACKWARD)
    )
    return len(inside) > 0 and (updated == 0 or 2 * updated > differentiated)


class _Optimizer:
    """An optimizer of the job, as an object for the iteration rule, which keeps weak references."""


def _iterations_by_updates(phases: pd.DataFrame) -> pd.api.extensions.ExtensionArray:
    """Number the iteration of each phase by the trace's rule, as far as names distinguish optimizers."""
    rule, optimizers = IterationRule(), {number: _Optimizer() for number in phases["optimizer"]}
    backwards = phases["phase"].eq(MarkKind.BACKWARD)
    if not backwards.any():
        backwards = phases["phase"].eq(MarkKind.UPDATE)
    begun = backwards.cumsum()
    last_rows: dict[int, int] = {}
    for row in phases[phases["phase"] == MarkKind.UPDATE].itertuples():
        iteration = rule.add_update([optimizers[row.optimizer]], begun[row.Index])
        if iteration is not None:
            last_rows[iteration] = row.Index
    return pd.array([*last_rows, None], dtype="Int64")[np.searchsorted([*last_rows.values()], phases.index)]


def _missing_marks(kinds: pd.Series) -> list[str]:
    """Return a line for each phase that is not marked, with the call that marks it."""
    if kinds.empty:
        return [
            "it does not mark phases: record the CPU too (ProfilerActivity.CPU), or mark phases with "
            'record_function("forward"), ("backward") and ("optimizer")'
        ]
    lines = []
    for name in _PHASE_NAMES[[kind for kind in (MarkKind.FORWARD, MarkKind.BACKWARD) if not kinds.eq(kind).any()]]:
        lines.append(f'it has no {name}: if the job has one, mark it with record_function("{name}")')
    if not kinds.eq(MarkKind.UPDATE).any():
        lines.append('it has no step of a torch optimizer: mark the update with record_function("optimizer")')
    return lines
