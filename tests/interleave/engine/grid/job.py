"""The options of a random training job."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

# Replicas, with gradients as views of buckets or parameters without gradients, and
# shards, that stay gathered or not, are gathered before they are needed, or in another
# dtype.
RANKS = (
    "ddp",
    "ddp views",
    "ddp unused",
    "sharded",
    "resharded",
    "prefetched",
    "mixed precision",
)


@dataclass(frozen=True)
class Event:
    """Something that happens before an iteration, or between its backward and its step.

    `number` selects a layer, a line or an allocation.
    """

    step: int
    kind: str
    number: int = 0
    follows_backward: bool = False


@dataclass(frozen=True, kw_only=True)
class Job:
    """The options of a job. Defaults are the plainest ones: a failing job shrinks
    towards them.

    Attributes:
        spare: Whether the parameters of the last layer are in no group at first.
        skips: Whether each layer's output is multiplied by the embedding.
        checkpoints: Whether layers are checkpointed by torch: not, `reentrant` or
            `plain`.
        call: The call of the model: `call`, `forward`, `functional`, or with a
            `penalty` on all parameters.
        compiled: Backend of torch.compile; None: the model is not compiled.
        twice: Whether each graph is differentiated twice.
        evaluates: Whether the model is evaluated between forward and backward.
        lengths: Numbers of tokens of a batch.
        accumulation: Numbers of backwards of a step, in turn.
        clipping: How the job itself clips gradients: by `norm` or after a `scaler`;
            None: not.
        second_rule: Rule of the last layer; None: that of all.
        hyperparameters: Those of `rule`, as pairs.
        rates: Bandwidths of the link to and from the device in bytes/s; None: no limit.
        frozen: Numbers of layers that are not trained.
        adapted: Numbers of layers of which adapters alone are trained.
        weights: As for `stream_weights`; None: weights are not moved.
        moves: The calls that move weights and activations: `weights first`,
            `activations first`, both `twice`, or in `one call`.
        ranks: The kind of parallel model, one of RANKS; None: there is one rank.
        device: Type of the device that the model is on: `cpu`, where the GPU is
            emulated, or `cuda`.
        syncs_last: Whether gradients of the last backward of a step alone are reduced
            over ranks.
        activations: As for `offload_activations`, or `random` for a random order of
            each layer; None: not moved.
    """

    seed: int
    kinds: tuple[str | int, ...] = ("residual", "residual")
    dtype: torch.dtype = torch.float32
    tied: bool = False
    reads_head: bool = False
    skips: bool = False
    checkpoints: str | None = None
    call: str = "call"
    compiled: str | None = None
    twice: bool = False
    evaluates: bool = False
    autocast: bool = False
    spare: bool = False
    steps: int = 4
    lengths: tuple[int, ...] = (6,)
    accumulation: tuple[int, ...] = (1,)
    clipping: str | None = None
    schedules: bool = False
    rule: str = "adamw"
    second_rule: str | None = None
    hyperparameters: tuple[tuple[str, Any], ...] = ()
    max_grad_norm: float | None = None
    loss_scale: float | str | None = None
    edits: tuple[Event, ...] = ()
    faults: tuple[Event, ...] = ()
    policy: str = "zero-offload"
    overlap: str = "none"
    gradients: str = "kept"
    storage: bool = False
    subgroup_params: int = 10**6
    memory_budget: float | None = None
    frozen: tuple[int, ...] = ()
    adapted: tuple[int, ...] = ()
    weights: str | None = None
    weights_budget: float | None = None
    activations: str | None = None
    activations_budget: float | None = None
    moves: str = "weights first"
    rates: tuple[float | None, float | None] = (None, None)
    jitter: bool = False
    ranks: str | None = None
    syncs_last: bool = False
    device: str = "cpu"

    def __str__(self) -> str:
        fields = type(self).__dataclass_fields__
        own = {name: getattr(self, name) for name in fields}
        changed = {
            name: value for name, value in own.items() if value != fields[name].default
        }
        return (
            f"Job({', '.join(f'{name}={value!r}' for name, value in changed.items())})"
        )
