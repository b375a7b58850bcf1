"""A dry run inside a process: installs everything, and removes it again."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
import torch._dynamo  # classifies torch's functions, which must happen before they are replaced

from ebbtide.machines.machine import Machine
from ebbtide.profiler.agent.framework import describe_framework
from ebbtide.profiler.agent.inventory import list_blocks
from ebbtide.profiler.agent.job_info import describe_model, describe_optimizers
from ebbtide.profiler.agent.patches import Patches
from ebbtide.profiler.dryrun.device.attention import AttentionChoice, register_attention, register_fused_norms
from ebbtide.profiler.dryrun.device.cuda_stubs import CudaStubs
from ebbtide.profiler.dryrun.device.fake_cuda import DEFAULT_CAPACITY_BYTES, capability_of, patch_cuda
from ebbtide.profiler.dryrun.device.fake_device import FakeDeviceMode
from ebbtide.profiler.dryrun.device.flex_attention import register_flex_attention
from ebbtide.profiler.dryrun.device.tensor_patches import patch_legacy_types, patch_tensors
from ebbtide.profiler.dryrun.device.triton_kernels import TritonKernels
from ebbtide.profiler.dryrun.device.unknown_shapes import register_missing_kernels
from ebbtide.profiler.dryrun.errors import DryRunFinished
from ebbtide.profiler.dryrun.files.user_files import UserFiles
from ebbtide.profiler.dryrun.frameworks.deepspeed import DeepSpeedPatches
from ebbtide.profiler.dryrun.frameworks.libraries import LibraryPatches
from ebbtide.profiler.dryrun.frameworks.parallelism import ModelParallelPatches, patch_data_parallel
from ebbtide.profiler.dryrun.frameworks.process_groups import ProcessGroups
from ebbtide.profiler.dryrun.frameworks.ray_train import patch_ray_train
from ebbtide.profiler.dryrun.memory.caching_allocator import device_allocator
from ebbtide.profiler.dryrun.memory.device_memory import CallStacks, DeviceMemory, FakeHostMemory, Transfers
from ebbtide.profiler.dryrun.memory.workspaces import kernel_workspaces
from ebbtide.profiler.dryrun.shadow_values import MAX_READS
from ebbtide.profiler.dryrun.time.clock import VirtualClock
from ebbtide.profiler.dryrun.time.phase_tracker import NamedRanges, PhaseTracker


@dataclass(frozen=True)
class DryRunOptions:
    """Options of a dry run.

    Attributes:
        iterations: Iterations after which the job is ended.
        capacity_bytes: Memory of the device; None: not stated.
        machine: The machine, for its rates and its compute capability; None: not named.
        ranks: Ranks of the job, whose rank 0 is run; None: not stated, and process groups have one rank.
        ranks_per_node: Ranks on one host; None: all of them.
    """

    iterations: int = 2
    capacity_bytes: int | None = None
    device_name: str = "dry run"
    machine: Machine | None = None
    ranks: int | None = None
    ranks_per_node: int | None = None


class DryRun:
    """A context in which CUDA tensors of this process are fake, and what they do is counted.

    Leaving it restores torch. Tensors made inside must not be used afterwards.

    Attributes:
        clock, memory, host_memory, transfers, annotations, stacks, mode, tracker, attention, deepspeed, user_files:
            What was counted.
        model, optimizers: Descriptions of the job's model and optimizers, as in meta.json.
        finished: Whether all iterations were reached.

    Raises:
        DryRunError: This build of torch cannot be faked.
    """

    def __init__(self, options: DryRunOptions | None = None) -> None:
        self.options = options or DryRunOptions()
        machine = self.options.machine
        self._capability = capability_of(self.options.device_name, machine.gpu if machine is not None else None)
        self.clock = VirtualClock(machine)
        self.memory = DeviceMemory(self.clock, device_allocator(self.options.capacity_bytes))
        self.host_memory = FakeHostMemory(self.clock)
        self.transfers = Transfers(self.clock)
        self.annotations = NamedRanges(self.clock)
        self.stacks = CallStacks(torch)
        self.tracker = PhaseTracker(self.clock, self._classify, self._end_iteration)
        self.mode = FakeDeviceMode(
            self.clock,
            self.memory,
            self.transfers,
            self.stacks,
            self.tracker.module_names,
            kernel_workspaces(self.memory, self.stacks, self.options.device_name, self._capability),
            self.host_memory,
        )
        self.model: dict[str, Any] = {}
        self.framework: dict[str, Any] = {}
        self.optimizers: list[dict[str, Any]] = []
        self.finished = False
        self.attention = AttentionChoice()
        self._triton = TritonKernels(self.clock, self.mode.values)
        self.user_files = UserFiles(self.mode)
        self.process_groups = ProcessGroups(self.options.ranks, self.options.ranks_per_node)
        self._patches = Patches()

    def __enter__(self) -> DryRun:
        self._stubs = CudaStubs(torch, self.process_groups.ranks_per_node)
        capacity = self.options.capacity_bytes or DEFAULT_CAPACITY_BYTES
        devices = self.process_groups.ranks_per_node
        patch_cuda(
            self._patches, self.clock, self.memory, self.options.device_name, self._capability, capacity, devices
        )
        patch_legacy_types(self._patches)
        self.annotations.install(self._patches)
        self.process_groups.install(self._patches)
        self.mode.collectives.install(self._patches)
        patch_data_parallel(self._patches, self.mode.collectives)
        patch_tensors(self._patches, self.memory, self.stacks, self.tracker.module_names, self.mode.values)
        self.user_files.install(self._patches)
        self.host_memory.install(self._patches)
        self.tracker.install(self._patches)
        self._libraries = LibraryPatches(self._patches, self.mode)
        self._triton.install(self._patches)
        self._cancel_ray = patch_ray_train(self._patches, self.process_groups)
        machine = self.options.machine
        self._model_parallel = ModelParallelPatches(self._patches, self.mode)
        self.deepspeed = DeepSpeedPatches(self._patches, self.tracker, self.clock, self.process_groups, machine)
        self._attention = register_attention(self.attention)
        register_fused_norms(self._attention)
        register_missing_kernels(self._attention, self._patches)
        self.mode.shapes.install(self._patches)
        register_flex_attention()
        self._only_lifts_cpu = torch._C._only_lift_cpu_tensors()
        torch._C._set_only_lift_cpu_tensors(True)
        self._multithreading = torch.autograd.set_multithreading_enabled(False)
        bootstrap = threading.Thread._bootstrap_inner  # type: ignore[attr-defined]
        self._patches.set(threading.Thread, "_bootstrap_inner", self.mode.wrap_thread(bootstrap))
        self.mode.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        self._freeze()
        self.mode.__exit__(kind, error, traceback)
        self._multithreading.__exit__(None, None, None)
        torch._C._set_only_lift_cpu_tensors(self._only_lifts_cpu)
        self._attention._destroy()
        self._libraries.remove()
        self._triton.remove()
        self._cancel_ray()
        self.deepspeed.remove()
        self._model_parallel.remove()
        self.tracker.remove()
        self.process_groups.remove()
        self._patches.undo()
        self.user_files.close()
        self._stubs.remove()
        return isinstance(error, DryRunFinished)

    def notes(self) -> list[str]:
        """Return lines for people: what is predicted, what is assumed, and what was met in the job."""
        notes = [
            "predicted by a dry run: the job ran without a GPU, on tensors without values",
            "times are predicted from FLOPs, bytes and launches at stated efficiencies, under fast, typical and slow "
            f"assumptions: {'; '.join(self.clock.assumptions().values())}",
        ]
        notes += self.process_groups.notes(self.clock.rates.gpu.peer_bytes_per_s)
        notes += self.memory.allocator.notes()
        notes += self.host_memory.notes()
        number = sum(self.mode.values.placeholders.values())
        if number:
            notes.append(
                f"the job read {number:,} values of tensors, which a dry run does not have: it got 1 for "
                "numbers and False for booleans"
            )
        if self._libraries.compiles:
            notes.append("torch.compile was left out: the memory is that of the eager model")
        if self.mode.shapes.bounds:
            names = ", ".join(f"{name} ({count:,})" for name, count in self.mode.shapes.bounds.most_common())
            notes.append(f"shapes that depend on values count with the largest possible size: {names}")
        if self.mode.shapes.least:
            names = ", ".join(f"{name} ({count:,})" for name, count in self.mode.shapes.least.most_common())
            notes.append(f"shapes that depend on values, without a stated bound, count with the smallest size: {names}")
        if self.attention.counts:
            chosen = ", ".join(f"{kernel} ({count:,})" for kernel, count in self.attention.counts.most_common())
            notes.append(f"kernels chosen for scaled_dot_product_attention: {chosen}")
        if self._triton.counts:
            names = ", ".join(f"{name} ({count:,})" for name, count in self._triton.counts.most_common())
            notes.append(f"Triton kernels count with the bytes of their arguments alone: {names}")
        if self.mode.values.waited:
            notes.append(f"the job was ended: it read {MAX_READS:,} unknown values without an optimizer step")
        if self.tracker.rule.index < 0:
            notes.append("no optimizer of torch stepped: there are no iterations")
        elif not self.finished:
            finished = self.tracker.rule.index + 1
            notes.append(f"the job ended by itself after {finished} of {self.options.iterations} iterations")
        return notes

    def _classify(self) -> None:
        """Note which storages hold parameters, buffers, gradients and optimizer state."""
        modules, optimizers = list(self.tracker.modules), list(self.tracker.optimizers)
        with self.tracker.threads.quiet() as quiet:
            if quiet:
                self.memory.set_categories(list_blocks(modules, optimizers, _storage_address))

    def _end_iteration(self, finished: int) -> None:
        optimizers = self.tracker.rule.optimizers
        modules = list(self.tracker.modules)
        self.model = describe_model(modules, optimizers, self.tracker.recomputes)
        self.framework = self.framework or describe_framework(modules, self.tracker.batch)
        self.optimizers = describe_optimizers(optimizers)
        self.mode.values.reads = 0
        if finished >= self.options.iterations:
            self.finished = True
            self._freeze()
            raise DryRunFinished

    def _freeze(self) -> None:
        """Count nothing any more: frameworks move and save tensors when they end."""
        if self.tracker.live:
            self._classify()
        self.tracker.live = False
        self.memory.close()
        self.host_memory.close()
        self.transfers.close()
        self.clock.close()
        self.annotations.close()
        self.user_files.stop_listing()


def _storage_address(storage: Any) -> int:
    return int(storage._cdata)
