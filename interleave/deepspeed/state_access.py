"""The optimizer state of ZeRO stage 3 as DeepSpeed and the job read it. Importing it needs DeepSpeed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from ebbtide.interleave.deepspeed.adam_scalars import CpuAdamScalars
from ebbtide.interleave.deepspeed.late_steps import LateSteps
from ebbtide.interleave.deepspeed.master_views import MasterViews
from ebbtide.interleave.deepspeed.subgroup_slices import SubgroupSlice, engine_subgroups
from ebbtide.interleave.engine.errors import EngineError
from ebbtide.interleave.engine.runtime.engine import Engine
from ebbtide.interleave.engine.runtime.layout import Subgroup
from ebbtide.interleave.engine.runtime.state_rows import MASTER


class StateAccess(LateSteps):
    """ZeRO stage 3 whose masters and moments are the state of an engine.

    Without storage the state has host buffers, and DeepSpeed's masters and moments are views of them. A part of the
    state may be on the device; reading DeepSpeed's masters moves it to the host first. With storage, masters and
    moments have values only from when something reads them to the next backward.
    """

    _masters: list[torch.Tensor]
    _slices: Sequence[SubgroupSlice]
    _views: MasterViews
    _cpu_adam: CpuAdamScalars | None
    _is_open = False

    @property
    def _engine(self) -> Engine:
        """The engine. It is opened when it is first needed."""
        assert self._runner is not None
        if not self._is_open:
            self._open()
        return self._runner.engine

    def _open(self, commit: Mapping[str, Any] | None = None) -> None:
        """Open the engine with the state of a commit; without one, with masters that are the parameters."""
        assert self._runner is not None
        engine = self._runner.rebuild(self._subgroups, len(self._slices), self._views.slice_buffers, commit)
        self._is_open = True
        if commit is None and self._runner.has_storage:
            for number, value in enumerate(self._values()):
                state = torch.zeros((3, value.numel()), dtype=torch.float32, device="cpu")
                state[MASTER] = value
                engine.store.states.write(number, state)

    @property
    def _subgroups(self) -> list[Subgroup]:
        dtype = self.fp16_partitioned_groups_flat[0].dtype
        return engine_subgroups(self._slices, dtype, self.gradient_accumulation_dtype)

    def _values(self) -> list[torch.Tensor]:
        """Return the parameters of each slice, flat."""
        return [self.fp16_partitioned_groups_flat[part.group][part.begin : part.end] for part in self._slices]

    def _start_plan(self) -> None:
        """Start the plan, with what was changed in masters and moments since it stopped."""
        self._views.write_back(self._engine.store.states)
        assert self._runner is not None
        self._runner.set_plan()

    def _show(self, groups: Iterable[int]) -> None:
        """Let the masters and moments of DeepSpeed's subgroups have their values, until the plan starts again."""
        if self._runner is None or (self._runner.closed and not self._runner.has_storage):
            return
        self._recall()
        self._views.show(self._engine.store.states, groups)

    def _recall(self) -> None:
        """Recall offloaded gradients and stop the plan."""
        raise NotImplementedError

    # -- as DeepSpeed reads it ----------------------------------------------------------------------------------

    def _create_fp32_partitions(self) -> None:
        """Create the masters; with storage, without elements."""
        if self.settings.storage is None:
            super()._create_fp32_partitions()
            return
        for _ in self.fp16_partitioned_groups_flat:
            master = torch.empty(0, dtype=torch.float32, device="cpu")
            master.requires_grad = True
            self._masters.append(master)
        self._clear_fp32_optimizer_param_groups()

    def initialize_optimizer_states(self) -> None:
        """Do nothing: gradients have no fp32 buffers on the host here, and moments are views of other memory."""

    @property
    def fp32_partitioned_groups_flat(self) -> list[torch.Tensor]:
        """The masters; reading them moves all state to the host and recalls offloaded gradients."""
        self._show(range(len(self._masters)))
        return self._masters

    @fp32_partitioned_groups_flat.setter
    def fp32_partitioned_groups_flat(self, masters: list[torch.Tensor]) -> None:
        self._masters = masters

    def _get_fp32_opt_state_partition(
        self, param: Any, release_swap_buffers: bool, optim_state_key: str | None = None
    ) -> tuple[torch.Tensor, int]:
        """Return the master or a moment of a parameter for the functions of DeepSpeed that get and set it."""
        group, begin, length = self.grad_position[self.get_param_id(param)]
        self._show([group])
        master = self._masters[group]
        whole = master if optim_state_key is None else self.optimizer.state[master][optim_state_key]
        return whole.narrow(0, begin, length), group

    def load_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Load a state dict of DeepSpeed. torch replaces the moments by new tensors; they are copied."""
        super().load_state_dict(*args, **kwargs)
        self._views.collect()

    # -- commits ------------------------------------------------------------------------------------------------

    def commit(self) -> dict[str, Any]:
        """Make the state in storage that to go on with, and return a small dict of this rank for `load_commit`.

        It includes parameters, since they are rounded masters, hyperparameters and the loss scale. It can be loaded
        with the same storage, ranks and subgroups, until the first step after the next commit.

        Raises:
            EngineError: There is no storage, or too little space in it; the commit before stays.
        """
        assert self._runner is not None
        self._recall()
        self._views.write_back(self._engine.store.states)
        commit = {
            "storage": self._runner.commit(),
            "steps": [int(self.optimizer.state[master]["step"]) for master in self._masters],
            "param_groups": [_hyperparameters(group) for group in self.optimizer.param_groups],
            "loss_scaler": dict(self.loss_scaler.__dict__),
        }
        if self._cpu_adam is not None:
            commit["cpu_adam"] = self._cpu_adam.state_dict()
        return commit

    def load_commit(self, commit: Mapping[str, Any]) -> None:
        """Go on from what `commit` has returned on this rank, in this process or after a crash.

        Gradients of this step are dropped. Frozen parameters and buffers of the model are not in it.

        Raises:
            EngineError: It is not a commit of this model, or the storage does not have it.
        """
        if not {"storage", "steps", "param_groups", "loss_scaler"} <= commit.keys():
            raise EngineError("this is not what commit() of an engine's optimizer has returned")
        assert self._runner is not None
        if not self._runner.has_storage:
            raise EngineError("this is a commit of a job with storage: call enable(..., storage=FOLDER)")
        steps, groups = commit["steps"], commit["param_groups"]
        if (len(steps), len(groups)) != (len(self._masters), len(self.optimizer.param_groups)):
            raise EngineError(
                f"this is the commit of another model: it has {len(steps)} subgroups in {len(groups)} groups, this "
                f"optimizer has {len(self._masters)} in {len(self.optimizer.param_groups)}"
            )
        if self._is_open:
            self._recall()
        self._clear_gradients()
        self._views.release()
        self._open(commit["storage"])
        states = self._engine.store.states
        for number, value in enumerate(self._values()):
            value.copy_(states.read(number)[MASTER])
        self._partition_all_parameters()
        for number in range(len(self._masters)):
            self._unflatten_partitioned_parameters(number)
        if self.persistent_parameters and not self._is_late:
            self.persistent_parameters[0].all_gather(self.persistent_parameters)
        for master, step in zip(self._masters, steps, strict=True):
            self.optimizer.state[master]["step"] = step
        for number, group in enumerate(groups):
            self.optimizer.param_groups[number].update(group)
        self.loss_scaler.__dict__.update(commit["loss_scaler"])
        if self._cpu_adam is not None and "cpu_adam" in commit:
            self._cpu_adam.load_state_dict(commit["cpu_adam"])

    def _clear_gradients(self) -> None:
        """Drop the gradients of this step."""
        raise NotImplementedError


def _hyperparameters(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}
