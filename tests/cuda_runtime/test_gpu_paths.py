"""Paths that a GPU has and an emulated device does not: queued copies, captures,
tables, streams, several devices."""

from tests.cuda_runtime.conftest import OnStandIn

# The job writes parameters on the host while copies of them could still be queued.
WRITE_AFTER_FORWARD = """
import torch
from ebbtide.interleave import stream_weights

def make():
    torch.manual_seed(0)
    return torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(4)]).cuda()

x = torch.randn(8, 256, device="cuda")
model = make()
with torch.no_grad():
    expected = make()(x).cpu()
    stream_weights(model, memory_budget=1e6)
    for _ in range(3):
        output = model(x)
        saved = [param.clone() for param in model.parameters()]
        for param in model.parameters():
            param.zero_()
        assert torch.equal(output.cpu(), expected)
        for param, values in zip(model.parameters(), saved):
            param.copy_(values)
# Weights without a gradient, after a backward.
for param in model.parameters():
    param.requires_grad_(False)
x.requires_grad_()
make()(x).sum().backward()
expected, x.grad = x.grad, None
model(x).sum().backward()
for param in model.parameters():
    param.zero_()
assert torch.equal(x.grad, expected)
"""

CAPTURE_AFTER_LATE_STEP = """
import torch
from ebbtide.interleave import InterleavedAdamW

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 16)).cuda()
optimizer = InterleavedAdamW(
    model.parameters(), policy="pipelined", overlap="forward", model=model, threads=1, subgroup_params=300
)
x, side = torch.ones(4, 16, device="cuda"), torch.cuda.Stream()

def train():
    optimizer.zero_grad()
    model(x).sum().backward()
    optimizer.step()

with torch.cuda.stream(side):
    for _ in range(3):
        train()
torch.cuda.current_stream().wait_stream(side)
assert optimizer._runner.is_late
graph = torch.cuda.CUDAGraph()
optimizer.zero_grad()
with torch.cuda.graph(graph):
    model(x).sum().backward()
for _ in range(2):
    graph.replay()
    optimizer.step()
train()
"""

TABLES_WITHOUT_MEMORY = """
import sys

import torch
from ebbtide.interleave import InterleavedOptimizer

def masters(fails):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 16)).bfloat16().cuda()
    optimizer = InterleavedOptimizer(
        model.parameters(), "adamw-remainder", lr=1e-2, policy="gpu-only", threads=1, memory_budget=1e8
    )
    x = torch.ones(4, 16, device="cuda", dtype=torch.bfloat16)
    for step in range(5):
        optimizer.zero_grad()
        model(x).float().square().sum().backward()
        torch.empty = without_tables if fails and step in (2, 3) else empty
        optimizer.step()
    torch.empty = empty
    values = [state["master"].clone() for state in optimizer.state_dict()["state"].values()]
    optimizer.close()
    return values

empty, refused = torch.empty, []

def without_tables(*args, **kwargs):
    if sys._getframe(1).f_code.co_name == "_load_table":
        refused.append(args)
        raise torch.OutOfMemoryError("CUDA out of memory.")
    return empty(*args, **kwargs)

expected, got = masters(False), masters(True)
assert refused
assert all(map(torch.equal, expected, got))
"""

RULES_AND_PAGEABLE_TABLES = """
import torch
from ebbtide.interleave.engine.numerics import reference, triton_kernel
from ebbtide.interleave.engine.numerics.reference import TensorUpdate
from ebbtide.interleave.engine.rules import find_rule

def updates(device):
    generator = torch.Generator().manual_seed(0)
    for rule in map(find_rule, ("lion", "adamw", "adamw-bf16")):
        gradient, param = torch.randn(2, 3000, generator=generator).to(device)
        state = [row.to(device) for row in rule.zero_rows(3000)]
        yield TensorUpdate(gradient, state, param, rule.scalars(rule.defaults, 1), rule)

on_device = list(updates("cuda"))
triton_kernel.gpu_update(on_device)
for got, expected in zip(on_device, updates("cpu"), strict=True):
    reference.update(expected.grad, expected.state, expected.out, expected.scalars, expected.rule)
    for one, other in zip((got.out, *got.state), (expected.out, *expected.state), strict=True):
        assert torch.equal(one.cpu(), other), got.rule
try:
    triton_kernel._launch(triton_kernel.compiled.load_table, 1, torch.ones(9, dtype=torch.int64), on_device[0].out, 9)
except ValueError as error:
    assert "cannot be accessed from Triton" in str(error)
else:
    raise AssertionError("pageable memory was not refused")
"""

