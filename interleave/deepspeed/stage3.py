"""ZeRO stage 3's optimizer, whose step runs a plan of ours with our engine. Imported only where DeepSpeed is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.utils import log_dist

from ebbtide.interleave.deepspeed.adam_scalars import CpuAdamConstants
from ebbtide.interleave.deepspeed.settings import Settings
from ebbtide.interleave.deepspeed.subgroup_slices import Extent, Gradients, cut, subgroups
from ebbtide.interleave.deepspeed.supported import check_optimizer, hyper_of
from ebbtide.interleave.engine.adaptive.runner import Driver
from ebbtide.interleave.engine.devices.emulated import EmulatedDevice
from ebbtide.interleave.engine.devices.open import open_device
from ebbtide.interleave.engine.numerics.reference import Scalars
from ebbtide.interleave.engine.runtime.store import EXP_AVG, EXP_AVG_SQ, MASTER
from ebbtide.interleave.model.schedule import Schedule

_MOMENTS = {"exp_avg": EXP_AVG, "exp_avg_sq": EXP_AVG_SQ}


class InterleavedStage3(DeepSpeedZeroOptimizer_Stage3):  # type: ignore[misc]
    """DeepSpeed reduces and partitions gradients, finds their norm, scales the loss, gathers parameters and writes
    checkpoints, as it always does. Ours are the gradient's way to the host, and the loop over subgroups in `step`.

    State lies in `homes`, host memory of which DeepSpeed's masters and moments are views. A part of it may be on the
    device; whoever asks DeepSpeed for its masters has it brought home first."""

    settings = Settings()

    def __init__(self, module: Any, init_optimizer: Any, *args: Any, **kwargs: Any) -> None:
        check_optimizer(init_optimizer)
        self._driver: Driver | None = None
        # Where state lies is the policy's to say.
        super().__init__(module, init_optimizer, *args, **{**kwargs, "offload_ratio": 1.0})
        self._scale = 1.0
        # torch's AdamW, which DeepSpeed may be given too, forms its constants in double precision.
        self._constants = CpuAdamConstants() if isinstance(init_optimizer, DeepSpeedCPUAdam) else None
        self._share_made = 0
        masters = self._masters
        self._slices = cut([master.numel() for master in masters], self.settings.subgroup_params)
        self._gradients = Gradients(self._slices, self._extents(), self.gradient_accumulation_dtype)
        # Gradients that somebody looks at before the step, and may change: fp32, by parameter.
        self._seen: dict[int, torch.Tensor] = {}
        given = self.settings.device
        device = given or open_device(self.fp16_partitioned_groups_flat)
        self._driver = Driver(
            self.settings.policy,
            self.settings.machine,
            self.settings.memory_budget,
            self.settings.threads,
            True,
            device,
            owns=given is None,
        )
        try:
            self._homes = [self._move_in(master, device.host((3, master.numel()), torch.float32)) for master in masters]
            homes = [self._homes[piece.group][:, piece.begin : piece.end] for piece in self._slices]
            dtype = self.fp16_partitioned_groups_flat[0].dtype
            self._driver.take(
                subgroups(self._slices, dtype, self.gradient_accumulation_dtype), len(self._slices), homes
            )
            self._driver.follow()
        except BaseException:
            self._driver.close()
            raise
        where = "an emulated device" if isinstance(device, EmulatedDevice) else "the GPU"
        log_dist(f"ebbtide drives ZeRO-3: {self.settings.policy}, {len(self._slices)} subgroups, {where}", ranks=[0])

    @property
    def last_schedule(self) -> Schedule | None:
        """What the last step was measured to do; None before the first."""
        return None if self._driver is None or self._driver.closed else self._driver.engine.last

    @property
    def ebbtide_policy(self) -> str:
        """The policy that drives this."""
        return self.settings.policy

    # -- state, as DeepSpeed knows it ---------------------------------------------------------------------------

    @property
    def fp32_partitioned_groups_flat(self) -> list[torch.Tensor]:
        """The masters; whoever asks for them finds masters, moments and gradients at home."""
        self._go_home()
        return self._masters

    @fp32_partitioned_groups_flat.setter
    def fp32_partitioned_groups_flat(self, masters: list[torch.Tensor]) -> None:
        self._masters = masters

    def initialize_optimizer_states(self) -> None:
        """Gradients have no fp32 buffers on the host here, and moments are made where they stay."""

    def load_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """As DeepSpeed's; torch's part of it replaces the moments by others, which move in here."""
        super().load_state_dict(*args, **kwargs)
        for master, home in zip(self.fp32_partitioned_groups_flat, self._homes, strict=True):
            self._move_in(master, home)

    def destroy(self) -> None:
        super().destroy()
        if self._driver is not None:
            self._driver.close()

    def _move_in(self, master: torch.Tensor, home: torch.Tensor) -> torch.Tensor:
        """A master and its moments lie in `home` from now on; without moments these are zero."""
        if master.data.data_ptr() != home[MASTER].data_ptr():
            home[MASTER].copy_(master.data)
            master.data = home[MASTER]
        master.grad = None
        state = self.optimizer.state[master]
        for name, row in _MOMENTS.items():
            if name not in state:
                home[row].zero_()
            elif state[name].data_ptr() != home[row].data_ptr():
                home[row].copy_(state[name])
            state[name] = home[row]
        state.setdefault("step", 0)
        return home

    def _go_home(self) -> None:
        """Bring all state to its home, and gradients that have left back; the next backward begins the plan anew."""
        if self._driver is None or self._driver.closed:
            return
        self._recall()
        self._driver.engine.store.bring_home()

    # -- gradients ----------------------------------------------------------------------------------------------

    def backward_prologue(self) -> None:
        super().backward_prologue()
        if self._driver is not None and not self._driver.engine.under_way and not self._gradients.any:
            self._driver.follow()

    def partition_grads(self, params_to_release: list[Any], grad_partitions: list[torch.Tensor]) -> Any:
        """Where this is all of the step's gradient it need not go through DeepSpeed's buffer on the host and back."""
        if self.micro_step_id != 0 or not self.is_gradient_accumulation_boundary():
            return super().partition_grads(params_to_release, grad_partitions)
        for param, partition in zip(params_to_release, grad_partitions, strict=True):
            if self.get_param_id(param) in self._gradients:
                self._made(param, partition.to(self.gradient_accumulation_dtype))
            if param.grad is not None and not get_accelerator().is_synchronized_device():
                # It was made on another stream than the one that reduces it.
                param.grad.record_stream(get_accelerator().current_stream())
            param.grad = None
        return []

    def _offload_grad_partition_at_boundary(self, param: Any, grad_buffer: torch.Tensor, *_: Any) -> None:
        """The gradient of a step is whole."""
        self._made(param, grad_buffer)

    def _made(self, param: Any, gradient: torch.Tensor) -> None:
        assert self._driver is not None
        number = self.get_param_id(param)
        self.norm_for_param_grads[number] = self._constant_buffered_norm2(gradient)
        if self._gradients.has(number):
            # Another backward without a step between: the gradient before it does not count.
            self._recall()
        self._seen.pop(number, None)
        engine = self._driver.engine
        for piece in self._gradients.arrive(number, gradient.view(-1)):
            if engine.under_way:
                engine.take(piece, self._gradients.take(piece, gradient.device))
        self._share_made += gradient.numel()
        engine.reach(min(1.0, self._share_made / self._gradients.params))

    def _recall(self) -> None:
        """Gradients that have left are here again, and nothing is under way."""
        assert self._driver is not None
        for piece, gradient in self._driver.engine.give_back(self._values()).items():
            self._gradients.put(piece, gradient)

    def _get_fp32_grad_state_partition(self, param: Any, release_swap_buffers: bool) -> tuple[torch.Tensor, int]:
        """For DeepSpeed's own functions that get and set a gradient before the step."""
        number = self.get_param_id(param)
        if number not in self._seen:
            self._recall()
            device = self.fp16_partitioned_groups_flat[0].device
            self._seen[number] = self._gradients.of_param(number, device).float()
        return self._seen[number], self.grad_position[number][0]

    def has_overflow(self, partition_gradients: bool = True) -> bool:
        """Of the gradients that were made, by their norms: DeepSpeed's buffer does not hold them."""
        norms = list(self.norm_for_param_grads.values())
        finite = not norms or bool(torch.isfinite(torch.stack(norms)).all())
        flag = torch.tensor([0 if finite else 1], dtype=torch.uint8, device=self.fp16_partitioned_groups_flat[0].device)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self.dp_process_group)
        self._model_parallel_all_reduce(tensor=flag, op=dist.ReduceOp.MAX)
        return bool(flag.item())

    def _overflow_clean_up(self, prev_scale: Any) -> None:
        super()._overflow_clean_up(prev_scale)
        assert self._driver is not None
        self._forget()
        if self._driver.engine.under_way:
            self._driver.engine.drop()

    def _forget(self) -> None:
        self._gradients.forget()
        self._seen.clear()
        self._share_made = 0

    # -- the step: DeepSpeed's loop calls these for each subgroup in turn ---------------------------------------

    def unscale_and_clip_grads(self, sub_group_id: int, total_norm: Any) -> None:
        """What the kernel multiplies each gradient with, by DeepSpeed's formula: loss scale times
        max(1, (norm + 1e-6) / clip_grad)."""
        combined = self.loss_scale
        if self.clip_grad > 0:
            clip = (total_norm / self.loss_scale + 1e-6) / self.clip_grad
            combined = torch.clamp(clip, min=1.0) * self.loss_scale
        self._scale = float(1.0 / combined)

    def _optimizer_step(self, sub_group_id: int) -> None:
        """All subgroups are updated at the first one's turn."""
        if sub_group_id == 0:
            self._update()

    def _reassign_or_swap_out_partitioned_parameters(self, sub_group_id: int) -> None:
        """The engine has written the parameters."""
        self._unflatten_partitioned_parameters(sub_group_id)

    def _update(self) -> None:
        assert self._driver is not None
        driver = self._driver
        self._use_seen()
        if not driver.engine.under_way:
            driver.follow()
        engine, values = driver.engine, self._values()
        left = set(range(len(self._slices))) - engine.taken
        engine.give({piece: self._gradients.take(piece, values[piece].device) for piece in left})
        scalars = [self._scalars(group, master) for group, master in enumerate(self._masters)]
        driver.step(values, [scalars[piece.group] for piece in self._slices], self._count)

    def _scalars(self, group: int, master: torch.Tensor) -> Scalars:
        hyper = hyper_of(self.optimizer, self.optimizer.param_groups[self.sub_group_to_group_id[group]])
        step = int(self.optimizer.state[master]["step"]) + 1
        if self._constants is None:
            return hyper.scalars(step, self._scale)
        return self._constants.scalars(hyper, step, self._scale)

    def _count(self) -> None:
        for master in self._masters:
            self.optimizer.state[master]["step"] += 1
        self._forget()

    def _use_seen(self) -> None:
        """Gradients that somebody has looked at are what he left them."""
        for number, gradient in self._seen.items():
            self._gradients.arrive(number, gradient.to(self.gradient_accumulation_dtype))
        self._seen.clear()

    def _values(self) -> Sequence[torch.Tensor]:
        """The parameters of each slice, flat."""
        return [self.fp16_partitioned_groups_flat[piece.group][piece.begin : piece.end] for piece in self._slices]

    def _extents(self) -> dict[int, Extent]:
        """Of the parameters that this rank has elements of that are not padding."""
        found = {}
        for param in (param for group in self.fp16_groups for param in group):
            if param.partition_numel() * self._get_param_partition_rank(param) < param.ds_numel:
                group, begin, length = self.grad_position[self.get_param_id(param)]
                found[self.get_param_id(param)] = Extent(group, begin, begin + length)
        return found
