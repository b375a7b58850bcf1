"""Runs a script whose library calls CUDA on the CPU: tensors and groups go to the host,
and CUDA's functions answer.

    python -m tests.recipes.without_cuda SCRIPT ARGUMENTS...

Everything else of the library is its own, as Megatron-core's schedules and
optimizers.
"""

import contextlib
import runpy
import sys

import torch
from torch.overrides import TorchFunctionMode


class _OnHost(TorchFunctionMode):
    """Makes tensors on the CPU where the script names CUDA."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1:
            return func(*args).replace("torch.", "torch.cuda.")
        args = [_host(value) for value in args]
        return func(
            *args, **{name: _host(value) for name, value in (kwargs or {}).items()}
        )


def _host(value):
    is_cuda = isinstance(value, str | torch.device) and str(value).startswith("cuda")
    return "cpu" if is_cuda else value


def main() -> None:
    cuda, groups = torch.cuda, torch.distributed.init_process_group
    torch.distributed.init_process_group = lambda _backend: groups("gloo")
    cuda.current_device = lambda: "cpu"
    cuda.set_device, cuda.synchronize, cuda.manual_seed = (
        lambda *_: None for _ in range(3)
    )
    cuda.get_rng_state = cuda.random.get_rng_state = lambda *_args, **_options: (
        torch.get_rng_state()
    )
    cuda.set_rng_state = lambda state, *_args, **_options: torch.set_rng_state(state)
    cuda.stream = lambda _stream: contextlib.nullcontext()
    torch.Tensor.cuda = lambda tensor, *_: tensor
    del sys.argv[0]
    with _OnHost():
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
