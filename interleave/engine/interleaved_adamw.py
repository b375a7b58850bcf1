"""AdamW as InterleavedOptimizer runs it, with the signature of torch.optim.AdamW."""

from typing import Any, Unpack

import torch

from ebbtide.interleave.engine.optimizer import InterleavedOptimizer
from ebbtide.interleave.engine.options import OptimizerArguments, shows_options


class AdamWArguments(OptimizerArguments, total=False):
    """The keywords of InterleavedAdamW: options of optimizers, and options of
    torch.optim.AdamW."""

    foreach: bool | None
    fused: bool | None
    capturable: bool
    amsgrad: bool
    maximize: bool
    differentiable: bool


class InterleavedAdamW(InterleavedOptimizer):
    """torch.optim.AdamW with an fp32 master: `InterleavedOptimizer` with the rule
    `adamw`.

    `lr`, `betas`, `eps` and `weight_decay` are as for torch.optim.AdamW, and
    OptimizerOptions lists the options. Of torch's other options, `foreach`, `fused` and
    `capturable` have no effect, and `amsgrad`, `maximize` and `differentiable` must be
    off.
    """

    @shows_options(OptimizerArguments, others="torch_options")
    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        **options: Unpack[AdamWArguments],
    ) -> None:
        super().__init__(
            params,
            "adamw",
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            **options,
        )
