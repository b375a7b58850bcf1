"""AdamW as InterleavedOptimizer runs it, with the signature of torch.optim.AdamW."""

from typing import Any

import torch

from ebbtide.interleave.engine.optimizer import InterleavedOptimizer


class InterleavedAdamW(InterleavedOptimizer):
    """torch.optim.AdamW with an fp32 master: `InterleavedOptimizer` with the rule `adamw`.

    Args:
        params: Parameters or parameter groups, as for torch.optim.AdamW.
        lr: As for torch.optim.AdamW, like `betas`, `eps` and `weight_decay`.
        options: The options of InterleavedOptimizer but `rule`.

    Raises:
        As InterleavedOptimizer.
    """

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        **options: Any,
    ) -> None:
        super().__init__(params, "adamw", lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, **options)
