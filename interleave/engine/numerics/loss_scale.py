"""Scaling of the loss, so that fp16 gradients do not vanish."""

from __future__ import annotations

import math
from typing import Any

from ebbtide.interleave.engine.errors import EngineError

# As torch.amp.GradScaler begins and goes on.
_INITIAL = 65536.0
_BACKOFF, _GROWTH = 0.5, 2.0
_INTERVAL = 2000


class LossScale:
    """A fixed factor, or one that falls when a gradient is not finite and grows while all are (`dynamic`)."""

    def __init__(self, asked: float | str | None) -> None:
        number = isinstance(asked, int | float) and not isinstance(asked, bool)
        if asked is not None and asked != "dynamic" and not (number and 0 < float(asked) < math.inf):
            raise EngineError(f"loss_scale is {asked!r}: it must be a number above 0, 'dynamic', or None")
        self._dynamic = asked == "dynamic"
        self.skips = asked is not None
        self.value = _INITIAL if asked == "dynamic" else float(asked or 1.0)
        self._good = 0

    def stepped(self, finite: bool) -> None:
        """A step was done, or left out because a gradient was not finite."""
        if not self._dynamic:
            return
        self._good = self._good + 1 if finite else 0
        if not finite:
            self.value *= _BACKOFF
        elif self._good == _INTERVAL:
            self.value *= _GROWTH
            self._good = 0

    def state(self) -> dict[str, Any]:
        return {"scale": self.value, "good_steps": self._good}

    def load(self, state: dict[str, Any]) -> None:
        """Go on from what `state` gave. Raises EngineError, and changes nothing, for anything else."""
        try:
            value, good = float(state["scale"]), int(state["good_steps"])
        except (TypeError, ValueError, KeyError):
            raise EngineError("loss_scale of a state dict has no scale and good_steps that are numbers") from None
        if self._dynamic:
            self.value, self._good = value, good
