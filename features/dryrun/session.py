"""A dry run inside a process: installs everything, and removes it again."""

from __future__ import annotations

import math
import os
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from types import TracebackType
from typing import Any

import torch

# classifies torch's functions, which must happen before they are replaced
import torch._dynamo

from ebbtide.features.dryrun.device.attention import (
    AttentionChoice,
    register_attention,
    register_fused_norms,
)
from ebbtide.features.dryrun.device.cuda_stubs import CudaStubs
from ebbtide.features.dryrun.device.fake_cuda import (
    DEFAULT_CAPACITY_BYTES,
    capability_of,
    patch_cuda,
)
from ebbtide.features.dryrun.device.fake_device import FakeDeviceMode
from ebbtide.features.dryrun.device.flex_attention import register_flex_attention
from ebbtide.features.dryrun.device.tensor_patches import (
    patch_legacy_types,
    patch_tensors,
)
from ebbtide.features.dryrun.device.triton_kernels import TritonKernels
from ebbtide.features.dryrun.device.unknown_shapes import register_missing_kernels
from ebbtide.features.dryrun.errors import DryRunError, DryRunFinished
from ebbtide.features.dryrun.failures import WAKE, follow_threads
from ebbtide.features.dryrun.files.user_files import UserFiles
from ebbtide.features.dryrun.frameworks.deepspeed import DeepSpeedPatches
from ebbtide.features.dryrun.frameworks.libraries import LibraryPatches
from ebbtide.features.dryrun.frameworks.parallelism import (
    patch_data_parallel,
    patch_model_parallel,
)
from ebbtide.features.dryrun.frameworks.process_groups import (
    ProcessGroups,
    patch_ray_train,
)
from ebbtide.features.dryrun.memory.caching_allocator import (
    CachingAllocator,
    context_bytes,
    device_allocator,
)
from ebbtide.features.dryrun.memory.convolutions import (
    keep_channels_last,
    reserved_range,
)
from ebbtide.features.dryrun.memory.device_memory import (
    CallStacks,
    DeviceMemory,
    FakeHostMemory,
    is_trial,
)
from ebbtide.features.dryrun.memory.workspaces import KernelWorkspaces, multiprocessors
from ebbtide.features.dryrun.shadow_values import tensors_in
from ebbtide.features.dryrun.time.clock import VirtualClock
from ebbtide.features.dryrun.time.phase_tracker import PhaseTracker
from ebbtide.machines.catalog import MachineArgument, find_machine
from ebbtide.machines.machine import Machine
from ebbtide.profiler.agent.inventory import list_blocks
from ebbtide.profiler.agent.job_info import (
    describe_framework,
    describe_model,
    describe_optimizers,
)
from ebbtide.profiler.agent.patches import Patches
from ebbtide.units import ByteCount, byte_count

_LOOKED_AT = 32
# Frameworks fetch a batch ahead: the longest one reaches the model in the second of
# these iterations.
_LONG_ITERATIONS = 2
Shape = tuple[int, ...]


