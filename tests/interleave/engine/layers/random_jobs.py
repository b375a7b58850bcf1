"""Random training jobs whose layers save tensors in every way known, and the memory of what they save."""

from __future__ import annotations

import os
import random
import signal
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from ebbtide.interleave.engine.devices.emulated import EmulatedDevice
from ebbtide.interleave.engine.interleaved_adamw import InterleavedAdamW
from tests.interleave.engine.layers.stacks import interleaved

WIDTH = 16


class Perceptron(nn.Module):  # type: ignore[misc]
    """Dropout, an operation in place, and a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.first, self.last = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.last(F.dropout(F.relu(self.first(self.norm(x)), inplace=True), 0.2, self.training))


class Attention(nn.Module):  # type: ignore[misc]
    """Views of one storage, saved several times."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs, self.outputs = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(0, 1) for part in self.inputs(x).chunk(3, -1))
        return x + self.outputs((torch.softmax(q @ k.mT, -1) @ v).transpose(0, 1).flatten(1))


class Normalized(nn.Module):  # type: ignore[misc]
    """Writes buffers in the forward, so that it must not be computed again."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(self.norm(x)))


class Cube(torch.autograd.Function):  # type: ignore[misc]
    """A kernel of somebody else's, which saves an input and an output."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        result = x * x * x
        ctx.save_for_backward(x, result)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        x, result = ctx.saved_tensors
        return gradient * (3 * x * x + 0 * result)


class Custom(nn.Module):  # type: ignore[misc]
    """A custom function, a checkpoint of its own, and expanded and strided tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(1, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = checkpoint(lambda y: torch.sin(self.linear(y)), x, use_reentrant=False)
        columns = inner[:, ::2].contiguous().repeat_interleave(2, 1) * self.scale.expand(len(x), -1)
        return x + Cube.apply(torch.tanh(columns)) * inner


class Nested(nn.Module):  # type: ignore[misc]
    """Several inputs, named ones, and outputs of which one is another's view."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: torch.Tensor, *, scale: torch.Tensor | None = None) -> torch.Tensor:
        both = torch.exp(-self.linear(x).square())
        left, right = both.split(WIDTH, 1)
        return left * right if scale is None else left * right * scale


KINDS = (Perceptron, Attention, Normalized, Custom, Nested)


class Model(nn.Module):  # type: ignore[misc]
    """Layers of random kinds, some shared, with connections over several of them."""

    def __init__(self, kinds: list[type[nn.Module]], skips: bool, tied: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, WIDTH)
        self.layers = nn.ModuleList(kind() for kind in kinds)
        self.head = nn.Linear(WIDTH, 8, bias=False)
        self.skips = skips
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = start = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, scale=start) if isinstance(layer, Nested) and self.skips else layer(x)
        return self.head(x * start if self.skips else x)


class Broken(Exception):
    """The error of a fault."""


@dataclass(frozen=True)
class Fault:
    """An attempt that fails before a step: an error in the forward or backward of a layer, or no memory on the host; or
    a fork, which does not fail."""

    kind: str
    step: int
    layer: int
    error: type[BaseException]

    def attempt(self, model: Model, optimizer: torch.optim.Optimizer, device: EmulatedDevice | None) -> None:
        """Fail, and leave everything as it was. In evaluation mode neither buffers nor random numbers change."""
        layer = model.layers[self.layer % len(model.layers)]
        child = [*layer.children()][-1]

        def fail(*_: Any) -> None:
            raise self.error("fault")

        def fail_in_backward(_: nn.Module, __: Any, output: torch.Tensor) -> None:
            if output.requires_grad:
                output.register_hook(fail)

        hook = None
        if self.kind == "forward":
            hook = child.register_forward_pre_hook(fail)
        elif self.kind == "backward":
            hook = child.register_forward_hook(fail_in_backward)
        full = patch.object(device, "allocate_host", fail) if self.kind == "full" and device is not None else None
        model.eval()
        try:
            with full or nullcontext():
                loss = model(torch.arange(9) % 8).sum()
                if self.kind == "fork":
                    run_in_fork(model)
                loss.backward()
        except self.error:
            pass
        finally:
            model.train()
            if hook is not None:
                hook.remove()
        optimizer.zero_grad()


def run_in_fork(model: Model) -> None:
    """Fork, end the child at once, and wait for it."""
    child = os.fork()
    if child == 0:
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


FAULTS = ("forward", "backward", "full", "fork")
OVERLAPS = ("none", "none", "forward", "backward", "both", "auto")


@dataclass(frozen=True)
class Parallel:
    """A model on several ranks. With `syncs_last` gradients of the last micro-step alone are reduced."""

    kind: str
    call: Any
    rank: int
    syncs_last: bool

    def set_sync(self, is_last: bool) -> None:
        is_synced = is_last or not self.syncs_last
        if self.kind == "ddp":
            # As its context `no_sync`.
            self.call.require_backward_grad_sync = is_synced
        else:
            self.call.set_requires_gradient_sync(is_synced)


