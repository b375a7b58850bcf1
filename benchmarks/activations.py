"""Measure the cost of `offload_activations` where it moves nothing, and draw memory
where it moves much.

    python benchmarks/activations.py overhead
    python benchmarks/activations.py comparison
    python benchmarks/activations.py picture -o docs/pictures/activations.png

The job is the decoder of `examples/train_gpt.py` on the CPU, with an emulated device.
The overhead is CPU time of the training thread, of steps with and without in turn. The
comparison is the CPU time of the fingerprints, and of watching for effects, in steps
that recompute all layers. The picture counts what autograd holds for the backward.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch.autograd.graph import saved_tensors_hooks

from ebbtide.features.layers.engine import effects, recomputation
from ebbtide.features.layers.engine.memory import LayerMemoryCount
from ebbtide.features.layers.engine.model_layers import storages_of
from ebbtide.interleave import offload_activations
from ebbtide.interleave.engine.devices.emulated import EmulatedDevice

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from train_gpt import GPT

LAYERS = 12
_COLORS = ("#555555", "#0072b2", "#d55e00")


class LoggingDevice(EmulatedDevice):
    """An emulated device that logs the memory of activations over time."""

    def __init__(self, link_bytes_per_s: float | None = None) -> None:
        super().__init__(None, link_bytes_per_s, link_bytes_per_s)
        self.log: list[tuple[float, int]] = []

    def claim(self, nbytes: int) -> None:
        super().claim(nbytes)
        self.log.append((time.perf_counter(), self._claimed))

    def unclaim(self, nbytes: int) -> None:
        super().unclaim(nbytes)
        self.log.append((time.perf_counter(), self._claimed))


def make_step(model: GPT) -> Callable[[], None]:
    tokens = torch.randint(0, 64, (4, 64))

    def step() -> None:
        model(tokens).sum().backward()
        model.zero_grad()

    return step


def make_model() -> GPT:
    torch.manual_seed(0)
    return GPT(64, 64, LAYERS, 64, 4)


def overhead(repeats: int) -> None:
    """Print the median CPU time of a step without and with, of steps of one model in
    turn.

    Two models differ by more than that, with their memory."""
    model = make_model()
    step = make_step(model)
    offload_activations(model, memory_budget=1e10, device=EmulatedDevice())
    for _ in range(5):
        step()
    forwards = [vars(block).pop("forward") for block in model.blocks]
    times: dict[str, list[float]] = {
        name: [] for name in ("plain", "with", "plain again")
    }
    for repeat in range(repeats):
        items = [*times.items()]
        # Each is first, second and third equally often.
        for name, values in items[repeat % 3 :] + items[: repeat % 3]:
            for block, forward in zip(
                model.blocks, forwards if name == "with" else (), strict=False
            ):
                block.forward = forward
            start = time.thread_time()
            step()
            values.append(1e3 * (time.thread_time() - start))
            for block in model.blocks:
                vars(block).pop("forward", None)
    for name, values in times.items():
        ratio = statistics.median(
            value / base for value, base in zip(values, times["plain"], strict=True)
        )
        print(
            f"{name:12} median {statistics.median(values):6.2f} ms, "
            f"{100 * (ratio - 1):+.2f} % in pairs"
        )


class _Scale(torch.nn.Module):
    """A layer without any work."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


def hook_cost(steps: int) -> None:
    """Print what a step takes longer, in us of CPU time, of layers without work."""
    model = torch.nn.Sequential(*(_Scale() for _ in range(LAYERS)))

    def run(count: int) -> float:
        start = time.thread_time()
        for _ in range(count):
            model(torch.ones(2, 4)).sum().backward()
        return 1e6 * (time.thread_time() - start) / count

    offload_activations(model, memory_budget=1e10, device=EmulatedDevice())
    run(10)
    forwards = [vars(layer).pop("forward") for layer in model]
    differences = []
    for _ in range(5):
        plain = run(steps)
        for layer, forward in zip(model, forwards, strict=True):
            layer.forward = forward
        differences.append(run(steps) - plain)
        for layer in model:
            vars(layer).pop("forward")
    print(
        f"hooks of {LAYERS} layers: {min(differences):.0f} to {max(differences):.0f} "
        "us of CPU time a step"
    )


