"""One part of the step `smoke`, in a process of its own. Prints its result as JSON.

    python smoke_job.py MODE [--params 20e6]    # trains in a mode; or: graph, fork, direct-read, deterministic, kernels

The model only multiplies, element by element, so that a GPU and the CPU compute the
same gradients to the bit, and those of each parameter depend on all others: a parameter
that is read too early changes the digest. Its backwards are real: hooks, autograd's
thread and late operations all run. Some steps are clipped, and each has two
backwards.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from typing import Any

import torch
from step import ROOT, load, use_deterministic_algorithms
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from ebbtide.interleave import InterleavedOptimizer
from ebbtide.interleave.engine.errors import EngineError
from ebbtide.state_bytes import STATE_BYTES

STEPS, MICRO_BATCHES, GAINS = 6, 2, 8
ALL_POLICIES = (
    "zero-offload",
    "pipelined",
    "twin-flow:0.5",
    "interleaved:2",
    "adaptive",
    "gpu-only",
)
OVERLAPPING = ("pipelined", "interleaved:2", "adaptive")
REFERENCE, REMAINDER = "reference", "reference-remainder"
# Mode -> policies, options. References run on the CPU.
MODES: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    REFERENCE: (("zero-offload",), {}),
    REMAINDER: (("zero-offload",), {"rule": "adamw-remainder"}),
    "none": (ALL_POLICIES, {}),
    "streamed": (ALL_POLICIES, {"gradients": "streamed"}),
    "forward": (OVERLAPPING, {"overlap": "forward"}),
    "both": (OVERLAPPING, {"overlap": "both", "gradients": "streamed"}),
    "remainder": (
        OVERLAPPING,
        {"overlap": "forward", "gradients": "streamed", "rule": "adamw-remainder"},
    ),
    "storage": (OVERLAPPING, {"overlap": "forward", "gradients": "streamed"}),
}
SUBGROUPS, SLOTS = 10, 3
# Share of the state that host memory holds in the mode `storage`, with buffers.
HOST_SHARE = 0.7


class Gain(nn.Module):
    """Multiplies by its weight."""

    def __init__(self, length: int, generator: torch.Generator) -> None:
        super().__init__()
        self.weight = nn.Parameter(
            (1 + 0.1 * torch.randn(length, generator=generator)).bfloat16()
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


class DirectGain(nn.Module):
    """Multiplies by the weight of a child that is never called, as attention does."""

    def __init__(self, length: int, generator: torch.Generator) -> None:
        super().__init__()
        self.inner = Gain(length, generator)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.inner.weight


def make_model(params: int, direct: bool = False) -> nn.Sequential:
    generator = torch.Generator().manual_seed(0)
    # No subgroup ends with a tensor.
    gains: list[nn.Module] = [
        Gain(params // GAINS + 3, generator) for _ in range(GAINS)
    ]
    if direct:
        gains[1] = DirectGain(params // GAINS + 3, generator)
    # The first one is used twice.
    return nn.Sequential(*gains, gains[0])


def inputs(length: int, steps: int) -> torch.Tensor:
    """Return the inputs of each backward. Gradients have norms above and below 1 in
    turn."""
    generator = torch.Generator().manual_seed(1)
    batches = torch.randn(steps * MICRO_BATCHES, length, generator=generator)
    # Powers of two keep products exact.
    small = 2.0 ** -round(torch.tensor(4.0 * GAINS * length).sqrt().log2().item())
    for number, batch in enumerate(batches):
        batch *= small * (0.5 if number // MICRO_BATCHES % 3 else 8.0)
    return batches.bfloat16()


def digest(model: nn.Module, optimizer: InterleavedOptimizer) -> str:
    """Return a digest of all parameters, masters and moments."""
    optimizer.synchronize()
    hasher = hashlib.sha256()
    state = optimizer.state_dict()["state"]
    for number, param in enumerate(model.parameters()):
        for tensor in (
            param.detach(),
            *(state[number][key] for key in ("master", "exp_avg", "exp_avg_sq")),
        ):
            hasher.update(tensor.cpu().contiguous().view(torch.uint8).numpy())
    return hasher.hexdigest()


def budget_bytes(total: int) -> float:
    """Return the memory budget: half of the state, and three subgroups that are passing
    through."""
    return STATE_BYTES * total * (1 / 2 + SLOTS / SUBGROUPS)


def make_optimizer(
    model: nn.Module, policy: str, options: dict[str, Any]
) -> InterleavedOptimizer:
    total = sum(param.numel() for param in model.parameters())
    budget = None if policy == "gpu-only" else budget_bytes(total)
    defaults = {
        "lr": 1e-2,
        "subgroup_params": -(-total // SUBGROUPS),
        "memory_budget": budget,
        "max_grad_norm": 1.0,
    }
    if "overlap" in options:
        options = {**options, "model": model}
    return InterleavedOptimizer(
        model.parameters(), policy=policy, **{**defaults, **options}
    )


def backward(model: nn.Module, x: torch.Tensor) -> None:
    model(x).float().sum().backward()


def train(
    model: nn.Module,
    policy: str,
    options: dict[str, Any],
    device: torch.device,
    after_step: Callable[[InterleavedOptimizer], None] = lambda _: None,
) -> dict[str, Any]:
    """Train; return the digest, and the peak of device memory in addition to parameters
    and gradients."""
    model = model.to(device)
    batches = inputs(next(model.parameters()).numel(), STEPS).to(device)
    own_peak = peak_bytes(lambda: backward(model, batches[0]))
    for param in model.parameters():
        param.grad = None
    with closing(make_optimizer(model, policy, options)) as optimizer:

        def run() -> None:
            for number in range(STEPS):
                for x in batches[number * MICRO_BATCHES :][:MICRO_BATCHES]:
                    backward(model, x)
                optimizer.step()
                after_step(optimizer)
                optimizer.zero_grad()
            optimizer.synchronize()

        peak = peak_bytes(run)
        state_peak = None if peak is None or own_peak is None else peak - own_peak
        ran = optimizer.plan.counts()
        return {
            "digest": digest(model, optimizer),
            "state_peak_bytes": state_peak,
            "operations": ran,
        }


def peak_bytes(call: Callable[[], None]) -> int | None:
    """Return the peak of torch's device memory during a call; None without a GPU."""
    if not torch.cuda.is_available():
        call()
        return None
    torch.cuda.reset_peak_memory_stats()
    call()
    peak: int = torch.cuda.max_memory_allocated()
    return peak


