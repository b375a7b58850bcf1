"""Runs torch's own data, tensor and pipeline parallelism in a dry run."""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import dataloader

from ebbtide.profiler.agent.patches import Patches, when_imported
from ebbtide.profiler.dryrun.device.collectives import Collectives
from ebbtide.profiler.dryrun.device.fake_device import FakeDeviceMode, HostlessFakeMode
from ebbtide.profiler.dryrun.errors import CannotFakeError

_Hook = Callable[[Any, Any], Any]
_CUDA_SOURCES = (".cu", ".cuh")


@dataclass
class _Reduction:
    """The reduction of a reducer's buckets: by a hook of the job, with its state, or an all-reduce in place."""

    group: Any
    collectives: Collectives
    hook: _Hook | None = None
    state: Any = None


def patch_data_parallel(patches: Patches, collectives: Collectives) -> None:
    """Give every reducer a communication hook until `patches.undo()`: its own reduction needs real works."""
    reductions: weakref.WeakKeyDictionary[Any, _Reduction] = weakref.WeakKeyDictionary()
    register = dist._register_comm_hook

    def wrap_init(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def init(model: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(model, *args, **kwargs)
            reductions[model.reducer] = reduction = _Reduction(model.process_group, collectives)
            register(model.reducer, reduction, _reduce)
            return result

        return init

    def register_hook(reducer: Any, state: Any, hook: _Hook) -> None:
        reductions[reducer].hook, reductions[reducer].state = hook, state

    def register_builtin_hook(reducer: Any, kind: Any) -> None:
        compresses = kind == dist.BuiltinCommHookType.FP16_COMPRESS
        register_hook(reducer, reductions[reducer].group, fp16_compress_hook if compresses else allreduce_hook)

    patches.wrap(DistributedDataParallel, "_ddp_init_helper", wrap_init)
    # Its statistics need a timer of CUDA.
    patches.set(dist.Logger, "set_runtime_stats_and_log", lambda _logger: None)
    patches.set(dist, "_register_comm_hook", register_hook)
    patches.set(dist, "_register_builtin_comm_hook", register_builtin_hook)


def _reduce(state: _Reduction, bucket: dist.GradBucket) -> torch.futures.Future[Any]:
    """Reduce a bucket, and let the end of the backward wait for it."""
    torch.autograd.Variable._execution_engine.queue_callback(state.collectives.wait_for_all)
    if state.hook is not None:
        return state.hook(state.state, bucket)
    buffer = bucket.buffer()
    dist.all_reduce(buffer, group=state.group, async_op=True)
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(buffer)
    return future


class ModelParallelPatches:
    """Patches of DTensor and of torch.distributed.pipelining, once the job has imported them, until `remove`."""

    def __init__(self, patches: Patches, mode: FakeDeviceMode) -> None:
        self._patches, self._mode = patches, mode
        self._cancel_callbacks = [
            when_imported("torch.distributed.tensor._sharding_prop", self._patch_propagation),
            when_imported("torch.distributed.pipelining.stage", self._patch_stages),
        ]

    def remove(self) -> None:
        """Wait for no imports any more."""
        for cancel in self._cancel_callbacks:
            cancel()

    def _patch_propagation(self, module: Any) -> None:
        """Let DTensor find the layouts of results on tensors of its own, of full size, which are not of the job."""
        mode = self._mode

        def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(original)
            def propagate(*args: Any, **kwargs: Any) -> Any:
                before, mode.enabled = mode.enabled, False
                try:
                    return original(*args, **kwargs)
                finally:
                    mode.enabled = before

            return propagate

        self._patches.set(module, "FakeTensorMode", HostlessFakeMode)
        self._patches.wrap(module.ShardingPropagator, "_propagate_tensor_meta_non_cached", wrap)

    def _patch_stages(self, module: Any) -> None:
        """Let stages take what others would send: gradients as this stage's outputs, inputs as a stage's outputs."""
        sent: list[Any] = []

        def send(_stage: Any, content: Any, _target: int) -> None:
            if isinstance(content, module._StageForwardMeta):
                sent[:] = [content]

        def receive(stage: Any, source: int) -> Any:
            if source > stage.stage_index:
                return module._StageBackwardMeta(backward_metas=module._derive_grad_metas(stage._stage_meta.outputs))
            return sent[0]

        votes: list[Any] = []

        def wrap_vote(original: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(original)
            def vote(stage: Any, *args: Any, **kwargs: Any) -> Any:
                result = original(stage, *args, **kwargs)
                if stage.is_first:
                    votes[:] = [result]
                return result

            return vote

        self._patches.wrap(module.PipelineStage, "_warmup_forward_vote", wrap_vote)
        # Whether shapes are stated or must be inferred: all stages agree with the first one.
        self._patches.set(module.PipelineStage, "_warmup_backward_result", lambda *_stage, **_received: votes[0])
        self._patches.set(module.PipelineStage, "_send_meta", send)
        self._patches.set(module.PipelineStage, "_recv_meta", receive)


class LibraryPatches:
    """Patches of data loaders, torch.compile, transformers, extensions and NVML, from creation to `remove`."""

    def __init__(self, patches: Patches) -> None:
        self.compiles = False
        patches.set(dataloader.DataLoader, "_get_iterator", _iterate_here)
        compile_function = torch.compile

        def compile_eagerly(model: Any = None, **options: Any) -> Any:
            # DeepSpeed compiles a function of Muon whenever it is imported, whether or not the job uses it.
            if str(getattr(model, "__module__", None)).startswith("deepspeed."):
                return model
            self.compiles = True
            return compile_function(model, **options)

        patches.set(torch, "compile", compile_eagerly)
        torch.compiler.set_stance("force_eager")
        warnings.filterwarnings("ignore", message="Using `torch.compile")  # about the hooks of this dry run
        self._cancel: Callable[[], None] = when_imported(
            "transformers.utils.import_utils",
            # It would build masks that it leaves out for real tensors.
            lambda module: patches.set(module, "is_fake_tensor", lambda _tensor: False),
        )
        self._cancel_extensions = patch_extensions(patches)

    def remove(self) -> None:
        """Stop waiting for imports, and let torch.compile work again."""
        self._cancel()
        self._cancel_extensions()
        torch.compiler.set_stance("default")


def _iterate_here(loader: Any) -> Any:
    """Load data in this process: fake tensors cannot be sent to another one."""
    loader.__dict__.update(num_workers=0, prefetch_factor=None, timeout=0)
    return dataloader._SingleProcessDataLoaderIter(loader)


def patch_extensions(patches: Patches) -> Callable[[], None]:
    """Replace the functions until `patches.undo()`, in modules that are imported until the returned one is called."""
    cancels = [
        when_imported("torch.utils.cpp_extension", lambda module: _refuse_compilation(module, patches)),
        when_imported("pynvml", lambda module: _answer_nvml(module, patches)),
    ]

    def cancel() -> None:
        for function in cancels:
            function()

    return cancel


def _refuse_compilation(module: Any, patches: Patches) -> None:
    load, load_inline = module.load, module.load_inline

    def refuse(function: str, name: Any) -> None:
        raise CannotFakeError(
            f"cannot dry-run torch.utils.cpp_extension.{function}({name!r}): a CUDA extension runs on a device only; "
            "make the job use operations of torch for the dry run, or an extension that is registered with "
            "torch.library.register_fake"
        )

    def load_other(name: Any, sources: Any, *args: Any, **kwargs: Any) -> Any:
        files = [sources] if isinstance(sources, str) else sources
        if kwargs.get("with_cuda") or any(str(file).endswith(_CUDA_SOURCES) for file in files):
            refuse("load", name)
        return load(name, sources, *args, **kwargs)

    def load_inline_other(name: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("with_cuda") or kwargs.get("cuda_sources") or (len(args) > 1 and args[1]):
            refuse("load_inline", name)
        return load_inline(name, *args, **kwargs)

    patches.set(module, "load", load_other)
    patches.set(module, "load_inline", load_inline_other)


def _answer_nvml(module: Any, patches: Patches) -> None:
    """Let jobs that print the use of the device find one, which does nothing."""

    def memory(*_args: Any, **_kwargs: Any) -> Any:
        free, total = torch.cuda.mem_get_info()
        return SimpleNamespace(total=total, free=free, used=total - free)

    answers: dict[str, Any] = {
        "nvmlInit": None,
        "nvmlShutdown": None,
        "nvmlDeviceGetCount": 1,
        "nvmlDeviceGetHandleByIndex": 0,
        "nvmlDeviceGetHandleByUUID": 0,
        "nvmlDeviceGetName": torch.cuda.get_device_name(),
        "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=0, memory=0),
        "nvmlDeviceGetTemperature": 0,
        "nvmlDeviceGetPowerUsage": 0,
        "nvmlDeviceGetEnforcedPowerLimit": 0,
        "nvmlDeviceGetTotalEnergyConsumption": 0,
        "nvmlDeviceGetComputeRunningProcesses": [],
        "nvmlSystemGetDriverVersion": "dry run",
    }
    for name, value in answers.items():
        patches.set(module, name, _constant(value))
    patches.set(module, "nvmlDeviceGetMemoryInfo", memory)


def _constant(value: Any) -> Callable[..., Any]:
    return lambda *_args, **_kwargs: value