def comparison(repeats: int, width: int, layers: int, length: int) -> None:
    """Print which share of the CPU time of steps that recompute all layers the
    comparison takes."""
    torch.manual_seed(0)
    model = GPT(64, length, layers, width, width // 64)
    tokens = torch.randint(0, 64, (1, length))
    spent: dict[str, float] = {}

    def timed(name: str, function: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object) -> object:
            start = time.thread_time()
            try:
                return function(*args)
            finally:
                spent[name] = spent.get(name, 0.0) + time.thread_time() - start

        return call

    owner = offload_activations(model, activations="recompute", device=EmulatedDevice())
    for _ in range(4):
        model(tokens).sum().backward()
    recomputed = [*owner.choices.values()].count("recompute")
    recomputation.fingerprint_tensor = timed(
        "fingerprints", recomputation.fingerprint_tensor
    )
    effects.Watch.change = timed("watching", effects.Watch.change)
    effects.Watch.is_current = timed("watching", effects.Watch.is_current)
    recomputation.global_states = timed("generators", recomputation.global_states)
    shares: dict[str, list[float]] = {}
    for _ in range(repeats):
        spent.clear()
        start = time.thread_time()
        model(tokens).sum().backward()
        step_s = time.thread_time() - start
        for name, seconds in [*spent.items(), ("all", sum(spent.values()))]:
            shares.setdefault(name, []).append(seconds / step_s)
    each = ", ".join(
        f"{name} {100 * statistics.median(values):.2f} %"
        for name, values in shares.items()
    )
    print(
        f"width {width}, {length} tokens, {recomputed} of {layers} layers recomputed, "
        f"step {step_s:.2f} s: {each}"
    )


def memory_without() -> list[tuple[float, int]]:
    """Return what autograd holds over a step of the plain job."""
    model, device = make_model(), LoggingDevice()
    memory, own, step = (
        LayerMemoryCount(device, None, "activations"),
        storages_of(model),
        make_step(model),
    )

    def count(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own and not memory.is_counted(storage):
            memory.claim(storage.nbytes())
            memory.count(storage)
        return tensor.detach()

    for block in model.blocks:
        block.forward = _Hooked(block.forward, count)
    step()
    device.log.clear()
    step()
    return device.log


class _Hooked:
    """A forward whose saved tensors are counted."""

    def __init__(
        self,
        forward: Callable[..., torch.Tensor],
        count: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        self._forward, self._count = forward, count

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        with saved_tensors_hooks(self._count, lambda tensor: tensor):
            return self._forward(x)


def memory_with(
    layers: float, link_bytes_per_s: float
) -> tuple[list[tuple[float, int]], list[str]]:
    """Return the memory over a step, with a budget of some layers, and the layers'
    kinds."""
    model, device = make_model(), LoggingDevice(link_bytes_per_s)
    budget = layers * max(size for _, size in memory_without()) / LAYERS
    with offload_activations(model, memory_budget=budget, device=device) as activations:
        step = make_step(model)
        for _ in range(4):
            step()
        device.log.clear()
        step()
        return device.log, [*activations.choices.values()]


def picture(path: Path) -> None:
    from matplotlib.figure import Figure

    curves = [("kept: without offload_activations", memory_without())]
    for layers, rate in ((7.0, 4e7), (3.2, 2e9)):
        log, kinds = memory_with(layers, rate)
        counts = ", ".join(
            f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds)
        )
        curves.append(
            (f"budget of {layers:g} layers, link {rate / 1e9:g} GB/s: {counts}", log)
        )
    figure = Figure(figsize=(9, 3.4), dpi=110, layout="constrained")
    axes = figure.subplots()
    for (label, log), color in zip(curves, _COLORS, strict=True):
        start, end = log[0][0], log[-1][0]
        times = [(at - start) / (end - start) for at, _ in log]
        axes.step(
            times,
            [size / 2**20 for _, size in log],
            where="post",
            label=label,
            color=color,
            lw=1.4,
        )
    axes.set(
        xlabel="share of the time from the first saved tensor to the last released one",
        xlim=(0, 1),
        ylim=(0, None),
    )
    axes.set_ylabel("saved for the backward, MiB")
    axes.legend(fontsize=8, loc="upper right")
    figure.savefig(path)
    print(path)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("overhead", "comparison", "picture"))
    parser.add_argument("-o", "--output", type=Path, default=Path("activations.png"))
    parser.add_argument(
        "--repeats", type=int, default=200, help="pairs of steps; default 200"
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.what == "picture":
        picture(args.output)
    elif args.what == "comparison":
        for width, length in ((512, 512), (1024, 256), (2048, 128)):
            comparison(min(args.repeats, 5), width=width, layers=2, length=length)
    else:
        overhead(args.repeats)
        hook_cost(300)


if __name__ == "__main__":
    main()
