"""The stand-in behaves as CUDA documents where the engine and the recorder rely on
it."""

import pytest

from tests.cuda_runtime.conftest import OnStandIn

TRAINING = """
import torch
from torch import nn
def train(device):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 4)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for x in torch.randn(3, 8, 16):
        model(x.to(device)).square().mean().backward(); optimizer.step(); optimizer.zero_grad()
    return [param.detach().cpu() for param in model.parameters()]
assert all(map(torch.equal, train("cpu"), train("cuda")))
"""


@pytest.mark.parametrize("seed", [1, 2])
def test_kernels__compute_the_bits_of_the_cpu_on_their_stream(
    on_stand_in: OnStandIn, seed: int
) -> None:
    on_stand_in(TRAINING, jitter_us=500, seed=seed)


def test_batch_norm__has_the_bits_of_the_cpu_in_training_and_evaluation_and_in_half_precision(
    on_stand_in: OnStandIn,
) -> None:
    script = """
import itertools, torch
from torch import nn
def run(device, dtype, autocast, training, affine):
    torch.manual_seed(0)
    layer = nn.BatchNorm1d(8, affine=affine).to(device, dtype).train(training)
    x = torch.randn(6, 8).to(device, dtype).requires_grad_()
    with torch.autocast(device, torch.bfloat16, enabled=autocast):
        y = layer(nn.functional.linear(x, torch.eye(8, device=device, dtype=dtype)))
    y.float().square().mean().backward()
    return [one.detach().cpu() for one in (y, x.grad, *(param.grad for param in layer.parameters()), *layer.buffers())]
types = [(torch.float32, False), (torch.bfloat16, False), (torch.float16, False), (torch.float32, True)]
for (dtype, autocast), *options in itertools.product(types, (True, False), (True, False)):
    expected, got = (run(device, dtype, autocast, *options) for device in ("cpu", "cuda"))
    assert all(map(torch.equal, expected, got)), (dtype, autocast, options)
"""
    on_stand_in(script)


def test_random_numbers__are_those_of_the_device_when_a_kernel_is_launched(
    on_stand_in: OnStandIn,
) -> None:
    script = """
import torch
def draw():
    torch.manual_seed(0)
    device = torch.randn(1000, device="cuda")
    torch.manual_seed(0)
    return device, torch.randn(5)
device, host = draw()
for _ in range(5):
    assert all(map(torch.equal, draw(), (device, host)))
state = torch.cuda.get_rng_state()
masked = torch.nn.functional.dropout(device, 0.3)
assert not torch.nn.functional.dropout(device, 0.3).equal(masked)
torch.cuda.set_rng_state(state)
assert torch.nn.functional.dropout(device, 0.3).equal(masked)
"""
    on_stand_in(script, jitter_us=5000)


