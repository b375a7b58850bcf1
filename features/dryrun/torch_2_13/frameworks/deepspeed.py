"""Adapts DeepSpeed to a dry run, once the job has imported it."""

import functools
from collections.abc import Callable
from typing import Any

import torch

from ebbtide.features.dryrun.errors import CannotFakeError
from ebbtide.features.dryrun.sink import Sink
from ebbtide.features.dryrun.time.clock import VirtualClock
from ebbtide.features.dryrun.torch_2_13.frameworks.process_groups import ProcessGroups
from ebbtide.machines.kernels import time_priors as priors
from ebbtide.machines.kernels.rates import KernelWork
from ebbtide.machines.kernels.time_priors import PriorRange, WorkClass
from ebbtide.machines.machine import FP32_UPDATE_BYTES, Machine
from ebbtide.profiler.agent.framework_objects import describe_engine
from ebbtide.profiler.agent.iteration_rule import UPDATE
from ebbtide.profiler.agent.patches import Patches, wrapper
from ebbtide.profiler.agent.phase_hooks import wrap_backward

# Of a kernel of `multi_tensor_adam`: tensors of one launch (depth_to_max_tensors in
# csrc/adam/multi_tensor_apply.cuh).
_TENSORS_PER_LAUNCH = 36
# Host time of stage 3 before a module or after it, beside torch's operations. Measured
# with 0.19.8 on an AMD EPYC: for both 0.35 ms in a forward, 0.28 ms in a backward.
_MODULE_HOOK_NS = PriorRange(100_000, 150_000, 250_000)


class _CpuAdam:
    """Stands in for the extension `cpu_adam`, whose updates run on the threads of the
    host."""

    def __init__(self, clock: VirtualClock, params_per_s: float | None) -> None:
        self._clock, self._params_per_s = clock, params_per_s

    def create_adam(self, *_options: Any) -> int:
        return 0

    def destroy_adam(self, _number: int) -> int:
        """Release nothing."""
        return 0

    def adam_update(self, _number: int, _step: int, *values: Any) -> int:
        """Update a subgroup: `values` ends with parameters, gradients and the two
        moments."""
        elements = values[-1].numel()
        clock = self._clock
        if self._params_per_s is None:
            clock.run_host(clock.rates.host_ns(FP32_UPDATE_BYTES * elements))
        else:
            time_ns = 1e9 * elements / self._params_per_s
            least_ns = clock.rates.least_host_ns(FP32_UPDATE_BYTES * elements)
            times = (time_ns / share for share in priors.COPY_EFFICIENCY)
            clock.run_host(PriorRange(*(max(least_ns, time) for time in times)))
        return 0

    adam_rollback = adam_update


