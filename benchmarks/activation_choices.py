"""Published choices for activations beside simulated ones: those of torchtitan's
`auto_perf_maxing`, and of prime-rl.

    PYTHONPATH=. python benchmarks/activation_choices.py

- torchtitan#3943 on one H100 publishes what is needed: peak and step of a job that
  keeps all, and of one that keeps the outputs of products ("SAC"). They give the bytes
  of both forms and the time to compute the rest again.
- torchtitan#3975 (4 H100) and #4636 (8 H100, whose model and batch follow from its FLOP
  a token and its memory) publish peak and step with full recomputation. The forms have
  the bytes per token and width of the jobs above; the time to compute elementwise work
  again is in proportion to the width, that of products to its square. What the step has
  beyond layers is that of full recomputation, and gradients are in memory all the time.
- prime-rl's baselines (main of 2026-08-21) are pairs with recomputation, and with the
  inputs of layers offloaded, too. Compute is fitted to the former.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from benchmarks.published import simulated
from benchmarks.tables import machine_line, table
from ebbtide.interleave.model.schedule import Schedule
from ebbtide.interleave.model.workload import (
    ActivationForm,
    Layer,
    Workload,
    with_layers,
)
from ebbtide.machines.catalog import preset
from ebbtide.machines.machine import Machine

GIB = 2**30
# Of activations, by token, layer and width, in both jobs of torchtitan#3943.
_EAGER_BYTES = 44.5
_SAC_SHARE = 0.405  # Of those bytes.


@dataclass(frozen=True)
class Model:
    """A decoder.

    Attributes:
        weights: Parameters of its layers.
        vocabulary: Tokens.
        elementwise: The time of what SAC computes again, beside that of products, at a
            width of 2,048.
    """

    name: str
    layers: int
    width: int
    weights: float
    vocabulary: int
    elementwise: float

    def token_flops(self, length: int) -> float:
        """Return the FLOP of a forward through the layers, by token of a sequence, with
        causal attention."""
        return 2 * self.weights + 2 * length * self.width * self.layers

    def forms(self, tokens: int, products_s: float) -> tuple[ActivationForm, ...]:
        """Return the forms of a layer's activations: all, SAC, and its input, which
        takes its forward again."""
        size = _EAGER_BYTES * tokens * self.width
        elementwise_s = products_s * self.elementwise * 2048 / self.width
        return (
            ActivationForm("all", size, 0.0),
            ActivationForm("SAC", _SAC_SHARE * size, elementwise_s),
            ActivationForm(
                "input", 2.0 * tokens * self.width, products_s + elementwise_s
            ),
        )


QWEN_1B = Model("Qwen3-1.7B", 28, 2048, 1.409e9, 151936, 1.2)
QWEN_14B = Model("Qwen3-14B", 40, 5120, 13.2e9, 151936, 1.2)
QWEN_32B = Model("Qwen3-32B", 64, 5120, 31.2e9, 151936, 1.2)
LLAMA_1B = Model("Llama3-1B", 16, 2048, 0.973e9, 128256, 0.43)
LLAMA_8B = Model("Llama3-8B", 32, 4096, 6.98e9, 128256, 0.43)


class Job:
    """A job of layers alone: each with its forward, twice that in the backward, and
    forms of activations."""

    def __init__(
        self,
        forms: tuple[ActivationForm, ...],
        layers: int,
        forward_s: float,
        machine: Machine,
    ) -> None:
        self.machine = replace(
            machine,
            gpu_update_params_per_s=1e15,
            step_overhead_s=0.0,
            host_memory_bytes=None,
        )
        one = Layer("layer", 1, forward_s, 2 * forward_s, forms)
        bare = Workload(
            "job",
            layers,
            layers,
            layers * forward_s,
            2 * layers * forward_s,
            0.0,
            state_bytes=0.0,
        )
        self._workload = with_layers(
            bare, [one._replace(name=f"layer {n}") for n in range(layers)], 1, "job"
        )

    def run(self, activations: str, free_bytes: float = 1e13) -> Schedule:
        """Simulate a choice within an amount of memory for the layers."""
        workload: Workload = replace(self._workload, gpu_free=((0.0, free_bytes),))
        return simulated(f"gpu-only,activations={activations}", workload, self.machine)


def one_gpu() -> list[list[str]]:
    """Compare the policy of torchtitan#3943 with `auto` under its peaks: steps over
    that of a job that keeps all."""
    rows = []
    for model, keep_s, keep_gb, sac_s, sac_gb, kept_share, published in (
        (
            LLAMA_1B,
            0.288,
            32.23,
            0.309,
            24.88,
            0.391,
            ((21.39, 0.331), (22.07, 0.323), (24.35, 0.306)),
        ),
        (
            QWEN_1B,
            0.540,
            46.96,
            0.619,
            34.95,
            0.419,
            ((29.49, 0.617), (30.32, 0.598), (33.76, 0.595)),
        ),
    ):
        # Layers have the share of their FLOP in the step; the rest is the vocabulary.
        flops = model.token_flops(2048)
        forward_s = (
            flops
            / (flops + 2 * model.vocabulary * model.width)
            * keep_s
            / 3
            / model.layers
        )
        total = (keep_gb - sac_gb) * 1e9 / (1 - kept_share) / model.layers
        forms = (
            ActivationForm("all", total, 0.0),
            ActivationForm("SAC", kept_share * total, (sac_s - keep_s) / model.layers),
            ActivationForm("input", 2.0 * 8192 * model.width, forward_s),
        )
        job = Job(forms, model.layers, forward_s, preset("h100-80gb").for_ranks(1))
        keep = job.run("keep")
        for peak_gb, step_s in published:
            best = job.run("auto", keep.peak_job_bytes() - (keep_gb - peak_gb) * 1e9)
            simulated_share = (best.iteration_s - keep.iteration_s) / keep_s
            rows.append(
                [
                    model.name,
                    f"{peak_gb:.2f} GB",
                    *_shares(step_s / keep_s - 1, simulated_share),
                ]
            )
    return rows


@dataclass(frozen=True)
class Sharded:
    """A job of torchtitan on several GPUs with its peak, GiB, and tokens a second with
    full recomputation."""

    model: Model
    ranks: int
    batch: int
    length: int
    full_gib: float
    full_rate: float

    def gain(self, peak_gib: float, link_bytes_per_s: float) -> float:
        """Simulate the gain in tokens a second of `auto` at a peak over full
        recomputation."""
        tokens = self.batch * self.length
        layer_flops = tokens * self.model.token_flops(self.length) / self.model.layers
        forms = self.model.forms(tokens, layer_flops / 600e12)
        machine = replace(
            preset("h100-80gb").for_ranks(self.ranks),
            h2d_bytes_per_s=link_bytes_per_s,
            d2h_bytes_per_s=link_bytes_per_s,
            duplex_bytes_per_s=None,
        )
        job = Job(forms, self.model.layers, forms[-1].recompute_s, machine)
        full = job.run("recompute")
        best = job.run("auto", full.peak_job_bytes() + (peak_gib - self.full_gib) * GIB)
        return (
            tokens
            / (tokens / self.full_rate - full.iteration_s + best.iteration_s)
            / self.full_rate
            - 1
        )


def several_gpus() -> list[list[str]]:
    """Compare gains over full recomputation in (nearly) the same memory.

    The rate of the link, whose path through the host all ranks share, is fitted to the
    first one."""
    qwen_32b = Sharded(QWEN_32B, 8, 1, 2048, 68.56, 1406)
    slow, fast = 4e9, 50e9
    for _ in range(12):
        rate = (slow * fast) ** 0.5
        slow, fast = (
            (slow, rate)
            if qwen_32b.gain(69.0, rate) > 1484 / 1406 - 1
            else (rate, fast)
        )
    print(
        "Rate of the link, fitted to the first row of the second table: "
        f"{fast / 1e9:.1f} GB/s\n"
    )
    rows = []
    for job, peak_gib, tokens_per_s in (
        (qwen_32b, 69.0, 1484),
        (qwen_32b, 72.0, 1487),
        (Sharded(QWEN_14B, 4, 8, 2048, 61.43, 3580), 61.62, 3617),
        (Sharded(QWEN_14B, 4, 16, 2048, 66.31, 4026), 66.91, 4135),
        (Sharded(QWEN_14B, 4, 8, 4096, 66.39, 3946), 66.93, 4103),
        (Sharded(LLAMA_8B, 4, 8, 2048, 34.22, 6553), 34.67, 7002),
        (Sharded(LLAMA_8B, 4, 16, 2048, 40.11, 7746), 40.31, 7750),
        (Sharded(LLAMA_8B, 4, 8, 4096, 40.14, 7442), 40.34, 7502),
    ):
        what = f"{job.ranks} GPUs, {job.batch} x {job.length:,}, {peak_gib:.2f} GiB"
        shares = _shares(tokens_per_s / job.full_rate - 1, job.gain(peak_gib, fast))
        rows.append([job.model.name, what, *shares])
    return rows


def pairs() -> list[list[str]]:
    """Compare prime-rl's steps and peaks with and without offload of the layers'
    inputs."""
    rows = []
    for name, card, ranks, layers, width, tokens, (step_s, peak), (
        offload_s,
        offload_peak,
    ) in (
        (
            "Qwen3-0.6B, LoRA",
            "h100-80gb",
            1,
            28,
            1024,
            65536,
            (13.156, 11.45),
            (13.401, 7.92),
        ),
        (
            "Qwen3-0.6B",
            "h100-80gb",
            1,
            28,
            1024,
            65536,
            (12.176, 19.56),
            (12.463, 16.08),
        ),
        (
            "Qwen3-4B, LoRA",
            "h100-80gb",
            1,
            36,
            2560,
            16384,
            (5.260, 23.30),
            (5.504, 20.57),
        ),
        (
            "Qwen3-4B, LoRA",
            "h100-80gb",
            1,
            36,
            2560,
            65536,
            (31.492, 41.99),
            (32.442, 31.06),
        ),
        (
            "INTELLECT-3, LoRA",
            "b200",
            8,
            46,
            4096,
            65536,
            (202.342, 153.61),
            (207.417, 131.49),
        ),
        (
            "Qwen3-235B-A22B, LoRA",
            "b200",
            8,
            94,
            4096,
            16384,
            (62.717, 161.52),
            (63.237, 150.34),
        ),
        (
            "INTELLECT-3, LoRA",
            "h200",
            8,
            46,
            4096,
            16384,
            (15.715, 89.72),
            (16.232, 84.23),
        ),
    ):
        # Two micro-batches a step: forward, recomputation and twice the forward in the
        # backward.
        forward_s = step_s / 2 / layers / 4
        size = 2.0 * tokens * width
        forms = (
            ActivationForm("all", 17 * size, 0.0),
            ActivationForm("input", size, forward_s),
        )
        job = Job(forms, layers, forward_s, preset(card).for_ranks(ranks))
        again, moved = job.run("recompute"), job.run("recompute-offload")
        slower = moved.iteration_s / again.iteration_s - 1
        saved = (again.peak_job_bytes() - moved.peak_job_bytes()) / GIB
        shares = _shares(offload_s / step_s - 1, slower)
        memory = f"{peak - offload_peak:.2f}", f"{saved:.2f}"
        rows.append([name, f"{ranks} x {card}, {tokens:,}", *shares, *memory])
    return rows


def _shares(published: float, simulated: float) -> list[str]:
    return [
        f"{100 * published:+.1f} %",
        f"{100 * simulated:+.1f} %",
        f"{100 * (simulated - published):+.1f}",
    ]


def main() -> None:
    """Print a table for each source."""
    print(f"{machine_line()}\n")
    columns = ["published", "simulated", "points"]
    table(["model", "peak", *columns], one_gpu())
    table(["model", "job and peak", *columns], several_gpus())
    table(
        ["model", "cards and tokens", *columns, "published GiB saved", "simulated"],
        pairs(),
    )


if __name__ == "__main__":
    main()
