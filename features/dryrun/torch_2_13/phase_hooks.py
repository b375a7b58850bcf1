"""Hooks in torch that report phases of the job, by the rules of the recorder."""

import functools
from typing import Any

import torch
from torch.nn.modules import module as torch_modules
from torch.optim import optimizer as torch_optimizers

from ebbtide.features.dryrun.time.phase_tracker import PhaseTracker
from ebbtide.profiler.agent.patches import Patches, wrapper
from ebbtide.profiler.agent.phase_hooks import (
    OutermostCall,
    hook_megatron,
    megatron_inner_optimizer,
    wrap_backward,
)
from ebbtide.profiler.agent.threads import TrainingThreads


def hook_phases(phases: PhaseTracker, patches: Patches) -> None:
    """Hook torch until `patches.undo()`."""
    phases.threads = TrainingThreads(torch)
    recorder: Any = phases
    is_compiling = torch.compiler.is_compiling
    call = OutermostCall(recorder, torch)
    patches.set(torch.nn.Module, "_compiled_call_impl", call)
    for owner in (torch.autograd, torch.autograd.graph):
        original = torch.autograd.graph._engine_run_backward
        backward = wrap_backward(recorder, is_compiling, original)
        patches.set(owner, "_engine_run_backward", backward)
    wrap_step: Any = functools.partial(phases.wrap_update, megatron_inner_optimizer)
    hook_megatron(recorder, is_compiling, patches, wrap_step)
    scaler_step = phases.wrap_update(
        lambda _scaler, optimizer, *_: optimizer, torch.amp.GradScaler.step
    )
    patches.set(torch.amp.GradScaler, "step", scaler_step)

    @wrapper
    def note_optimizer(original: Any, optimizer: Any) -> None:
        phases.end.made.add(optimizer)
        original(optimizer)

    patches.wrap(torch_optimizers.Optimizer, "_patch_step_function", note_optimizer)
    for handle in (
        torch_optimizers.register_optimizer_step_pre_hook(phases.before_step),
        torch_optimizers.register_optimizer_step_post_hook(phases.after_step),
        torch_modules.register_module_forward_pre_hook(phases.enter_module),
        torch_modules.register_module_forward_hook(
            phases.leave_module, always_call=True
        ),
    ):
        patches.on_undo(handle.remove)