class BatchLengths:
    """Follows the shapes of batches, and gives the longest of the next ones when it is
    asked to."""

    def __init__(self) -> None:
        # By loader: the shape of the largest tensor of each batch.
        self._shapes: dict[int, set[Shape]] = {}
        self._long_iterations = 0

    @property
    def seen(self) -> tuple[Shape, Shape] | None:
        """The smallest and the largest batch of the loader whose batches vary the most;
        None: batches are alike."""
        ranges = [
            sorted(shapes, key=math.prod)
            for shapes in self._shapes.values()
            if len(shapes) > 1
        ]
        widest = max(
            ranges,
            key=lambda shapes: math.prod(shapes[-1]) - math.prod(shapes[0]),
            default=None,
        )
        return None if widest is None else (widest[0], widest[-1])

    def install(self, patches: Patches) -> None:
        """Follow torch's data loaders until `patches.undo()`."""
        kind = torch.utils.data.DataLoader
        iterate = kind.__iter__
        patches.set(
            kind, "__iter__", lambda loader: self.follow(id(loader), iterate(loader))
        )

    def needs_longest(self) -> bool:
        """Return whether an iteration with the longest batch is to follow, as where
        batches vary, and begin it."""
        if self.seen is None or self._long_iterations == _LONG_ITERATIONS:
            return False
        self._long_iterations += 1
        return True

    def follow(self, loader: int, batches: Any) -> Iterator[Any]:
        """Give the batches of a loader; where the longest one is asked for, that of the
        next ones in place of each."""
        shapes = self._shapes.setdefault(loader, set())
        for batch in batches:
            ahead = [
                batch,
                *islice(batches, _LOOKED_AT - 1 if self._long_iterations else 0),
            ]
            shapes.update(map(_shape, ahead))
            longest = max(ahead, key=lambda each: math.prod(_shape(each)))
            yield from [longest] * len(ahead)


def _shape(batch: Any) -> Shape:
    """Return the shape of the largest tensor in a batch."""
    values = batch.values() if isinstance(batch, Mapping) else [batch]
    return max(
        (tuple(tensor.shape) for tensor in tensors_in(values)),
        key=math.prod,
        default=(),
    )


@dataclass(frozen=True)
class DryRunOptions:
    """Options of a dry run.

    Attributes:
        iterations: Iterations after which the job is ended.
        capacity_bytes: Memory of the device; None: not stated.
        machine: The machine, its file or its name, for its rates and its compute
            capability; None: not named.
        ranks: Ranks of the job, whose rank 0 is run; None: not stated, and process
            groups have one rank.
        ranks_per_node: Ranks on one host; None: all of them.
    """

    iterations: int = 2
    capacity_bytes: ByteCount | None = None
    device_name: str = "dry run"
    machine: MachineArgument | None = None
    ranks: int | None = None
    ranks_per_node: int | None = None


