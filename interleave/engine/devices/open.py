"""Opens the device that parameters are on."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ebbtide.interleave.engine.devices.device import Device
from ebbtide.interleave.engine.devices.emulated import EmulatedDevice
from ebbtide.interleave.engine.errors import EngineError
from ebbtide.interleave.engine.local_shards import local_shard


def open_device(params: Sequence[torch.Tensor]) -> Device:
    """Open the GPU that parameters are on, or an emulated device without limits for parameters on the CPU.

    Raises:
        EngineError: If the parameters are on a device of another kind.
    """
    kind = local_shard(params[0]).device.type if params else "cpu"
    if kind == "cpu":
        return EmulatedDevice()
    if kind == "cuda":
        from ebbtide.interleave.engine.devices.cuda import CudaDevice

        return CudaDevice(local_shard(params[0]).device)
    raise EngineError(f"the parameters are on a device of kind {kind}: move the model to a GPU or to the CPU first")
