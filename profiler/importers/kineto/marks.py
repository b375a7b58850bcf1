"""What in a Kineto trace tells of phases: annotations, calls of modules, and ops with sequence numbers."""

from __future__ import annotations

import re
from collections import defaultdict
from functools import lru_cache

from ebbtide.profiler.chrome_trace.events import Event, spans
from ebbtide.profiler.chrome_trace.int_table import Rows

FORWARD, BACKWARD, UPDATE = range(3)
_STEP, _OPTIMIZER_STEP, _EVALUATED, _OP = range(3, 7)

OPS = frozenset({"cpu_op", "Operator", "user_annotation"})
CALLS = "python_function"
_MODULE = "nn.Module: "
_PROFILER_STEP = re.compile(r"ProfilerStep#[0-9]{1,18}")
_PREFIXES = {
    "Optimizer.step#": _OPTIMIZER_STEP,
    "autograd::engine::evaluate_function: ": _EVALUATED,
    "aten::": _OP,
    "Optimizer.zero_grad": _OP,
}
# Words of an annotation stand between these: "## forward ##", "DistributedDataParallel.forward"; not so in
# "FSDP::pre_forward" and "alltoall_bwd_single", which are but parts.
_BETWEEN = re.compile(r"[\s.:/#|+()\[\]-]+")
_WORDS = {
    FORWARD: re.compile(r"(forward|fwd)(_?(pass|step))?"),
    BACKWARD: re.compile(r"(backward|bwd)(_?(pass|step))?"),
    UPDATE: re.compile(r"(optimizer|optim)(_?(step|update))?"),
}


class Marks:
    """Collects them, each with its span in ns.

    steps: ProfilerStep annotations. words: annotations that say FORWARD, BACKWARD or UPDATE. updates: steps of
    optimizers, with a number for each name. calls: of modules. ops: those that autograd may differentiate. evaluated:
    what its engine evaluates; the sequence number is that of the op (MISSING where gradients are accumulated).
    """

    def __init__(self) -> None:
        self.steps = Rows("start", "end", "number")
        self.words = Rows("start", "end", "phase")
        self.updates = Rows("start", "end", "optimizer")
        self.calls = Rows("start", "end")
        self.ops = Rows("start", "end", "sequence")
        self.evaluated = Rows("start", "end", "sequence")
        self._optimizers: dict[str, int] = {}

    def add_ops(self, events: list[Event]) -> None:
        """Of ops on the CPU, and of annotations."""
        kinds: defaultdict[int, list[Event]] = defaultdict(list)
        for event in events:
            kind = _kind(event.name)
            if kind != _OP or event.args.sequence >= 0:
                kinds[kind].append(event)
        for kind, found in kinds.items():
            if kind == _STEP:
                self.steps.add(*spans(found), [int(event.name.partition("#")[2]) for event in found])
            elif kind == _OPTIMIZER_STEP:
                self.updates.add(*spans(found), [self._optimizer(event.name) for event in found])
            elif kind == _EVALUATED:
                self.evaluated.add(*spans(found), [event.args.sequence for event in found])
            elif kind == _OP:
                self.ops.add(*spans(found), [event.args.sequence for event in found])
            else:
                self.words.add(*spans(found), [kind] * len(found))

    def add_calls(self, events: list[Event]) -> None:
        """Of Python functions, which are recorded with stacks."""
        calls = [event for event in events if event.name.startswith(_MODULE)]
        if calls:
            self.calls.add(*spans(calls))

    def _optimizer(self, name: str) -> int:
        return self._optimizers.setdefault(name, len(self._optimizers))


@lru_cache(maxsize=1 << 14)
def _kind(name: str) -> int:
    for prefix, kind in _PREFIXES.items():
        if name.startswith(prefix):
            return kind
    if _PROFILER_STEP.fullmatch(name):
        return _STEP
    words = _BETWEEN.split(name.lower())
    said = [kind for kind, pattern in _WORDS.items() if any(map(pattern.fullmatch, words))]
    return said[0] if len(said) == 1 else _OP
