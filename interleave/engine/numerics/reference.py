"""The definition of an update with an fp32 master.

Every kernel on every device gives these bits.

All arithmetic is IEEE binary32: each operation rounds once, to nearest with ties to
even; quotient and root are correctly rounded too, no multiply-add is fused, subnormals
are kept. The gradient, converted to fp32, which is exact, is multiplied by its factor.
Then the formula of a rule (`rules`) gives the new master p' and the new moments,
products before sums and from left to right, and

    out = p' in the parameter's precision     to nearest, ties to even; infinite beyond its range

Moments in bfloat16 are converted to fp32 before the formula, which is exact, and
rounded after it (`rounding`), like those in 8 bits (see ScaledMoments).

The kernels of torch fuse some operations, and their vectorized root is not always
rounded correctly. Multiplying by a scale of 1 changes no bit, so it is never skipped. A
NaN result is stored as the one quiet NaN without sign and payload, since processors
differ in the NaN that they produce.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ebbtide.interleave.engine.errors import EngineError
from ebbtide.interleave.engine.numerics.norm import sum_of_squares
from ebbtide.interleave.engine.numerics.rounding import random_bits
from ebbtide.interleave.engine.numerics.whole_update import update_whole
from ebbtide.interleave.engine.rules.adamw import ADAMW
from ebbtide.interleave.engine.rules.rule import GroupRules, Scalars, UpdateRule

Floats = npt.NDArray[np.float32]
Halves = npt.NDArray[np.uint16]

NAN = 0x7FC00000
BFLOAT16_NAN = 0x7FC0
FLOAT16_NAN = 0x7E00
# The same values as in torch.amp.GradScaler.
_INITIAL = 65536.0
_BACKOFF, _GROWTH = 0.5, 2.0
_INTERVAL = 2000


@dataclass(frozen=True)
class TensorUpdate:
    """Tensors of an update: contiguous, on one device, with one dimension and the same
    length.

    Gradient and parameter (`out`) are bfloat16, float16 or float32. The state is master
    and moments as the rule has them; a master may be in two parts, one of them `out`
    (see SplitMaster), or `out` itself. `position` is the first element's position (see
    rounding.py), `shape` the shape of a whole matrix.
    """

    grad: torch.Tensor
    state: Sequence[torch.Tensor]
    out: torch.Tensor
    scalars: Scalars
    rule: UpdateRule = ADAMW
    position: int = 0
    shape: tuple[int, int] | None = None

    @property
    def written(self) -> torch.Tensor | None:
        """The parameter to write; None where it is the master."""
        return None if self.state[0] is self.out else self.out


def update(
    grad: torch.Tensor,
    state: Sequence[torch.Tensor],
    out: torch.Tensor | None,
    scalars: Scalars,
    rule: UpdateRule = ADAMW,
    position: int = 0,
    shape: tuple[int, int] | None = None,
) -> None:
    """Update the state in place and write the parameter `out`, unless it is None.

    The state is master and moments.

    All are CPU tensors of one shape; `grad` and `out` are bfloat16, float16 or float32.
    The first element is at `position` (see rounding.py). With a shape they are a whole
    matrix, flat, which the rule updates as one."""
    if rule.split is not None:
        _update_split(grad, state, out, scalars, rule, position)
        return
    if shape is not None:
        assert rule.whole_update is not None
        own = rule.whole_update
        transform = partial(
            own.transform, multiply=own.multiply, sum_of_squares=sum_of_squares
        )
        update_whole(grad, state, out, scalars, rule, shape, update, transform)
        return
    scale, *factors = scalars
    grad = grad.detach()
    noise = None
    if rule.rounds and (seed := factors.pop()):
        noise = random_bits(seed, position, grad.numel()).reshape(grad.shape)
    # NaN and overflow are ordinary results here.
    with np.errstate(all="ignore"):
        old = [row.detach().float().numpy() for row in state[: 1 + len(rule.moments)]]
        scales = state[len(old) :]
        if rule.scaled is not None:
            for number, row in enumerate(scales):
                old[1 + number] = rule.scaled.widen(
                    state[1 + number].numpy(), row.numpy(), number
                )
        results = rule.formula(grad.float().numpy() * scale, *old, *factors)
    master, *moments = map(canonical_nan, results)
    for row in (state[0],) if out is None else (state[0], out):
        _store(row.detach(), master)
    for number, (row, moment) in enumerate(zip(state[1:], moments, strict=False)):
        if rule.scaled is not None:
            row.numpy()[...], scales[number].numpy()[...] = rule.scaled.quantize(
                moment, number
            )
        elif rule.rounds:
            own_noise = (
                None
                if noise is None
                else noise >> np.uint32(16 * number) & np.uint32(0xFFFF)
            )
            row.view(torch.uint16).numpy()[...] = bfloat16_bits(moment, own_noise)
        else:
            row.detach().numpy()[...] = moment


def _update_split(
    grad: torch.Tensor,
    state: Sequence[torch.Tensor],
    out: torch.Tensor | None,
    scalars: Scalars,
    rule: UpdateRule,
    position: int,
) -> None:
    """Update state whose masters are the parameter and a remainder."""
    assert out is not None
    assert rule.split is not None
    master = rule.split.join(out, state[0])
    update(grad, (master, *state[1:]), None, scalars, rule.with_masters, position)
    for part, value in zip((out, state[0]), rule.split.split(master), strict=True):
        part.detach().copy_(value)


def _store(row: torch.Tensor, values: Floats) -> None:
    """Write values in the precision of a row."""
    if row.dtype == torch.float32:
        row.numpy()[...] = values
    else:
        bits = (
            bfloat16_bits(values)
            if row.dtype == torch.bfloat16
            else float16_bits(values)
        )
        row.view(torch.uint16).numpy()[...] = bits


def canonical_nan(values: Floats) -> Floats:
    """Return the values with every NaN replaced by the one quiet NaN."""
    return np.where(np.isnan(values), np.uint32(NAN).view(np.float32), values)


def bfloat16_bits(
    values: Floats, noise: npt.NDArray[np.uint32] | None = None
) -> Halves:
    """Return the bits of the values rounded to bfloat16, to nearest with ties to even,
    or up by these random 16 bits.

    The addition before the shift carries into the exponent, up to infinity. NaN is
    excluded, since 0x7fffffff would become -0.
    """
    bits = values.view(np.uint32)
    if noise is None:
        noise = np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    rounded = (bits + noise) >> np.uint32(16)
    return np.where(
        np.isnan(values), np.uint16(BFLOAT16_NAN), rounded.astype(np.uint16)
    )


def float16_bits(values: Floats) -> Halves:
    """Return the bits of the values rounded to float16, to nearest with ties to even;
    infinite from 65,520 on."""
    with np.errstate(all="ignore"):
        rounded: Any = values.astype(np.float16).view(np.uint16)
    return np.where(np.isnan(values), np.uint16(FLOAT16_NAN), rounded)


class LossScale:
    """A factor for the loss: a number above 0, `dynamic`, or None for 1. Raises
    EngineError for anything else.

    A dynamic factor shrinks when a gradient is not finite, and grows while all
    gradients are finite."""

    def __init__(self, scale: float | str | None) -> None:
        is_number = isinstance(scale, int | float) and not isinstance(scale, bool)
        if (
            scale is not None
            and scale != "dynamic"
            and not (is_number and 0 < float(scale) < math.inf)
        ):
            raise EngineError(
                f"loss_scale is {scale!r}: it must be a number above 0, 'dynamic', or "
                "None"
            )
        self._dynamic = scale == "dynamic"
        # Whether a step with a gradient that is not finite is skipped without an error.
        self.skips_steps = scale is not None
        self.value = _INITIAL if scale == "dynamic" else float(scale or 1.0)
        self._good_steps = 0

    def update(self, finite: bool) -> None:
        """Adapt a dynamic factor after a step that was done, or skipped.

        `finite`: it was done; it is skipped since a gradient was not finite.
        """
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
        """Continue from the result of `state_dict`. Raises EngineError as `check`."""
        self.check(state)
        if self._dynamic:
            self.value, self._good_steps = (
                float(state["scale"]),
                int(state["good_steps"]),
            )

    @staticmethod
    def check(state: Any) -> None:
        """Raise EngineError for what is no result of `state_dict`."""
        try:
            is_valid = (
                0 < float(state["scale"]) < math.inf and int(state["good_steps"]) >= 0
            )
        except (TypeError, ValueError, KeyError):
            is_valid = False
        if not is_valid:
            raise EngineError(
                "loss_scale of a state dict needs the numbers scale, above 0, and "
                "good_steps"
            )


def scalars_of(
    rules: GroupRules,
    params: Sequence[torch.Tensor],
    param_groups: Sequence[Mapping[str, Any]],
    step_count: Callable[[torch.Tensor], int],
    updated: Collection[int],
    scale: float,
) -> list[Scalars | None]:
    """Return the factors of the next update of each parameter.

    Return None for those that are not `updated` (indices), or in no group. `step_count`
    returns how often a parameter was updated before; `scale` is the factor of all
    gradients.
    """
    groups = {param: group for group in param_groups for param in group["params"]}
    # The same object for all parameters of a group with as many updates.
    scalars: dict[tuple[int, int], Scalars] = {}
    result: list[Scalars | None] = []
    for index, param in enumerate(params):
        if index not in updated or param not in groups:
            result.append(None)
            continue
        group, step = groups[param], step_count(param) + 1
        if (id(group), step) not in scalars:
            scalars[id(group), step] = rules.rule_of(group).scalars(group, step, scale)
        result.append(scalars[id(group), step])
    return result