class _FusedAdam:
    """Stands in for the extension `fused_adam`, which updates lists of tensors in place
    on the device."""

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock

    def multi_tensor_adam(
        self, _chunk: int, _flag: Any, lists: list[list[Any]], *_options: Any
    ) -> None:
        """Update the parameters. lists: gradients, parameters, first and second
        moments."""
        gradients, *others = lists
        size = sum(tensor.numel() * tensor.element_size() for tensor in gradients)
        size += 2 * sum(
            tensor.numel() * tensor.element_size()
            for tensors in others
            for tensor in tensors
        )
        launches = -(-len(gradients) // _TENSORS_PER_LAUNCH)
        self._clock.run_host(priors.PYTHON_OPERATION_NS)
        work = KernelWork(
            "deepspeed::multi_tensor_adam",
            "compute",
            WorkClass.FOREACH,
            0,
            size,
            launches=launches,
        )
        self._clock.run_kernel(work)


def extension(
    name: str, clock: VirtualClock, cpu_update_params_per_s: float | None
) -> Any:
    """Return the stand-in for an extension; `cpu_update_params_per_s` of a rank, None:
    by the host's memory."""
    if name == "cpu_adam":
        return _CpuAdam(clock, cpu_update_params_per_s)
    if name == "fused_adam":
        return _FusedAdam(clock)
    raise CannotFakeError(
        f"cannot dry-run DeepSpeed's extension {name}: only those of Adam are known; "
        "choose AdamW, and offload to "
        "the CPU in place of NVMe"
    )


class DeepSpeedPatches:
    """Patches of DeepSpeed.

    DeepSpeed's own engine runs: it chooses CUDA as its accelerator, and its collectives
    go to torch's fake groups.

    `machine`: the machine, for its updates on the CPU; None: not named.

    `description`: the trace's `deepspeed` entry; None before the first update of an
    engine."""

    def __init__(
        self,
        patches: Patches,
        sink: Sink,
        groups: ProcessGroups,
        machine: Machine | None,
    ) -> None:
        self.description: dict[str, Any] | None = None
        self._patches, self._sink = patches, sink
        self._tracker, self._clock = sink.phases, sink.clock
        self._cpu_rate = _cpu_update_params_per_s(machine, groups.ranks_per_node)
        replaced: dict[str, dict[str, Any]] = {
            "accelerator.real_accelerator": {"ds_accelerator": None},
            # DeepSpeed asks MPI where no launcher has set the environment.
            "comm.comm": {
                "cdb": None,
                "mpi_discovery": lambda **_options: groups.set_environment(),
            },
            # Groups that were made outside of this dry run.
            "utils.groups": dict.fromkeys(
                ("_WORLD_GROUP", "_ZERO_PARAM_INTRA_PARALLEL_GROUP", "mesh_device")
            ),
        }
        for name, values in replaced.items():
            patches.when_imported(
                f"deepspeed.{name}", functools.partial(_set_all, patches, values)
            )
        patches.when_imported(
            "deepspeed.ops.op_builder.builder", self._patch_extensions
        )
        part, overflow, hook = (
            self._wrap_part_of_update,
            _wrap_overflow_check,
            self._wrap_module_hook,
        )
        optimizer = {
            "finalize_gradient_accumulation_boundary": part,
            "has_overflow": overflow,
        }
        backward = functools.partial(
            wrap_backward, sink.phases, torch.compiler.is_compiling
        )
        wrappers: dict[str, dict[str, dict[str, Any]]] = {
            "runtime.engine": {
                "DeepSpeedEngine": {
                    "backward": backward,
                    "_take_model_step": self._wrap_step,
                    # Without managed accumulation, gradients are reduced and copied
                    # when the update begins.
                    "allreduce_gradients": part,
                }
            },
            "runtime.utils": {
                "CheckOverflow": {
                    "has_overflow": overflow,
                    "check_using_norm": overflow,
                }
            },
            "runtime.zero.partitioned_param_coordinator": {
                "PartitionedParameterCoordinator": {
                    "fetch_sub_module": hook,
                    "release_sub_module": hook,
                }
            },
            "runtime.zero.stage3": {"DeepSpeedZeroOptimizer_Stage3": optimizer},
            "runtime.zero.stage_1_and_2": {"DeepSpeedZeroOptimizer": optimizer},
        }
        for name, functions in wrappers.items():
            patches.wrap_when_imported(f"deepspeed.{name}", functions)

    def _patch_extensions(self, module: Any) -> None:
        clock, rate = self._clock, self._cpu_rate
        self._patches.set(
            module.OpBuilder,
            "load",
            lambda builder, **_options: extension(builder.name, clock, rate),
        )

    @wrapper
    def _wrap_module_hook(
        self, original: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        self._clock.run_host(_MODULE_HOOK_NS)
        return original(*args, **kwargs)

    @wrapper
    def _wrap_step(
        self, original: Callable[..., Any], engine: Any, /, *args: Any, **kwargs: Any
    ) -> Any:
        step = self._tracker.wrap_update(lambda engine, *_: engine.optimizer, original)
        try:
            return step(engine, *args, **kwargs)
        finally:
            # Its gradients exist after a step only, which may end the job.
            if self.description is None and engine.optimizer is not None:
                self.description = describe_engine(engine, self._tracker.recomputes)

    @wrapper
    def _wrap_part_of_update(
        self, original: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        """Wrap a method that runs in an update, or by itself before one."""
        with self._sink.phase(UPDATE):
            return original(*args, **kwargs)


def _set_all(patches: Patches, values: dict[str, Any], module: Any) -> None:
    for name, value in values.items():
        patches.set(module, name, value)


@wrapper
def _wrap_overflow_check(
    original: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> bool:
    """Wrap a check for gradients that are not finite: it runs, and finds none."""
    original(*args, **kwargs)
    return False


def _cpu_update_params_per_s(machine: Machine | None, ranks: int) -> float | None:
    """Return what one of the ranks of a host updates on the CPU; None where it is not
    known."""
    if machine is None:
        return None
    return (
        machine if machine.box is None else machine.for_ranks(ranks)
    ).cpu_update_params_per_s
