"""The phases of a rank, from what marks them in its Kineto trace."""

from __future__ import annotations

import numpy as np
import pandas as pd

from ebbtide.profiler.agent.iterations import IterationRule
from ebbtide.profiler.importers.kineto.intervals import outermost, within
from ebbtide.profiler.importers.kineto.marks import BACKWARD, FORWARD, UPDATE, Marks
from ebbtide.profiler.trace.spools import micro_steps

_NAMES = np.array(["forward", "backward", "update"])


def phases(marks: Marks, notes: list[str]) -> tuple[pd.DataFrame, int | None]:
    """The phases, in order and without overlap: the columns of the table `phases` that are not device times; and where
    the first iteration begins, if that is marked. What is not marked, and how to mark it, goes to `notes`.

    Forward and backward are the outermost annotations that say so. Else forward is the outermost calls of modules that
    train, where calls were recorded, or else from the first to the last op that is differentiated later; and backward
    from the first to the last thing that the autograd engine evaluates. What begins inside a phase belongs to that.
    """
    pieces = outermost(_pieces(marks))
    steps = marks.steps.table().sort_values("start", ignore_index=True)
    pieces["step"] = within(pieces["start"], steps["start"], steps["end"])
    same = pieces[["phase", "part_of", "step"]]
    begins = same.ne(same.shift()).any(axis=1)
    if not pieces["phase"].eq(BACKWARD).any():
        begins |= True  # Between two updates was one, which cannot be seen.
    found = pieces.groupby(begins.cumsum()).agg(
        phase=("phase", "first"), start_ns=("start", "first"), end_ns=("end", "last"),
        step=("step", "first"), optimizer=("part_of", "first"),
    ).reset_index(drop=True)  # fmt: skip
    begin = None
    if _steps_are_iterations(found):
        found["iteration"] = pd.array([*steps["number"], None], dtype="Int64")[found["step"]]
        begin = int(steps["start"][found.loc[found["step"] >= 0, "step"].iloc[0]])
    else:
        found["iteration"] = _by_updates(found)
        if found["iteration"].notna().any():
            notes.append("iterations are counted by the steps of optimizers (prof.step() once in each would mark them)")
        elif len(found):
            notes.append("nothing in it tells the iterations: call prof.step() once in each")
    notes += _missing(found["phase"])
    found["phase"] = _NAMES[found["phase"].to_numpy(np.int64)]
    return found[["iteration", "phase", "start_ns", "end_ns"]].assign(micro_step=micro_steps(found)), begin


def _pieces(marks: Marks) -> pd.DataFrame:
    """All that tells of a phase, in any order: start, end, phase, and part_of: what follows each other with the same
    number here is one."""
    words = marks.words.table()
    said = {phase: _alone(words[words["phase"] == phase], phase) for phase in (FORWARD, BACKWARD, UPDATE)}
    engine = outermost(marks.evaluated.table()).assign(phase=BACKWARD, part_of=0)
    trained = _differentiated(marks, engine).assign(phase=FORWARD, part_of=0)
    calls = _alone(marks.calls.table(), FORWARD)
    steps = marks.updates.table().assign(phase=UPDATE).rename(columns={"optimizer": "part_of"})
    parts = [
        _first(_that_train(said[FORWARD], trained), _that_train(calls, trained), trained),
        _first(said[BACKWARD], engine),
        _first(steps, said[UPDATE].assign(part_of=0)),
    ]
    return pd.concat([part[["start", "end", "phase", "part_of"]] for part in parts], ignore_index=True)


def _first(*choices: pd.DataFrame) -> pd.DataFrame:
    """The first that has rows, if one has."""
    return next((choice for choice in choices if len(choice)), choices[-1])


def _alone(spans: pd.DataFrame, phase: int) -> pd.DataFrame:
    return spans.assign(phase=phase, part_of=np.arange(len(spans)))


def _differentiated(marks: Marks, engine: pd.DataFrame) -> pd.DataFrame:
    """The ops that the engine evaluates later, but for those that it runs itself to recompute."""
    ops = marks.ops.table()
    ops = ops[within(ops["start"], engine["start"], engine["end"]) < 0]
    evaluated = marks.evaluated.table().groupby("sequence", as_index=False)["start"].max()
    ops = ops.merge(evaluated, on="sequence", suffixes=("", "_of_engine"))
    ops = ops[ops["start"] < ops["start_of_engine"]]
    # An op has the number that the next op to be differentiated will have: the last of a number is that op.
    return ops.sort_values("start").drop_duplicates("sequence", keep="last")


def _that_train(forward: pd.DataFrame, trained: pd.DataFrame) -> pd.DataFrame:
    """Without evaluations: the spans in which an op is differentiated later, or all where that is known of none."""
    starts = np.sort(trained["start"])
    trains = np.searchsorted(starts, forward["end"]) > np.searchsorted(starts, forward["start"])
    return forward[trains] if len(trained) else forward


def _steps_are_iterations(found: pd.DataFrame) -> bool:
    """Whether ProfilerStep annotations mark iterations; where most of them have no update they mark micro-steps."""
    inside = found[found["step"] >= 0]
    updated, differentiated = (inside.loc[inside["phase"] == kind, "step"].nunique() for kind in (UPDATE, BACKWARD))
    return len(inside) > 0 and (updated == 0 or 2 * updated > differentiated)


class _Optimizer:
    """What the rule knows an optimizer by."""


def _by_updates(found: pd.DataFrame) -> pd.api.extensions.ExtensionArray:
    """The iteration of each phase by the trace's rule, as far as names tell optimizers apart."""
    rule, optimizers = IterationRule(), {number: _Optimizer() for number in found["optimizer"]}
    backwards = found["phase"].eq(BACKWARD)
    if not backwards.any():
        backwards = found["phase"].eq(UPDATE)
    begun = backwards.cumsum()
    ends: dict[int, int] = {}
    for row in found[found["phase"] == UPDATE].itertuples():
        iteration = rule.stepped([optimizers[row.optimizer]], begun[row.Index])
        if iteration is not None:
            ends[iteration] = row.Index
    return pd.array([*ends, None], dtype="Int64")[np.searchsorted([*ends.values()], found.index)]


def _missing(phase: pd.Series) -> list[str]:
    """What was not marked, and what would."""
    if phase.empty:
        return [
            "nothing in it tells the phases: record the CPU too (ProfilerActivity.CPU), or mark them by "
            'record_function("forward"), ("backward") and ("optimizer")'
        ]
    lines = []
    for name in _NAMES[[kind for kind in (FORWARD, BACKWARD) if not phase.eq(kind).any()]]:
        lines.append(f'nothing in it tells the {name}: if it has one, mark it by record_function("{name}")')
    if not phase.eq(UPDATE).any():
        lines.append('no optimizer of torch steps in it: mark the update by record_function("optimizer")')
    return lines