def run_mode(mode: str, params: int, device: torch.device) -> dict[str, Any]:
    policies, options = MODES[mode]
    runs: dict[str, Any] = {}
    for policy in policies:
        if mode == "storage":
            with tempfile.TemporaryDirectory() as folder:
                memory = HOST_SHARE * STATE_BYTES * params + 16 * 2 * params / SUBGROUPS
                stored = {**options, "storage": folder, "host_memory_budget": memory}
                runs[policy] = train(make_model(params), policy, stored, device)
                runs[policy]["in_storage"] = "read" in runs[policy]["operations"]
        else:
            runs[policy] = train(make_model(params), policy, options, device)
    return {"runs": runs}


def run_direct_read(params: int, device: torch.device) -> dict[str, Any]:
    """Train with a weight that is read without a call of its module: the same bits, or
    an error that says so."""
    expected = train(
        make_model(params, direct=True), "zero-offload", {}, torch.device("cpu")
    )["digest"]
    runs: dict[str, Any] = {}
    for mode in ("forward", "both"):
        options = MODES[mode][1]
        try:
            run = train(make_model(params, direct=True), "pipelined", options, device)
        except EngineError as error:
            runs[mode] = {"error": str(error)}
        else:
            runs[mode] = {"same": run["digest"] == expected}
    return {"direct": runs}


def captured(call: Callable[[], Any], on_gpu: bool) -> Callable[[], Any]:
    """Return a function that repeats a call: as a CUDA graph, or without a GPU as it
    is."""
    if not on_gpu:
        return call
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    # torch.cuda.graph() would first wait for the device and collect garbage: late
    # updates would be over by then.
    with torch.cuda.stream(stream):
        graph.capture_begin()
        call()
        graph.capture_end()
    torch.cuda.current_stream().wait_stream(stream)
    return graph.replay


