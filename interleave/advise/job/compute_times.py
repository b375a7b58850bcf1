"""The times of forward and backward on a machine: by arithmetic, or scaled from the machine they were recorded on."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ebbtide.errors import MachineError, WorkloadError
from ebbtide.interleave.advise.job.training_job import ComputeTimes, TunableSettings
from ebbtide.machines.gpu_compute import GpuCompute
from ebbtide.machines.machine import Machine
from ebbtide.profiler.trace import Trace

# Published decoders from 1e9 to 1e11 parameters have about this width per layer (GPT-3 6.7B: 128, Llama 65B: 102).
_WIDTH_PER_LAYER = 128
# Weights of a layer: 4 h^2 of attention and 8 h^2 of the feed-forward network.
_LAYER_WEIGHTS = 12
# Bytes per token and hidden unit that a layer keeps for the backward, in half precision, without attention scores;
# and its input alone, which full checkpointing keeps. Korthikanti et al. 2022, "Reducing Activation Recomputation in
# Large Transformer Models", equation 1 and section 5, where fused attention keeps no scores.
_LAYER_BYTES = 34
_CHECKPOINT_BYTES = 2
# Bytes per token and entry of the vocabulary: logits in fp32, and their gradients.
_LOGIT_BYTES = 4
# ZeRO-3 and FSDP hold the layer at work and the next one.
GATHERED_LAYERS = 2
# Passes over all parameters that ZeRO-3 and FSDP move between ranks per micro-step: gathers of the forward and of the
# backward, and the reduction of gradients.
_FORWARD_PASSES, _BACKWARD_PASSES = 1, 2
# Types of matrix products by preference.
_HALF_TYPES, _FULL_TYPES = ("bfloat16", "float16"), ("tf32", "float32")


@dataclass(frozen=True)
class TransformerShape:
    """The shape of a decoder."""

    params: int
    layers: int
    hidden: int
    vocabulary: int
    sequence: int

    @property
    def layer_params(self) -> float:
        """Parameters of a layer."""
        return self.params / self.layers

    def forward_flops(self, tokens: float) -> float:
        """Return the operations of a forward; a backward has twice as many.

        2 per parameter and token, and for causal attention 2 layers x hidden x sequence per token.
        """
        return tokens * (2.0 * self.params + 2.0 * self.layers * self.hidden * self.sequence)

    def kept_bytes(self, tokens: float, checkpointing: bool) -> float:
        """Return the bytes of activations that a forward over `tokens` tokens keeps, without the logits."""
        return tokens * self.hidden * self.layers * (_CHECKPOINT_BYTES if checkpointing else _LAYER_BYTES)

    def layer_bytes(self, tokens: float) -> float:
        """Return the bytes of activations of one layer, which checkpointing computes again in the backward."""
        return tokens * self.hidden * _LAYER_BYTES

    def logit_bytes(self, tokens: float) -> float:
        """Return the bytes of the logits; their gradients take as many."""
        return tokens * self.vocabulary * _LOGIT_BYTES


def checkpointed_share(params: int) -> float:
    """Return the share of a decoder's activations that remains with full checkpointing: inputs, and one layer."""
    layers = guessed_layers(params)
    return min(1.0, _CHECKPOINT_BYTES / _LAYER_BYTES + 1 / layers)


def guessed_layers(params: int) -> int:
    """Return the layers of a decoder of usual proportions, 128 hidden units per layer: params = 12 layers hidden^2."""
    return max(1, round(math.cbrt(params / (_LAYER_WEIGHTS * _WIDTH_PER_LAYER**2))))


def shape_of(
    params: int, sequence: int, vocabulary: int, layers: int | None = None, hidden: int | None = None
) -> TransformerShape:
    """Return the shape of a decoder; what is not given follows from params = 12 layers hidden^2."""
    if params < 1:
        raise WorkloadError("--params must be at least 1")
    if layers is None:
        layers = guessed_layers(params) if hidden is None else max(1, round(params / (_LAYER_WEIGHTS * hidden**2)))
    if hidden is None:
        hidden = max(1, round(math.sqrt(params / (_LAYER_WEIGHTS * layers))))
    return TransformerShape(params, layers, hidden, vocabulary, sequence)


