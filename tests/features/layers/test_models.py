"""Activations and weights of layers in sharded, replicated and compiled models, and
with functions of their own."""

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from ebbtide.interleave import offload_activations, stream_weights
from ebbtide.interleave.engine.devices.emulated import EmulatedDevice
from ebbtide.interleave.engine.errors import DeviceMemoryError, EngineError
from tests.features.layers.stacks import (
    LAYER_BYTES,
    WEIGHT_BYTES,
    WIDTH,
    same,
    stack,
    train,
)


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist = torch.distributed
    if dist.is_initialized():
        # By a test of DeepSpeed in this process.
        yield
        return
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("kind", ["sharded", "ddp"])
def test_offload_activations__sharded_and_replicated_models(
    kind: str, one_rank: None
) -> None:
    expected, moved = local(train(parallel(kind), 4)), parallel(kind)
    with offload_activations(
        moved, memory_budget=2.2 * LAYER_BYTES, device=EmulatedDevice()
    ) as activations:
        assert same(local(train(moved, 4)), expected)
        assert "offload" in activations.choices.values()
        # Gathered parameters are not copied.
        assert activations.host_bytes <= 5 * LAYER_BYTES


@pytest.mark.parametrize("kind", ["sharded", "ddp"])
def test_stream_weights__sharded_and_replicated_models(
    kind: str, one_rank: None
) -> None:
    expected, moved = local(train(parallel(kind), 4)), parallel(kind)
    with stream_weights(moved, device=EmulatedDevice()) as streamed:
        assert same(local(train(moved, 4)), expected)
        # Shards stay, and are named.
        assert len(streamed.kept) == (10 if kind == "sharded" else 0)
        assert (streamed.peak_bytes > 0) == (kind == "ddp")


def test_stream_weights__under_ddp_on_a_gpu_is_an_error_that_names_the_remedy(
    one_rank: None,
) -> None:
    model = parallel("ddp")
    with stream_weights(model, device=EmulatedDevice()) as streamed:
        # As of a model on a GPU.
        streamed._mover.weights._torch_device = torch.device("cuda")
        with pytest.raises(
            EngineError,
            match="all_reduce the gradients of the model itself in a gloo group",
        ):
            train(model)
        streamed._mover.weights._torch_device = torch.device("cpu")


def parallel(kind: str) -> Any:
    """Return a model that is sharded, or replicated, over one rank."""
    plain = stack()
    if kind == "ddp":
        return nn.parallel.DistributedDataParallel(plain)
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
    for layer in plain.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(plain, mesh=mesh)


def local(results: list[Any]) -> list[torch.Tensor]:
    return [one.to_local() if hasattr(one, "to_local") else one for one in results]


class KeptReferences(torch.autograd.Function):  # type: ignore[misc]
    """A product that keeps references to its inputs, in place of saving them."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.x, ctx.weight = x, weight
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return gradient @ ctx.weight, gradient.t() @ ctx.x


class LayerOfReferences(nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(KeptReferences.apply(x, self.weight))
        return KeptReferences.apply(y, self.weight) + y


@pytest.mark.parametrize("what", ["weights", "activations"])
def test_custom_functions_that_keep_references__have_the_same_bits_or_an_error_that_names_the_layer(
    what: str,
) -> None:
    def model() -> Any:
        plain = stack()
        plain.layers = nn.ModuleList(LayerOfReferences() for _ in range(5))
        return plain

    move: Any
    move, layer_bytes = (
        (stream_weights, WEIGHT_BYTES)
        if what == "weights"
        else (offload_activations, LAYER_BYTES)
    )
    expected = train(model(), 5)
    for layers in (11, 2.2):
        moved = model()
        with move(
            moved, memory_budget=layers * layer_bytes, device=EmulatedDevice()
        ) as owner:
            if layers > 9:
                assert same(train(moved, 5), expected)
            else:
                error = (
                    r"layer layers\.\d: layers need .*: raise it, .* custom autograd "
                    r"functions use save_for_backward"
                )
                with pytest.raises(DeviceMemoryError, match=error):
                    train(moved, 5)
            assert owner.peak_bytes <= layers * layer_bytes
            gc.collect()
            assert owner.used_bytes == 0


def test_layer_forward__is_not_misled_by_what_a_recorder_calls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    call = property(
        lambda module: vars(module).get("_compiled_call_impl") or module._call_impl
    )
    model = stack()
    monkeypatch.setattr(nn.Module, "_compiled_call_impl", call)
    with offload_activations(model, device=EmulatedDevice()):
        assert all("forward" in vars(layer) for layer in model.layers)
