"""How gradients come to the engine: all at the step, or each as soon as a backward has made it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ebbtide.interleave.engine.checks import flat_gradient
from ebbtide.interleave.engine.engine import Engine
from ebbtide.interleave.engine.gradients import Gradients
from ebbtide.interleave.engine.portable import like, local
from ebbtide.interleave.engine.progress import Progress
from ebbtide.interleave.engine.streamed import Streamed

# Stands among guards for: a backward has added to a gradient that was taken.
_ADDED = torch.zeros(0)


class Intake:
    """The gradients of these parameters. streams: each leaves when it is made for the last time in a step, and
    something that only has its shape stands in `p.grad`. Somebody may set that to None, or run one more backward: then
    the gradient is taken back, without or with what was added, and leaves with the step."""

    def __init__(self, params: Sequence[torch.Tensor], engine: Engine, gradients: Gradients, streams: bool) -> None:
        self._params = params
        self._engine = engine
        self._gradients = gradients
        self._streams = streams
        # What stands in p.grad for gradients that were taken, by the parameter's index.
        self._guards: dict[int, torch.Tensor] = {}
        self._progress = Progress(params, self._made, self._adds)

    def collect(self) -> dict[int, torch.Tensor]:
        """The gradients that have not been taken, flat, by the parameter's index; all are noted for their norm."""
        engine = self._engine
        as_they_were = all(self._params[index].grad is self._guards.get(index) for index in engine.taken)
        if not (engine.under_way and as_they_were):
            self.give_back()
        found = {}
        for index, param in enumerate(self._params):
            if param.grad is not None and index not in engine.taken:
                found[index] = flat_gradient(param)
                self._gradients.note(index, found[index])
        return found

    def give_back(self) -> None:
        """Gradients that were taken are in `p.grad` again, with what was added to them since; nothing is under way."""
        taken = self._engine.taken
        for index, gradient in self._engine.give_back([local(param).detach() for param in self._params]).items():
            param, guard = self._params[index], self._guards.get(index)
            if guard is _ADDED and param.grad is not None:
                gradient += flat_gradient(param)
            elif guard is None or param.grad is not guard:
                continue
            param.grad = like(param, gradient.view(local(param).shape))
        for index in taken:
            self._guards.pop(index, None)
        self._gradients.forget()

    def stepped(self) -> None:
        """The step is over, or left out."""
        self._guards.clear()
        self._progress.stepped()

    def close(self) -> None:
        """Look at no backward any more."""
        self._progress.remove()

    def _made(self, index: int, share: float) -> None:
        """The backward has made a gradient for the last time in this step (see Progress)."""
        engine, param = self._engine, self._params[index]
        if self._streams and engine.under_way and index not in engine.taken:
            gradient = flat_gradient(param)
            self._gradients.note(index, gradient)
            engine.take(index, gradient)
            self._guards[index] = param.grad = Streamed.of(param)
        engine.reach(share)

    def _adds(self, index: int) -> None:
        """A backward is about to add to `p.grad`: not to what only stands for a gradient."""
        param = self._params[index]
        if index in self._guards and param.grad is self._guards[index]:
            param.grad = None
            self._guards[index] = _ADDED
        elif param.grad is None:
            # Somebody has set it to None since the gradient was taken: then it does not count.
            self._guards.pop(index, None)
