"""Random training jobs whose forwards read parameters in every way known, and their results under an optimizer."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ebbtide.interleave.engine.devices.emulated import EmulatedDevice
from ebbtide.interleave.engine.errors import EngineError
from ebbtide.interleave.engine.interleaved_adamw import InterleavedAdamW
from tests.interleave.engine.training import MACHINE

WIDTH = 16


@torch.jit.script
def scripted_product(inputs: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return inputs @ weight


class _Square(torch.autograd.Function):  # type: ignore[misc]
    """A kernel of somebody else's, that gets a weight."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(inputs, weight)
        return inputs * weight * weight

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, weight = ctx.saved_tensors
        return gradient * weight * weight, (2 * gradient * inputs * weight).sum(0)


class Attention(nn.Module):  # type: ignore[misc]
    """Reads the weight of a child that is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.attention(inputs[None], inputs[None], inputs[None], need_weights=False)[0][0]


class Encoder(nn.Module):  # type: ignore[misc]
    """Reads parameters of its children in another way when it is evaluated."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 2, WIDTH, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.encoder(inputs[None])[0]


class Direct(nn.Module):  # type: ignore[misc]
    """Reads the weight of a child, which it calls never, before or after."""

    def __init__(self, order: str, read: str) -> None:
        super().__init__()
        self.child = nn.Linear(WIDTH, WIDTH)
        self.order, self.read = order, read

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        result = self.child(inputs) if self.order == "after" else inputs
        weight = self.child.weight
        if self.read == "scripted":
            result = result + scripted_product(inputs, weight)
        elif self.read == "function":
            result = result + _Square.apply(inputs, self.child.bias)
        elif self.read == "detached":
            result = result + inputs * weight.detach().abs().mean()
        elif self.read == "grad":
            result = result + torch.func.grad(lambda value: F.linear(inputs, value).square().mean())(weight).mean()
        else:
            result = result + F.linear(inputs, weight)
        return self.child(result) if self.order == "before" else result


class View(nn.Module):  # type: ignore[misc]
    """Reads a view of its weight that it has kept."""

    def __init__(self) -> None:
        super().__init__()
        self.child = nn.Linear(WIDTH, WIDTH)
        self.kept: torch.Tensor | None = None

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.kept is None:
            self.kept = self.child.weight.detach()
        return self.child(inputs + (inputs @ self.kept))


class Functional(nn.Module):  # type: ignore[misc]
    """Calls a child with parameters that it has computed from the child's."""

    def __init__(self) -> None:
        super().__init__()
        self.child = nn.Linear(WIDTH, WIDTH)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        halves = {name: param * 0.5 for name, param in self.child.named_parameters()}
        return torch.func.functional_call(self.child, halves, inputs)


class Experts(nn.Module):  # type: ignore[misc]
    """Calls one of its children at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.step = 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.experts[self.step % 3](inputs)


class Recurrent(nn.Module):  # type: ignore[misc]
    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.cell = kind(WIDTH, WIDTH)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.cell(inputs)[0]


class Writing(nn.Linear):  # type: ignore[misc]
    """Writes to its weight in the forward, as an embedding with a maximum norm does."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.weight.data[0] = 0
        return super().forward(inputs)


def _linear() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH)


BLOCKS: dict[str, Callable[[], nn.Module]] = {
    "linear": _linear,
    "norm": lambda: nn.LayerNorm(WIDTH),
    "attention": Attention,
    "encoder": Encoder,
    "view": View,
    "functional": Functional,
    "experts": Experts,
    "lstm": lambda: Recurrent(nn.LSTM),
    "gru": lambda: Recurrent(nn.GRU),
    "writing": lambda: Writing(WIDTH, WIDTH),
    "weight norm": lambda: nn.utils.parametrizations.weight_norm(_linear()),
    "spectral norm": lambda: nn.utils.parametrizations.spectral_norm(_linear()),
    "scripted": lambda: torch.jit.script(nn.Sequential(_linear(), nn.Tanh(), _linear())),
    "nested": lambda: nn.Sequential(nn.Sequential(_linear()), nn.Tanh(), _linear()),
    **{
        f"{read} {order}": lambda order=order, read=read: Direct(order, read)  # type: ignore[misc]
        for order in ("never", "before", "after")
        for read in ("linear", "scripted", "function", "detached", "grad")
    },
}


