"""The state and the parameters of ZeRO stage 3 as DeepSpeed and the job read them.
Importing it needs DeepSpeed."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from deepspeed import comm as dist
from deepspeed.checkpoint.constants import (
    FP32_FLAT_GROUPS,
    OPTIMIZER_STATE_DICT,
    PARTITION_COUNT,
    ZERO_STAGE,
)
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

from ebbtide.features.deepspeed.engine import subgroup_slices
from ebbtide.features.overlap.gates import MethodGate
from ebbtide.interleave.engine.adaptive.runner import AdaptiveRunner
from ebbtide.interleave.engine.commits import commit_place
from ebbtide.interleave.engine.errors import EngineError
from ebbtide.interleave.engine.options import OptimizerOptions
from ebbtide.interleave.engine.params.local_shards import own_rank
from ebbtide.interleave.engine.params.state_dict import check_commit
from ebbtide.interleave.engine.rules.adamw import ADAMW
from ebbtide.interleave.engine.rules.rule import Group, Scalars, UpdateRule
from ebbtide.interleave.engine.runtime.engine import Engine
from ebbtide.interleave.engine.runtime.layout import MASTER, Subgroup


class CpuAdamScalars:
    """Computes the scalars of DeepSpeed's CPU Adam.

    A job then trains as it did with DeepSpeed.

    DeepSpeed's CPU Adam computes its scalars in fp32 (so 1 - beta2 is off by 1.3e-5).
    It multiplies the powers of its betas up step by step, and computes them anew if the
    step is not the next one. As there, one object serves all subgroups of an optimizer.
    `rule` is AdamW or Adam."""

    def __init__(self, rule: UpdateRule = ADAMW) -> None:
        self._rule = rule
        self._step = 0
        self._betas: tuple[np.float32, np.float32] | None = None
        self._powers = (np.float32(1), np.float32(1))

    def scalars(self, group: Group, step: int, scale: float) -> Scalars:
        """Return the scalars of a step, counted from 1.

        Its gradients are multiplied with `scale`.
        """
        beta1, beta2 = betas = (
            np.float32(group["betas"][0]),
            np.float32(group["betas"][1]),
        )
        if self._betas is None and step == 1:
            self._powers = betas
        elif betas == self._betas and step == self._step + 1:
            self._powers = self._powers[0] * beta1, self._powers[1] * beta2
        elif (betas, step) != (self._betas, self._step):
            self._powers = (
                np.float32(float(beta1) ** step),
                np.float32(float(beta2) ** step),
            )
        self._betas, self._step = betas, step
        one, lr, decay = (
            np.float32(1),
            np.float32(group["lr"]),
            np.float32(group["weight_decay"]),
        )
        power1, power2 = self._powers
        if self._rule is ADAMW:
            decay = one - lr * decay
        rate, root = lr / (one - power1), np.float32(math.sqrt(one - power2))
        # In the order of the formulas of AdamW and Adam.
        return (
            np.float32(scale),
            beta1,
            one - beta1,
            beta2,
            one - beta2,
            decay,
            rate,
            root,
            np.float32(group["eps"]),
        )

    def state_dict(self) -> dict[str, Any]:
        """Return what `load_state_dict` takes to go on with the same bits."""
        betas = None if self._betas is None else list(map(float, self._betas))
        return {
            "step": self._step,
            "betas": betas,
            "powers": list(map(float, self._powers)),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` has returned."""
        self._step = state_dict["step"]
        beta1, beta2 = state_dict["betas"] or (None, None)
        self._betas = None if beta1 is None else (np.float32(beta1), np.float32(beta2))
        power1, power2 = state_dict["powers"]
        self._powers = np.float32(power1), np.float32(power2)


def _size_of(moment: Any) -> int:
    return moment.numel() if isinstance(moment, torch.Tensor) else 0


