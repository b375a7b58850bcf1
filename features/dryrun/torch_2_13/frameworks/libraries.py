"""Lets libraries work in a dry run: data loaders, torch.compile, transformers,
bitsandbytes, extensions and NVML."""

import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributions import Distribution
from torch.utils.data import dataloader

from ebbtide.features.dryrun.errors import CannotFakeError
from ebbtide.features.dryrun.torch_2_13.device.fake_cuda import constant
from ebbtide.features.dryrun.torch_2_13.device.fake_device import FakeDeviceMode
from ebbtide.profiler.agent.patches import Patches, wrapper

# In errors of torch.distributions about values, not about shapes.
_CHECKS_OF_VALUES = ("to satisfy the constraint", "to be within the support")
_CUDA_SOURCES = (".cu", ".cuh")
_SENSORS = ("Temperature", "PowerUsage", "EnforcedPowerLimit", "TotalEnergyConsumption")
_POOL = "float scale, SymInt pooled_height, SymInt pooled_width"
_IMAGE = "SymInt batch_size, SymInt channels, SymInt height, SymInt width"
_CONVOLUTION = (
    "Tensor input, Tensor weight, Tensor offset, Tensor mask, Tensor bias, SymInt sh, "
    "SymInt sw, SymInt ph, SymInt pw, "
    "SymInt dh, SymInt dw, SymInt groups, SymInt offset_groups, bool use_mask"
)
# Operators of torchvision 0.28 by name.
_VISION_OPERATORS = {
    **dict.fromkeys(
        ("nms", "qnms"), "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
    ),
    "roi_align": (
        f"(Tensor input, Tensor rois, {_POOL}, SymInt sampling_ratio, bool aligned) "
        "-> Tensor"
    ),
    "_roi_align_backward": (
        f"(Tensor grad, Tensor rois, {_POOL}, {_IMAGE}, SymInt ratio, bool aligned) "
        "-> Tensor"
    ),
    **dict.fromkeys(
        ("roi_pool", "ps_roi_pool"),
        f"(Tensor input, Tensor rois, {_POOL}) -> (Tensor, Tensor)",
    ),
    **dict.fromkeys(
        ("_roi_pool_backward", "_ps_roi_pool_backward"),
        f"(Tensor grad, Tensor rois, Tensor map, {_POOL}, {_IMAGE}) -> Tensor",
    ),
    "ps_roi_align": (
        f"(Tensor input, Tensor rois, {_POOL}, SymInt sampling_ratio) -> (Tensor, "
        "Tensor)"
    ),
    "_ps_roi_align_backward": (
        f"(Tensor grad, Tensor rois, Tensor map, {_POOL}, SymInt ratio, {_IMAGE}) -> "
        "Tensor"
    ),
    "deform_conv2d": f"({_CONVOLUTION}) -> Tensor",
    "_deform_conv2d_backward": (
        f"(Tensor grad, {_CONVOLUTION}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
    ),
    "qroi_align": (
        f"(Tensor x, Tensor r, float s, int z, float t, int y, {_POOL}, SymInt n, "
        "bool aligned) -> Tensor"
    ),
}


