"""Detects PyTorch's phases: calls of the outermost module, autograd's backward engine,
and optimizer steps.

Nothing is registered on a module: a global module hook breaks or slows compiled code,
and a module's own hooks travel into its pickles and copies. `TorchHooks.remove` undoes
everything.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Mapping
from typing import Any, Callable
from weakref import WeakKeyDictionary

from .closures import UpdateParts
from .frames import code_with_hook, hidden, hide_frame
from .iteration_rule import BACKWARD, FORWARD, UPDATE
from .job_info import batch_of
from .patches import Patches, wrapper
from .recorder import Recorder

_CALL_ATTRIBUTE = "_compiled_call_impl"


class OutermostCall:
    """Records calls of the outermost module, as a descriptor.

    It replaces the class attribute `torch.nn.Module._compiled_call_impl`, which
    `Module.__call__` reads and, if it is not None, calls instead of the module's own
    call (`Module.compile()` works so). Inside a phase it returns what the module itself
    has there (0.1 us); outside of one a call that is recorded as a forward, or as one
    without gradients. Dynamo inlines modules without reading it, and torch keeps it out
    of pickles.
    """

    def __init__(self, recorder: Recorder, torch: Any) -> None:
        self._recorder = recorder
        self._tensor = torch.Tensor
        self._grad_enabled = torch.is_grad_enabled
        self._compiling = torch.compiler.is_compiling

    def __get__(self, module: Any, owner: Any = None) -> Any:
        if module is None:
            return None
        compiled = module.__dict__.get(_CALL_ATTRIBUTE)
        recorder = self._recorder
        if recorder.in_phase:
            if recorder.phase == BACKWARD:
                recorder.recomputes = True
            return compiled
        if not recorder.live or self._compiling():
            return compiled
        if self._grad_enabled():
            return functools.partial(self._forward, module, compiled)
        if recorder.without_gradients.active:
            return compiled
        return functools.partial(self._forward_without_gradients, module, compiled)

    def __set__(self, module: Any, value: Any) -> None:
        module.__dict__[_CALL_ATTRIBUTE] = value

    def __delete__(self, module: Any) -> None:
        module.__dict__.pop(_CALL_ATTRIBUTE, None)

    @hidden
    def _forward(self, module: Any, compiled: Any, /, *args: Any, **kwargs: Any) -> Any:
        recorder = self._recorder
        call = compiled or module._call_impl
        if recorder.threads.is_bystander:
            return self._forward_of_bystander(module, call, *args, **kwargs)
        if not recorder.enter(FORWARD):
            return call(*args, **kwargs)
        trains = True
        recorder.called = module
        try:
            result = call(*args, **kwargs)
            trains = (
                result.requires_grad
                if isinstance(result, self._tensor)
                else self._trains(result, module)
            )
            if trains:
                recorder.source = recorder.modules.get(module) or self._add(
                    module, (args, kwargs)
                )
            return result
        finally:
            recorder.leave(keep=trains)

    @hidden
    def _forward_without_gradients(
        self, module: Any, compiled: Any, /, *args: Any, **kwargs: Any
    ) -> Any:
        call = compiled or module._call_impl
        recorded = self._recorder.without_gradients
        if not recorded.begin():
            return call(*args, **kwargs)
        try:
            return call(*args, **kwargs)
        finally:
            recorded.end()

    @hide_frame
    def _forward_of_bystander(
        self, module: Any, call: Any, /, *args: Any, **kwargs: Any
    ) -> Any:
        """Call a module in a thread that has had no phase, where other threads train.
        It may load data, and must not hide the phases of the others: this becomes a
        phase once it is known to train."""
        recorder = self._recorder
        if recorder.threads.in_forward:
            return call(*args, **kwargs)
        start_ns, start_mark = time.monotonic_ns(), recorder.mark_time()
        with recorder.threads.forward():
            result = call(*args, **kwargs)
        if self._trains(result, module):
            recorder.add_forward(
                recorder.modules.get(module) or self._add(module, (args, kwargs)),
                start_ns,
                start_mark,
            )
        else:
            recorder.gpu.release_mark(start_mark)
        return result

    def _trains(self, result: Any, module: Any) -> bool:
        """Return whether the result can be differentiated.

        Transforms and metrics are modules, too.
        """
        trains = _requires_grad(result, self._tensor)
        if trains is None:
            trains = any(parameter.requires_grad for parameter in module.parameters())
        return trains

    def _add(self, module: Any, arguments: Any) -> int:
        """Return a number for an outermost module: 1 for the first one."""
        modules = self._recorder.modules
        self._recorder.batch = self._recorder.batch or batch_of(arguments, self._tensor)
        return modules.setdefault(module, len(modules) + 1)


def _requires_grad(value: Any, tensor: type, depth: int = 3) -> bool | None:
    """Return whether a tensor in `value` requires a gradient.

    Return None if it contains no tensor.
    """
    if isinstance(value, tensor):
        return bool(value.requires_grad)  # type: ignore[attr-defined]
    if isinstance(value, Mapping):
        parts: Any = list(value.values())
    elif isinstance(value, (list, tuple)):
        parts = value
    else:
        parts = list(getattr(value, "__dict__", {}).values())
    answers = (
        [_requires_grad(part, tensor, depth - 1) for part in parts[:64]]
        if depth
        else []
    )
    if any(answers):
        return True
    return False if False in answers else None


@wrapper
def wrap_backward(
    recorder: Recorder,
    compiling: Callable[[], bool],
    original: Callable[..., Any],
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Wrap a function so that its calls are recorded as backwards.

    Calls are not recorded while dynamo traces (`compiling`).
    """
    if compiling():
        return original(*args, **kwargs)
    recorder.threads.enter_backward()
    if not recorder.enter(BACKWARD):
        return original(*args, **kwargs)
    try:
        return original(*args, **kwargs)
    finally:
        recorder.leave()