# The share of a GPU's peak that training of large decoders reaches: 0.3 to 0.55 in published runs (Korthikanti et al.
# 2022; Chowdhery et al. 2022, "PaLM", table 3).
EFFICIENCY = 0.4
EFFICIENCY_FACTOR = 1.37
# Times of one job on one machine differ by so much between recordings (traces/: forward, backward and other together).
SAME_GPU_FACTOR = 1.06
# Scaled by kernels, by peaks, and not at all.
KERNELS_FACTOR = 1.15
PEAKS_FACTOR = 1.3
UNKNOWN_GPU_FACTOR = 2.0
_TYPES_BY_BYTES = {2.0: _HALF_TYPES, 4.0: _FULL_TYPES}
# Standard normal deviates of the ends of a range with a probability of 80 %.
DEVIATIONS_OF_RANGE = 1.2816


@dataclass(frozen=True)
class RecordedKernels:
    """The kernels of a job.

    They have operations, and bytes of device memory that they read and write. By the bytes per parameter the type of
    matrix products is chosen.
    """

    flops: npt.NDArray[np.float64]
    bytes: npt.NDArray[np.float64]
    element_bytes: float

    def time_ratio(self, before: GpuCompute, after: GpuCompute) -> float | None:
        """Return the time of all kernels on one GPU over that on another; None if a rate is not known.

        A kernel takes the longer of its operations at the peak of matrix products and its bytes at the peak of memory
        (Williams et al. 2009, "Roofline"). Efficiencies are taken to be alike on both.
        """
        times = [self._seconds(gpu) for gpu in (before, after)]
        if times[0] is None or times[1] is None or not times[0]:
            return None
        return times[1] / times[0]

    def _seconds(self, gpu: GpuCompute) -> float | None:
        names = (*_HALF_TYPES, *_FULL_TYPES) if self.element_bytes == 2 else _FULL_TYPES
        peak = next((gpu.flops_per_s[name] for name in names if name in gpu.flops_per_s), None)
        if peak is None or gpu.memory_bytes_per_s is None:
            return None
        return float(np.maximum(self.flops / peak, self.bytes / gpu.memory_bytes_per_s).sum())


def recorded_kernels(trace: Trace, element_bytes: float) -> RecordedKernels | None:
    """Return the work of the kernels of a trace's first rank; None where it was not recorded."""
    kernels = trace.kernels(trace.ranks[0])
    counted = kernels[kernels["flops"].notna() & kernels["bytes"].notna()]
    if not len(counted):
        return None
    flops, size = (counted[name].to_numpy(np.float64) for name in ("flops", "bytes"))
    return RecordedKernels(flops, size, element_bytes)


@dataclass(frozen=True)
class TransformerCompute:
    """The compute of a decoder of known shape: operations over a share of the GPU's peak."""

    shape: TransformerShape
    param_bytes: float

    def times(self, machine: Machine, settings: TunableSettings, micro_steps: int) -> ComputeTimes:
        """Return the times of an iteration."""
        peak = peak_flops(machine.gpu, self.param_bytes)
        if peak is None:
            raise MachineError(
                f"machine {machine.name} has no gpu.flops_per_s, which the times of a job of a given size need: name a "
                "preset, or add the peak rates of the GPU to the file"
            )
        tokens = self.shape.sequence * (settings.micro_batch or 1) * micro_steps
        forward = self.shape.forward_flops(tokens) / (peak * EFFICIENCY)
        backward = forward * (3 if settings.checkpointing else 2)
        note = (
            f"forward and backward: {EFFICIENCY:.0%} of {peak / 1e12:.0f} TFLOP/s, within a factor of "
            f"{EFFICIENCY_FACTOR:g}"
        )
        times = ComputeTimes(forward, backward, 0.0, EFFICIENCY_FACTOR, 0.0, note)
        params = self.shape.params
        return with_collectives(times, self.param_bytes * params * micro_steps, machine, settings.ranks)


