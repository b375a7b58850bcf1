"""Fakes the CUDA device in torch 2.13."""

import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

# classifies torch's functions, which must happen before they are replaced
import torch._dynamo

from ebbtide.features.dryrun.failures import follow_threads
from ebbtide.features.dryrun.gpu import FakedGpu
from ebbtide.features.dryrun.memory.call_stacks import CallStacks
from ebbtide.features.dryrun.peers import Peers
from ebbtide.features.dryrun.sink import Sink
from ebbtide.features.dryrun.torch_2_13.batch_lengths import BatchLengths
from ebbtide.features.dryrun.torch_2_13.device.attention import (
    AttentionChoice,
    register_attention,
    register_whole_operations,
)
from ebbtide.features.dryrun.torch_2_13.device.cuda_build import leave_out_device_code
from ebbtide.features.dryrun.torch_2_13.device.cuda_stubs import CudaStubs
from ebbtide.features.dryrun.torch_2_13.device.fake_cuda import patch_cuda
from ebbtide.features.dryrun.torch_2_13.device.fake_device import (
    FakeDeviceMode,
    is_in_backward,
)
from ebbtide.features.dryrun.torch_2_13.device.flex_attention import (
    register_flex_attention,
)
from ebbtide.features.dryrun.torch_2_13.device.pickled_tensors import patch_pickles
from ebbtide.features.dryrun.torch_2_13.device.tensor_patches import (
    patch_legacy_types,
    patch_tensors,
)
from ebbtide.features.dryrun.torch_2_13.device.triton_kernels import TritonKernels
from ebbtide.features.dryrun.torch_2_13.device.unknown_shapes import (
    register_missing_kernels,
)
from ebbtide.features.dryrun.torch_2_13.files.user_files import UserFiles
from ebbtide.features.dryrun.torch_2_13.frameworks.deepspeed import DeepSpeedPatches
from ebbtide.features.dryrun.torch_2_13.frameworks.libraries import LibraryPatches
from ebbtide.features.dryrun.torch_2_13.frameworks.parallelism import (
    patch_data_parallel,
    patch_model_parallel,
    patch_replicas,
)
from ebbtide.features.dryrun.torch_2_13.frameworks.process_groups import (
    ProcessGroups,
    patch_ray_train,
)
from ebbtide.features.dryrun.torch_2_13.operations.convolutions import (
    keep_channels_last,
)
from ebbtide.features.dryrun.torch_2_13.operations.storages import FollowedStorages
from ebbtide.features.dryrun.torch_2_13.operations.workspaces import KernelWorkspaces
from ebbtide.features.dryrun.torch_2_13.phase_hooks import hook_phases
from ebbtide.machines.machine import Machine
from ebbtide.profiler.agent.patches import Patches


class Backend:
    """Everything that is replaced in torch, as `backends.Backend` describes it."""

    torch_version = str(torch.__version__)
    # What a fake tensor keeps its device in.
    device_attribute = "_fake_device"

    def __init__(self) -> None:
        self.stacks = CallStacks(str(Path(torch.__file__).parent), _running_node)
        self.attention = AttentionChoice()
        self.batches = BatchLengths()

    def install(
        self,
        sink: Sink,
        gpu: FakedGpu,
        ranks: int | None,
        ranks_per_node: int | None,
        machine: Machine | None,
        peers: Peers | None,
    ) -> Callable[[], None]:
        sink.memory.error = torch.OutOfMemoryError
        patches = Patches()
        self.process_groups = ProcessGroups(ranks, ranks_per_node, peers)
        devices = self.process_groups.ranks_per_node
        storages = FollowedStorages(sink)
        workspaces = KernelWorkspaces(sink.memory, self.stacks, gpu)
        self.mode = mode = FakeDeviceMode(
            sink, self.stacks, storages, workspaces, self.device_attribute, devices
        )
        self.triton = TritonKernels(sink.clock, mode.values)
        self.user_files = UserFiles(mode)
        patches.on_undo(CudaStubs(torch, devices).remove)
        patches.on_undo(self.user_files.close)
        patch_cuda(patches, sink, gpu, devices)
        patch_legacy_types(patches)
        self.process_groups.install(patches)
        mode.collectives.install(patches, peers)
        patch_data_parallel(patches, mode.collectives)
        patch_tensors(patches, storages, self.stacks, mode.values)
        patch_pickles(patches)
        self.user_files.install(patches)
        storages.install(patches)
        self.batches.install(patches)
        hook_phases(sink.phases, patches)
        self.libraries = LibraryPatches(patches, mode)
        self.triton.install(patches)
        patch_ray_train(patches, self.process_groups)
        patch_model_parallel(patches, mode, peers)
        patch_replicas(patches)
        self.deepspeed = DeepSpeedPatches(patches, sink, self.process_groups, machine)
        self._register_kernels(patches)
        mode.shapes.install(patches)
        register_flex_attention()
        keep_channels_last(patches)
        _change_settings(patches)
        leave_out_device_code(patches)
        patches.wrap(threading.Thread, "_bootstrap_inner", mode.wrap_thread)
        follow_threads(patches, lambda: sink.clock.closed)
        mode.__enter__()

        def uninstall() -> None:
            mode.__exit__(None, None, None)
            self.process_groups.remove()
            patches.undo()

        return uninstall

    def storage_key(self, storage: Any) -> int:
        return int(storage._cdata)

    def notes(self) -> list[str]:
        notes = []
        number = sum(self.mode.values.placeholders.values())
        if number:
            notes.append(
                f"the job read {number:,} values of tensors, which a dry run does not "
                "have: it got 1 for numbers and False for booleans"
            )
        if self.libraries.compiles:
            notes.append(
                "torch.compile was left out: the memory is that of the eager model, "
                "but for temporaries of code without gradients, "
                "the times are those of fused kernels"
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
        if self.triton.counts:
            notes.append(
                "Triton kernels count with the bytes of their arguments alone: "
                f"{_counted(self.triton.counts)}"
            )
        return notes

    def _register_kernels(self, patches: Patches) -> None:
        """Register kernels that a build for the CPU lacks, until `patches.undo()`."""
        library = register_attention(self.attention)
        patches.on_undo(library._destroy)
        if not torch.version.cuda:
            register_whole_operations(library)
        register_missing_kernels(library, patches)


def _change_settings(patches: Patches) -> None:
    """Set what fake tensors need of torch and of autograd, until `patches.undo()`."""
    only_lifts_cpu = torch._C._only_lift_cpu_tensors()
    patches.on_undo(lambda: torch._C._set_only_lift_cpu_tensors(only_lifts_cpu))
    torch._C._set_only_lift_cpu_tensors(True)
    multithreading = torch.autograd.set_multithreading_enabled(False)
    patches.on_undo(lambda: multithreading.__exit__(None, None, None))


def _running_node() -> str | None:
    """Return the name of autograd's node that runs; None: none does."""
    if not is_in_backward():
        return None
    node = torch._C._current_autograd_node()
    return node and str(node.name())


def _counted(counts: Counter[str]) -> str:
    return ", ".join(f"{name} ({count:,})" for name, count in counts.most_common())