def hook_megatron(
    recorder: Recorder,
    compiling: Callable[[], bool],
    patches: Patches,
    wrap_step: Callable[..., Callable[..., Any]],
) -> None:
    """Wrap the backward of Megatron's schedules, and its optimizers' steps.

    `wrap_step` wraps the steps, once they are imported.
    """
    backward = {
        "": {"custom_backward": functools.partial(wrap_backward, recorder, compiling)}
    }
    patches.wrap_when_imported("megatron.core.pipeline_parallel.schedules", backward)
    for module, classes in _MEGATRON_OPTIMIZERS.items():
        steps = {name: {"step": wrap_step} for name in classes}
        patches.wrap_when_imported(f"megatron.core.optimizer.{module}", steps)


_MEGATRON_OPTIMIZERS = {
    "optimizer": ("MixedPrecisionOptimizer", "FP32Optimizer", "ChainedOptimizer"),
    "layer_wise_optimizer": ("LayerWiseDistributedOptimizer",),
}


def megatron_inner_optimizer(optimizer: Any) -> Any:
    """Return the first torch optimizer in a Megatron optimizer, which may be chained.

    Return the optimizer itself where there is none.
    """
    parts = getattr(optimizer, "chained_optimizers", None) or [optimizer]
    inner = (getattr(part, "optimizer", None) for part in parts)
    return next((candidate for candidate in inner if candidate is not None), optimizer)


