"""The times of forward and backward on a machine: by arithmetic, or scaled from the
machine they were recorded on."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from ebbtide.errors import MachineError
from ebbtide.features.advise.job.decoder import (
    NOT_STATED,
    Implementation,
    TransformerShape,
    compute_span,
)
from ebbtide.features.advise.job.training_job import ComputeTimes, TunableSettings
from ebbtide.machines.accuracy import evidence_for
from ebbtide.machines.evidence import JobKind, card_of, kind_of
from ebbtide.machines.kernels.efficiency import (
    DEVIATIONS_OF_RANGE,
    PRODUCT,
    card_class_of,
    kernel_share,
)
from ebbtide.machines.kernels.time_priors import (
    COLLECTIVE_EFFICIENCY,
    COLLECTIVE_NS,
)
from ebbtide.machines.machine import GpuCompute, Machine
from ebbtide.profiler.trace import Trace
from ebbtide.state_bytes import PARAM_BYTES

# ZeRO-3 and FSDP hold the layer at work and the next one.
GATHERED_LAYERS = 2
# Passes over all parameters that ranks move per micro-step: gathers, and the reduction
# of gradients.
_FORWARD_PASSES, _BACKWARD_PASSES = 1, 2
# The same of ranks that hold a part of a replica: parameters, and gradients.
_REPLICA_PASSES = 2
_FULL_BYTES = 4
# Types of matrix products by preference.
_HALF_TYPES, _FULL_TYPES = ("bfloat16", "float16"), ("tf32", "float32")


# Times of one job on one machine differ by so much between recordings (traces/:
# forward, backward and other together).
SAME_GPU_FACTOR = 1.06
# Scaled by kernels, by peaks, and not at all.
KERNELS_FACTOR = 1.15
PEAKS_FACTOR = 1.3
UNKNOWN_GPU_FACTOR = 2.0
# What the times in notes are of.
_PASSES = "forward and backward:"
_TYPES_BY_BYTES = {2.0: _HALF_TYPES, 4.0: _FULL_TYPES}


@dataclass(frozen=True)
class RecordedKernels:
    """The kernels of a job: operations, and bytes of device memory read and written;
    and the bytes of a parameter."""

    flops: npt.NDArray[np.float64]
    bytes: npt.NDArray[np.float64]
    element_bytes: float

    def time_ratio(self, before: GpuCompute, after: GpuCompute) -> float | None:
        """Return the time of all kernels on one GPU over that on another; None: a rate
        is not known. A kernel takes the longer of its operations, at the rate of large
        products, and its bytes (Williams et al. 2009, "Roofline")."""
        times = [self._seconds(gpu) for gpu in (before, after)]
        if times[0] is None or times[1] is None or not times[0]:
            return None
        return times[1] / times[0]

    def _seconds(self, gpu: GpuCompute) -> float | None:
        names = (*_HALF_TYPES, *_FULL_TYPES) if self.element_bytes == 2 else _FULL_TYPES
        peak = _first_rate(gpu, names)
        if peak is None or gpu.memory_bytes_per_s is None:
            return None
        peak *= product_share(gpu)
        return float(
            np.maximum(self.flops / peak, self.bytes / gpu.memory_bytes_per_s).sum()
        )


def recorded_kernels(trace: Trace, element_bytes: float) -> RecordedKernels | None:
    """Return the work of the kernels of a trace's first rank; None: not recorded."""
    kernels = trace.kernels(trace.ranks[0])
    counted = kernels[kernels["flops"].notna() & kernels["bytes"].notna()]
    if not len(counted):
        return None
    flops, size = (counted[name].to_numpy(np.float64) for name in ("flops", "bytes"))
    return RecordedKernels(flops, size, element_bytes)