REFUSED_LAUNCHES = """
import torch
from ebbtide.interleave.engine.devices.cuda import CudaDevice
from ebbtide.interleave.engine.errors import EngineError
from tests.cuda_runtime import runtime

device, ones = CudaDevice(torch.device("cuda")), torch.ones(8, device="cuda")
for start in (device.sums_of_squares, device.fingerprint):
    expected = start([ones])()
    runtime.fail("cudaLaunchKernel", 1)
    try:
        start([ones])
    except EngineError as error:
        assert "Triton Error [CUDA]: out of memory" in str(error), error
    else:
        raise AssertionError("the launch was not refused")
    assert start([ones])() == expected
"""

SEVERAL_DEVICES = """
import torch
from ebbtide.errors import UserError
from ebbtide.interleave import offload_activations, stream_weights

class Layer(torch.nn.Module):
    def __init__(self, device):
        super().__init__()
        self.linear, self.device = torch.nn.Linear(64, 64).to(device), device

    def forward(self, x):
        hidden = self.linear(x.to(self.device))
        return torch.nn.functional.gelu(hidden) * torch.sigmoid(hidden)

def gradients(moves):
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[Layer(f"cuda:{number // 2}") for number in range(4)])
    if moves:
        offload_activations(model, memory_budget=1e6, activations="offload")
    for _ in range(4):
        model.zero_grad()
        model(torch.ones(8, 64, device="cuda:0")).square().sum().backward()
    return model, [param.grad.cpu() for param in model.parameters()]

model, expected = gradients(False)
_, got = gradients(True)
assert all(map(torch.equal, expected, got))
try:
    stream_weights(model)
except UserError as error:
    assert "cuda:0, cuda:1" in str(error), error
else:
    raise AssertionError("not refused")
"""

# Branches of a layer on two streams: their backwards run there, too.
BRANCHES = """
import sys

import torch
from torch import nn
from ebbtide.interleave import offload_activations, stream_weights

side = torch.cuda.Stream()

class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.one, self.other = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x):
        stream = torch.cuda.current_stream()
        side.wait_stream(stream)
        with torch.cuda.stream(side):
            other = torch.tanh(self.other(x))
        x.record_stream(side)
        one = torch.tanh(self.one(x))
        stream.wait_stream(side)
        other.record_stream(stream)
        return one + other

def gradients(weights=None, activations=None):
    torch.manual_seed(0)
    model = nn.Sequential(*[Block(64) for _ in range(5)]).cuda()
    if weights:
        stream_weights(model, weights=weights)
    if activations:
        offload_activations(model, activations=activations)
    x, values = torch.randn(32, 64), []
    for _ in range(4):
        model.zero_grad()
        model(x.cuda()).square().mean().backward()
        torch.cuda.synchronize()
        values += [param.grad.cpu() for param in model.parameters()]
    return values

expected = gradients()
for options in ({"weights": "streamed"}, {"activations": "offload"}, {"activations": "recompute"},
                {"weights": "streamed", "activations": "offload"}):
    assert all(map(torch.equal, expected, gradients(**options))), options
"""

