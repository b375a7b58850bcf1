"""Checks of DeepSpeed's version, configuration and optimizer, with one-line errors."""

from importlib.metadata import PackageNotFoundError, version
from typing import Any

from ebbtide.interleave.engine.errors import EngineError
from ebbtide.interleave.engine.rules import UpdateRule, find_rule
from ebbtide.interleave.policies import Policy

_TESTED = "0.19.8"
# By the class of the optimizer.
_RULES = {
    "DeepSpeedCPUAdam": "adamw",
    "AdamW": "adamw",
    "Adam": "adam",
    "DeepSpeedCPULion": "lion",
}
# Muon has another optimizer for groups that are not of matrices.
_RULES["MuonWithAuxAdam"] = "adamw"


def check_version() -> None:
    """Check the version. Raises EngineError without DeepSpeed, and for a version that
    is not tested."""
    try:
        installed = version("deepspeed")
    except PackageNotFoundError:
        raise EngineError(
            "DeepSpeed is not installed: pip install 'ebbtide[deepspeed]'"
        ) from None
    if installed.split("+")[0] != _TESTED:
        raise EngineError(
            f"DeepSpeed {installed} is not tested with ebbtide: install {_TESTED}"
        )


def check_policy(policy: Policy) -> None:
    """Raise EngineError for a policy with updates inside the backward."""
    if policy.speculates:
        raise EngineError(
            f"policy {policy}: updates inside the backward are not supported with "
            "DeepSpeed: choose overlap=none or "
            "overlap=forward"
        )


def check_engine(engine: Any) -> None:
    """Check the configuration of a DeepSpeedEngine that is being initialized. Raises
    EngineError."""
    stage = int(engine.zero_optimization_stage())
    if stage != 3:
        raise EngineError(
            f"ebbtide supports ZeRO stage 3, but the configuration has stage {stage}: "
            "set zero_optimization.stage to 3 "
            "or do not call enable()"
        )
    optimizer_target = _offload_target(engine.zero_offload_optimizer())
    if (
        _offload_target(engine.zero_offload_param()) is not None
        or optimizer_target == "nvme"
    ):
        raise EngineError(
            "ZeRO-Infinity (offload_param, or offload to nvme) is not supported: "
            "offload only the optimizer, to the cpu"
        )
    if optimizer_target is None:
        raise EngineError(
            "the optimizer is not offloaded: set zero_optimization.offload_optimizer "
            'to {"device": "cpu"}'
        )
    for feature, is_enabled in (
        ("SuperOffload (offload_optimizer.super_offload)", engine.super_offload()),
        ("ZenFlow", engine.zenflow),
        ("half-precision masters", engine.fp16_master_weights_and_gradients()),
        ("half-precision masters", engine.bf16_master_weights_and_gradients()),
        (
            "half-precision moments (bf16_optimizer_states)",
            engine.bf16_optimizer_states(),
        ),
        ("a model with experts (MoE)", engine.has_moe_layers),
        ("DeepCompile", engine.is_deepcompile_enabled()),
        ("torch_autocast with float16", _autocasts_to_half(engine)),
    ):
        if is_enabled:
            raise EngineError(
                f"{feature} is not supported: turn it off, or do not call enable()"
            )


def rules_of(optimizer: Any) -> list[UpdateRule]:
    """Return the rule of each parameter group of the optimizer that DeepSpeed would
    use.

    Raises EngineError if there is none, and for options that are not supported."""
    name = type(optimizer).__name__
    if name not in _RULES:
        raise EngineError(
            f"the optimizer is {name}: use DeepSpeedCPUAdam (type AdamW or Adam), "
            "DeepSpeedCPULion (type Lion), Muon, "
            "or torch's AdamW or Adam; for others use InterleavedOptimizer without "
            "DeepSpeed"
        )
    if not getattr(
        getattr(optimizer, "aux_optimizer", optimizer), "fp32_optimizer_states", True
    ):
        raise EngineError(
            "fp32_optimizer_states is off: moments of half precision are not supported"
        )
    # Of DeepSpeed's CPU Adam; without it the decay is a part of the gradient.
    rule = find_rule(
        _RULES[name] if getattr(optimizer, "adam_w_mode", True) else "adam"
    )
    rules = [
        find_rule("muon") if group.get("use_muon") else rule
        for group in optimizer.param_groups
    ]
    for own, group in zip(rules, optimizer.param_groups, strict=True):
        check_group(own, group)
        for param in group["params"] if own.whole_update is not None else ():
            shape = tuple(getattr(param, "ds_shape", param.shape))
            if len(shape) != 2 or getattr(param, "muon_num_heads", None):
                raise EngineError(
                    f"Muon for a parameter of shape {shape}, or by heads "
                    "(per_head_muon), is not "
                    "supported: set its use_muon to False"
                )
    return rules


def check_group(rule: UpdateRule, group: dict[str, Any]) -> None:
    """Check the hyperparameters of a group. Raises EngineError for those that are not
    supported."""
    rule.check_group({**rule.defaults, **group})
    if not group.get("bias_correction", True):
        raise EngineError("bias_correction is off, which is not supported: turn it on")


def _offload_target(offload: Any) -> str | None:
    """Return the device that something is offloaded to; None if it is not offloaded."""
    device = getattr(offload, "device", None)
    name = getattr(device, "value", device)
    return None if name in (None, "none") else str(name)


def _autocasts_to_half(engine: Any) -> bool:
    import torch

    return bool(
        engine.torch_autocast_enabled()
        and engine.torch_autocast_dtype() == torch.float16
    )
