"""AdamW as InterleavedOptimizer runs it, with the signature of torch.optim.AdamW."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from ebbtide.interleave.engine.devices.opening import DeviceArgument
from ebbtide.interleave.engine.optimizer import InterleavedOptimizer
from ebbtide.interleave.engine.options import BudgetArgument, EngineOptions, MachineArgument


class InterleavedAdamW(InterleavedOptimizer):
    """torch.optim.AdamW with an fp32 master: `InterleavedOptimizer` with the rule `adamw`.

    Arguments are those of InterleavedOptimizer, and `lr`, `betas`, `eps` and `weight_decay` as for torch.optim.AdamW.
    Of its others (`torch_options`), `foreach`, `fused` and `capturable` have no effect, and `amsgrad`, `maximize` and
    `differentiable` must be off.
    """

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        *,
        policy: str = "adaptive",
        machine: MachineArgument | None = None,
        subgroup_params: int = EngineOptions.subgroup_params,
        memory_budget: BudgetArgument | None = None,
        max_grad_norm: float | None = None,
        gradients: Literal["kept", "streamed"] = "kept",
        loss_scale: float | Literal["dynamic"] | None = None,
        device: DeviceArgument | None = None,
        threads: int | None = None,
        overlap: Literal["none", "forward", "backward", "both", "auto"] = "none",
        model: torch.nn.Module | None = None,
        storage: str | Path | Sequence[str | Path] | None = None,
        host_memory_budget: float | str | None = None,
        master: Literal["fp32", "remainder"] = "fp32",
        **torch_options: bool | None,
    ) -> None:
        super().__init__(
            params,
            "adamw",
            policy=policy,
            machine=machine,
            subgroup_params=subgroup_params,
            memory_budget=memory_budget,
            max_grad_norm=max_grad_norm,
            gradients=gradients,
            loss_scale=loss_scale,
            device=device,
            threads=threads,
            overlap=overlap,
            model=model,
            storage=storage,
            host_memory_budget=host_memory_budget,
            master=master,
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            **torch_options,
        )
