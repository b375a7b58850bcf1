"""CUDA streams that no job can get.

Torch gives its own 32 streams of a priority to every caller in turn.
"""

from __future__ import annotations

import ctypes
from typing import Any

# CU_STREAM_NON_BLOCKING: no waits for the default stream.
# https://docs.nvidia.com/cuda/cuda-driver-api (cuStreamCreate)
_NON_BLOCKING = 1


def own_stream(torch: Any, device: int) -> Any:
    """Return a new stream of a GPU, which lives as long as the process.

    With another driver than CUDA's it is one of torch's, which the job may get, too."""
    handle = ctypes.c_void_p()
    with torch.cuda.device(device):
        if torch.version.cuda is None:
            return torch.cuda.Stream()
        # Makes the context of the device the current one.
        torch.cuda.current_stream(device)
        error = ctypes.CDLL("libcuda.so.1").cuStreamCreate(
            ctypes.byref(handle), _NON_BLOCKING
        )
        if error or handle.value is None:
            return torch.cuda.Stream()
    return torch.cuda.ExternalStream(handle.value, device)