class Net(nn.Module):  # type: ignore[misc]
    """Blocks and a head, which may be tied to an embedding and is read by the loss where there is no call of it."""

    def __init__(self, draw: random.Random, kinds: list[str]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, WIDTH)
        self.blocks = nn.ModuleList(BLOCKS[kind]() for kind in kinds)
        self.head = nn.Linear(WIDTH, 11, bias=False)
        self.calls_head = draw.random() < 0.5
        self.reads_hook = draw.random() < 0.2
        if draw.random() < 0.4:
            self.head.weight = self.embedding.weight
        self.checkpoints = draw.choice([None, None, True, False])
        # These change with each call, or cannot be recomputed: torch.func.grad and scripted code take no checkpoints.
        excluded = ("spectral norm", "view", "writing", "grad", "scripted")
        self.checkpointed = [draw.random() < 0.5 and not kind.startswith(excluded) for kind in kinds]

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        values = self.embedding(tokens)
        for block, checkpointed in zip(self.blocks, self.checkpointed, strict=True):
            if checkpointed and self.checkpoints is not None and self.training:
                result = checkpoint(block, values, use_reentrant=self.checkpoints)
            else:
                result = block(values)
            values = values + torch.tanh(result)
        logits = self.head(values) if self.calls_head else values @ self.head.weight.t()
        loss = F.cross_entropy(logits.float(), tokens)
        return loss + self.head.weight.detach().float().square().mean() if self.reads_hook else loss