class StateAccess(DeepSpeedZeroOptimizer_Stage3):  # type: ignore[misc]
    """ZeRO stage 3 whose masters and moments are the state of an engine.

    Without storage the state has host buffers, and DeepSpeed's masters and moments are
    views of them. A part of the state may be on the device; reading DeepSpeed's masters
    moves it to the host first. With storage, masters and moments have values only from
    when something reads them to the next backward.

    Updates may run under the next forward. Gathers of parameters wait for those that
    they read. Everything else that uses parameters, gradients or state calls
    `synchronize` first."""

    settings: OptimizerOptions
    persistent_parameters: list[Any]
    _runner: AdaptiveRunner | None = None
    _gates: Sequence[MethodGate] = ()
    _gradients: subgroup_slices.SliceGradients
    _masters: list[torch.Tensor]
    _slices: Sequence[subgroup_slices.SubgroupSlice]
    _views: subgroup_slices.HeldMasters | subgroup_slices.StoredMasters
    # Of DeepSpeed's subgroups.
    _rules: Sequence[UpdateRule]
    _grad_dtype: torch.dtype
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
        """Open the engine with the state of a commit.

        Without one, open it with masters that are the parameters.
        """
        assert self._runner is not None
        engine = self._runner.rebuild(
            self._subgroups, len(self._slices), self._views.slice_buffers, commit
        )
        self._is_open = True
        if commit is None and self._runner.backing.is_used:
            for number, value in enumerate(self._values()):
                rows = len(self._rules[self._slices[number].group].row_names)
                state = torch.zeros(
                    (rows, value.numel()), dtype=torch.float32, device="cpu"
                )
                state[MASTER] = value
                engine.store.states.write(number, state)

    @property
    def _subgroups(self) -> list[Subgroup]:
        dtype = self.fp16_partitioned_groups_flat[0].dtype
        return subgroup_slices.engine_subgroups(
            self._slices, dtype, self._grad_dtype, self._rules
        )

    def _values(self) -> list[torch.Tensor]:
        """Return the parameters of each slice, flat."""
        return [
            self.fp16_partitioned_groups_flat[part.group][part.begin : part.end]
            for part in self._slices
        ]

    def _start_plan(self) -> None:
        """Start the plan, with changes in masters and moments since it stopped."""
        self._views.write_back(self._engine.store.states)
        assert self._runner is not None
        self._runner.set_plan()

    def _show(self, groups: Iterable[int]) -> None:
        """Let the masters and moments of DeepSpeed's subgroups have their values until
        the plan starts again."""
        if self._runner is None:
            return
        self._runner.check_process()
        if self._runner.closed and not self._runner.backing.is_used:
            return
        self._recall()
        self._views.show(self._engine.store.states, groups)

    # -- as DeepSpeed reads it
    # ----------------------------------------------------------------------------------

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
        """Do nothing: gradients have no fp32 buffers on the host here.

        Moments are views of other memory.
        """

    @property
    def fp32_partitioned_groups_flat(self) -> list[torch.Tensor]:
        """The masters.

        Reading them moves all state to the host and recalls offloaded gradients.
        """
        self._show(range(len(self._masters)))
        return self._masters

    @fp32_partitioned_groups_flat.setter
    def fp32_partitioned_groups_flat(self, masters: list[torch.Tensor]) -> None:
        self._masters = masters

    def _get_fp32_opt_state_partition(
        self, param: Any, release_swap_buffers: bool, optim_state_key: str | None = None
    ) -> tuple[torch.Tensor, int]:
        """Return the master or a moment of a parameter for DeepSpeed's functions that
        get and set it."""
        group, begin, length = self.grad_position[self.get_param_id(param)]
        self._show([group])
        master = self._masters[group]
        whole = (
            master
            if optim_state_key is None
            else self.optimizer.state[master][optim_state_key]
        )
        return whole.narrow(0, begin, length), group

    def load_state_dict(
        self, state_dict_list: Any, load_optimizer_states: bool = True, **kwargs: Any
    ) -> None:
        """Load a state dict of DeepSpeed.

        Torch replaces the moments by new tensors; they are copied.

        Raises EngineError if this rank's state dict lacks a part of the state, or is of
        another stage, model or number of ranks; nothing is changed."""
        if not kwargs.get("checkpoint_folder"):
            self._check_saved(
                state_dict_list[dist.get_rank(group=self.dp_process_group)],
                load_optimizer_states,
            )
        self.synchronize()
        super().load_state_dict(state_dict_list, load_optimizer_states, **kwargs)
        self._views.collect()

    def _check_saved(self, saved: Any, has_moments: bool) -> None:
        """Raise EngineError unless a state dict of DeepSpeed has all masters, and all
        moments if some."""
        for key, own in (
            (ZERO_STAGE, int(ZeroStageEnum.weights)),
            (PARTITION_COUNT, self.partition_count),
        ):
            if saved.get(key) != own:
                raise EngineError(
                    f"the checkpoint has {key} {saved.get(key)}, and this engine "
                    f"{own}: convert it to a universal "
                    "checkpoint of DeepSpeed, or load it with the stage and the ranks "
                    "that it was saved with"
                )
        sizes = [values.numel() for values in self.fp16_partitioned_groups_flat]
        self._check_sizes(
            "fp32 masters",
            [master.numel() for master in saved[FP32_FLAT_GROUPS]],
            sizes,
        )
        states = saved[OPTIMIZER_STATE_DICT]["state"] if has_moments else {}
        numbers = [
            number
            for group in saved[OPTIMIZER_STATE_DICT]["param_groups"]
            for number in group["params"]
        ]
        # Of each parameter group in turn.
        order = sorted(range(len(sizes)), key=self.sub_group_to_group_id.__getitem__)
        # DeepSpeed has no moments before its first step.
        for name in (
            {moment for rule in self._rules for moment in rule.moments}
            if states
            else ()
        ):
            needed = [
                sizes[group] if name in self._rules[group].moments else 0
                for group in order
            ]
            self._check_sizes(
                name,
                [_size_of(states.get(number, {}).get(name)) for number in numbers],
                needed,
            )

    @staticmethod
    def _check_sizes(name: str, saved: list[int], needed: list[int]) -> None:
        if saved != needed:
            raise EngineError(
                f"the checkpoint has {name} of {saved} elements in the subgroups of "
                f"this rank, {needed} are needed: "
                "it is of another model, or was saved without them (DeepSpeed leaves "
                "out what is on NVMe)"
            )

    # -- commits
    # ----------------------------------------------------------------------------------

    def commit(self) -> dict[str, Any]:
        """Make the state in storage the one to resume from.

        Return a small dict of this rank for `load_commit`.

        It includes parameters, since they are rounded masters, hyperparameters and the
        loss scale. It can be loaded with the same storage, ranks and subgroups, until
        the first step after the next commit. Raises EngineError if there is no storage,
        or too little space in it; the commit before stays."""
        assert self._runner is not None
        self._recall()
        self._views.write_back(self._engine.store.states)
        steps = [int(self.optimizer.state[master]["step"]) for master in self._masters]
        commit = {
            "storage": self._runner.commit(**self._commit_details(steps)),
            "steps": steps,
            "param_groups": [
                {key: value for key, value in group.items() if key != "params"}
                for group in self.optimizer.param_groups
            ],
            "loss_scaler": dict(self.loss_scaler.__dict__),
        }
        if self._cpu_adam is not None:
            commit["cpu_adam"] = self._cpu_adam.state_dict()
        return commit

    def load_commit(self, commit: Mapping[str, Any]) -> None:
        """Go on from what `commit` has returned on this rank, in this process or after
        a crash.

        Gradients of this step are dropped. Frozen parameters and buffers of the model
        are not in it. Raises EngineError if it is not a commit of this model, or the
        storage does not have it.
        """
        self._check_commit(commit)
        steps, groups = commit["steps"], commit["param_groups"]
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
        if self._cpu_adam is not None:
            self._cpu_adam.load_state_dict(commit["cpu_adam"])

    def _check_commit(self, commit: Mapping[str, Any]) -> None:
        """Raise EngineError if something is not a commit of this model and storage."""
        needed = {"storage", "steps", "param_groups", "loss_scaler"}
        if missing := needed - commit.keys():
            raise EngineError(
                "this is not what commit() of an engine's optimizer has returned: it "
                f"has no {min(missing)}"
            )
        assert self._runner is not None
        if not self._runner.backing.is_used:
            place = commit_place(commit["storage"])
            raise EngineError(
                f"{place}, and this job has no storage: call enable(..., "
                "storage=FOLDER)"
            )
        steps, groups = commit["steps"], commit["param_groups"]
        own_groups = self.optimizer.param_groups
        if (len(steps), len(groups)) != (len(self._masters), len(own_groups)):
            raise EngineError(
                f"this is the commit of another model: it has {len(steps)} subgroups "
                f"in {len(groups)} groups, this "
                f"optimizer has {len(self._masters)} in {len(own_groups)}"
            )
        if self._cpu_adam is not None and "cpu_adam" not in commit:
            raise EngineError(
                "this commit has no cpu_adam: load what commit() of an engine's "
                "optimizer has returned"
            )
        check_commit(commit["storage"], self._commit_details(steps))
        self._runner.backing.check(self._subgroups, commit["storage"])

    def _commit_details(self, steps: Sequence[int]) -> dict[str, Any]:
        """Return the details of a commit of this rank: the numbers of updates of
        DeepSpeed's subgroups."""
        shapes = [
            [tuple(param.ds_shape) for param in params] for params in self.fp16_groups
        ]
        ranks = dist.get_world_size(self.dp_process_group)
        return {
            "params": [f"{own} over {ranks} ranks" for own in shapes],
            "steps": list(steps),
            "rank": own_rank(),
        }

    # -- late updates
    # ----------------------------------------------------------------------------------

    def synchronize(self) -> None:
        """Wait until the last step has written all parameters.

        With late updates it may not have when it returned.

        Raises EngineError if an operation of the step failed."""
        if self._runner is not None:
            self._runner.finish_step()

    def before_fork(self) -> None:
        """Let a forked child have parameters that all updates have written."""
        self.synchronize()

    def after_fork(self, in_child: bool) -> None:
        """Do nothing: the engine follows forks itself."""

    def backward_prologue(self) -> None:
        """Begin a backward, after the last step has ended."""
        self.synchronize()
        super().backward_prologue()

    def step(self, closure: None = None) -> None:
        """Run the step of DeepSpeed, after the last one has ended."""
        if self._runner is not None:
            # Before DeepSpeed communicates, which would hang in a forked child.
            self._runner.check_process()
        self.synchronize()
        super().step(closure)

    def offload_states(self, *args: Any, **kwargs: Any) -> None:
        """Move what DeepSpeed can move to the host."""
        self.synchronize()
        super().offload_states(*args, **kwargs)

    def destroy(self) -> None:
        """Destroy DeepSpeed's part, and close the engine, after the last step has
        ended."""
        try:
            self.synchronize()
        finally:
            for gate in self._gates:
                gate.remove()
            if self._runner is not None and self._runner.backing.is_used:
                # Before, since DeepSpeed reads the masters, which would read all state
                # into host memory.
                self._runner.close()
                self._runner = None
            super().destroy()
            if self._runner is not None:
                self._runner.close()

    @property
    def _is_late(self) -> bool:
        """Return whether updates may be late, the same on all ranks, since it decides
        which collectives run."""
        return self.settings.supported.forward

    def _gate_gathers(self, params: Iterable[Any]) -> None:
        """Let gathers of parameters wait, if updates may be late.

        Modules, prefetches and GatheredParameters gather.

        A gather reads the parts of all parameters in its list, before autograd sees any
        of them. DeepSpeed calls the function of any one in the list. A gate delays it;
        it never leaves one out or changes the order."""
        gates = []
        for param in params if self._is_late else ():

            def before_gather(
                param_list: Sequence[Any] | None = None,
                *_: Any,
                param: Any = param,
                **__: Any,
            ) -> None:
                self._wait_for([param] if param_list is None else param_list)

            gates.append(MethodGate(param, "all_gather", before_gather))
            gates.append(
                MethodGate(
                    param,
                    "all_gather_coalesced",
                    lambda params, *_, **__: self._wait_for(params),
                )
            )
        self._gates = gates

    def _wait_for(self, params: Sequence[Any]) -> None:
        """Wait until late operations have written this rank's parts of parameters."""
        assert self._runner is not None
        self._runner.wait_for_params(
            [
                part
                for param in params
                for part in self._gradients.slices_of(self.get_param_id(param))
            ]
        )

    def _post_step(self, timer_names: Any) -> None:
        """Leave small ("persistent") parameters to the modules that use them.

        Do so if updates may be late.

        DeepSpeed gathers all of them at the end of a step, which would have to wait for
        all late updates. In its first step and after an overflow, it gathers them by
        module itself."""
        persistent = self.persistent_parameters
        if self._is_late:
            self.persistent_parameters = []
        super()._post_step(timer_names)
        self.persistent_parameters = persistent
