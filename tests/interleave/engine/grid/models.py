"""Small models whose layers read, write and save what layers of real models do."""

import random
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

WIDTH, VOCABULARY = 8, 11


@dataclass
class Shared:
    """A bias that a model hands to its layers, in an object, and changes between them;
    and a cache of their keys."""

    bias: torch.Tensor
    cache: list[torch.Tensor]


@torch.jit.script
def scripted_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x @ weight


def _linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


class Perceptron(nn.Module):  # type: ignore[misc]
    """Dropout, an operation in place, and a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.first = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.last = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = F.relu(self.first(self.norm(x)), inplace=True)
        return x + self.last(F.dropout(hidden, 0.2, self.training))


class Attention(nn.Module):  # type: ignore[misc]
    """Views of one storage, saved several times."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs = nn.Linear(WIDTH, 3 * WIDTH)
        self.outputs = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.inputs(x).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(0, 1) for part in parts)
        values = torch.softmax(q @ k.mT, -1) @ v
        return x + self.outputs(values.transpose(0, 1).flatten(1))


class OutsideOfCall(nn.Module):  # type: ignore[misc]
    """Reads the weight of a child that is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.attention(x[None], x[None], x[None], need_weights=False)[0][0]


class Encoder(nn.Module):  # type: ignore[misc]
    """Reads parameters of its children in another way when it is evaluated."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            WIDTH, 2, WIDTH, dropout=0.0, batch_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.encoder(x[None])[0]


