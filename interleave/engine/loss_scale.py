"""Scaling of the loss, so that fp16 gradients do not vanish."""

from __future__ import annotations

from typing import Any

from ebbtide.interleave.engine.errors import EngineError

# As torch.amp.GradScaler begins and goes on.
_INITIAL = 65536.0
_BACKOFF, _GROWTH = 0.5, 2.0
_INTERVAL = 2000


class LossScale:
    """A fixed factor, or one that falls when a gradient is not finite and grows while all are (`dynamic`)."""

    def __init__(self, asked: float | str | None) -> None:
        if asked is not None and asked != "dynamic" and not (isinstance(asked, int | float) and asked > 0):
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
        if self._dynamic:
            self.value, self._good = float(state["scale"]), int(state["good_steps"])