@dataclass
class RandomJob:
    """A job that is drawn from a seed."""

    seed: int

    def __post_init__(self) -> None:
        self.draw = random.Random(self.seed)
        torch.manual_seed(self.seed)
        self.kinds = self.kinds_of(self.draw)
        self.net = Net(self.draw, self.kinds).to(self.draw.choice([torch.bfloat16, torch.float32]))
        # What is scripted, a LSTM in half precision, or changed by each call cannot be compiled or recomputed.
        is_plain = {"linear", "norm", "attention", "experts", "nested", "linear never"}.issuperset(self.kinds)
        self.backend = self.draw.choice(["eager", "aot_eager"]) if is_plain and self.draw.random() < 0.3 else None
        self.call = self.draw.choice(["call", "call", "call", "forward", "functional", "hook"])
        self.accumulation = self.draw.choice([1, 1, 2])
        self.evaluates = self.draw.random() < 0.4
        self.reads_after = self.draw.choice([None, None, "ema", "data", "norm"])
        overlap = self.draw.choice(["forward", "forward", "both"])
        # Options of the optimizer that do not change the bits.
        self.options: dict[str, Any] = {
            "policy": self.draw.choice(["pipelined", "pipelined", "interleaved:2", "adaptive"]),
            "overlap": overlap,
            "gradients": "streamed" if overlap == "both" else self.draw.choice(["kept", "streamed"]),
            "subgroup_params": self.draw.choice([100, 400, 10**6]),
        }
        if self.options["policy"] == "adaptive":
            self.options |= {"machine": MACHINE, "memory_budget": 20e3}
        self.rate = self.rate_of(self.draw)
        # Streamed gradients cannot be set to zero in place.
        self.set_to_none = self.options["gradients"] == "streamed" or self.draw.random() < 0.5

    def kinds_of(self, draw: random.Random) -> list[str]:
        """Draw the blocks."""
        return draw.choices(list(BLOCKS), k=draw.randint(1, 4))

    def rate_of(self, draw: random.Random) -> float:
        """Draw the bandwidth of the link in both directions, in bytes/s."""
        return draw.choice([1e5, 3e5, 1e6, 1e7])

    def __str__(self) -> str:
        return f"seed {self.seed}: {self.kinds}, {self.call}, {self.backend}, {self.options}, {self.rate:g} B/s"

    def run(self, options: dict[str, Any], rate: float | None) -> tuple[list[float], str]:
        """Return the losses and a digest of parameters and state.

        Raises:
            EngineError: If the job does what the optimizer cannot follow.
        """
        net, losses = self.net, []
        device = EmulatedDevice(None, rate, rate, None)
        model = net
        tokens = torch.Generator().manual_seed(self.seed)
        arguments = {"lr": 1e-2, "max_grad_norm": 1.0, "threads": 1, "device": device, **options}
        if "overlap" in arguments:
            arguments["model"] = net
        optimizer = InterleavedAdamW(net.parameters(), **arguments)
        if self.backend is not None:
            model = torch.compile(net, backend=self.backend)
        average = [param.detach().clone() for param in net.parameters()]
        try:
            for step in range(4):
                for block in net.blocks:
                    block.step = step  # type: ignore[assignment]
                for _ in range(self.accumulation):
                    loss = self._loss(model, torch.randint(11, (6,), generator=tokens))
                    loss.backward()
                    losses.append(loss.item())
                optimizer.step()
                self._after_step(average, losses)
                if self.evaluates:
                    net.eval()
                    with torch.no_grad():
                        losses.append(self._loss(model, torch.arange(6)).item())
                    net.train()
                optimizer.zero_grad(set_to_none=self.set_to_none)
            state = optimizer.state_dict()["state"]
            tensors = [*net.parameters(), *average]
            tensors += [
                entry[name] for _, entry in sorted(state.items()) for name in ("master", "exp_avg", "exp_avg_sq")
            ]
            return losses, _digest(tensors)
        finally:
            optimizer.close()
            device.close()

    def _loss(self, model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
        if self.call == "forward":
            return model.forward(tokens)
        if self.call == "functional":
            return torch.func.functional_call(model, dict(model.named_parameters()), tokens)
        loss = model(tokens)
        if self.call == "hook":
            loss = loss + 1e-3 * sum(param.float().square().sum() for param in self.net.parameters())
        return loss

    def _after_step(self, average: list[torch.Tensor], losses: list[float]) -> None:
        params = list(self.net.parameters())
        if self.reads_after == "ema":
            with torch.no_grad():
                torch._foreach_lerp_(average, params, 0.5)
        elif self.reads_after == "data":
            for mean, param in zip(average, params, strict=True):
                mean.mul_(0.5).add_(param.data, alpha=0.5)
        elif self.reads_after == "norm":
            losses.append(float(nn.utils.get_total_norm(params)))


def _digest(tensors: list[torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


@contextmanager
def deterministic() -> Iterator[None]:
    """Let sums have one order: with one thread, scripted code that is not fused after some calls, and evaluations of
    torch's transformer layers without kernels of their own, which no layer with hooks has."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.jit.optimized_execution(False):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(True)
        torch.set_num_threads(threads)


def check(seed: int) -> str | None:
    """Run the job of a seed with and without overlap, and return how they differ; None if they do not.

    An EngineError of the run with overlap is no difference, if it says what to do.
    """
    with deterministic():
        plain = RandomJob(seed)
        options: dict[str, Any] = {"policy": "zero-offload", "subgroup_params": 10**6}
        if plain.backend is not None:
            # With the same graphs, whose sums have the same order.
            options["overlap"] = "none"
        expected = plain.run(options, None)
        job = RandomJob(seed)
        try:
            got = job.run(job.options, job.rate)
        except EngineError as error:
            return None if "call optimizer.synchronize()" in str(error) else f"{job}: {error}"
    return None if got == expected else f"{job}: {got}, and without overlap {expected}"
