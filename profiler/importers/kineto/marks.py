"""Events of a Kineto trace from which phases follow: annotations, calls of modules, and ops with sequence numbers."""

from __future__ import annotations

import re
from collections import defaultdict
from enum import IntEnum
from functools import lru_cache

from ebbtide.profiler.chrome_trace.events import Event, spans
from ebbtide.profiler.chrome_trace.int_table import IntTable


class MarkKind(IntEnum):
    """Meaning of an annotation or op. The first three are the phases, in the order of `ebbtide.phases.PHASES`."""

    FORWARD = 0
    BACKWARD = 1
    UPDATE = 2
    PROFILER_STEP = 3
    OPTIMIZER_STEP = 4
    EVALUATED = 5
    OP = 6


OPS = frozenset({"cpu_op", "Operator", "user_annotation"})
CALLS = "python_function"
_MODULE = "nn.Module: "
_PROFILER_STEP = re.compile(r"ProfilerStep#[0-9]{1,18}")
_PREFIXES = {
    "Optimizer.step#": MarkKind.OPTIMIZER_STEP,
    "autograd::engine::evaluate_function: ": MarkKind.EVALUATED,
    "aten::": MarkKind.OP,
    "Optimizer.zero_grad": MarkKind.OP,
}
# Separators of the words of an annotation: "## forward ##", "DistributedDataParallel.forward". The names
# "FSDP::pre_forward" and "alltoall_bwd_single" are only parts of a phase, so `_` separates no words.
_SEPARATORS = re.compile(r"[\s.:/#|+()\[\]-]+")
_WORDS = {
    MarkKind.FORWARD: re.compile(r"(forward|fwd)(_?(pass|step))?"),
    MarkKind.BACKWARD: re.compile(r"(backward|bwd)(_?(pass|step))?"),
    MarkKind.UPDATE: re.compile(r"(optimizer|optim)(_?(step|update))?"),
}


class Marks:
    """Collects the marks of a trace, each with its span in ns.

    Attributes:
        steps: ProfilerStep annotations.
        words: Annotations whose words name a phase.
        updates: Steps of optimizers, with a number for each name.
        calls: Calls of modules.
        ops: Ops that autograd may differentiate.
        evaluated: Functions that the autograd engine evaluates; the sequence number is that of the op (MISSING for
            the accumulation of gradients).
    """

    def __init__(self) -> None:
        self.steps = IntTable("start", "end", "number")
        self.words = IntTable("start", "end", "phase")
        self.updates = IntTable("start", "end", "optimizer")
        self.calls = IntTable("start", "end")
        self.ops = IntTable("start", "end", "sequence")
        self.evaluated = IntTable("start", "end", "sequence")
        self._optimizers: dict[str, int] = {}

    def add_ops(self, events: list[Event]) -> None:
        """Add the marks among CPU ops and annotations."""
        by_kind: defaultdict[MarkKind, list[Event]] = defaultdict(list)
        for event in events:
            kind = _kind(event.name)
            if kind != MarkKind.OP or event.args.sequence >= 0:
                by_kind[kind].append(event)
        for kind, marks in by_kind.items():
            if kind == MarkKind.PROFILER_STEP:
                self.steps.add(*spans(marks), [int(event.name.partition("#")[2]) for event in marks])
            elif kind == MarkKind.OPTIMIZER_STEP:
                self.updates.add(*spans(marks), [self._optimizer(event.name) for event in marks])
            elif kind == MarkKind.EVALUATED:
                self.evaluated.add(*spans(marks), [event.args.sequence for event in marks])
            elif kind == MarkKind.OP:
                self.ops.add(*spans(marks), [event.args.sequence for event in marks])
            else:
                self.words.add(*spans(marks), [int(kind)] * len(marks))

    def add_calls(self, events: list[Event]) -> None:
        """Add the calls of modules among Python functions, which are recorded with stacks."""
        calls = [event for event in events if event.name.startswith(_MODULE)]
        if calls:
            self.calls.add(*spans(calls))

    def _optimizer(self, name: str) -> int:
        return self._optimizers.setdefault(name, len(self._optimizers))


@lru_cache(maxsize=1 << 14)
def _kind(name: str) -> MarkKind:
    for prefix, kind in _PREFIXES.items():
        if name.startswith(prefix):
            return kind
    if _PROFILER_STEP.fullmatch(name):
        return MarkKind.PROFILER_STEP
    words = _SEPARATORS.split(name.lower())
    matching = [kind for kind, pattern in _WORDS.items() if any(map(pattern.fullmatch, words))]
    return matching[0] if len(matching) == 1 else MarkKind.OP