@dataclass(frozen=True)
class TransformerCompute:
    """The compute of a decoder of known shape: its kernels, each at the share of the
    GPU's peaks that it reaches."""

    shape: TransformerShape
    param_bytes: float
    implementation: Implementation = NOT_STATED

    def times(
        self, machine: Machine, settings: TunableSettings, micro_steps: int
    ) -> ComputeTimes:
        """Return the times of an iteration."""
        peak = peak_flops(machine.gpu, self.param_bytes)
        if peak is None:
            raise MachineError(
                f"machine {machine.name} has no gpu.flops_per_s, which the times of a "
                "job of a given size need: name a "
                "preset, or add the peak rates of the GPU to the file"
            )
        tokens = self.shape.tokens(settings)
        precision = "bfloat16" if self.param_bytes == PARAM_BYTES else "tf32"
        forward, backward = compute_span(
            self.shape, tokens, machine, precision, self.implementation
        )
        forwards = 1 + settings.checkpointing
        sums_s = self._sums_s(machine, tokens)
        steps = micro_steps * self.shape.parallel.bubble(micro_steps)
        fast, typical, slow = (
            steps * (forwards * (a + sums_s) + b + sums_s)
            for a, b in zip(forward, backward, strict=True)
        )
        forward_s = steps * (forward.typical + sums_s)
        flops = self.shape.forward_flops(tokens) * (3 + settings.checkpointing)
        flops /= self.shape.parallel.ranks
        share = flops * micro_steps / typical / peak
        note = (
            f"{_PASSES} {share:.0%} of {peak / 1e12:.0f} TFLOP/s "
            f"({typical / slow * share:.0%} to "
            f"{typical / fast * share:.0%}), {self.implementation.text}"
        )
        factor = (slow / fast) ** (0.5 / DEVIATIONS_OF_RANGE)
        params, ranks = self.shape.params, settings.ranks
        is_exposed = self.implementation.runtimes[0].exposes_exchanges
        # Copies of gradients that are not hidden are part of the backward.
        gradients = is_exposed * _FULL_BYTES * params / ranks
        copied = gradients * self.implementation.offloaded_share
        copies_s = copied / (machine.d2h_bytes_per_s or math.inf)
        # The kernels of an update on the device: no step of a framework is waited for.
        rate = machine.gpu_update_params_per_s
        update_s = None if rate is None else params / ranks / rate
        kind = kind_of(
            "transformer",
            self.implementation.runtime,
            self.shape.sequence,
            precision,
            ranks,
            machine.gpu_name,
        )
        times = ComputeTimes(
            forward_s,
            typical - forward_s + copies_s,
            0.0,
            factor,
            0.0,
            note,
            update_s,
            evidence_for(kind),
        )
        replica = self.shape.parallel
        if replica.ranks == 1:
            gathered = self.param_bytes * params * micro_steps
            return with_collectives(times, gathered, machine, ranks, is_exposed)
        # Replicas keep their parameters: they exchange them and gradients once.
        passes = _REPLICA_PASSES / (_FORWARD_PASSES + _BACKWARD_PASSES)
        gathered = passes * self.param_bytes * params / replica.ranks
        return with_collectives(
            times,
            gathered,
            machine,
            max(1, ranks // replica.ranks),
            stride=replica.tensor,
        )

    def _sums_s(self, machine: Machine, tokens: float) -> float:
        """Return the time of sums over ranks that share layers: two of each layer in a
        forward, and in a backward, which nothing overlaps (Shoeybi et al. 2019,
        "Megatron-LM", section 3)."""
        ranks = self.shape.parallel.tensor
        rate = machine.ring_bytes_per_s(ranks)
        if ranks == 1 or rate is None:
            return 0.0
        size = 2 * (ranks - 1) / ranks * tokens * self.shape.hidden * self.param_bytes
        own_s = size / (rate * COLLECTIVE_EFFICIENCY.typical)
        layers = self.shape.layers / self.shape.parallel.pipeline
        return 2 * layers * (own_s + COLLECTIVE_NS.typical / 1e9)


@dataclass(frozen=True)
class RecordedCompute:
    """The compute of a recorded or described job: its times, and their GPU."""

    forward_s: float
    backward_s: float
    other_s: float
    gpu: GpuCompute | None  # The GPU of these times; None: not known.
    # Its name, for people; None: not known, the times count for every machine.
    gpu_name: str | None
    work: RecordedKernels | None
    factor: float  # The factor within which the times themselves are known.
    settings: TunableSettings
    param_bytes: float
    params: float
    own_update_s: float | None = None
    # The kind of a job whose times a dry run predicted; None: they were measured.
    kind: JobKind | None = None

    def times(
        self, machine: Machine, settings: TunableSettings, micro_steps: int
    ) -> ComputeTimes:
        """Return the times of an iteration; more micro-steps of a smaller micro-batch
        take as long as before."""
        ratio, factor, note = self._scale(machine)
        forward, backward = self.forward_s * ratio, self.backward_s * ratio
        if settings.checkpointing and not self.settings.checkpointing:
            backward += forward
        factor = combined_factor(self.factor, factor)
        own_s = (
            self.own_update_s
            and self.own_update_s * ratio * self.settings.ranks / settings.ranks
        )
        evidence = None
        if self.kind is not None:
            card = card_of(machine.gpu_name)
            evidence = evidence_for(self.kind._replace(card=card))
        times = ComputeTimes(
            forward, backward, self.other_s, factor, 0.0, note, own_s, evidence
        )
        if self.settings.ranks > 1:
            # The recorded times have their collectives.
            return times
        return with_collectives(
            times, self.param_bytes * self.params * micro_steps, machine, settings.ranks
        )

    def _scale(self, machine: Machine) -> tuple[float, float, str]:
        """Return the times on a machine over those recorded, the factor within which
        that is known, and the source."""
        if self.gpu_name is None:
            return 1.0, 1.0, f"{_PASSES} as in the workload, on every machine"
        source = f"{_PASSES} of {self.gpu_name}"
        own, gpu = self.gpu, machine.gpu
        here, there = (peak_flops(one, self.param_bytes) for one in (own, gpu))
        if own is None or gpu is None or here is None or there is None:
            if self.gpu_name == machine.name:
                return 1.0, SAME_GPU_FACTOR, source
            text = (
                f"{_PASSES} as recorded on {self.gpu_name}, since peak rates are not "
                "known"
            )
            return 1.0, UNKNOWN_GPU_FACTOR, text
        if here == there and own.memory_bytes_per_s == gpu.memory_bytes_per_s:
            return 1.0, SAME_GPU_FACTOR, source
        by_kernels = None if self.work is None else self.work.time_ratio(own, gpu)
        if by_kernels is not None:
            text = f"{source}, x {by_kernels:.2f} by its kernels"
            return by_kernels, KERNELS_FACTOR, text
        ratio = here * product_share(own) / there / product_share(gpu)
        text = f"{source}, x {ratio:.2f} by peak rates, within {PEAKS_FACTOR:g}"
        return ratio, PEAKS_FACTOR, text


def with_collectives(
    times: ComputeTimes,
    gathered_bytes: float,
    machine: Machine,
    ranks: int,
    is_exposed: bool = False,
    stride: int = 1,
) -> ComputeTimes:
    """Return times with the exchanges of parameters and gradients; `gathered_bytes`:
    all parameters times the micro-steps. Where it is not known how far compute hides
    them, the time is the geometric mean of the longer of both and of their sum, the
    ends of the 80 % range. `stride`: ranks between two of a ring."""
    rate = machine.ring_bytes_per_s(ranks, stride)
    if ranks == 1 or rate is None:
        return times
    one_pass = (
        gathered_bytes * (ranks - 1) / ranks / (rate * COLLECTIVE_EFFICIENCY.typical)
    )
    passes = _FORWARD_PASSES + _BACKWARD_PASSES
    compute, exchange = times.forward_s + times.backward_s, one_pass * passes
    if not compute + exchange:
        return times
    longest = compute + exchange
    shortest = longest if is_exposed else max(compute, exchange)
    total = math.sqrt(shortest * longest)
    overlap_factor = math.exp(math.log(longest / shortest) / 2 / DEVIATIONS_OF_RANGE)
    share = times.forward_s / compute if compute else _FORWARD_PASSES / passes
    compute_share = compute / longest
    return replace(
        times,
        forward_s=total * share,
        backward_s=total * (1 - share),
        factor=combined_factor(times.factor**compute_share, overlap_factor),
        collectives_s=exchange,
    )


def combined_factor(*factors: float) -> float:
    """Return the factor within which a product is known: independent errors that are
    normal in the logarithm."""
    return math.exp(math.sqrt(sum(math.log(factor) ** 2 for factor in factors)))


def product_share(gpu: GpuCompute) -> float:
    """Return the share of its peak that large matrix products reach on a GPU."""
    return kernel_share(PRODUCT, gpu.name or "", card_class_of(gpu)).median


def peak_flops(gpu: GpuCompute | None, param_bytes: float) -> float | None:
    """Return the peak of products in the type of the parameters; None: not known."""
    if gpu is None:
        return None
    return _first_rate(gpu, _TYPES_BY_BYTES.get(param_bytes, _HALF_TYPES))


def _first_rate(gpu: GpuCompute, names: Sequence[str]) -> float | None:
    """Return the peak of the first type of products whose peak is known."""
    return next(
        (gpu.flops_per_s[name] for name in names if name in gpu.flops_per_s), None
    )
