"""The work of a kernel, and the time that a GPU takes for it.

The time is under fast, typical and slow assumptions.
"""

from dataclasses import dataclass, replace

from ebbtide.machines.kernels import efficiency
from ebbtide.machines.kernels import time_priors as priors
from ebbtide.machines.kernels.efficiency import EFFICIENT, FLASH_2, PRODUCT
from ebbtide.machines.kernels.time_priors import CASES, PriorRange, WorkClass
from ebbtide.machines.machine import GpuCompute, Machine
from ebbtide.machines.sheets import GPU_SHEETS

ProductSize = efficiency.ProductSize
AttentionSize = efficiency.AttentionSize
# Where no machine states its own: a device without a name counts as one.
DEFAULT_GPU = "h100-80gb"
_DEFAULT = GPU_SHEETS[DEFAULT_GPU].compute
# Where a data sheet has no rate of a type, the operation runs in the next one.
_NEXT_TYPE = {
    "float8": "bfloat16",
    "bfloat16": "float16",
    "float16": "tf32",
    "tf32": "float32",
}


@dataclass(frozen=True, slots=True)
class KernelWork:
    """The work of the kernels of one operation."""

    name: str
    # `compute`, `communication`, `copy` or `memset`, as in the table `kernels`.
    kind: str
    work_class: WorkClass
    # Floating-point operations of products, convolutions and attention; 0 for others.
    flops: float
    # Bytes of device memory that are read and written; of a collective, those that each
    # GPU sends.
    bytes: float
    precision: str = "float32"
    # Of a product, a convolution or attention; None: large.
    size: ProductSize | AttentionSize | None = None
    launches: int = 1
    # Bytes that further kernels move before and after: operands in another layout, or
    # unpacked.
    copied_bytes: float = 0.0
    group: str | None = None  # Of a collective, its process group and number of ranks.
    # Of a collective of several boxes, the share of the ranks of a box that take part;
    # 0: of one box.
    share_of_box: float = 0.0