@dataclass(frozen=True)
class Job:
    """A random job. `steps` have the number of tokens of each micro-step."""

    seed: int
    kinds: tuple[type[nn.Module], ...]
    skips: bool
    tied: bool
    frozen: bool
    autocast: bool
    twice: bool
    evaluates: bool
    interleaved: bool
    steps: tuple[tuple[int, ...], ...]
    overlap: str
    fault: Fault | None

    def model(self) -> Model:
        torch.manual_seed(self.seed)
        model = Model([*self.kinds], self.skips, self.tied)
        if self.frozen:
            model.layers[0].requires_grad_(False)
        return model

    def optimizer(self, model: nn.Module, device: EmulatedDevice | None) -> torch.optim.Optimizer:
        params = [param for param in model.parameters() if param.requires_grad]
        if not self.interleaved:
            return torch.optim.SGD(params, lr=0.05, momentum=0.9)
        gradients = "streamed" if self.overlap in ("backward", "both") else "kept"
        return interleaved(model, device, self.overlap, gradients)

    def train(
        self, model: Model, device: EmulatedDevice | None = None, parallel: Parallel | None = None
    ) -> list[torch.Tensor]:
        """Return the losses, then the gradients of the last step, parameters and buffers."""
        optimizer = self.optimizer(model, device)
        call, rank = (model, 0) if parallel is None else (parallel.call, parallel.rank)
        torch.manual_seed(self.seed + 1 + rank)
        results: list[torch.Tensor] = []
        gradients: list[torch.Tensor] = []
        for number, step in enumerate(self.steps):
            optimizer.zero_grad()
            if self.fault is not None and self.fault.step == number:
                self.fault.attempt(model, optimizer, device)
            for micro_step, length in enumerate(step):
                if parallel is not None:
                    parallel.set_sync(micro_step == len(step) - 1)
                tokens = torch.randint(0, 8, (length + 1,))
                with torch.autocast("cpu", torch.bfloat16) if self.autocast else nullcontext():
                    loss = F.cross_entropy(call(tokens[:-1]).float(), tokens[1:])
                if self.evaluates:
                    model.eval()
                    with torch.no_grad():
                        results.append(call(tokens[:-1]).sum())
                    model.train()
                loss.backward(retain_graph=self.twice)
                if self.twice:
                    loss.backward()
                results.append(loss.detach())
            if self.overlap not in ("backward", "both") or not self.interleaved:
                gradients = [param.grad.clone() for param in model.parameters() if param.grad is not None]
            optimizer.step()
        optimizer.zero_grad()
        if isinstance(optimizer, InterleavedAdamW):
            optimizer.close()
        return [*results, *gradients, *(value.detach().clone() for value in model.state_dict().values())]


def random_job(seed: int, same_length: bool) -> Job:
    draw = random.Random(seed)
    lengths = (9,) if same_length else (6, 9)
    return Job(
        seed,
        tuple(draw.choice(KINDS) for _ in range(draw.randint(2, 5))),
        *(draw.random() < share for share in (0.4, 0.3, 0.2, 0.25, 0.25, 0.25, 0.4)),
        tuple(tuple(draw.choice(lengths) for _ in range(draw.choice((1, 1, 2)))) for _ in range(5)),
        draw.choice(OVERLAPS),
        None if draw.random() < 0.6 else random_fault(draw),
    )


def random_fault(draw: random.Random) -> Fault:
    return Fault(draw.choice(FAULTS), draw.randrange(5), draw.randrange(5), draw.choice((Broken, KeyboardInterrupt)))


class CountingDevice(EmulatedDevice):
    """An emulated device that knows which memory is the host's."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.host: list[weakref.ref[torch.UntypedStorage]] = []

    def allocate_host(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        memory = super().allocate_host(*args, **kwargs)
        self.host.append(weakref.ref(memory.untyped_storage()))
        return memory


@contextmanager
def time_limit(seconds: float, what: str) -> Iterator[None]:
    """Return a context that raises TimeoutError in the main thread when it takes too long, also while that waits."""

    def end(*_: Any) -> None:
        raise TimeoutError(f"{what} has not ended after {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, end)
    # Again, should what is cleaned up wait, too. The time limit of the whole test goes on behind this one.
    left_s, _ = signal.setitimer(signal.ITIMER_REAL, seconds, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        signal.setitimer(signal.ITIMER_REAL, left_s)


class LiveBytes(TorchDispatchMode):  # type: ignore[misc]
    """Every storage that operations make, as long as it lives."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                storage = leaf.untyped_storage()
                self._storages[storage._cdata] = weakref.ref(storage)
        return result

    def nbytes(self, without: set[int]) -> int:
        alive = {key: storage for key, one in self._storages.items() if (storage := one()) is not None}
        return sum(storage.nbytes() for key, storage in alive.items() if key not in without)


@contextmanager
def watched(model: Model, device: CountingDevice) -> Iterator[list[int]]:
    """Return a context that lists the live bytes after each layer's forward.

    They are those of tensors that are made in it, without the layer's inputs and output, the host's and the model's."""
    seen: list[int] = []
    others: list[torch.Tensor] = [*model.parameters(), *model.buffers()]
    live = LiveBytes()

    def look(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        without = {tensor.untyped_storage()._cdata for tensor in [output, *args, *others]}
        without |= {storage._cdata for one in device.host if (storage := one()) is not None}
        seen.append(live.nbytes(without))

    handles = [layer.register_forward_hook(look) for layer in model.layers]
    # What the model itself holds on to.
    handles.append(model.embedding.register_forward_hook(lambda _, __, output: others.append(output)))
    with live:
        yield seen
    for handle in handles:
        handle.remove()
