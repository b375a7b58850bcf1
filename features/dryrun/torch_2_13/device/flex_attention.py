"""flex_attention, whose kernel is compiled for a device: its results and its work, as
of a dense mask."""

import math
from collections.abc import Callable
from typing import Any

from torch._higher_order_ops.flex_attention import (
    flex_attention,
    flex_attention_backward,
)
from torch._subclasses.fake_tensor import FakeTensorMode

from ebbtide.features.dryrun.torch_2_13.device.fake_device import FakeDeviceMode
from ebbtide.features.dryrun.torch_2_13.operations.kernel_work import tensor_bytes
from ebbtide.features.dryrun.torch_2_13.operations.shadow_values import tensors_in
from ebbtide.machines.kernels.efficiency import AttentionSize
from ebbtide.machines.kernels.rates import KernelWork
from ebbtide.machines.kernels.time_priors import WorkClass

# Products of matrices: of scores and of their result; in the backward of five.
_FORWARD_PRODUCTS, _BACKWARD_PRODUCTS = 2, 5


def register_flex_attention() -> None:
    """Let operations on fake tensors of the device run in the mode of the dry run, for
    the rest of the process."""
    for operator, work_class, products in (
        (flex_attention, WorkClass.ATTENTION, _FORWARD_PRODUCTS),
        (flex_attention_backward, WorkClass.ATTENTION_BACKWARD, _BACKWARD_PRODUCTS),
    ):
        if FakeDeviceMode not in operator.python_key_table:
            operator.py_impl(FakeDeviceMode)(_rule(operator, work_class, products))


def _rule(operator: Any, work_class: WorkClass, products: int) -> Callable[..., Any]:
    def run(mode: FakeDeviceMode, *args: Any, **kwargs: Any) -> Any:
        result = operator.python_key_table[FakeTensorMode](
            mode.fake_mode, *args, **kwargs
        )
        inputs, outputs = list(tensors_in(args)), list(tensors_in(result))
        query, key = inputs[0], inputs[1]
        flops = products * 2 * math.prod(query.shape) * key.shape[-2]
        size = sum(map(tensor_bytes, (*inputs, *outputs)))
        precision = str(query.dtype).removeprefix("torch.")
        name = operator.name()
        attention = AttentionSize(query.shape[-2], query.shape[-1])
        mode.follow_kernel(
            KernelWork(name, "compute", work_class, flops, size, precision, attention),
            outputs,
        )
        return result

    return run
