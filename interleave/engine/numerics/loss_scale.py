"""Scaling of the loss, so that fp16 gradients do not underflow."""

from __future__ import annotations

import math
from typing import Any

from ebbtide.interleave.engine.errors import EngineError

# The same values as in torch.amp.GradScaler.
_INITIAL = 65536.0
_BACKOFF, _GROWTH = 0.5, 2.0
_INTERVAL = 2000


class LossScale:
    """A factor for the loss: fixed, or `dynamic`.

    A dynamic factor shrinks when a gradient is not finite, and grows while all gradients are finite.

    Args:
        scale: A number above 0, "dynamic", or None for a factor of 1.

    Attributes:
        value: The current factor.
        skips_steps: Whether a step with a gradient that is not finite is skipped without an error.

    Raises:
        EngineError: If `scale` is something else.
    """

    def __init__(self, scale: float | str | None) -> None:
        is_number = isinstance(scale, int | float) and not isinstance(scale, bool)
        if scale is not None and scale != "dynamic" and not (is_number and 0 < float(scale) < math.inf):
            raise EngineError(f"loss_scale is {scale!r}: it must be a number above 0, 'dynamic', or None")
        self._dynamic = scale == "dynamic"
        self.skips_steps = scale is not None
        self.value = _INITIAL if scale == "dynamic" else float(scale or 1.0)
        self._good_steps = 0

    def update(self, finite: bool) -> None:
        """Adapt a dynamic factor after a step that was done (`finite`), or skipped since a gradient was not finite."""
        if not self._dynamic:
            return
        self._good_steps = self._good_steps + 1 if finite else 0
        if not finite:
            self.value *= _BACKOFF
        elif self._good_steps == _INTERVAL:
            self.value *= _GROWTH
            self._good_steps = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the current factor and the count of good steps."""
        return {"scale": self.value, "good_steps": self._good_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from the result of `state_dict`. Raises EngineError, and changes nothing, for anything else."""
        try:
            value, good_steps = float(state["scale"]), int(state["good_steps"])
        except (TypeError, ValueError, KeyError):
            raise EngineError("loss_scale of a state dict needs the numbers scale and good_steps") from None
        if self._dynamic:
            self.value, self._good_steps = value, good_steps