class LibraryPatches:
    """Patches of libraries; `compiles`: whether the job has called what torch.compile
    returned."""

    def __init__(self, patches: Patches, mode: FakeDeviceMode) -> None:
        self.compiles = False
        self._code = mode.compiled
        patches.set(dataloader.DataLoader, "_get_iterator", _iterate_here)
        compile_function = torch.compile

        def compile_eagerly(model: Any = None, **options: Any) -> Any:
            compiled = compile_function(model, **options)
            if isinstance(compiled, torch.nn.Module):
                compiled.forward = self._follow_calls(options, compiled.forward)
            elif model is not None:
                compiled = self._follow_calls(options, compiled)
            return compiled

        patches.set(torch, "compile", compile_eagerly)
        torch.compiler.set_stance("force_eager")
        patches.on_undo(lambda: torch.compiler.set_stance("default"))
        # about the hooks of this dry run
        warnings.filterwarnings("ignore", message="Using `torch.compile")
        for name in ("range_push", "range_pop", "range_start", "range_end"):
            patches.set(torch.cuda.nvtx, name, constant(0))
        patches.when_imported(
            "transformers.utils.import_utils",
            # It would build masks that it leaves out for real tensors.
            lambda module: patches.set(module, "is_fake_tensor", lambda _tensor: False),
        )
        for name in ("__init__", "_validate_sample"):
            patches.wrap(Distribution, name, _accept_unknown_values)
        patch_extensions(patches, mode)

    @wrapper
    def _follow_calls(
        self,
        options: dict[str, Any],
        compiled: Callable[..., Any],
        /,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        self.compiles = True
        with self._code.call(options):
            return compiled(*args, **kwargs)


@wrapper
def _accept_unknown_values(
    original: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Any:
    """Check arguments or values of a distribution, which may be any where they are not
    known."""
    try:
        return original(*args, **kwargs)
    except ValueError as error:
        values = (*args, *vars(args[0]).values())
        if not any(isinstance(value, FakeTensor) for value in values) or not any(
            text in str(error) for text in _CHECKS_OF_VALUES
        ):
            raise
        return None


def _iterate_here(loader: Any) -> Any:
    """Load data in this process: fake tensors cannot be sent to another one."""
    loader.__dict__.update(num_workers=0, prefetch_factor=None, timeout=0)
    return dataloader._SingleProcessDataLoaderIter(loader)


def patch_extensions(patches: Patches, mode: FakeDeviceMode) -> None:
    """Replace functions of libraries that load or need compiled code, until
    `patches.undo()`."""
    patches.when_imported(
        "torch.utils.cpp_extension", lambda module: _refuse_compilation(module, patches)
    )
    patches.when_imported("pynvml", lambda module: _answer_nvml(module, patches))
    patches.when_imported(
        "bitsandbytes.cuda_specs",
        lambda module: patches.set(module, "get_cuda_specs", constant(None)),
    )
    patches.when_imported(
        "bitsandbytes.cextension", lambda module: _leave_out_kernels(module, patches)
    )
    patches.when_imported(
        "bitsandbytes.functional", lambda module: _page_state(module, patches, mode)
    )
    patches.when_imported(
        "torchvision.extension", lambda module: _define_operators(module, patches)
    )
    patches.when_imported(
        "torchvision._meta_registrations", lambda _: _keep_all_boxes()
    )
    patches.when_imported(
        "torchvision.models.detection.roi_heads",
        lambda module: _count_samples(module, patches, mode),
    )
    patches.when_imported(
        "torchaudio._extension.utils",
        lambda module: _leave_out_library(module, patches),
    )


def _refuse_compilation(module: Any, patches: Patches) -> None:
    load, load_inline = module.load, module.load_inline

    def refuse(function: str, name: Any) -> None:
        raise CannotFakeError(
            f"cannot dry-run torch.utils.cpp_extension.{function}({name!r}): a CUDA "
            "extension runs on a device only; "
            "make the job use operations of torch for the dry run, or an extension "
            "that is registered with "
            "torch.library.register_fake"
        )

    def load_other(name: Any, sources: Any, *args: Any, **kwargs: Any) -> Any:
        files = [sources] if isinstance(sources, str) else sources
        if kwargs.get("with_cuda") or any(
            str(file).endswith(_CUDA_SOURCES) for file in files
        ):
            refuse("load", name)
        return load(name, sources, *args, **kwargs)

    def load_inline_other(name: Any, *args: Any, **kwargs: Any) -> Any:
        if (
            kwargs.get("with_cuda")
            or kwargs.get("cuda_sources")
            or (len(args) > 1 and args[1])
        ):
            refuse("load_inline", name)
        return load_inline(name, *args, **kwargs)

    patches.set(module, "load", load_other)
    patches.set(module, "load_inline", load_inline_other)


def _leave_out_kernels(module: Any, patches: Patches) -> None:
    """Let the kernels for CUDA that a build for the CPU lacks do nothing: they fill
    tensors that their callers made."""

    missing = constant(None)
    missing.restype = None  # by which Unsloth knows native functions

    def function_of(library: Any, name: str) -> Any:
        return getattr(library._lib, name, None) or missing

    patches.set(module.BNBNativeLibrary, "__getattr__", function_of)


def _page_state(module: Any, patches: Patches, mode: FakeDeviceMode) -> None:
    """Keep the state of paged optimizers on the host: the driver moves pages of it to
    the device as there is room."""

    def paged(
        *shape: int, dtype: torch.dtype = torch.float32, device: Any = None
    ) -> Any:
        state = mode.host_tensor(shape, dtype)
        state.is_paged, state.page_deviceid = True, 0
        return state

    patches.set(module, "get_paged", paged)
    for name in ("prefetch_tensor", "elementwise_func"):
        patches.set(module, name, constant(None))


def _define_operators(module: Any, patches: Patches) -> None:
    """Define torchvision's operators, for fake tensors alone, where they cannot be
    loaded, as from PyPI beside a CPU build."""
    if not module._has_ops():
        for name, schema in _VISION_OPERATORS.items():
            torch.library.define(f"torchvision::{name}", schema)
        patches.set(module, "_has_ops", constant(True))
        patches.set(module, "_check_cuda_version", constant(-1))  # a build for the CPU


def _keep_all_boxes() -> None:
    """Let `nms` keep all boxes, the most that is possible: torchvision states no number
    to fake tensors."""
    for name in ("nms", "qnms"):
        torch.library.register_fake(
            f"torchvision::{name}",
            lambda boxes, _scores, _threshold: boxes.new_empty(
                len(boxes), dtype=torch.int64
            ),
            allow_override=True,
        )


def _count_samples(module: Any, patches: Patches, mode: FakeDeviceMode) -> None:
    """Let as many of the sampled boxes have an object as the sampler of a model takes
    at most."""

    @wrapper
    def select(original: Callable[..., Any], heads: Any, *args: Any) -> Any:
        samples = original(heads, *args)
        sampler = heads.fg_bg_sampler
        most = int(sampler.batch_size_per_image * sampler.positive_fraction)
        for labels in samples[2]:
            mode.values.counts.set(labels, most)
        return samples

    patches.wrap(module.RoIHeads, "select_training_samples", select)


def _leave_out_library(module: Any, patches: Patches) -> None:
    """Let torchaudio be imported where its library cannot be loaded: as without it."""
    load = module._load_lib

    def load_if_possible(name: str) -> bool:
        try:
            return bool(load(name))
        except OSError:
            return False

    patches.set(module, "_load_lib", load_if_possible)


def _answer_nvml(module: Any, patches: Patches) -> None:
    """Let jobs that print the use of the device find one, which does nothing."""

    def memory(*_args: Any, **_kwargs: Any) -> Any:
        free, total = torch.cuda.mem_get_info()
        return SimpleNamespace(total=total, free=free, used=total - free)

    answers: dict[str, Any] = {
        **dict.fromkeys(("nvmlInit", "nvmlShutdown")),
        **{
            f"nvmlDeviceGet{name}": 0
            for name in ("HandleByIndex", "HandleByUUID", *_SENSORS)
        },
        "nvmlDeviceGetCount": 1,
        "nvmlDeviceGetName": torch.cuda.get_device_name(),
        "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=0, memory=0),
        "nvmlDeviceGetComputeRunningProcesses": [],
        "nvmlSystemGetDriverVersion": "dry run",
    }
    for name, value in answers.items():
        patches.set(module, name, constant(value))
    patches.set(module, "nvmlDeviceGetMemoryInfo", memory)
