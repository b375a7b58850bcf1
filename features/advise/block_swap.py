"""Block swap as a lever: how many frozen layers of a job must leave the device."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from ebbtide.errors import PolicyError
from ebbtide.interleave.model.schedule import Schedule
from ebbtide.interleave.model.workload import Workload
from ebbtide.interleave.policies import Policy
from ebbtide.interleave.replay.recorded_job import RecordedJob
from ebbtide.interleave.replay.replay import memory_excess, replay
from ebbtide.interleave.replay.schedule_to_trace import device_memory
from ebbtide.machines.machine import Machine

_GIB = 2**30


class Swap(NamedTuple):
    """A number of layers on the host: the device memory of the job, its iteration over
    the iteration without copies, and the memory that it lacks (None: none)."""

    layers: int
    device_bytes: float
    factor: float
    lacks: str | None

    @property
    def fits(self) -> bool:
        """Whether the memory of device and host suffices."""
        return self.lacks is None


@dataclass(frozen=True)
class BlockSwap:
    """The fewest frozen layers to swap.

    Attributes:
        count: Layers of the job.
        capacity_bytes: The memory of the device.
        both_ways: With copies of unchanged weights to the host, as most tools do.
        up_only: Without.
    """

    count: int
    capacity_bytes: float
    both_ways: Swap
    up_only: Swap

    def as_json(self) -> dict[str, Any]:
        """Return the object `block_swap` of `ebbtide plan --json`."""
        values = asdict(self)
        return values | {
            name: swap._asdict() | {"fits": swap.fits}
            for name, swap in (("both_ways", self.both_ways), ("up_only", self.up_only))
        }

    @property
    def fits(self) -> bool:
        """Whether the job fits with it."""
        return self.both_ways.fits or self.up_only.fits

    @property
    def text(self) -> str:
        """The swap in a line."""
        one, other = self.both_ways, self.up_only
        if not self.fits:
            return f"swapping {one.layers} frozen blocks does not suffice: {one.lacks}"
        used, all_bytes = one.device_bytes / _GIB, self.capacity_bytes / _GIB
        return (
            f"swap {one.layers} of {self.count} blocks: {used:.1f} of {all_bytes:.1f} "
            f"GiB, {one.factor:.2f} x the iteration; with copies up only "
            f"{other.factor:.2f} x ({other.layers} blocks, through 2 buffers)"
        )

    @property
    def lines(self) -> list[tuple[str, str]]:
        """The tools that swap blocks, each with the lines to paste."""
        swapped, only_up = self.both_ways.layers, self.up_only.layers
        share = swapped / self.count
        return [
            (
                "musubi-tuner",
                f"--blocks_to_swap {only_up} --block_swap_h2d_only "
                "--gradient_checkpointing --use_pinned_memory_for_block_swap",
            ),
            ("kohya sd-scripts", f"--blocks_to_swap {swapped}"),
            ("diffusion-pipe (TOML)", f"blocks_to_swap = {swapped}"),
            (
                "OneTrainer (of the trained part, e.g. transformer)",
                f'"gradient_checkpointing": true, "offload_fraction": {share:.2f}',
            ),
            ("ComfyUI-FluxTrainer (node)", f"blocks_to_swap: {swapped}"),
            (
                "FSDP2, for the swapped blocks (their adapters are updated on the CPU)",
                "fully_shard(block, offload_policy=CPUOffloadPolicy())",
            ),
            (
                "DeepSpeed ZeRO-3 (all frozen weights)",
                '"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu", '
                '"pin_memory": true}}',
            ),
            (
                "a plain loop",
                f"ebbtide.interleave.stream_weights(model, weights="
                f'"streamed:{only_up}")',
            ),
        ]


def plan_block_swap(
    workload: Workload | None, machine: Machine, job: RecordedJob
) -> BlockSwap | None:
    """Return the fewest layers of a workload to swap on a machine.

    Return None where its layers are not known, or not frozen."""
    if workload is None or not workload.layers or machine.gpu_memory_bytes is None:
        return None
    try:
        policies = [
            Policy.make("block-swap", 0),
            Policy.make("block-swap"),
            Policy.make("block-swap", down="no"),
        ]
        replayed = replay(workload, machine, policies, job)
    except PolicyError:
        return None
    base, *swaps = replayed.schedules
    both_ways, up_only = (
        _swap(schedule, machine, base.iteration_s) for schedule in swaps
    )
    capacity = machine.gpu_memory_bytes
    return BlockSwap(len(workload.layers), capacity, both_ways, up_only)


def _swap(schedule: Schedule, machine: Machine, base_s: float) -> Swap:
    layers = schedule.plan.layers
    assert layers is not None
    counts, _ = layers.counts(len(schedule.workload.chunk_shares))
    used = float(device_memory(schedule, machine)[1].max())
    used += schedule.workload.missing_bytes
    factor = schedule.iteration_s / base_s
    return Swap(counts["streamed"], used, factor, memory_excess(schedule, machine))