def test_allocators__end_with_an_error_at_the_limit_of_memory(
    on_stand_in: OnStandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = """
import torch
kept = [torch.ones(length, 1 << 18, device="cuda") for length in (1, 3, 7, 30)]
assert [float(one.sum()) for one in kept] == [length * 2.0**18 for length in (1, 3, 7, 30)]
try:
    torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    raise SystemExit("no error")
except torch.cuda.OutOfMemoryError:
    pass
del kept
torch.cuda.empty_cache()
free, total = torch.cuda.mem_get_info()
assert free == total == 256 << 20, (free, total)
"""
    for settings in ("", "expandable_segments:True", "backend:cudaMallocAsync"):
        monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", settings)
        on_stand_in(script, bytes=256 << 20)


def test_allocators__without_a_cache_free_what_they_have_allocated(
    on_stand_in: OnStandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = """
import torch
for _ in range(3):
    nothing = [torch.empty(0, device="cuda") for _ in range(3)]
    kept = [torch.ones(1 << 20, device="cuda") for _ in range(3)]
    assert {tensor.data_ptr() for tensor in nothing} == {0}
    del nothing
    kept.append(torch.ones(1 << 20, device="cuda"))
    assert sum(tensor.sum() for tensor in kept) == 4 << 20
    del kept
    free, total = torch.cuda.mem_get_info()
    assert free == total, (free, total)
"""
    monkeypatch.setenv("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")
    on_stand_in(script)


def test_device_memory__is_no_memory_of_the_host(on_stand_in: OnStandIn) -> None:
    script = """
import ctypes, torch
ctypes.string_at(torch.ones(8, device="cuda").data_ptr(), 4)
"""
    assert on_stand_in(script, succeeds=False).returncode == -11


def test_copies__wait_for_the_host_only_if_its_memory_is_pageable(
    on_stand_in: OnStandIn,
) -> None:
    script = """
import time, torch
from tests.cuda_runtime import runtime
device = torch.ones(1 << 20, device="cuda")
pinned, pageable = torch.empty(1 << 20, pin_memory=True), torch.empty(1 << 20)
torch.cuda.synchronize()
pinned.copy_(device, non_blocking=True)
assert not torch.cuda.current_stream().query()
torch.cuda.synchronize()
assert runtime.pageable_bytes("d2h") == 0
pageable.copy_(device, non_blocking=True)
assert torch.cuda.current_stream().query() and runtime.pageable_bytes("d2h") == 4 << 20
"""
    on_stand_in(script, gbps=0.05)


def test_races__are_reported_with_both_lines(on_stand_in: OnStandIn) -> None:
    script = """
import torch
from tests.cuda_runtime import runtime
one, other = torch.cuda.Stream(), torch.cuda.Stream()
values = torch.zeros(1000, device="cuda")
torch.cuda.synchronize()
with torch.cuda.stream(one):
    values.add_(1)
other.wait_stream(one)
with torch.cuda.stream(other):
    values.mul_(2)
assert runtime.race_count() == 0
with torch.cuda.stream(one):
    values.add_(1)
assert runtime.race_count() > 0
"""
    report = on_stand_in(script, order=1).stderr
    assert all(name in report for name in ("aten.mul_.Tensor", "aten.add_.Tensor"))
    assert report.count(".py:") >= 2


def test_captures__refuse_what_is_unsafe_and_replay_in_order(
    on_stand_in: OnStandIn,
) -> None:
    script = """
import torch
total, one = torch.zeros(4, device="cuda"), torch.ones(4, device="cuda")
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    total.add_(one)
    total.mul_(2)
graph.replay(); graph.replay()
assert total.tolist() == [6.0] * 4
try:
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        torch.cuda.synchronize()
    raise SystemExit("no error")
except torch.AcceleratorError:
    pass
"""
    on_stand_in(script)


def test_legacy_stream__and_blocking_streams_wait_for_each_other(
    on_stand_in: OnStandIn,
) -> None:
    script = """
import ctypes, torch
from tests.cuda_runtime import runtime
handle = ctypes.c_void_p()
torch.zeros(1, device="cuda")
assert not ctypes.CDLL(None).cudaStreamCreate(ctypes.byref(handle))
blocking = torch.cuda.ExternalStream(handle.value)
values = torch.zeros(1000, device="cuda")
with torch.cuda.stream(blocking):
    values.add_(1)
values.mul_(2)
with torch.cuda.stream(blocking):
    values.add_(1)
torch.cuda.synchronize()
assert values.tolist() == [3.0] * 1000 and runtime.race_count() == 0
"""
    on_stand_in(script, jitter_us=2000, order=1)


def test_failures__are_those_that_tests_ask_for(on_stand_in: OnStandIn) -> None:
    script = """
import torch
from tests.cuda_runtime import runtime
values = torch.ones(8, device="cuda")
runtime.fail("cudaLaunchKernel", 2)
values.add_(1)
try:
    values.add_(1)
    raise SystemExit("no error")
except torch.AcceleratorError:
    pass
values.add_(1)
assert values.tolist() == [3.0] * 8
runtime.fail("", 1, error=700, sticky=True)
for _ in range(2):
    try:
        torch.cuda.synchronize()
        raise SystemExit("no error")
    except torch.AcceleratorError as error:
        assert "illegal memory access" in str(error)
runtime.fail("", 0)
"""
    on_stand_in(script)


def test_process__ends_cleanly_after_an_exception(on_stand_in: OnStandIn) -> None:
    script = """
import torch
for _ in range(50):
    torch.ones(1000, device="cuda").add_(1)
raise RuntimeError("the end")
"""
    done = on_stand_in(script, succeeds=False, jitter_us=1000)
    assert done.returncode == 1
    assert done.stderr.strip().endswith("RuntimeError: the end")


def test_kernels__collect_no_garbage_whose_finalizers_wait_for_the_device(
    on_stand_in: OnStandIn,
) -> None:
    script = """
import gc, weakref, torch
from tests.cuda_runtime import runtime

class Cycle:
    def __init__(self):
        self.own = self

def make_garbage():
    for _ in range(2000):
        weakref.finalize(Cycle(), torch.cuda.synchronize)

runtime.launch("garbage", make_garbage, [], [])
torch.cuda.synchronize()
assert gc.isenabled()
"""
    on_stand_in(script, dump_s=200)


def test_fork__leaves_the_child_without_devices(on_stand_in: OnStandIn) -> None:
    script = """
import os, torch
torch.ones(1, device="cuda")
child = os.fork()
if not child:
    try:
        torch.ones(1, device="cuda")
    except RuntimeError:
        os._exit(7)
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
"""
    on_stand_in(script)


def test_fork__lets_the_child_end_where_its_parent_waits_for_a_time(
    on_stand_in: OnStandIn,
) -> None:
    script = """
import os, signal, sys
child = os.fork()
if not child:
    signal.alarm(60)
    sys.exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
"""
    on_stand_in(script, dump_s=500)
