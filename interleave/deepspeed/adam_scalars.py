"""The scalars of an update, rounded as DeepSpeed's CPU Adam rounds them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from ebbtide.interleave.engine.numerics.reference import Hyper, Scalars


class CpuAdamScalars:
    """Computes the scalars of DeepSpeed's CPU Adam, so that a job trains as it did with DeepSpeed.

    DeepSpeed's CPU Adam computes its scalars in fp32 (so 1 - beta2 is off by 1.3e-5). It multiplies the powers of its
    betas up step by step, and computes them anew if the step is not the next one. As there, one object serves all
    subgroups of an optimizer.
    """

    def __init__(self) -> None:
        self._step = 0
        self._betas: tuple[np.float32, np.float32] | None = None
        self._powers = (np.float32(1), np.float32(1))

    def scalars(self, hyper: Hyper, step: int, scale: float) -> Scalars:
        """Return the scalars of a step.

        Args:
            hyper: The hyperparameters.
            step: The step, counted from 1.
            scale: Factor for each gradient.
        """
        beta1, beta2 = betas = np.float32(hyper.beta1), np.float32(hyper.beta2)
        if self._betas is None and step == 1:
            self._powers = betas
        elif betas == self._betas and step == self._step + 1:
            self._powers = self._powers[0] * beta1, self._powers[1] * beta2
        elif (betas, step) != (self._betas, self._step):
            self._powers = np.float32(float(beta1) ** step), np.float32(float(beta2) ** step)
        self._betas, self._step = betas, step
        one, lr = np.float32(1), np.float32(hyper.lr)
        power1, power2 = self._powers
        return Scalars(
            scale=np.float32(scale),
            beta1=beta1,
            share1=one - beta1,
            beta2=beta2,
            share2=one - beta2,
            kept=one - lr * np.float32(hyper.weight_decay),
            rate=lr / (one - power1),
            root=np.float32(math.sqrt(one - power2)),
            eps=np.float32(hyper.eps),
        )

    def state_dict(self) -> dict[str, Any]:
        """Return what `load_state_dict` takes to go on with the same bits."""
        betas = None if self._betas is None else list(map(float, self._betas))
        return {"step": self._step, "betas": betas, "powers": list(map(float, self._powers))}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` has returned."""
        self._step = state_dict["step"]
        beta1, beta2 = state_dict["betas"] or (None, None)
        self._betas = None if beta1 is None else (np.float32(beta1), np.float32(beta2))
        power1, power2 = state_dict["powers"]
        self._powers = np.float32(power1), np.float32(power2)