class GpuRates:
    """Times of work on a GPU, and on its host's memory.

    `machine`: the machine; None, or one without rates of its GPU: rates that it lacks
    are an H100's."""

    def __init__(self, machine: Machine | None = None) -> None:
        stated = machine.gpu if machine is not None else None
        self.is_assumed = stated is None or not stated.flops_per_s
        self.gpu = _DEFAULT if stated is None or self.is_assumed else _completed(stated)
        self._card_class = efficiency.card_class_of(self.gpu)
        self._host_bytes_per_s = (
            machine and machine.host_memory_bytes_per_s
        ) or priors.HOST_BYTES_PER_S
        box = machine.box if machine is not None else None
        self._network_bytes_per_s = box.network_bytes_per_s if box is not None else None

    def kernel_ns(self, work: KernelWork) -> list[int]:
        """Return the time of a kernel in each case: max(FLOPs / rate, bytes / rate) and
        a fixed time per launch."""
        if work.work_class is WorkClass.COLLECTIVE:
            return _times(
                0.0,
                None,
                work.bytes / self._ring_bytes_per_s(work.share_of_box),
                priors.COLLECTIVE_EFFICIENCY,
                priors.COLLECTIVE_NS,
                1,
            )
        flops_s = work.flops / self.peak(work.precision) if work.flops else 0.0
        rate = self.gpu.memory_bytes_per_s or 1.0
        memory = priors.MEMORY_EFFICIENCY[work.work_class]
        copy = priors.MEMORY_EFFICIENCY[WorkClass.ELEMENTWISE]
        times = _times(
            flops_s,
            self._efficiency(work),
            work.bytes / rate,
            memory,
            priors.KERNEL_NS,
            work.launches,
        )
        # Kernels outside of the matrix units read the layout that there is.
        is_read = work.work_class is WorkClass.CONVOLUTION and self._is_plain(work)
        if is_read or not work.copied_bytes:
            return times
        copies = _times(
            0.0, None, work.copied_bytes / rate, copy, priors.KERNEL_NS, launches=1
        )
        return [sum(pair) for pair in zip(times, copies, strict=True)]

    @property
    def peer_bytes_per_s(self) -> float:
        """The rate at which a GPU sends to others of its host."""
        return self.gpu.peer_bytes_per_s or _DEFAULT.peer_bytes_per_s or 1.0

    def _ring_bytes_per_s(self, share_of_box: float) -> float:
        """Return the rate at which a rank sends; rings between boxes share the links of
        each (`Machine.ring_bytes_per_s`)."""
        peer = self.peer_bytes_per_s
        network = share_of_box * (self._network_bytes_per_s or 0.0)
        return min(peer, network) if network else peer

    def host_ns(self, size: int) -> list[int]:
        """Return the time in each case for the host to read and write `size` bytes."""
        return _times(
            0.0,
            None,
            size / self._host_bytes_per_s,
            priors.HOST_EFFICIENCY,
            priors.VIEW_NS,
            1,
        )

    def least_host_ns(self, size: float) -> float:
        """Return the time below which the host cannot move `size` bytes."""
        return 1e9 * size / self._host_bytes_per_s

    def peak(self, precision: str) -> float:
        """Return the peak of a type in FLOP/s.

        Where it is not known, return the peak of the next one.
        """
        rates = self.gpu.flops_per_s
        return rates.get(self._type_of(precision)) or min(rates.values())

    def _type_of(self, precision: str) -> str:
        """Return the type that a GPU computes in: it may lack units for one."""
        while precision not in self.gpu.flops_per_s and precision in _NEXT_TYPE:
            precision = _NEXT_TYPE[precision]
        return precision

    def _reduction(self, work: KernelWork) -> float:
        """Return the operations of a kernel over those that its algorithm computes."""
        is_plain = work.work_class is WorkClass.CONVOLUTION and self._is_plain(work)
        if is_plain and isinstance(work.size, efficiency.ProductSize):
            return work.size.reduction
        return 1.0

    def _is_plain(self, work: KernelWork) -> bool:
        """Return whether a product runs outside of the matrix units."""
        return self._type_of(work.precision) == "float32"

    def share(self, kernel: str) -> efficiency.RateShare:
        """Return the share of the peak that a kind of kernel reaches in large sizes."""
        return efficiency.kernel_share(kernel, self.gpu.name or "", self._card_class)

    @property
    def fused_attention(self) -> list[str]:
        """The fused implementations of attention that were measured for this class of
        GPUs."""
        named = {
            one.kernel
            for one in efficiency.EVIDENCE
            if one.card_class is self._card_class
        } - {PRODUCT}
        return sorted(named) or [FLASH_2]

    @property
    def description(self) -> str:
        """The peak rates in words."""
        peaks = ", ".join(
            f"{rate / 1e12:,.0f} TFLOP/s {name}"
            for name, rate in self.gpu.flops_per_s.items()
        )
        memory = (
            f"{(self.gpu.memory_bytes_per_s or 0) / 1e12:.2f} TB/s of device memory"
        )
        return (
            f"{self.gpu.name or 'GPU'}{' (assumed)' if self.is_assumed else ''}: "
            f"{peaks}, {memory}"
        )

    def _efficiency(self, work: KernelWork) -> PriorRange | None:
        """Return the share of the peak of a kernel, which is never above what the card
        can reach of the operations that are computed; None: without FLOPs."""
        share = self._share_of_peak(work)
        if share is None:
            return None
        limit = efficiency.peak_limit(self._card_class)
        reached = PriorRange(*(min(limit, value) for value in share))
        return reached.scaled(self._reduction(work))

    def _share_of_peak(self, work: KernelWork) -> PriorRange | None:
        size = work.size
        if work.work_class is WorkClass.DEPTHWISE:
            return priors.DEPTHWISE_EFFICIENCY
        if work.work_class is WorkClass.CONVOLUTION:
            share = priors.CONVOLUTION_OF_PRODUCT
            if not self._is_plain(work):
                share = efficiency.CONVOLUTIONS.get(self._card_class, share)
            return self._product_share(work).times(share)
        if work.work_class is WorkClass.MATRIX:
            return self._product_share(work)
        if work.work_class in (WorkClass.ATTENTION, WorkClass.ATTENTION_BACKWARD):
            backward = work.work_class is WorkClass.ATTENTION_BACKWARD
            factor = efficiency.BACKWARD_OF_ATTENTION if backward else 1.0
            kind = FLASH_2
            if isinstance(size, efficiency.AttentionSize):
                factor *= efficiency.attention_factor(size, self._card_class)
                kind = size.implementation
            return self.share(FLASH_2 if kind == EFFICIENT else kind).cases(factor)
        return None

    def _product_share(self, work: KernelWork) -> PriorRange:
        is_plain, factor = self._is_plain(work), 1.0
        if isinstance(work.size, efficiency.ProductSize):
            factor = efficiency.product_factor(work.size, plain=is_plain)
        if is_plain:
            return priors.FLOAT32_EFFICIENCY.scaled(factor)
        factor *= efficiency.OTHER_TYPES.get(work.precision, 1.0)
        return self.share(PRODUCT).cases(factor)


def _completed(gpu: GpuCompute) -> GpuCompute:
    memory, peer = gpu.memory_bytes_per_s, gpu.peer_bytes_per_s
    return replace(
        gpu,
        memory_bytes_per_s=memory or _DEFAULT.memory_bytes_per_s,
        peer_bytes_per_s=peer or _DEFAULT.peer_bytes_per_s,
    )


def _times(
    flops_s: float,
    compute: PriorRange | None,
    bytes_s: float,
    memory: PriorRange,
    fixed_ns: PriorRange,
    launches: int,
) -> list[int]:
    times = []
    for case in range(len(CASES)):
        seconds = bytes_s / memory[case]
        if compute is not None:
            seconds = max(seconds, flops_s / compute[case])
        times.append(round(1e9 * seconds + launches * fixed_ns[case]))
    return times