class TorchHooks:
    """Reports torch's phases to `recorder`, from creation to `remove`."""

    def __init__(self, recorder: Recorder, torch: Any) -> None:
        self._recorder = recorder
        self._compiling = torch.compiler.is_compiling
        self._patches = Patches()
        module = torch.nn.Module
        self._patches.set(module, _CALL_ATTRIBUTE, OutermostCall(recorder, torch))
        # a warning may name another line of torch then
        with contextlib.suppress(Exception):
            self._patches.set_code(
                module._wrapped_call_impl, code_with_hook(module._wrapped_call_impl)
            )
        # `backward` and `grad` both look this up in torch.autograd; non-strict tracing
        # restores it from graph.
        run_backward = wrap_backward(
            recorder, self._compiling, torch.autograd._engine_run_backward
        )
        self._patches.set(torch.autograd, "_engine_run_backward", run_backward)
        self._patches.set(torch.autograd.graph, "_engine_run_backward", run_backward)
        hook_megatron(
            recorder, self._compiling, self._patches, self._wrap_megatron_step
        )
        hook_pipelining(recorder, self._patches)
        scaler = torch.amp.GradScaler
        self._patches.set(scaler, "step", self._wrap_update(1, False, scaler.step))
        optimizer = torch.optim.Optimizer
        self._patches.wrap(
            optimizer, "_patch_step_function", self._wrap_patch_step_function
        )
        for existing in _subclasses(optimizer):
            if getattr(existing.__dict__.get("step"), "hooked", False):
                self._hook_step(existing)

    def remove(self) -> None:
        """Restore torch as it was."""
        self._patches.undo()

    @wrapper
    def _wrap_update(
        self,
        optimizer_index: int,
        of_torch: bool,
        original: Callable[..., Any],
        /,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Wrap a method as an update.

        `optimizer_index` is the position of the optimizer among its arguments.
        """
        if self._compiling():
            return original(*args, **kwargs)
        recorder = self._recorder
        outermost = recorder.enter(UPDATE)
        optimizer = (
            args[optimizer_index]
            if len(args) > optimizer_index
            else kwargs.get("optimizer")
        )
        # Further arguments may be a closure.
        parts = None if outermost else recorder.parts
        if len(args) > optimizer_index + 1 or kwargs:
            if outermost:
                parts = UpdateParts(recorder)
            if parts is not None and optimizer_index == 0:
                args, kwargs = parts.wrap_closure(args, kwargs, of_torch)
        try:
            result = original(*args, **kwargs)
            if parts is not None:
                parts.failed = False
            return result
        finally:
            # Also if GradScaler has skipped the step for an infinite gradient: the
            # iteration has ended.
            if (
                optimizer is not None
                and recorder.in_phase
                and not (parts is not None and parts.failed)
            ):
                recorder.stepped.append(optimizer)
            if outermost and parts is not None:
                parts.leave(optimizer)
            elif outermost:
                recorder.leave()

    @wrapper
    def _wrap_megatron_step(
        self, original: Callable[..., Any], optimizer: Any, /, *args: Any, **kwargs: Any
    ) -> Any:
        """Wrap a step of Megatron's optimizers, which copies and clips gradients, steps
        torch's optimizers, and copies and gathers parameters."""
        outermost = self._recorder.enter(UPDATE)
        try:
            return original(optimizer, *args, **kwargs)
        finally:
            if outermost:
                # Also where gradients that are not finite have left out the step of the
                # inner optimizers.
                self._recorder.stepped.append(megatron_inner_optimizer(optimizer))
                self._recorder.leave()

    @wrapper
    def _wrap_patch_step_function(
        self, original: Callable[..., Any], optimizer: Any, /
    ) -> None:
        """Wrap torch's own hooking of `step`, which runs when an optimizer is
        created."""
        original(optimizer)
        self._recorder.optimizers[optimizer] = True
        self._hook_step(type(optimizer))

    def _hook_step(self, kind: Any) -> None:
        """Wrap `step` once in the optimizer class that defines it, where torch itself
        hooks it."""
        if not self._recorder.live or getattr(kind.step, "_ebbtide_update", False):
            return
        owner = next(base for base in kind.__mro__ if "step" in base.__dict__)
        of_torch = owner.__module__.startswith("torch.optim.")
        step = self._wrap_update(0, of_torch, owner.__dict__["step"])
        step._ebbtide_update = True  # type: ignore[attr-defined]
        self._patches.set(owner, "step", step)


def _subclasses(kind: Any) -> set[Any]:
    return {kind}.union(*(_subclasses(sub) for sub in kind.__subclasses__()))


class _Stage:
    """The micro-batches of one pipeline stage: how many began, and the number of each
    one in flight."""

    def __init__(self) -> None:
        self.count = 0
        self.numbers: dict[Any, int] = {}


class MicroBatches:
    """Reports the current micro-batch to `recorder`, by the methods of pipeline stages
    that it wraps."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._stages: WeakKeyDictionary[Any, _Stage] = WeakKeyDictionary()

    @wrapper
    def wrap(
        self,
        begins: bool,
        original: Callable[..., Any],
        owner: Any,
        /,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Wrap a method of a stage whose first argument names a micro-batch.

        The name may return after the micro-batch's backward.
        """
        name = args[0] if args else next(iter(kwargs.values()), None)
        stage = self._stages.setdefault(owner, _Stage())
        if begins:
            stage.count += 1
            stage.numbers[name] = stage.count
        self._recorder.micro_batch = stage.numbers.get(name, 0)
        try:
            return original(owner, *args, **kwargs)
        finally:
            self._recorder.micro_batch = 0


def hook_pipelining(recorder: Recorder, patches: Patches) -> None:
    """Wrap the stages of torch's pipelines, once they are imported."""
    batches = MicroBatches(recorder)
    begin, end = (functools.partial(batches.wrap, begins) for begins in (True, False))
    chunks = {
        "forward_one_chunk": begin,
        "backward_one_chunk": end,
        "backward_weight_one_chunk": end,
    }
    patches.wrap_when_imported(
        "torch.distributed.pipelining.stage", {"_PipelineStageBase": chunks}
    )
