"""How gradients come to the engine: all at the step, or each as soon as a backward has made it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ebbtide.interleave.engine.backward_progress import Progress
from ebbtide.interleave.engine.checks import flat_gradient
from ebbtide.interleave.engine.gradient_placeholder import added, spend, stand_in
from ebbtide.interleave.engine.gradients import Gradients
from ebbtide.interleave.engine.runtime.engine import Engine
from ebbtide.interleave.engine.state_dict import like, local


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
        self._progress = Progress(params, self._made)

    def collect(self) -> dict[int, torch.Tensor]:
        """The gradients that have not been taken, flat, by the parameter's index."""
        engine = self._engine
        if not (engine.under_way and all(map(self._as_it_was, engine.taken))):
            self.give_back()
        return {
            index: flat_gradient(param)
            for index, param in enumerate(self._params)
            if param.grad is not None and index not in engine.taken
        }

    def give_back(self) -> None:
        """Gradients that were taken are in `p.grad` again, with what was added to them since; nothing is under way."""
        for index, gradient in self._engine.give_back([local(param).detach() for param in self._params]).items():
            param, guard = self._params[index], self._guards[index]
            if param.grad is guard:
                for more in added(guard):
                    gradient += local(more).reshape(-1)
                param.grad = like(param, gradient.view(local(param).shape))
        self._guards.clear()
        self._gradients.forget()

    def stepped(self) -> None:
        """The step is over, or left out."""
        for guard in self._guards.values():
            spend(guard)
        self._guards.clear()
        self._progress.stepped()

    def close(self) -> None:
        """Look at no backward any more."""
        self._progress.remove()

    def _as_it_was(self, index: int) -> bool:
        """A gradient that was taken: nobody has set it to None, or added to it."""
        guard = self._guards[index]
        return self._params[index].grad is guard and not added(guard)

    def _made(self, index: int, share: float) -> None:
        """The backward has made a gradient for the last time in this step (see Progress)."""
        engine, param = self._engine, self._params[index]
        if self._streams and engine.under_way and index not in engine.taken:
            gradient = flat_gradient(param)
            self._gradients.note(index, gradient)
            engine.take(index, gradient)
            self._guards[index] = param.grad = stand_in(param)
        engine.reach(share)
