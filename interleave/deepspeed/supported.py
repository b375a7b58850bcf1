"""Which DeepSpeed, and which of its configurations and optimizers, this can drive; one line for the rest."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Any

from ebbtide.interleave.engine.checks import check_group
from ebbtide.interleave.engine.errors import EngineError
from ebbtide.interleave.engine.numerics.reference import Hyper

# Tried with these, and with those between them.
FIRST, LAST = (0, 19, 8), (0, 19, 8)


def check_version() -> None:
    """Raise EngineError without DeepSpeed, and for a version that this was not tried with."""
    try:
        found = version("deepspeed")
    except PackageNotFoundError:
        raise EngineError("DeepSpeed is not installed: pip install 'ebbtide[deepspeed]'") from None
    numbers = tuple(int(part) for part in found.split("+")[0].split(".")[:3] if part.isdigit())
    if not FIRST <= numbers <= LAST:
        raise EngineError(
            f"DeepSpeed {found} was not tried with this: it must be {_text(FIRST)}"
            + (f" to {_text(LAST)}" if LAST != FIRST else "")
        )


def check_engine(engine: Any) -> None:
    """Raise EngineError for an engine (a DeepSpeedEngine that is being made) whose configuration cannot be driven."""
    stage = int(engine.zero_optimization_stage())
    if stage != 3:
        raise EngineError(
            f"this drives ZeRO stage 3, and the configuration has stage {stage}: set zero_optimization.stage to 3, or "
            "do not call enable()"
        )
    if _place(engine.zero_offload_param()) is not None or _place(engine.zero_offload_optimizer()) == "nvme":
        raise EngineError(
            "ZeRO-Infinity (offload_param, or offload to nvme) is not driven: offload only the optimizer, to the cpu"
        )
    if _place(engine.zero_offload_optimizer()) is None:
        raise EngineError(
            'the optimizer is not offloaded: set zero_optimization.offload_optimizer to {"device": "cpu"}'
        )
    for what, there in (
        ("SuperOffload (offload_optimizer.super_offload)", engine.super_offload()),
        ("ZenFlow", engine.zenflow),
        ("half-precision masters", engine.fp16_master_weights_and_gradients()),
        ("half-precision masters", engine.bf16_master_weights_and_gradients()),
        ("half-precision moments (bf16_optimizer_states)", engine.bf16_optimizer_states()),
        ("a model with experts (MoE)", engine.has_moe_layers),
        ("DeepCompile", engine.is_deepcompile_enabled()),
        ("torch_autocast with float16", _autocasts_to_half(engine)),
    ):
        if there:
            raise EngineError(f"{what} is not driven: turn it off, or do not call enable()")


def check_optimizer(optimizer: Any) -> None:
    """Raise EngineError for an optimizer that is no AdamW as ours is."""
    name = type(optimizer).__name__
    if name not in ("DeepSpeedCPUAdam", "AdamW"):
        raise EngineError(
            f"the optimizer is {name}: this drives DeepSpeedCPUAdam (type AdamW or Adam) and torch's AdamW"
        )
    if not getattr(optimizer, "fp32_optimizer_states", True):
        raise EngineError("fp32_optimizer_states is off: moments of half precision are not driven")
    for group in optimizer.param_groups:
        hyper_of(optimizer, group)


def hyper_of(optimizer: Any, group: dict[str, Any]) -> Hyper:
    """Hyperparameters of a group. Raises EngineError for those that ours does not have."""
    check_group(group)
    if not group.get("bias_correction", True):
        raise EngineError("bias_correction is off: this always corrects")
    decay = float(group["weight_decay"])
    if decay and not getattr(optimizer, "adam_w_mode", True):
        raise EngineError(
            "Adam with weight_decay (L2) is not driven: set adam_w_mode to true (decoupled), or weight_decay to 0"
        )
    beta1, beta2 = group["betas"]
    return Hyper(float(group["lr"]), float(beta1), float(beta2), float(group["eps"]), decay)


def _place(offload: Any) -> str | None:
    """Where something is offloaded to; None: nowhere."""
    device = getattr(offload, "device", None)
    name = getattr(device, "value", device)
    return None if name in (None, "none") else str(name)


def _autocasts_to_half(engine: Any) -> bool:
    import torch

    return bool(engine.torch_autocast_enabled() and engine.torch_autocast_dtype() == torch.float16)


def _text(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))