class DryRun:
    """A context in which CUDA tensors of this process are fake, and what they do is
    counted.

    Leaving it restores torch. Tensors made inside must not be used afterwards.

    Attributes:
        clock, memory, host_memory, stacks, mode, tracker, attention, deepspeed,
            user_files: What was counted.
        machine, capacity_bytes: Those of the options, read.
        model, optimizers: Descriptions of the job's model and optimizers, as in
            meta.json.
        finished: Whether all iterations were reached.

    Raises:
        DryRunError: This build of torch cannot be faked, or the job cannot get to its
            end.
    """

    def __init__(self, options: DryRunOptions | None = None) -> None:
        self.options = options or DryRunOptions()
        capacity, machine = self.options.capacity_bytes, self.options.machine
        self.capacity_bytes = (
            None if capacity is None else int(byte_count(capacity, "capacity_bytes"))
        )
        self.machine = machine = None if machine is None else find_machine(machine)
        self._capability = capability_of(
            self.options.device_name, machine.gpu if machine is not None else None
        )
        self.clock = VirtualClock(machine)
        gpu = multiprocessors(self.options.device_name, self._capability)
        self.context_bytes = context_bytes(gpu.count)
        self.memory = DeviceMemory(self.clock, self._new_allocator())
        self.host_memory = FakeHostMemory(self.clock)
        self.batches = BatchLengths()
        # The peak of reserved memory before the iterations with the longest batch.
        self._natural_bytes: int | None = None
        self.stacks = CallStacks(torch)
        self.tracker = PhaseTracker(self.clock, self._classify, self._end_iteration)
        self.mode = FakeDeviceMode(
            self.clock,
            self.memory,
            self.stacks,
            self.tracker.module_names,
            KernelWorkspaces(self.memory, self.stacks, self._capability, gpu),
            self.host_memory,
        )
        self.model: dict[str, Any] = {}
        self.framework: dict[str, Any] = {}
        self.optimizers: list[dict[str, Any]] = []
        self.finished = False
        self.attention = AttentionChoice()
        self._triton = TritonKernels(self.clock, self.mode.values)
        self.user_files = UserFiles(self.mode)
        self.process_groups = ProcessGroups(
            self.options.ranks, self.options.ranks_per_node
        )
        self._patches = Patches()
        self._process = os.getpid()

    def __enter__(self) -> DryRun:
        self._patches.on_undo(
            CudaStubs(torch, self.process_groups.ranks_per_node).remove
        )
        self._patches.on_undo(self.user_files.close)
        capacity = self.capacity_bytes or DEFAULT_CAPACITY_BYTES
        devices = self.process_groups.ranks_per_node
        patch_cuda(
            self._patches,
            self.clock,
            self.memory,
            self.options.device_name,
            self._capability,
            capacity,
            devices,
        )
        patch_legacy_types(self._patches)
        self.process_groups.install(self._patches)
        self.mode.collectives.install(self._patches)
        patch_data_parallel(self._patches, self.mode.collectives)
        patch_tensors(
            self._patches,
            self.memory,
            self.stacks,
            self.tracker.module_names,
            self.mode.values,
        )
        self.user_files.install(self._patches)
        self.host_memory.install(self._patches)
        self.batches.install(self._patches)
        self.tracker.install(self._patches)
        self._libraries = LibraryPatches(self._patches, self.mode)
        self._triton.install(self._patches)
        patch_ray_train(self._patches, self.process_groups)
        machine = self.machine
        patch_model_parallel(self._patches, self.mode)
        self.deepspeed = DeepSpeedPatches(
            self._patches, self.tracker, self.clock, self.process_groups, machine
        )
        library = register_attention(self.attention)
        self._patches.on_undo(library._destroy)
        register_fused_norms(library)
        register_missing_kernels(library, self._patches)
        self.mode.shapes.install(self._patches)
        register_flex_attention()
        keep_channels_last(self._patches)
        only_lifts_cpu = torch._C._only_lift_cpu_tensors()
        self._patches.on_undo(
            lambda: torch._C._set_only_lift_cpu_tensors(only_lifts_cpu)
        )
        torch._C._set_only_lift_cpu_tensors(True)
        multithreading = torch.autograd.set_multithreading_enabled(False)
        self._patches.on_undo(lambda: multithreading.__exit__(None, None, None))
        self._patches.wrap(threading.Thread, "_bootstrap_inner", self.mode.wrap_thread)
        follow_threads(self._patches, lambda: self.clock.closed)
        self.mode.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        self._freeze()
        self.mode.__exit__(kind, error, traceback)
        self.process_groups.remove()
        self._patches.undo()
        if isinstance(error, DryRunFinished) and error.args:
            raise DryRunError(*error.args) from error
        return isinstance(error, DryRunFinished)

    def reserved_range(self) -> tuple[int, int]:
        """Return the least and the largest peak of reserved memory, in bytes: batches
        and workspaces may vary."""
        most = self.memory.most_reserved_bytes
        least = most if self._natural_bytes is None else self._natural_bytes
        if not self.memory.convolutions:
            return least, most
        allocators = self._new_allocator(), self._new_allocator()
        low, high = reserved_range(
            self.memory.blocks, self.memory.convolutions, allocators
        )
        return min(low, least), max(high, most)

    def host_use(self) -> dict[str, tuple[int, float | None]]:
        """Return the most host memory of the rank and its limit (None: not known), of
        all and of pinned memory."""
        ranks, machine = self.process_groups.ranks_per_node, self.machine
        divisible = machine is not None and (machine.box is not None or ranks == 1)
        own = (
            machine.for_ranks(ranks) if machine is not None and divisible else Machine()
        )
        most, pinned = self.host_memory.most_bytes, self.host_memory.most_pinned_bytes
        return {
            "all": (most, own.host_memory_bytes),
            "pinned": (pinned, own.pinned_memory_bytes),
        }

    def notes(self) -> list[str]:
        """Return lines for people: what is predicted, what is assumed, and what was met
        in the job."""
        notes = [
            "predicted by a dry run: the job ran without a GPU, on tensors without "
            "values",
            "times are predicted from FLOPs, bytes and launches at stated "
            "efficiencies, under fast, typical and slow "
            f"assumptions: {'; '.join(self.clock.assumptions().values())}",
        ]
        notes += self.process_groups.notes(self.clock.rates.gpu.peer_bytes_per_s)
        notes.append(
            "beside the pools, a GPU holds the CUDA context (about "
            f"{self.context_bytes / 1e9:.2f} GB, which the "
            "verdict keeps free), and buffers of NCCL where there are several ranks "
            "(0.2 GB and more)"
        )
        notes += self.memory.allocator.notes()
        notes += self.host_memory.notes()
        number = sum(self.mode.values.placeholders.values())
        if number:
            notes.append(
                f"the job read {number:,} values of tensors, which a dry run does not "
                "have: it got 1 for "
                "numbers and False for booleans"
            )
        if self._libraries.compiles:
            notes.append(
                "torch.compile was left out: the memory is that of the eager model"
            )
        if self.mode.shapes.bounds:
            names = _counted(self.mode.shapes.bounds)
            notes.append(
                "shapes that depend on values count with the largest possible size: "
                f"{names}"
            )
        if self.mode.shapes.least:
            names = _counted(self.mode.shapes.least)
            notes.append(
                "shapes that depend on values, without a stated bound, count with the "
                f"smallest size: {names}"
            )
        if self.batches.seen is not None:
            notes.append(
                "batches vary: the last iterations have the longest one of those seen"
            )
        if self.attention.counts:
            notes.append(
                "kernels chosen for scaled_dot_product_attention: "
                f"{_counted(self.attention.counts)}"
            )
        if self._triton.counts:
            notes.append(
                "Triton kernels count with the bytes of their arguments alone: "
                f"{_counted(self._triton.counts)}"
            )
        if self.tracker.rule.index < 0:
            notes.append("no optimizer of torch stepped: there are no iterations")
        elif not self.finished:
            finished = self.tracker.rule.index + 1
            notes.append(
                f"the job ended by itself after {finished} of "
                f"{self.options.iterations} iterations"
            )
        return notes

    def _new_allocator(self) -> CachingAllocator:
        return device_allocator(self.capacity_bytes, self.context_bytes)

    def _classify(self) -> None:
        """Note which storages hold parameters, buffers, gradients and optimizer
        state."""
        modules, optimizers = list(self.tracker.modules), list(self.tracker.optimizers)
        with self.tracker.threads.quiet() as quiet:
            if quiet:
                blocks = list_blocks(
                    modules, optimizers, lambda storage: int(storage._cdata)
                )
                self.memory.set_categories(blocks)

    def _end_iteration(self, finished: int) -> None:
        if os.getpid() != self._process:
            os.kill(self._process, WAKE)
            os._exit(0)
        optimizers = self.tracker.rule.optimizers
        modules = list(self.tracker.modules)
        self.model = describe_model(modules, optimizers, self.tracker.recomputes)
        self.framework = self.framework or describe_framework(
            modules, self.tracker.batch
        )
        self.optimizers = describe_optimizers(optimizers)
        self.mode.values.reads = 0
        if finished >= self.options.iterations and not is_trial():
            self._natural_bytes = self._natural_bytes or self.memory.most_reserved_bytes
            if self.batches.needs_longest():
                return
            self.finished = True
            self._freeze()
            raise DryRunFinished

    def _freeze(self) -> None:
        """Count nothing any more: frameworks move and save tensors when they end."""
        if self.tracker.live:
            self._classify()
        self.tracker.live = False
        self.clock.closed = True
        self.user_files.stop_listing()


def _counted(counts: Counter[str]) -> str:
    return ", ".join(f"{name} ({count:,})" for name, count in counts.most_common())
