"""The methods of DeepSpeed's ZeRO optimizers that are rows of an update."""

from __future__ import annotations

from typing import Any, Callable

from ..zero_optimizer import masters, place, sizes
from .substeps import SubSteps


class Row:
    """What one method is in the table `ops`.

    subgroup: which one it works on, by the optimizer's sub-steps so far and the method's arguments. resource: where.
    """

    def __init__(
        self,
        name: str,
        subgroup: Callable[[SubSteps, Any], int | None] = lambda steps, args: None,
        resource: Callable[[Any, int], str] = lambda optimizer, subgroup: "host",
    ) -> None:
        self.name = name
        self._subgroup = subgroup
        self._resource = resource

    def enter(self, steps: SubSteps, args: Any) -> int | None:
        """The method begins; the subgroup it works on. What cannot be told is left out: never raises."""
        subgroup, resource, nbytes = None, "host", None
        try:
            subgroup = self._subgroup(steps, args)
            if subgroup is not None:
                resource = self._resource(args[0], subgroup)
                nbytes = _bytes_up(args[0], subgroup) if self.name == "parameters" else None
        except Exception:
            pass
        steps.switch(self.name, resource, subgroup, nbytes)
        return subgroup

    def leave(self, steps: SubSteps, args: Any, subgroup: int | None) -> None:
        """The method has returned."""
        steps.switch("rest")


class Sticky(Row):
    """A method that begins what the lines after it go on with."""

    def leave(self, steps: SubSteps, args: Any, subgroup: int | None) -> None:
        pass


class Update(Row):
    """Stages 1 and 2 copy a subgroup's parameters back in lines that follow its update."""

    def leave(self, steps: SubSteps, args: Any, subgroup: int | None) -> None:
        Row("parameters", lambda steps, args: subgroup).enter(steps, args)


def _argument(steps: SubSteps, args: Any) -> int:
    return int(args[1])


def _following(steps: SubSteps, args: Any) -> int:
    """Stages 1 and 2 do not say which subgroup they unscale: they go through them in order."""
    return steps.updates


def _master(optimizer: Any, subgroup: int) -> str:
    return place(masters(optimizer)[subgroup])


def _gradient(optimizer: Any, subgroup: int) -> str:
    master = masters(optimizer)[subgroup]
    return place(master if master.grad is None else master.grad)


def _bytes_up(optimizer: Any, subgroup: int) -> int | None:
    """What goes up of a subgroup's parameters in the model's precision; None where its state lies on the device."""
    if _master(optimizer, subgroup) != "cpu":
        return None
    return int(sizes(optimizer)[subgroup] * optimizer.dtype.itemsize)


STAGE_3 = {
    "_overflow_check_and_loss_scale_update": Row("overflow check"),
    "_get_norm_groups": Row("gradient norm"),
    "_prepare_sub_group": Row("prepare", _argument),
    "unscale_and_clip_grads": Row("unscale", _argument, _gradient),
    "_optimizer_step": Row("update", _argument, _master),
    "_reassign_or_swap_out_partitioned_parameters": Row("parameters", _argument),
    "_release_sub_group": Row("release", _argument),
    "_post_step": Row("gather"),
}

STAGE_1_AND_2 = {
    "check_overflow": Row("overflow check"),
    "scaled_global_norm": Row("gradient norm"),
    "free_grad_in_param_list": Sticky("prepare", _following),
    "unscale_and_clip_grads": Row("unscale", _following, _gradient),
    "_optimizer_step": Update("update", _argument, _master),
    "reset_cpu_buffers": Row("rest"),
    "_update_model_bit16_weights": Row("gather"),
}
