"""The workload of a job: the parameters to update, and the times and memory of the rest
of an iteration."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta

from ebbtide.analysis.metrics.device_fit import equal_sizes
from ebbtide.analysis.metrics.state_split import Framework, StateSplit, split_of
from ebbtide.errors import WorkloadError
from ebbtide.json_files import (
    convert_object,
    misspelled_keys,
    number_range,
    read_object,
)
from ebbtide.state_bytes import (
    GRAD_BYTES,
    PARAM_BYTES,
    REMAINDER_STATE_BYTES,
    STATE_BYTES,
)

# (seconds from the iteration's start, bytes free from there on), in order; the first at
# 0.
FreeMemorySteps = tuple[tuple[float, float], ...]
_MAX_SUBGROUPS = 10_000_000
# Where it is not known in how many steps clipping changes anything.
DEFAULT_CLIP_ACTIVE_SHARE = 0.05
_LAYERS = (
    'a list of {"name", "params", "forward_s", "backward_s", "activation_bytes", '
    '"recompute_s"}'
)
_SIZES = "a list of whole numbers above 0 that add up to params"
Params = Annotated[float, number_range(1, 1e15)]
Seconds = Annotated[float, number_range(0, 1e6)]
BytesPerParam = Annotated[float, number_range(0, 64)]
FreeBytes = Annotated[float, number_range(0, 1e14)]
BusyShare = Annotated[
    float,
    Meta(
        ge=0,
        lt=1,
        description=(
            "a number from 0 to less than 1: a link that is always busy moves nothing"
        ),
    ),
]
Sizes = Annotated[
    tuple[Annotated[int, Meta(ge=1)], ...],
    Meta(max_length=_MAX_SUBGROUPS, description=_SIZES),
]
Flag = Annotated[bool, Meta(description="true or false")]
_MAX_LAYERS, _MAX_CHUNKS, _MAX_ACTIVATIONS = 10_000, 4096, 100_000
# Fields of a workload that files do not have, or have in another form.
_OTHER_FIELDS = (
    "gpu_free",
    "layers",
    "chunk_shares",
    "layer_memory",
    "host_gradient_bytes",
    "own_update_s",
    "in_own_engine",
    "framework",
)
# The framework whose version is a key of the file.
_FRAMEWORK = "deepspeed"


class ActivationForm(NamedTuple):
    """A form in which a layer's activations can be kept for the backward: its bytes,
    and the seconds to compute the rest again."""

    name: str
    nbytes: float
    recompute_s: float


class Layer(NamedTuple):
    """A layer: its trained parameters, and its times and activations in an iteration.
    The first form has all activations; `frozen_bytes` are those of weights that no
    update changes."""

    name: str
    params: int
    forward_s: float
    backward_s: float
    forms: tuple[ActivationForm, ...]
    frozen_bytes: float = 0.0

    def keeps_trained(self, param_bytes: float) -> bool:
        """Whether trained weights stay on the device where the layer is streamed.

        They are adapters: the smaller part of its weights."""
        return self.params * param_bytes < self.frozen_bytes


class LayerMemory(NamedTuple):
    """Device memory of placed layers from a time on, in bytes of weights, gradients and
    activations."""

    at_s: float
    weights: float
    gradients: float
    activations: float

    @property
    def total(self) -> float:
        """The memory of all kinds together, in bytes."""
        return self.weights + self.gradients + self.activations


@dataclass(frozen=True)
class Workload:
    """One rank's part of a job. An iteration is other, forward, backward, update, in
    this order.

    Attributes:
        name: The name, for people.
        params: Parameters whose state the rank holds.
        subgroup_params: Parameters of a subgroup; the last one may be smaller.
        forward_s: The forward, without any waiting for the optimizer; so are backward_s
            and other_s.
        other_s: The part of the iteration that no phase covers.
        param_bytes: Bytes per parameter of the half-precision copy on the device.
        grad_bytes: Bytes per parameter of a gradient.
        state_bytes: Bytes per parameter of the optimizer state: fp32 master weight,
            unless the parameter is the master, and moments; with the master as
            remainder, the remainder and the moments.
        gpu_free: Device memory that the job's own parameters, gradients and activations
            leave free, as a step function over the iteration; None: not known.
        host_free_bytes: Host memory that the plan may use; None: all of the rank's part
            (`Machine.host_memory_bytes`).
        h2d_busy_share: The share of the link's time that the job's own copies to the
            device take.
        d2h_busy_share: The same of copies to the host.
        clipping: Whether all gradients are needed before any update.
        clip_active_share: Share of the steps in which they change an update: the norm
            is clipped, or not finite.
        master: Where the fp32 master weight is: "fp32" in the state; "parameter" if
            there is none beside the parameter; "remainder" if the state has the
            master's 16 bits that the bf16 parameter has not. With the last two an
            update reads the parameter.
        norm: Where the norm of the gradients, for which clipping waits, is computed:
            "host" or "device". None: its time is not known, or part of the machine's
            step_overhead_s.
        collective_bytes: (phase, bytes to the device, bytes to the host) that the job's
            collectives (all-gather, reduce-scatter) move over this link per iteration,
            on a box without another one between its GPUs. Phases: `other`, `forward`,
            `backward`.
        gpu_slack_bytes: Free memory that a plan must leave, for rounding and
            fragmentation of the allocator; `gpu_free` is without it.
        gradients_held_until_step: Whether gradients stay on the device, in the job's
            own memory, until the step begins; else each may be copied to the host as
            soon as it is ready. The key of the file is `gradients_stay`.
        copies_gradients_early: Whether gradients that stay on the device are copied to
            the host as soon as they are ready, too; a copy counts if its gradient is
            the same when the step begins.
        accumulates: Whether there are several micro-steps: gradients that stay on the
            device are there all the time.
        missing_bytes: Device memory that the job lacks without any optimizer state; 0
            where it has enough.
        sizes: The parameters of each subgroup, where they were recorded.
        framework: The framework that ran the updates of the recorded job and split its
            state; None for other jobs. The key of the file is `deepspeed_version`.
        notes: What is estimated or not known, for people.
        layers: Layers in the order of the forward, whose weights and activations a plan
            may move; `gpu_free` is then what is free beside everything but their
            parameters, gradients and activations.
        chunk_shares: The share of a layer's work that each chunk of an iteration has
            (the key of the file is `chunks`).
        layer_memory: Device memory of the layers over the iteration, if a plan for them
            is chosen (`layers.place`).
        host_gradient_bytes: Where weights of all layers come from the host before each
            forward (`stream_weights`): bytes per parameter of gradients, which go there
            while compute waits. None: weights are on the device.
        own_update_s: The update of a job's own optimizer, all state on the device;
            None: by the machine's rates.
        in_own_engine: Whether ebbtide's engine updates, which keeps no gradients in
            fp32 beside resident state.
    """

    name: str
    params: int
    subgroup_params: int
    forward_s: Seconds
    backward_s: Seconds
    other_s: Seconds = 0.0
    param_bytes: BytesPerParam = float(PARAM_BYTES)
    grad_bytes: BytesPerParam = float(GRAD_BYTES)
    state_bytes: float = float(STATE_BYTES)
    gpu_free: FreeMemorySteps | None = None
    host_free_bytes: FreeBytes | None = None
    h2d_busy_share: BusyShare = 0.0
    d2h_busy_share: BusyShare = 0.0
    clipping: Flag = True
    clip_active_share: Annotated[float, number_range(0, 1)] = DEFAULT_CLIP_ACTIVE_SHARE
    master: Annotated[
        Literal["fp32", "parameter", "remainder"],
        Meta(description='"fp32", "parameter" or "remainder"'),
    ] = "fp32"
    norm: (
        Annotated[Literal["host", "device"], Meta(description='"host" or "device"')]
        | None
    ) = None
    collective_bytes: tuple[tuple[str, float, float], ...] = ()
    gpu_slack_bytes: FreeBytes = 0.0
    gradients_held_until_step: bool = False
    copies_gradients_early: Flag = False
    accumulates: Flag = False
    missing_bytes: FreeBytes = 0.0
    sizes: Sizes | None = None
    framework: Framework | None = None
    notes: Annotated[tuple[str, ...], Meta(description="a list of texts")] = ()
    layers: tuple[Layer, ...] = ()
    chunk_shares: tuple[float, ...] = (1.0,)
    layer_memory: tuple[LayerMemory, ...] = ()
    host_gradient_bytes: float | None = None
    own_update_s: float | None = None
    in_own_engine: bool = False

    @cached_property
    def subgroups(self) -> tuple[int, ...]:
        """Parameters of each subgroup, in the order of the forward.

        By default no subgroup has parameters of two layers.
        """
        if self.sizes is not None:
            return self.sizes
        if self.layers:
            rest = self.params - sum(layer.params for layer in self.layers)
            runs = [layer.params for layer in self.layers if layer.params]
            runs += [rest] * (rest > 0)
            return tuple(
                size
                for run in runs
                for size in equal_sizes(run, min(self.subgroup_params, run))
            )
        return equal_sizes(self.params, self.subgroup_params)

    @cached_property
    def streamed_bytes(self) -> tuple[float, ...]:
        """Bytes of the weights of each layer that move where it is streamed."""
        return tuple(
            layer.frozen_bytes
            if layer.keeps_trained(self.param_bytes)
            else layer.frozen_bytes + self.param_bytes * layer.params
            for layer in self.layers
        )

    @cached_property
    def adapter_bytes(self) -> float:
        """Bytes of trained weights of layers that never move."""
        return sum(
            self.param_bytes * layer.params
            for layer in self.layers
            if layer.keeps_trained(self.param_bytes)
        )

    @cached_property
    def layers_of_subgroups(self) -> list[int]:
        """The layer of the first parameter of each subgroup; the number of layers if
        the parameter is after all of them."""
        ends = list(accumulate(layer.params for layer in self.layers))
        return [
            bisect_right(ends, offset)
            for offset in accumulate(self.subgroups[:-1], initial=0)
        ]

    @property
    def split(self) -> StateSplit:
        """The split of the state by the job's framework, else by the policies.

        The framework is the one that ran the job.
        """
        return split_of(self.framework)

    @property
    def cpu_update_bytes(self) -> float:
        """Host memory bytes per parameter that an update on the CPU reads and writes.

        Gradient and state are read, state and half-precision parameter are written. A
        parameter is read, too, if it is the master or a part of the master."""
        param_accesses = 1 if self.master == "fp32" else 2
        return (
            self.grad_bytes + 2 * self.state_bytes + param_accesses * self.param_bytes
        )

    @property
    def returned_gradient_bytes(self) -> float:
        """Device memory bytes per parameter for a gradient that was copied to the host
        and back.

        It is in the memory of its parameter, unless the update reads that.
        """
        return 0.0 if self.master == "fp32" else self.grad_bytes

    @property
    def copies_at_step(self) -> bool:
        """Whether no gradient is copied to the host before the step begins."""
        return self.gradients_held_until_step and not self.copies_gradients_early

    @property
    def needs_all_gradients(self) -> bool:
        """Whether no update can begin before the end of the backward."""
        return self.clipping or self.gradients_held_until_step

    @property
    def compute_s(self) -> float:
        """The length of the iteration without its update."""
        return self.other_s + self.forward_s + self.backward_s

    @property
    def kept_gradients_begin_s(self) -> float:
        """The time from which on gradients that stay take memory on the device."""
        return 0.0 if self.accumulates else self.compute_s - self.backward_s

    def free_at(self, seconds: float) -> float | None:
        """Return the free bytes at a time of the iteration.

        The last value is the update's. None: not known.
        """
        if self.gpu_free is None:
            return None
        return value_at(self.gpu_free, seconds)

    def gpu_free_from(self, seconds: float) -> FreeMemorySteps:
        """Return the steps of free memory from a time of the iteration on.

        gpu_free must be known.
        """
        steps = self.gpu_free or ((0.0, 0.0),)
        return (
            (seconds, value_at(steps, seconds)),
            *((at_s, size) for at_s, size in steps if at_s > seconds),
        )

    @property
    def min_free_bytes(self) -> float | None:
        """The bytes that are free at every moment of the iteration; None: not known."""
        return (
            min(size for _, size in self.gpu_free)
            if self.gpu_free is not None
            else None
        )

    def as_json(self) -> dict[str, Any]:
        """Return the object of a workload file, which `workload_from` reads."""
        values = {
            key: value
            for key, value in asdict(self).items()
            if key not in _OTHER_FIELDS
        }
        values["gpu_free_bytes"] = self.gpu_free and [
            {"at_s": time, "bytes": size + self.gpu_slack_bytes}
            for time, size in self.gpu_free
        ]
        values["collective_bytes"] = {
            phase: {"h2d": h2d, "d2h": d2h} for phase, h2d, d2h in self.collective_bytes
        }
        values["gradients_stay"] = values.pop("gradients_held_until_step")
        framework = self.framework
        values["deepspeed_version"] = (
            framework.version if framework and framework.key == _FRAMEWORK else None
        )
        if self.layers:
            values["layers"] = [
                {
                    **layer._asdict(),
                    "forms": [
                        dict(zip(_FORM_KEYS, form, strict=True)) for form in layer.forms
                    ],
                }
                for layer in self.layers
            ]
            values["chunks"] = list(self.chunk_shares)
        return values


def value_at(steps: FreeMemorySteps, seconds: float) -> float:
    """Return the value of a step function that begins at 0."""
    return next(size for at_s, size in reversed(steps) if at_s <= max(seconds, 0.0))


class _FreeMemoryStep(msgspec.Struct):
    at_s: Seconds
    bytes: FreeBytes


class _LinkBytes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    h2d: FreeBytes = 0.0
    d2h: FreeBytes = 0.0


class _CollectiveBytes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    other: _LinkBytes | None = None
    forward: _LinkBytes | None = None
    backward: _LinkBytes | None = None

    def items(self) -> tuple[tuple[str, float, float], ...]:
        phases = {
            "other": self.other,
            "forward": self.forward,
            "backward": self.backward,
        }
        return tuple(
            (phase, size.h2d, size.d2h)
            for phase, size in phases.items()
            if size is not None
        )


_FORM_KEYS = ("name", "bytes", "recompute_s")


class _FileForm(msgspec.Struct):
    name: str
    bytes: FreeBytes
    recompute_s: Seconds


class _FileLayer(msgspec.Struct):
    params: Annotated[float, number_range(0, 1e15)]
    forward_s: Seconds
    backward_s: Seconds
    name: str = ""
    activation_bytes: FreeBytes | None = None
    recompute_s: Seconds | None = None
    forms: Annotated[list[_FileForm], Meta(min_length=1, max_length=8)] | None = None
    frozen_bytes: FreeBytes = 0.0

    def layer(self, number: int, where: str) -> Layer:
        name = self.name or f"layer {number}"
        if (self.forms is None) == (self.activation_bytes is None):
            raise WorkloadError(
                f"{where}: {name} must have activation_bytes (and recompute_s), or "
                "forms"
            )
        if not (round(self.params) or self.frozen_bytes):
            raise WorkloadError(f"{where}: {name} must have params, or frozen_bytes")
        forms = [
            ActivationForm(form.name, form.bytes, form.recompute_s)
            for form in self.forms or ()
        ]
        if self.activation_bytes is not None:
            forms = [ActivationForm("kept", self.activation_bytes, 0.0)]
            if self.recompute_s is not None:
                forms.append(ActivationForm("recomputed", 0.0, self.recompute_s))
        if forms[0].recompute_s or any(form.nbytes > forms[0].nbytes for form in forms):
            raise WorkloadError(
                f"{where}: the first form of {name} must have all its activations, and "
                "recompute_s 0"
            )
        return Layer(
            name,
            round(self.params),
            self.forward_s,
            self.backward_s,
            tuple(forms),
            self.frozen_bytes,
        )


class _FileKeys(msgspec.Struct):
    """The keys of a workload file whose values a workload has in another form."""

    params: Params
    name: Any = None
    subgroup_params: Params | None = None
    state_bytes: Annotated[float, number_range(1, 1024)] | None = None
    gpu_free_bytes: (
        Annotated[
            FreeBytes | list[_FreeMemoryStep],
            Meta(
                description=(
                    'a number from 0 to 1e+14, or a list of {"at_s", "bytes"} with '
                    "at_s from 0 to 1e+06"
                )
            ),
        ]
        | None
    ) = None
    collective_bytes: Annotated[
        _CollectiveBytes,
        Meta(
            description=(
                'an object of {"h2d", "d2h"} (bytes per iteration) by phase: other, '
                "forward, backward"
            )
        ),
    ] = _CollectiveBytes()
    gradients_stay: Flag = False
    deepspeed_version: Annotated[str, Meta(description="a text")] | None = None
    layers: Annotated[
        list[_FileLayer], Meta(max_length=_MAX_LAYERS, description=_LAYERS)
    ] = []
    chunks: Annotated[
        Annotated[int, Meta(ge=1, le=_MAX_CHUNKS)]
        | Annotated[
            list[Annotated[float, Meta(gt=0)]],
            Meta(min_length=1, max_length=_MAX_CHUNKS),
        ],
        Meta(
            description=(
                f"a whole number from 1 to {_MAX_CHUNKS}, or a list of shares above 0"
            )
        ),
    ] = 1


def workload_from(values: dict[str, Any], where: str) -> Workload:
    """Convert a workload file's object (null: missing).

    `where` names it in messages, and if it has no name.
    """
    file = convert_object(values, _FileKeys, where, WorkloadError)
    params = round(file.params)
    subgroup_params = min(round(file.subgroup_params or params), params)
    if params / subgroup_params > _MAX_SUBGROUPS:
        raise WorkloadError(
            f"{where}: more than {_MAX_SUBGROUPS:,} subgroups: choose larger ones"
        )
    converted = {
        **dict.fromkeys(("state_bytes", *_OTHER_FIELDS)),
        "name": where if file.name is None else str(file.name),
        "params": params,
        "subgroup_params": subgroup_params,
        "collective_bytes": file.collective_bytes.items(),
        "gradients_held_until_step": file.gradients_stay,
    }
    workload = convert_object(values | converted, Workload, where, WorkloadError)
    if workload.sizes is not None and sum(workload.sizes) != params:
        raise WorkloadError(
            f"{where}: sizes is a list with the sum {sum(workload.sizes)}; it must be "
            f"{_SIZES}"
        )
    workload = replace(
        workload,
        state_bytes=_state_bytes(workload, file.state_bytes, where),
        gpu_free=_free_steps(file.gpu_free_bytes, workload.gpu_slack_bytes),
        framework=None
        if file.deepspeed_version is None
        else Framework(_FRAMEWORK, file.deepspeed_version),
    )
    return with_layers(
        workload,
        [layer.layer(number, where) for number, layer in enumerate(file.layers)],
        file.chunks,
        where,
    )


def with_layers(
    workload: Workload,
    layers: Sequence[Layer],
    chunks: int | Sequence[float],
    where: str,
) -> Workload:
    """Return a workload with layers.

    Their activations are the activations of all chunks of an iteration.

    Raises WorkloadError where they have more parameters or take more time than the
    workload."""
    if not layers:
        return workload
    shares = [1.0] * chunks if isinstance(chunks, int) else chunks
    sums = {
        key: sum(getattr(layer, key) for layer in layers)
        for key in ("params", "forward_s", "backward_s")
    }
    is_frozen = not sums["params"] and all(layer.frozen_bytes for layer in layers)
    if is_frozen:
        del sums["params"]
    for key, total in sums.items():
        if not 0 < total <= getattr(workload, key) * (1 + 1e-6):
            raise WorkloadError(
                f"{where}: {key} of layers add up to {total:g}; that must be above 0 "
                f"and at most {key} of the "
                f"workload, {getattr(workload, key):g}"
            )
    if len(layers) * len(shares) > _MAX_ACTIVATIONS:
        raise WorkloadError(
            f"{where}: {len(layers)} layers x {len(shares)} chunks are more than "
            f"{_MAX_ACTIVATIONS:,}"
        )
    return replace(
        workload,
        layers=tuple(layers),
        chunk_shares=tuple(share / sum(shares) for share in shares),
        forward_s=max(sums["forward_s"], workload.forward_s),
        backward_s=max(sums["backward_s"], workload.backward_s),
    )


def _state_bytes(workload: Workload, state_bytes: float | None, where: str) -> float:
    """Return the bytes per parameter of the state.

    By default, it is the bytes of the kind of master.
    """
    if workload.master == "fp32":
        return STATE_BYTES if state_bytes is None else state_bytes
    if workload.master == "parameter":
        # Two moments in the parameter's precision.
        return 2 * workload.param_bytes if state_bytes is None else state_bytes
    if workload.param_bytes != PARAM_BYTES:
        raise WorkloadError(
            f"{where}: master is remainder and param_bytes {workload.param_bytes:g}: "
            "only the master of a bf16 "
            f"parameter ({PARAM_BYTES} B) can be a remainder"
        )
    if state_bytes not in (None, REMAINDER_STATE_BYTES):
        raise WorkloadError(
            f"{where}: master is remainder and state_bytes {state_bytes:g}: remainder "
            "and moments have "
            f"{REMAINDER_STATE_BYTES} B; leave state_bytes out"
        )
    return REMAINDER_STATE_BYTES


def load_workload(path: Path) -> Workload:
    """Read a workload file, with a note for each key that is misspelled. Raises
    WorkloadError for an invalid one."""
    values = read_object(path, "workload", WorkloadError)
    workload = workload_from(values, path.name)
    others = {"gpu_free", "gradients_held_until_step", "framework"}
    keys = {*_FileKeys.__struct_fields__, *Workload.__dataclass_fields__} - others
    return replace(
        workload, notes=(*workload.notes, *misspelled_keys(values, keys, path.name))
    )


def _free_steps(
    free: float | list[_FreeMemoryStep] | None, slack: float
) -> FreeMemorySteps | None:
    """Return the steps of free memory without the slack."""
    if not isinstance(free, list):
        return None if free is None else ((0.0, max(0.0, free - slack)),)
    steps = sorted(
        ((step.at_s, max(0.0, step.bytes - slack)) for step in free),
        key=lambda step: step[0],
    )
    if steps and steps[0][0] > 0:
        # What is free before the first entry is not known.
        steps.insert(0, (0.0, 0.0))
    return tuple(steps) or None
