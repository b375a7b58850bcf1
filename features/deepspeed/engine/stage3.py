"""The optimizer of ZeRO stage 3 with a step that runs a plan on the engine. Importing
it needs DeepSpeed."""

from typing import Any

import numpy as np
import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.utils import log_dist

from ebbtide.features.deepspeed.engine import subgroup_slices
from ebbtide.features.deepspeed.engine.state_access import CpuAdamScalars, StateAccess
from ebbtide.features.deepspeed.engine.supported import check_group, rules_of
from ebbtide.features.matrices.sharded_matrices import ShardedMatrices
from ebbtide.interleave.engine.adaptive.runner import AdaptiveRunner
from ebbtide.interleave.engine.devices.emulated import EmulatedDevice
from ebbtide.interleave.engine.errors import EngineError
from ebbtide.interleave.engine.forks import Rest, follow_forks
from ebbtide.interleave.engine.rules.rule import Group, Scalars
from ebbtide.interleave.model.plan import Plan
from ebbtide.interleave.model.schedule import Schedule
from ebbtide.machines.machine import Machine


class InterleavedStage3(StateAccess):
    """ZeRO stage 3 with a policy of ebbtide for the optimizer state.

    DeepSpeed reduces and partitions gradients, computes their norm, scales the loss,
    gathers parameters and writes checkpoints, as always. This class replaces the copies
    of gradients to the host, and the loop over subgroups in `step`.

    Muon's momentum stays on the host. A step gathers what it makes of gradients, each
    matrix on a rank that computes the products, and returns the parts to all ranks as
    gradients for the engine."""

    def __init__(
        self, module: Any, init_optimizer: Any, *args: Any, **kwargs: Any
    ) -> None:
        rules = rules_of(init_optimizer)
        if self.settings.storage is not None and any(
            rule.whole_update is not None for rule in rules
        ):
            raise EngineError(
                "Muon's state cannot be in storage under DeepSpeed: leave storage= out"
            )
        # The policy decides where state is.
        kwargs["offload_ratio"] = 1.0
        accumulates, offload = (
            kwargs["gradient_accumulation_steps"] > 1,
            kwargs["offload_optimizer_config"],
        )
        if not accumulates:
            kwargs["offload_optimizer_config"] = offload.model_copy(
                update={"pin_memory": False}
            )
        super().__init__(module, init_optimizer, *args, **kwargs)
        if not accumulates:
            # See `partition_grads`. If the job accumulates after all, the pages come
            # back as they are written.
            subgroup_slices.release_pages(self.grad_partitions_flat_buffer)
        self._scale = 1.0
        # Others, such as torch's AdamW, compute their scalars in double precision.
        other = getattr(init_optimizer, "aux_optimizer", init_optimizer)
        adam = next((rule for rule in rules if rule.whole_update is None), rules[0])
        self._cpu_adam = (
            CpuAdamScalars(adam) if isinstance(other, DeepSpeedCPUAdam) else None
        )
        self._ready_params = 0
        settings, masters = self.settings, self._masters
        sizes = [values.numel() for values in self.fp16_partitioned_groups_flat]
        self._slices = subgroup_slices.cut_subgroups(sizes, settings.subgroup_params)
        self._rules = [
            rules[self.sub_group_to_group_id[group]] for group in range(len(sizes))
        ]
        # The sharded matrices: the number of their subgroup and the parameter, by its
        # number.
        self._matrix_params = {
            self.get_param_id(param): (group, param)
            for group, params in enumerate(self.fp16_groups)
            for param in params
            if self._rules[group].whole_update is not None
        }
        divided = {
            number: ((param.ds_numel,), 0)
            for number, (_, param) in self._matrix_params.items()
        }
        device_name = str(self.fp16_partitioned_groups_flat[0].device)
        self._matrices = ShardedMatrices(divided, self.dp_process_group, device_name)
        self._grad_dtype = (
            torch.float32 if divided else self.gradient_accumulation_dtype
        )
        self._gradients = subgroup_slices.SliceGradients(
            self._slices, self._extents(), self._grad_dtype
        )
        # Gradients that the job reads before the step, and may change: fp32, by
        # parameter.
        self._exposed: dict[int, torch.Tensor] = {}
        self._runner = AdaptiveRunner(settings)
        self._runner.uses_ranks = True
        follow_forks(self, Rest.CALLS)
        if settings.device is None:
            self._runner.open_device(self.fp16_partitioned_groups_flat[0].device)
        device = self._runner.device
        try:
            if settings.storage is None:
                self._views = subgroup_slices.HeldMasters(
                    self.optimizer, self._rules, masters, self._slices, device
                )
                self._start_plan()
            else:
                # The engine is opened when it is needed, since a commit that is loaded
                # first names the files to use.
                self._views = subgroup_slices.StoredMasters(
                    self.optimizer, rules[0], masters, sizes, self._slices
                )
                self._runner.check(self._subgroups)
            self._gate_gathers(module.parameters())
        except BaseException:
            self._runner.close()
            raise
        kind = "an emulated device" if isinstance(device, EmulatedDevice) else "the GPU"
        log_dist(
            f"ebbtide drives ZeRO-3: {settings.policy}, {len(self._slices)} "
            f"subgroups, {kind}",
            ranks=[0],
        )

    @property
    def last_schedule(self) -> Schedule | None:
        """The measured schedule of the last step; None before the first."""
        return (
            None
            if self._runner is None or self._runner.closed
            else self._runner.engine.last_schedule
        )

    @property
    def plan(self) -> Plan:
        """The plan of the next step."""
        assert self._runner is not None
        return self._runner.plan

    @property
    def machine(self) -> Machine:
        """The rates for planning, corrected by the steps so far."""
        assert self._runner is not None
        return self._runner.planner.machine

    @property
    def ebbtide_policy(self) -> str:
        """The policy of this optimizer."""
        return self.settings.policy.text

    # -- gradients
    # ----------------------------------------------------------------------------------

    def backward_prologue(self) -> None:
        """Start the plan, unless it runs or there are gradients of this step."""
        super().backward_prologue()
        if (
            self._runner is not None
            and not self._engine.is_running
            and self._gradients.is_empty
        ):
            self._start_plan()

    def partition_grads(
        self, params_to_release: list[Any], grad_partitions: list[torch.Tensor]
    ) -> Any:
        """Offload gradients directly if the step has one micro-step.

        DeepSpeed's buffer on the host is not used.
        """
        if self.micro_step_id != 0 or not self.is_gradient_accumulation_boundary():
            return super().partition_grads(params_to_release, grad_partitions)
        for param, partition in zip(params_to_release, grad_partitions, strict=True):
            if self.get_param_id(param) in self._gradients:
                self._add_gradient(param, partition.to(self._grad_dtype))
            if (
                param.grad is not None
                and not get_accelerator().is_synchronized_device()
            ):
                # It was computed on another stream than the one that reduces it.
                param.grad.record_stream(get_accelerator().current_stream())
            param.grad = None
        return []

    def _offload_grad_partition_at_boundary(
        self, param: Any, grad_buffer: torch.Tensor, *_: Any
    ) -> None:
        """Offload the gradient of a step, which is complete."""
        self._add_gradient(param, grad_buffer)

    def _add_gradient(self, param: Any, gradient: torch.Tensor) -> None:
        self.synchronize()
        number = self.get_param_id(param)
        self.norm_for_param_grads[number] = self._constant_buffered_norm2(gradient)
        if self._gradients.has_gradient(number):
            # Another backward without a step in between: it replaces the earlier
            # gradient.
            self._recall()
        self._exposed.pop(number, None)
        engine = self._engine
        for part in self._gradients.add(number, gradient.view(-1)):
            if (
                engine.is_running
                and self._rules[self._slices[part].group].whole_update is None
            ):
                engine.offload_gradient(
                    part, self._gradients.pop(part, gradient.device)
                )
        self._ready_params += gradient.numel()
        engine.report_progress(min(1.0, self._ready_params / self._gradients.params))

    def _recall(self) -> None:
        """Recall offloaded gradients and stop the plan."""
        self.synchronize()
        for part, gradient in self._engine.recall_gradients(self._values()).items():
            self._gradients.restore(part, gradient)

    def _get_fp32_grad_state_partition(
        self, param: Any, release_swap_buffers: bool
    ) -> tuple[torch.Tensor, int]:
        """Return a gradient for DeepSpeed's functions that get and set it before the
        step."""
        number = self.get_param_id(param)
        if number not in self._exposed:
            self._recall()
            device = self.fp16_partitioned_groups_flat[0].device
            self._exposed[number] = self._gradients.param_gradient(
                number, device
            ).float()
        return self._exposed[number], self.grad_position[number][0]

    def has_overflow(self, partition_gradients: bool = True) -> bool:
        """Check the gradients, which are not in DeepSpeed's buffer, by their norms."""
        norms = list(self.norm_for_param_grads.values())
        finite = not norms or bool(torch.isfinite(torch.stack(norms)).all())
        flag = torch.tensor(
            [0 if finite else 1],
            dtype=torch.uint8,
            device=self.fp16_partitioned_groups_flat[0].device,
        )
        dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self.dp_process_group)
        self._model_parallel_all_reduce(tensor=flag, op=dist.ReduceOp.MAX)
        return bool(flag.item())

    def _overflow_clean_up(self, prev_scale: Any) -> None:
        super()._overflow_clean_up(prev_scale)
        self._clear_gradients()
        if self._engine.is_running:
            self._engine.discard()

    def _clear_gradients(self) -> None:
        self._gradients.clear()
        self._exposed.clear()
        self._ready_params = 0

    def _apply_muon_to_accumulated_grads(self) -> None:
        """Replace the gradients of matrices by their updates.

        DeepSpeed clips these then.
        """
        assert self._runner is not None
        self._apply_exposed_gradients()
        kernel, parts, factors = self._runner.kernel, {}, {}
        for number, (group, param) in self._matrix_params.items():
            rule, hyperparameters = (
                self._rules[group],
                {**self._hyperparameters(group), "lr": 1.0},
            )
            assert rule.whole_update is not None
            scalars = rule.scalars(hyperparameters, 1, 1 / self.loss_scale)
            factors[number] = rule.whole_update.parts(scalars, tuple(param.ds_shape))
            begin = param.partition_numel() * self._get_param_partition_rank(param)
            length = max(0, min(param.partition_numel(), param.ds_numel - begin))
            direction = torch.zeros(length, dtype=torch.float32, device="cpu")
            if length:
                gradient = self._gradients.param_gradient(number, direction.device)[
                    :length
                ]
                momentum = self.optimizer.state[self._masters[group]][rule.moments[0]]
                own = momentum.narrow(0, self.grad_position[number][1], length)
                kernel.update(
                    gradient, (direction, own), None, factors[number].scalars, rule=rule
                )
            parts[number] = [direction]
        whole = self._matrices.gather(parts)
        for number in self._matrices.own:
            direction = whole[number][0]
            group, param = self._matrix_params[number]
            whole_update = self._rules[group].whole_update
            assert whole_update is not None
            kernel.transform(
                whole_update, direction, tuple(param.ds_shape), factors[number]
            )
            # The ratio of learning rates, by the shape.
            direction *= float(factors[number].finish_scalars[-1])
        self._matrices.scatter(whole, parts)
        for number, (direction,) in parts.items():
            if number in self._gradients:
                update = direction.to(self.fp16_partitioned_groups_flat[0].device)
                self._gradients.add(number, update)
                self.norm_for_param_grads[number] = (
                    self._constant_buffered_norm2(update) * self.loss_scale
                )

    def _hyperparameters(self, group: int) -> Group:
        rule, own = (
            self._rules[group],
            self.optimizer.param_groups[self.sub_group_to_group_id[group]],
        )
        check_group(rule, own)
        return {**rule.defaults, **own}

    # -- the step: DeepSpeed's loop calls these for each subgroup in turn
    # ---------------------------------------

    def unscale_and_clip_grads(self, sub_group_id: int, total_norm: Any) -> None:
        """Compute the factor for each gradient, which the kernel applies, by
        DeepSpeed's formula: one over the loss scale times max(1, (norm + 1e-6) /
        clip_grad)."""
        combined = self.loss_scale
        if self.clip_grad > 0:
            clip = (total_norm / self.loss_scale + 1e-6) / self.clip_grad
            combined = torch.clamp(clip, min=1.0) * self.loss_scale
        self._scale = float(1.0 / combined)

    def _optimizer_step(self, sub_group_id: int) -> None:
        """Update all subgroups when DeepSpeed updates the first one."""
        if sub_group_id == 0:
            self._update()

    def _reassign_or_swap_out_partitioned_parameters(self, sub_group_id: int) -> None:
        """Gather parameters; the engine has already written them."""
        self._unflatten_partitioned_parameters(sub_group_id)

    def _update(self) -> None:
        assert self._runner is not None
        runner = self._runner
        self._apply_exposed_gradients()
        engine, values = self._engine, self._values()
        if not engine.is_running:
            self._start_plan()
        not_offloaded = set(range(len(self._slices))) - engine.update.offloaded
        engine.submit_gradients(
            {
                part: self._gradients.pop(part, values[part].device)
                for part in not_offloaded
            }
        )
        scalars = [
            self._scalars(group, master) for group, master in enumerate(self._masters)
        ]
        runner.step(
            values, [scalars[part.group] for part in self._slices], self._end_step
        )

    def _scalars(self, group: int, master: torch.Tensor) -> Scalars:
        rule, own = self._rules[group], self._hyperparameters(group)
        step = int(self.optimizer.state[master]["step"]) + 1
        if rule.whole_update is not None:
            # Updates of matrices are clipped, and have no loss scale.
            factors = rule.whole_update.parts(
                rule.scalars(own, step), (1, 1)
            ).finish_scalars
            return np.float32(self._scale * self.loss_scale), *factors[1:]
        return (self._cpu_adam or rule).scalars(own, step, self._scale)

    def _end_step(self) -> None:
        for master in self._masters:
            self.optimizer.state[master]["step"] += 1
        self._clear_gradients()

    def _apply_exposed_gradients(self) -> None:
        """Use the gradients that the job has read, with its changes."""
        for number, gradient in self._exposed.items():
            self._gradients.add(number, gradient.to(self._grad_dtype))
        self._exposed.clear()

    def _extents(self) -> dict[int, subgroup_slices.SubgroupSlice]:
        """Return the extents of the parameters with elements on this rank.

        Padding does not count.

        Real elements are not padding.
        """
        extents = {}
        for param in (param for group in self.fp16_groups for param in group):
            if (
                param.partition_numel() * self._get_param_partition_rank(param)
                < param.ds_numel
            ):
                group, begin, length = self.grad_position[self.get_param_id(param)]
                extents[self.get_param_id(param)] = subgroup_slices.SubgroupSlice(
                    group, begin, begin + length
                )
        return extents