def run_graph(params: int, device: torch.device) -> dict[str, Any]:
    """Capture a graph of another model while updates are late; then train by replays of
    forward and backward."""
    on_gpu = device.type == "cuda"
    with torch.device(device):
        side, x, out = nn.Linear(64, 64), torch.ones(8, 64), torch.zeros(8, 64)
    side(x)
    same, late_ms = [], []

    def compute_beside() -> None:
        for _ in range(200):
            out.copy_(side(x))

    def capture_beside(optimizer: InterleavedOptimizer) -> None:
        with torch.no_grad():
            replay = captured(compute_beside, on_gpu)
            if len(same) % 2:
                begun = time.perf_counter()
                optimizer.synchronize()
                late_ms.append((time.perf_counter() - begun) * 1e3)
            out.zero_()
            replay()
            same.append(torch.equal(out, side(x)))

    beside = train(
        make_model(params), "pipelined", MODES["forward"][1], device, capture_beside
    )
    model = make_model(params).to(device)
    batches = inputs(next(model.parameters()).numel(), STEPS).to(device)
    static = torch.zeros_like(batches[:MICRO_BATCHES])

    def backwards() -> None:
        for param in model.parameters():
            param.grad = None
        for x in static:
            backward(model, x)

    with closing(make_optimizer(model, "pipelined", {})) as optimizer:
        replay = backwards
        for number in range(STEPS):
            static.copy_(batches[number * MICRO_BATCHES :][:MICRO_BATCHES])
            if number == STEPS // 2:
                replay = captured(backwards, on_gpu)
            replay()
            optimizer.step()
        replayed = digest(model, optimizer)
    digests = {"beside": beside["digest"], "replayed": replayed}
    return {
        "captured": on_gpu,
        **digests,
        "right": all(same),
        "late_after_capture_ms": late_ms,
    }


def run_fork(params: int, device: torch.device) -> dict[str, Any]:
    """Make a data loader with forked workers in each epoch, with and without late
    updates."""
    result: dict[str, Any] = {}
    for mode in ("none", "forward"):
        model = make_model(params).to(device)
        length = next(model.parameters()).numel()
        data = TensorDataset(inputs(length, 2).unflatten(0, (-1, 1)))
        epochs = []
        with closing(make_optimizer(model, "pipelined", MODES[mode][1])) as optimizer:
            for _ in range(4):
                begun = time.perf_counter()
                for (x,) in DataLoader(
                    data, num_workers=2, multiprocessing_context="fork"
                ):
                    backward(model, x[0, 0].to(device))
                    optimizer.step()
                    optimizer.zero_grad()
                epochs.append(time.perf_counter() - begun)
            result[mode] = {"epoch_s": epochs[1:], "digest": digest(model, optimizer)}
    return result


def run_deterministic(device: torch.device) -> dict[str, Any]:
    """Compute the gradients of a small GPT three times, as the steps do that compare
    losses."""
    use_deterministic_algorithms()
    with torch.device(device):
        torch.manual_seed(0)
        model = (
            load(ROOT / "examples" / "train_gpt.py")
            .GPT(512, 1024, 2, 256, 4)
            .bfloat16()
        )
        tokens = torch.randint(512, (4, 1025))
    bits = set()
    for _ in range(3):
        model.zero_grad()
        logits = model(tokens[:, :-1])
        F.cross_entropy(
            logits.flatten(0, 1).float(), tokens[:, 1:].flatten()
        ).backward()
        grads = [
            param.grad.cpu().contiguous().view(torch.uint8).numpy()
            for param in model.parameters()
        ]
        bits.add(hashlib.sha256(b"".join(grad.tobytes() for grad in grads)).hexdigest())
    return {"same": len(bits) == 1}


def run_kernels(device: torch.device) -> dict[str, Any]:
    """Run every kernel on small tensors against the reference, for a tool that checks
    their memory accesses."""
    from tests.interleave.engine.numerics import gpu_checks

    on_gpu = device.type == "cuda"
    lengths = [0, 1, 1024, 5_003] if on_gpu else [0, 1, 700]
    for begin in gpu_checks.BEGINS[: 2 if on_gpu else 1]:
        gpu_checks.check_updates(lengths, begin, device.type)
        gpu_checks.check_remainder_updates(lengths, begin, device.type)
    if on_gpu:
        gpu_checks.check_sums([0, 1, 70_001], gpu_checks.BEGINS, device.type)
        gpu_checks.check_fingerprints([0, 1, 70_001], gpu_checks.BEGINS, device.type)
    return {"kernels": "the bits of the reference"}


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    others = ("direct-read", "graph", "fork", "deterministic", "kernels")
    flags.add_argument("part", choices=[*MODES, *others])
    flags.add_argument("--params", type=float, default=20e6)
    args = flags.parse_args()
    on_cpu = args.part in (REFERENCE, REMAINDER) or not torch.cuda.is_available()
    device, params = torch.device("cpu" if on_cpu else "cuda"), round(args.params)
    if args.part in MODES:
        result = run_mode(args.part, params, device)
    elif args.part == "direct-read":
        result = run_direct_read(params, device)
    elif args.part == "graph":
        result = run_graph(params, device)
    elif args.part == "fork":
        result = run_fork(params, device)
    elif args.part == "deterministic":
        result = run_deterministic(device)
    else:
        result = run_kernels(device)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