# Frozen layers, adapters and a number of streamed layers, with one optimizer each.
MOVED_LAYERS = """
import torch
from torch import nn
from ebbtide.interleave import InterleavedAdamW, move_layers
from tests.interleave.engine.grid.models import add_adapters

def make(kind):
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(5)])
    if kind == "frozen":
        model[:2].requires_grad_(False)
    if kind == "adapted":
        for layer in model:
            add_adapters(layer)
    return model

def train(kind, origin="cuda", **options):
    model = make(kind).to(origin)
    if options:
        moved = move_layers(model, device="cuda", **options)
        streamed = [kind == "streamed" for kind in moved.weights.values()]
        for layer, is_streamed in zip(model, streamed):
            for name, param in layer.named_parameters():
                stays = not is_streamed or (kind == "adapted" and param.requires_grad)
                assert param.device.type == ("cuda" if stays else "cpu"), name
    params = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.SGD(params, lr=0.1) if kind != "adapted" else InterleavedAdamW(params, lr=0.01, policy="pipelined", threads=1)
    for step in range(5):
        optimizer.zero_grad()
        model(torch.full((8, 64), step / 5, device="cuda")).square().mean().backward()
        optimizer.step()
    torch.cuda.synchronize()
    return [param.detach().cpu() for param in model.parameters()]

for kind in ("trained", "frozen", "adapted"):
    expected = train(kind)
    for options in ({"weights": "streamed"}, {"weights": "streamed:2", "activations": "recompute"},
                    {"weights": "auto", "memory_budget": 60e3}):
        assert all(map(torch.equal, expected, train(kind, **options))), (kind, options)
    # A model that the GPU does not hold.
    assert all(map(torch.equal, expected, train(kind, "cpu", weights="streamed"))), kind
"""

INPUT_ON_THE_HOST = """
import torch
from ebbtide.interleave import offload_activations

class Layer(torch.nn.Linear):
    def forward(self, lengths, x):
        return torch.nn.functional.gelu(super().forward(x))

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(Layer(64, 64) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = layer(torch.tensor([len(x)]), x)
        return x

model = Model().cuda()
moved = offload_activations(model, activations="offload")
for _ in range(4):
    model(torch.ones(8, 64, device="cuda")).sum().backward()
assert moved._mover.transfers.device.torch_device.type == "cuda"
"""


def test_streamed_weights__may_be_written_after_each_pass(
    on_stand_in: OnStandIn,
) -> None:
    on_stand_in(WRITE_AFTER_FORWARD, gbps=0.01)


def test_capture__waits_for_late_updates_before_it(on_stand_in: OnStandIn) -> None:
    on_stand_in(CAPTURE_AFTER_LATE_STEP)


def test_tables__are_read_from_the_host_where_the_device_has_no_memory(
    on_stand_in: OnStandIn,
) -> None:
    on_stand_in(TABLES_WITHOUT_MEMORY)


def test_updates__of_several_rules_run_what_triton_launches_with_memory_that_a_gpu_can_read(
    on_stand_in: OnStandIn,
) -> None:
    on_stand_in(RULES_AND_PAGEABLE_TABLES)


def test_sums_and_fingerprints__end_in_an_engine_error_where_a_launch_is_refused(
    on_stand_in: OnStandIn,
) -> None:
    on_stand_in(REFUSED_LAUNCHES)


def test_layers__of_several_devices_are_left_alone_or_refused(
    on_stand_in: OnStandIn,
) -> None:
    on_stand_in(SEVERAL_DEVICES, devices=2)


def test_layers__with_branches_on_two_streams_have_the_same_bits_without_races(
    on_stand_in: OnStandIn,
) -> None:
    done = on_stand_in(BRANCHES, jitter_us=1000, seed=1, order=1)
    assert "race" not in done.stderr, done.stderr[-2000:]


def test_activations__move_where_the_first_input_of_layers_is_on_the_host(
    on_stand_in: OnStandIn,
) -> None:
    on_stand_in(INPUT_ON_THE_HOST)


def test_moved_layers__frozen_and_with_adapters_have_the_bits_of_the_plain_job(
    on_stand_in: OnStandIn,
) -> None:
    on_stand_in(MOVED_LAYERS)