@dataclass(frozen=True)
class RecordedCompute:
    """The compute of a recorded or described job: its times, on the GPU that they are of.

    Attributes:
        gpu: The GPU of these times; None: not known.
        gpu_name: Its name, for people; None: not known, the times count as those of every machine.
        factor: The factor within which the times themselves are known.
    """

    forward_s: float
    backward_s: float
    other_s: float
    gpu: GpuCompute | None
    gpu_name: str | None
    work: RecordedKernels | None
    factor: float
    settings: TunableSettings
    param_bytes: float
    params: float

    def times(self, machine: Machine, settings: TunableSettings, micro_steps: int) -> ComputeTimes:
        """Return the times of an iteration; more micro-steps of a smaller micro-batch take as long as before."""
        ratio, factor, note = self._scale(machine)
        forward, backward = self.forward_s * ratio, self.backward_s * ratio
        if settings.checkpointing and not self.settings.checkpointing:
            backward += forward
        factor = combined_factor(self.factor, factor)
        times = ComputeTimes(forward, backward, self.other_s, factor, 0.0, note)
        if self.settings.ranks > 1:
            # The recorded times have their collectives.
            return times
        return with_collectives(times, self.param_bytes * self.params * micro_steps, machine, settings.ranks)

    def _scale(self, machine: Machine) -> tuple[float, float, str]:
        """Return the times on a machine over those recorded, the factor within which that is known, and the source."""
        if self.gpu_name is None:
            return 1.0, 1.0, "forward and backward: as in the workload, on every machine"
        here = peak_flops(self.gpu, self.param_bytes)
        there = peak_flops(machine.gpu, self.param_bytes)
        if self.gpu is not None and machine.gpu is not None and here is not None and there is not None:
            if here == there and self.gpu.memory_bytes_per_s == machine.gpu.memory_bytes_per_s:
                return 1.0, SAME_GPU_FACTOR, f"forward and backward: of {self.gpu_name}"
            if self.work is not None and (ratio := self.work.time_ratio(self.gpu, machine.gpu)) is not None:
                return ratio, KERNELS_FACTOR, f"forward and backward: of {self.gpu_name}, x {ratio:.2f} by its kernels"
            ratio = here / there
            text = f"forward and backward: of {self.gpu_name}, x {ratio:.2f} by peak rates, within {PEAKS_FACTOR:g}"
            return ratio, PEAKS_FACTOR, text
        if self.gpu_name == machine.name:
            return 1.0, SAME_GPU_FACTOR, f"forward and backward: of {self.gpu_name}"
        text = f"forward and backward: as recorded on {self.gpu_name}, since peak rates are not known"
        return 1.0, UNKNOWN_GPU_FACTOR, text


def with_collectives(times: ComputeTimes, gathered_bytes: float, machine: Machine, ranks: int) -> ComputeTimes:
    """Return times with the exchanges of parameters and gradients between ranks.

    How far they overlap with compute is not known: between the longer of the two and their sum. The time is the
    geometric mean of both ends, which are taken as the ends of a range with a probability of 80 %. `gathered_bytes`
    are those of all parameters, times the micro-steps.
    """
    rate = (machine.gpu.peer_bytes_per_s if machine.gpu is not None else None) or machine.h2d_bytes_per_s
    if ranks == 1 or rate is None:
        return times
    one_pass = gathered_bytes * (ranks - 1) / ranks / rate
    passes = _FORWARD_PASSES + _BACKWARD_PASSES
    compute, exchange = times.forward_s + times.backward_s, one_pass * passes
    if not compute + exchange:
        return times
    shortest, longest = max(compute, exchange), compute + exchange
    total = math.sqrt(shortest * longest)
    overlap_factor = math.exp(math.log(longest / shortest) / 2 / DEVIATIONS_OF_RANGE)
    share = times.forward_s / compute if compute else _FORWARD_PASSES / passes
    compute_share = compute / longest
    return ComputeTimes(
        forward_s=total * share,
        backward_s=total * (1 - share),
        other_s=times.other_s,
        factor=combined_factor(times.factor**compute_share, overlap_factor),
        collectives_s=exchange,
        note=times.note,
    )


def combined_factor(*factors: float) -> float:
    """Return the factor within which a product is known: independent errors that are normal in the logarithm."""
    return math.exp(math.sqrt(sum(math.log(factor) ** 2 for factor in factors)))


def peak_flops(gpu: GpuCompute | None, param_bytes: float) -> float | None:
    """Return the peak of matrix products in the type of the parameters; None if it is not known."""
    if gpu is None:
        return None
    names = _TYPES_BY_BYTES.get(param_bytes, _HALF_TYPES)
    return next((gpu.flops_per_s[name] for name in names if name in gpu.flops_per_s), None)