class Cube(torch.autograd.Function):  # type: ignore[misc]
    """A kernel of somebody else's, which saves an input, a weight and an output."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        result = x * weight * weight
        ctx.save_for_backward(x, weight, result)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight, result = ctx.saved_tensors
        of_weight = (2 * gradient * x * weight + 0 * result).sum(0)
        return gradient * weight * weight, of_weight


class Custom(nn.Module):  # type: ignore[misc]
    """A custom function, a checkpoint of its own, and expanded and strided tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = _linear()
        self.scale = nn.Parameter(torch.ones(1, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = checkpoint(lambda y: torch.sin(self.linear(y)), x, use_reentrant=False)
        columns = inner[:, ::2].contiguous().repeat_interleave(2, 1)
        scaled = columns * self.scale.expand(len(x), -1)
        return x + Cube.apply(torch.tanh(scaled), self.linear.bias) * inner


class Residual(nn.Module):  # type: ignore[misc]
    """A linear layer beside its input; subclasses change how it is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = _linear()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(x) * self.factor()) * torch.sigmoid(x)

    def factor(self) -> float | torch.Tensor:
        return 1.0


class OwnGenerator(Residual):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(3)

    def __deepcopy__(self, memo: dict[int, Any]) -> "OwnGenerator":
        twin = OwnGenerator()
        twin.load_state_dict(self.state_dict())
        twin.generator.set_state(self.generator.get_state())
        return twin.train(self.training).to(self.linear.weight)

    def factor(self) -> float | torch.Tensor:
        if not self.training:
            return 1.0
        return float(torch.rand((), generator=self.generator))


class PythonRandom(Residual):
    def factor(self) -> float | torch.Tensor:
        return random.random() if self.training else 1.0


class NumpyRandom(Residual):
    def factor(self) -> float | torch.Tensor:
        return float(np.random.rand()) if self.training else 1.0


class Counter(Residual):
    """Divides by the number of its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def factor(self) -> float | torch.Tensor:
        self.calls += self.training
        return 1.0 / max(1, self.calls)


class Buffered(Residual):
    """Follows the mean of its calls in a buffer, which it assigns."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.mean = self.mean * 0.9 + 0.1 * x.detach().abs().mean()
        return super().forward(x)

    def factor(self) -> float | torch.Tensor:
        return self.mean


class Dropped(Residual):
    """Is left out at random, as LayerDrop does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and float(torch.rand(())) < 0.3:
            return x
        return super().forward(x)


class Biased(Residual):
    """Adds a bias that is given by keyword, or in an object."""

    def forward(
        self,
        x: torch.Tensor,
        bias: torch.Tensor | None = None,
        shared: Shared | None = None,
    ) -> torch.Tensor:
        if shared is not None:
            bias = shared.bias
        return x + torch.tanh(self.linear(x) + (0.0 if bias is None else bias))


class InObject(Biased):
    """Gets its bias in an object."""


class Caching(Residual):
    """Appends its values to a cache that is given by keyword, and attends to all of
    them."""

    def forward(self, x: torch.Tensor, shared: Shared | None = None) -> torch.Tensor:
        values = self.linear(x)
        if shared is None:
            return x + values
        shared.cache.append(values)
        keys = torch.cat(shared.cache)
        return x + torch.softmax(x @ keys.t(), -1) @ keys


class Normalized(nn.Module):  # type: ignore[misc]
    """Writes buffers in the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(WIDTH), _linear()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(self.norm(x)))


class MaxNorm(nn.Module):  # type: ignore[misc]
    """Scales rows of its own weight in the forward of training."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.rows = _linear(), nn.Embedding(5, WIDTH, max_norm=0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # A batch in evaluation that fails may end before this layer, and a second
        # scaling changes bits again.
        self.rows.max_norm = 0.5 if self.training else None
        return x + torch.tanh(
            self.linear(x) + self.rows(torch.arange(len(x), device=x.device) % 5)
        )


class Writing(nn.Module):  # type: ignore[misc]
    """Writes to its weight in the forward of training, by one of three functions."""

    def __init__(self, write: Callable[[nn.Parameter], Any]) -> None:
        super().__init__()
        self.linear, self.write = _linear(), write

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            with torch.no_grad():
                self.write(self.linear.weight)
        return x + torch.tanh(self.linear(x))


def _normalize(weight: nn.Parameter) -> None:
    weight.div_(weight.norm(dim=1, keepdim=True) + 0.1)


def _clamp(weight: nn.Parameter) -> None:
    weight.clamp_(-0.2, 0.2)


def _zero_row(weight: nn.Parameter) -> None:
    weight.data[0] = 0


class Convolution(nn.Module):  # type: ignore[misc]
    """A convolution whose weight has its channels last in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(2, 2, 3, padding=1)
        self.convolution.to(memory_format=torch.channels_last)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        image = x[None].unflatten(-1, (2, -1)).transpose(1, 2)
        result = self.convolution(image).transpose(1, 2).flatten(-2)[0]
        return x + torch.tanh(result)


class Twice(Residual):
    """Uses its weight twice."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(torch.tanh(self.linear(x))))


class Recurrent(nn.Module):  # type: ignore[misc]
    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.cell = kind(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.cell(x)[0]


class Experts(nn.Module):  # type: ignore[misc]
    """Calls one of its children at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(_linear() for _ in range(3))
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        expert = self.experts[self.calls // 2 % 3]
        self.calls += self.training
        return x + torch.tanh(expert(x))


class Direct(nn.Module):  # type: ignore[misc]
    """Reads the weight of a child, which it calls never, before or after."""

    def __init__(self, order: str, read: str) -> None:
        super().__init__()
        self.child, self.order, self.read = _linear(), order, read

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result = self.child(x) if self.order == "before" else x
        weight = self.child.weight
        if self.read == "scripted":
            result = result + scripted_product(x, weight)
        elif self.read == "function":
            result = result + Cube.apply(x, self.child.bias)
        elif self.read == "detached":
            result = result + x * weight.detach().abs().mean()
        elif self.read == "out":
            result = (
                result
                + torch.mul(weight.detach(), 2.0, out=torch.empty_like(weight)).mean()
            )
        elif self.read == "func.grad":
            of_weight = torch.func.grad(
                lambda value: F.linear(x, value).square().mean()
            )
            result = result + of_weight(weight).mean()
        elif self.read == "inner backward":
            result = result + self._gradient(x.detach()).mean()
        else:
            result = result + F.linear(x, weight)
        return torch.tanh(self.child(result) if self.order == "after" else result)

    def _gradient(self, x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            x.requires_grad_()
            loss = F.linear(x, self.child.weight).square().mean()
            (gradient,) = torch.autograd.grad(loss, x)
        return gradient.detach()


class View(nn.Module):  # type: ignore[misc]
    """Reads a view of its weight that it has kept."""

    def __init__(self) -> None:
        super().__init__()
        self.child = _linear()
        self.kept: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kept is None:
            self.kept = self.child.weight.detach()
        return torch.tanh(self.child(x + (x @ self.kept)))


class Functional(nn.Module):  # type: ignore[misc]
    """Calls a child with parameters that it has computed from the child's."""

    def __init__(self) -> None:
        super().__init__()
        self.child = _linear()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        halves = {name: param * 0.5 for name, param in self.child.named_parameters()}
        return x + torch.func.functional_call(self.child, halves, x)


class Scripted(nn.Module):  # type: ignore[misc]
    """Calls scripted code."""

    def __init__(self) -> None:
        super().__init__()
        self.code = torch.jit.script(nn.Sequential(_linear(), nn.Tanh(), _linear()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.code(x)


class Split(nn.Module):  # type: ignore[misc]
    """Outputs of which one is another's view, and a bias by position."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        left, right = torch.exp(-self.linear(x).square()).split(WIDTH, 1)
        return left * right + x


class Adapted(nn.Module):  # type: ignore[misc]
    """A frozen linear layer beside a trained product of low rank, as adapters of peft
    are."""

    def __init__(self, base_layer: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.first = nn.Linear(base_layer.in_features, 1, bias=False)
        self.last = nn.Linear(1, base_layer.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x) + self.last(self.first(x))

    @property
    def weight(self) -> torch.Tensor:
        """The weight of the base, which models ask for its dtype, as of peft's
        layers."""
        return self.base_layer.weight


def add_adapters(layer: nn.Module) -> None:
    """Freeze a layer, and put adapters beside its linear layers."""
    layer.requires_grad_(False)
    for module in list(layer.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear:
                setattr(module, name, Adapted(child))


def _parametrized(function: Callable[..., nn.Module], **options: Any) -> nn.Module:
    return nn.Sequential(function(_linear(), **options), nn.Tanh())


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "residual": Residual,
    "perceptron": Perceptron,
    "attention": Attention,
    "norm": lambda: nn.Sequential(nn.LayerNorm(WIDTH), _linear(), nn.Tanh()),
    "nested": lambda: nn.Sequential(nn.Sequential(_linear()), nn.Tanh(), _linear()),
    "outside of call": OutsideOfCall,
    "encoder": Encoder,
    "custom": Custom,
    "split": Split,
    "own generator": OwnGenerator,
    "random": PythonRandom,
    "numpy": NumpyRandom,
    "counter": Counter,
    "buffer": Buffered,
    "dropped": Dropped,
    "bias by keyword": Biased,
    "bias in an object": InObject,
    "cache": Caching,
    "batch norm": Normalized,
    "max norm": MaxNorm,
    "normalized weight": lambda: Writing(_normalize),
    "clamped weight": lambda: Writing(_clamp),
    "zeroed row": lambda: Writing(_zero_row),
    "weight norm": lambda: _parametrized(nn.utils.parametrizations.weight_norm, dim=1),
    "spectral norm": lambda: _parametrized(nn.utils.parametrizations.spectral_norm),
    "convolution": Convolution,
    "twice": Twice,
    "gru": lambda: Recurrent(nn.GRU),
    "lstm": lambda: Recurrent(nn.LSTM),
    "experts": Experts,
    "view": View,
    "functional": Functional,
    "scripted": Scripted,
    "wide": lambda: nn.Sequential(
        nn.Linear(WIDTH, 72), nn.Tanh(), nn.Linear(72, WIDTH)
    ),
    **{
        f"read by {read}, called {order}": partial(Direct, order, read)
        for order in ("never", "before", "after")
        for read in (
            "linear",
            "scripted",
            "function",
            "detached",
            "out",
            "func.grad",
            "inner backward",
        )
    },
}
# Layers that adapters may be added to.
ADAPTABLE = (
    "residual",
    "perceptron",
    "attention",
    "norm",
    "nested",
    "split",
    "counter",
    "buffer",
    "cache",
    "twice",
)
# Layers that write to their weights: the graph of a call before cannot be
# differentiated.
WRITERS = ("max norm", "normalized weight", "clamped weight", "zeroed row")


class Net(nn.Module):  # type: ignore[misc]
    """Layers between an embedding and a head, which may share their weight.

    Args:
        kinds: Names of LAYERS; a number is a layer that occurs before, again.
        tied: Whether the head has the weight of the embedding.
        reads_head: Whether the loss reads the head's weight without a call.
        checkpoints: Whether layers are checkpointed by torch: not, `reentrant` or
            `plain`.
        skips: Whether each layer's output is multiplied by the embedding.
        frozen: Numbers of layers that are not trained.
        adapted: Numbers of layers of which adapters alone are trained.
    """

    def __init__(
        self,
        kinds: tuple[str | int, ...],
        *,
        tied: bool = False,
        reads_head: bool = False,
        checkpoints: str | None = None,
        skips: bool = False,
        frozen: tuple[int, ...] = (),
        adapted: tuple[int, ...] = (),
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        layers: list[nn.Module] = []
        for kind in kinds:
            layers.append(layers[kind] if isinstance(kind, int) else LAYERS[kind]())
        self.layers = nn.ModuleList(layers)
        for number in frozen:
            layers[number].requires_grad_(False)
        for number in adapted:
            add_adapters(layers[number])
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        self.kinds, self.reads_head = kinds, reads_head
        self.checkpoints, self.skips = checkpoints, skips

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = start = self.embedding(tokens)
        shared = Shared(torch.ones(WIDTH, dtype=x.dtype, device=x.device), [])
        for layer in self.layers:
            shared.bias.mul_(0.5)
            x = self._call(layer, x, shared)
            if self.skips:
                x = x * start
        logits = x @ self.head.weight.t() if self.reads_head else self.head(x)
        return F.cross_entropy(logits.float(), tokens)

    def _call(self, layer: nn.Module, x: torch.Tensor, shared: Shared) -> torch.Tensor:
        if isinstance(layer, InObject | Caching):
            return layer(x, shared=shared)
        if isinstance(layer, Biased):
            return layer(x, bias=shared.bias)
        if (
            self.checkpoints
            and self.training
            and type(layer) in (Perceptron, Attention, Residual)
        ):
            return checkpoint(layer, x, use_reentrant=self.checkpoints == "reentrant")
        return layer(x)


def precision(autocast: bool, device: str) -> Any:
    """Return the context of a forward."""
    return torch.autocast(device, torch.bfloat16) if autocast else nullcontext()
