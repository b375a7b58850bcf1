"""Leaves out code of torch that calls a real device."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses import fake_tensor

from ebbtide.features.dryrun.errors import CannotFakeError
from ebbtide.profiler.agent.patches import Patches, wrapper

# Of the builds of torch 2.13 for CUDA.
_VERSION = "13.0"
_RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")


def leave_out_device_code(patches: Patches) -> None:
    """Replace what would call a device until `patches.undo()`, mostly of builds with
    CUDA."""
    # It would make a tensor on the device.
    patches.set(fake_tensor, "init_gpu_context", lambda _device: None)
    if not torch.version.cuda:
        # Jobs refuse to run without a version, or with an old one.
        patches.set(torch.version, "cuda", _VERSION)
        patches.set(torch.cuda, "_compile_kernel", _refuse_kernel)
        return
    # It records an event for the statistics of DistributedDataParallel.
    patches.set(dist.Reducer, "prepare_for_forward", lambda _reducer: None)
    patches.set(torch.backends.cudnn, "is_acceptable", lambda _tensor: False)
    for name in _RECURRENT:
        function = _without_cudnn(getattr(torch._VF, name))
        patches.set(torch._VF, name, function)


def _refuse_kernel(*_args: Any, **_kwargs: Any) -> Any:
    raise CannotFakeError(
        "cannot dry-run torch.cuda._utils._cuda_load_module: it needs a device: leave "
        "it out for the dry run"
    )


@wrapper
def _without_cudnn(original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    with torch.backends.cudnn.flags(enabled=False):
        return original(*args, **kwargs)
