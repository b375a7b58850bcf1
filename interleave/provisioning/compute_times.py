"""The times of forward and backward on a machine: by arithmetic, or scaled from the machine they were recorded on."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ebbtide.errors import MachineError
from ebbtide.interleave.provisioning.recorded_kernels import RecordedKernels
from ebbtide.interleave.provisioning.training_job import ComputeTimes, TunableSettings
from ebbtide.interleave.provisioning.transformer import TransformerShape
from ebbtide.machines.gpu_compute import GpuCompute
from ebbtide.machines.machine import Machine

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
# Passes over all parameters that ZeRO-3 and FSDP move between ranks per micro-step: gathers of the forward and of the
# backward, and the reduction of gradients.
_FORWARD_PASSES, _BACKWARD_PASSES = 1, 2
# Types of matrix products by preference.
_HALF_TYPES = ("bfloat16", "float16")
_TYPES_BY_BYTES = {2.0: _HALF_TYPES, 4.0: ("tf32", "float32")}
# Standard normal deviates of the ends of a range with a probability of 80 %.
DEVIATIONS_OF_RANGE = 1.2816


@dataclass(frozen=True)
class TransformerCompute:
    """The compute of a decoder of known shape: operations over a share of the GPU's peak.

    Attributes:
        shape: The shape.
        param_bytes: Bytes per parameter that ranks exchange.
    """

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
        forward_s: The forward.
        backward_s: The backward.
        other_s: The time outside of the phases.
        gpu: The GPU of these times; None: not known.
        gpu_name: Its name, for people; None: not known, the times count as those of every machine.
        work: Operations and bytes of the kernels; None: not known.
        factor: The factor within which the times themselves are known.
        settings: The settings that they are of.
        param_bytes: Bytes per parameter.
        params: Parameters of the job.
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
    geometric mean of both ends, which are taken as the ends of a range with a probability of 80 %.

    Args:
        times: The times without exchanges.
        gathered_bytes: Bytes of all parameters, times the micro-steps.
        machine: The machine.
        ranks: Ranks that share the parameters.
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
