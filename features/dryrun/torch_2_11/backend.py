"""Fakes the CUDA device in torch 2.11."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses import fake_tensor

from ebbtide.features.dryrun.torch_2_13 import backend as torch_2_13
from ebbtide.features.dryrun.torch_2_13.device.attention import register_fused_norms
from ebbtide.profiler.agent.patches import Patches, wrapper

_RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")


class Backend(torch_2_13.Backend):
    """The backend of torch 2.13, and what differs here.

    It takes builds with CUDA, too, and leaves out their code for a real device.
    """

    device_attribute = "fake_device"

    def _register_norms(self, library: torch.library.Library) -> None:
        if not torch.version.cuda:
            register_fused_norms(library)

    def _change_settings(self, patches: Patches) -> None:
        super()._change_settings(patches)
        # It would make a tensor on a real device.
        patches.set(fake_tensor, "init_gpu_context", lambda _device: None)
        if not torch.version.cuda:
            return
        # It records an event for the statistics of DistributedDataParallel.
        patches.set(dist.Reducer, "prepare_for_forward", lambda _reducer: None)
        patches.set(torch.backends.cudnn, "is_acceptable", lambda _tensor: False)
        for name in _RECURRENT:
            function = _without_cudnn(getattr(torch._VF, name))
            patches.set(torch._VF, name, function)


@wrapper
def _without_cudnn(original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    with torch.backends.cudnn.flags(enabled=False):
        return original(*args, **kwargs)
