"""Exposed time of the optimizer with updates inside the backward and under the next
forward, beside its prediction.

    python benchmarks/overlap_steps.py [--params 48e6] [--steps 12] [--clipped 0 0.05 0.5 1]

The device is emulated: its link is throttled, the updates of the CPU are real. The
job's forward and backward are timed waits, so that they take no core. Each policy
trains the same job in turns; a share of the steps is clipped. Exposed time is the
iteration less that of the job without an optimizer. Predictions use the rates measured
here before, and the policy's plan at the end. The fingerprints and norms that the
emulated device computes on the job's thread are measured alone, as the overhead of a
step. Prints Markdown.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from dataclasses import dataclass, replace
from typing import Any

import torch

from ebbtide.interleave import InterleavedAdamW
from ebbtide.interleave.compare.testbed import Testbed, find_testbed
from ebbtide.interleave.simulation.simulator import simulate_steps

LAYERS = 8
# Steps before the plan follows the job's phases.
WARM_UP = 8
MAX_NORM = 1.0
POLICIES = ("none", "forward", "backward", "both", "auto")


class _Wait(torch.autograd.Function):  # type: ignore[misc]
    """A layer that waits in the forward and in the backward, whose gradient of the
    weight is given."""

    @staticmethod
    def forward(
        ctx: Any, inputs: torch.Tensor, weight: torch.Tensor, layer: Layer
    ) -> torch.Tensor:
        ctx.layer = layer
        time.sleep(layer.forward_s)
        return inputs.clone()

    @staticmethod
    def backward(
        ctx: Any, gradient: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, None]:
        time.sleep(ctx.layer.backward_s)
        return gradient, ctx.layer.gradient, None


class Layer(torch.nn.Module):  # type: ignore[misc]
    """A layer of timed waits.

    Args:
        params: Number of parameters.
        forward_s: Time of its forward; its backward takes `backward_s`.
        backward_s: Time of its backward.
    """

    def __init__(self, params: int, forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(params).to(torch.bfloat16))
        self.gradient = torch.empty(params, dtype=torch.bfloat16)
        self.forward_s, self.backward_s = forward_s, backward_s

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return _Wait.apply(inputs, self.weight, self)


@dataclass(frozen=True)
class Shape:
    """Size of the job.

    Attributes:
        params: Parameters of all layers.
        forward_s: Time of the forward.
        backward_s: Time of the backward.
    """

    params: int
    forward_s: float
    backward_s: float


@dataclass(frozen=True)
class Run:
    """Times of a policy, s.

    Attributes:
        iteration_s: Median iteration.
        exposed_s: Median exposed time, mean over clipped and other steps.
        predicted_s: Predicted exposed time.
        speculated: Subgroups that the plan at the end speculates.
    """

    iteration_s: float
    exposed_s: float
    predicted_s: float
    speculated: int


def make_layers(shape: Shape) -> list[Layer]:
    torch.manual_seed(0)
    return [
        Layer(
            shape.params // LAYERS, shape.forward_s / LAYERS, shape.backward_s / LAYERS
        )
        for _ in range(LAYERS)
    ]


def measure_job(shape: Shape, steps: int) -> float:
    """Return the median iteration of the job without an optimizer, s."""
    model = torch.nn.Sequential(*make_layers(shape))
    inputs = torch.zeros(1, requires_grad=True)
    times = []
    for _ in range(steps):
        begin_s = time.perf_counter()
        model.zero_grad()
        model(inputs).sum().backward()
        times.append(time.perf_counter() - begin_s)
    return statistics.median(times)


def train(
    overlap: str, shape: Shape, clipped: float, steps: int, testbed: Testbed
) -> Run:
    job_s = measure_job(shape, steps)
    layers = make_layers(shape)
    model = torch.nn.Sequential(*layers)
    options: dict[str, Any] = (
        {} if overlap == "none" else {"overlap": overlap, "model": model}
    )
    device = testbed.make_device()
    optimizer = InterleavedAdamW(
        model.parameters(),
        policy="pipelined",
        machine=testbed.machine,
        subgroup_params=shape.params // LAYERS // 2,
        gradients="streamed",
        max_grad_norm=MAX_NORM,
        threads=testbed.threads,
        device=device,
        **options,
    )
    inputs = torch.zeros(1, requires_grad=True)
    times: dict[bool, list[float]] = {False: [], True: []}
    try:
        for step in range(WARM_UP + steps):
            # Spread evenly: the Bresenham rule.
            is_clipped = int((step + 1) * clipped) > int(step * clipped)
            for layer in layers:
                layer.gradient.fill_(1.0 if is_clipped else 1e-6)
            begin_s = time.perf_counter()
            model.zero_grad()
            model(inputs).sum().backward()
            optimizer.step()
            if step >= WARM_UP:
                times[is_clipped].append(time.perf_counter() - begin_s)
        optimizer.synchronize()
        workload = replace(
            optimizer._runner.planner.workload,
            forward_s=shape.forward_s,
            backward_s=shape.backward_s,
            clip_active_share=clipped,
        )
        plan = optimizer.plan
    finally:
        optimizer.close()
        if device is not None:
            device.close()
    compute_s = shape.forward_s + shape.backward_s
    predicted = simulate_steps(plan, workload, testbed.machine)
    shares = {
        kind: len(values) / sum(map(len, times.values()))
        for kind, values in times.items()
    }
    iteration_s = sum(
        shares[kind] * statistics.median(values)
        for kind, values in times.items()
        if values
    )
    return Run(
        iteration_s,
        iteration_s - job_s,
        predicted.mean("iteration_s") - compute_s,
        len(plan.speculated),
    )


def measure_overhead(shape: Shape, testbed: Testbed) -> float:
    """Return the time that a step's fingerprints and norm of all gradients take, s."""
    device = testbed.make_device()
    assert device is not None
    values = [
        torch.zeros(shape.params // LAYERS, dtype=torch.bfloat16) for _ in range(LAYERS)
    ]
    times = []
    for _ in range(5):
        begin_s = time.perf_counter()
        for start in (device.fingerprint, device.fingerprint, device.sums_of_squares):
            start(values)()
        times.append(time.perf_counter() - begin_s)
    device.close()
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--params", type=float, default=48e6)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--link", type=float, default=1e9, help="bytes/s of the emulated link, each way"
    )
    parser.add_argument("--forward", type=float, default=0.15, help="s")
    parser.add_argument("--backward", type=float, default=0.45, help="s")
    parser.add_argument(
        "--clipped", type=float, nargs="+", default=[0.0, 0.05, 0.5, 1.0]
    )
    arguments = parser.parse_args()
    shape = Shape(int(arguments.params), arguments.forward, arguments.backward)
    testbed = find_testbed(shape.params, 0.0, arguments.link, None)
    machine = replace(testbed.machine, step_overhead_s=measure_overhead(shape, testbed))
    testbed = replace(testbed, machine=machine)
    print(
        f"{shape.params / 1e6:.0f} M parameters, forward {shape.forward_s} s, "
        f"backward {shape.backward_s} s;",
        end=" ",
    )
    print(
        f"link {arguments.link / 1e9:g} GB/s, CPU "
        f"{(machine.cpu_update_params_per_s or 0) / 1e6:.0f} Mparam/s,",
        end=" ",
    )
    print(f"overhead of a step {1e3 * (machine.step_overhead_s or 0):.0f} ms\n")
    print(
        "| clipped | overlap | speculated | iteration | exposed | of `none` | "
        "predicted | measured / predicted |"
    )
    print("| ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    for clipped in arguments.clipped:
        runs: dict[str, list[Run]] = {overlap: [] for overlap in POLICIES}
        for _ in range(arguments.rounds):
            for overlap in POLICIES:
                runs[overlap].append(
                    train(overlap, shape, clipped, arguments.steps, testbed)
                )
                gc.collect()
        medians = {
            overlap: tuple(
                statistics.median(getattr(run, key) for run in each)
                for key in Run.__dataclass_fields__
            )
            for overlap, each in runs.items()
        }
        for overlap, (
            iteration_s,
            exposed_s,
            predicted_s,
            speculated,
        ) in medians.items():
            times = [
                f"{1e3 * seconds:.0f} ms"
                for seconds in (iteration_s, exposed_s, predicted_s)
            ]
            ratios = [
                f"{exposed_s / other:.2f}"
                for other in (medians["none"][1], predicted_s)
            ]
            cells = [
                f"{clipped:.0%}",
                overlap,
                f"{speculated:.0f}",
                *times[:2],
                ratios[0],
                times[2],
                ratios[1],
            ]
            print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
