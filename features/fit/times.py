"""The time of an iteration of a job that trains a model, by arithmetic."""

from functools import cache

from ebbtide.errors import MachineError
from ebbtide.features.advise.job.compute_times import with_collectives
from ebbtide.features.advise.job.decoder import (
    Implementation,
    LayerParts,
    compute_span,
    shape_of,
)
from ebbtide.features.advise.job.training_job import ComputeTimes
from ebbtide.features.fit.memory import MemoryModel
from ebbtide.features.fit.shape import ModelShape
from ebbtide.machines.machine import Machine

_EAGER = Implementation("eager")
# Bytes of device memory that a weight of 4 bits reads and writes to be unpacked.
_UNPACKED_BYTES = 0.5 + 2
# Bytes of a weight, its gradient and two moments that an update on the CPU reads and
# writes, over those of one in fp32 with a copy for the device, which rates are of.
_HALF_UPDATE = 14 / 30


@cache
def _passes(
    shape: ModelShape, sequence: int, batch: int, machine: Machine
) -> tuple[float, float]:
    """Return the likely times of a forward and a backward of a micro-step, s."""
    parts = LayerParts(
        head_size=shape.head_size, key_value_heads=shape.kv_heads, is_tied=shape.is_tied
    )
    decoder = shape_of(
        shape.params,
        sequence,
        shape.vocabulary,
        shape.layers,
        shape.hidden,
        shape.heads,
        parts,
    )
    spans = compute_span(decoder, batch * sequence, machine, "bfloat16", _EAGER)
    return spans[0].typical, spans[1].typical


def iteration_s(model: MemoryModel, machine: Machine) -> float:
    """Return the likely time of an iteration, s. Raises MachineError where a rate is
    not known."""
    job, shape = model.job, model.shape
    forward_s, backward_s = _passes(shape, job.sequence, job.batch, machine)
    head = shape.embedding_params
    products = shape.layers * shape.linear_params + head
    if model.is_adapted:
        # Without the products of the gradients of weights.
        backward_s /= 2
    if job.loss == "chunked":
        backward_s += forward_s * head / products
    if job.checkpointing:
        backward_s += forward_s
    forward_s += _unpacked_s(model, machine)
    backward_s += (1 + job.checkpointing) * _unpacked_s(model, machine)
    d2h, h2d = _rate(machine, "d2h"), _rate(machine, "h2d")
    copied = model.offloaded_activations()
    forward_s += copied / d2h
    backward_s += copied / h2d
    if job.offloads_optimizer:
        backward_s += model.trained_bytes * model.trained / d2h
    times = ComputeTimes(
        job.micro_steps * forward_s,
        job.micro_steps * backward_s,
        other_s=0.0,
        factor=1.0,
        collectives_s=0.0,
        note="",
    )
    if model.is_sharded:
        gathered = model.weight_bytes * shape.params * job.micro_steps
        times = with_collectives(times, gathered, machine, job.ranks)
    return times.forward_s + times.backward_s + _update_s(model, machine)


def _unpacked_s(model: MemoryModel, machine: Machine) -> float:
    """Return the time in which weights of 4 bits are unpacked for a pass."""
    rate = machine.gpu.memory_bytes_per_s if machine.gpu is not None else None
    if model.job.method != "qlora" or rate is None:
        return 0.0
    weights = model.shape.layers * model.shape.linear_params
    return weights * _UNPACKED_BYTES / rate


def _update_s(model: MemoryModel, machine: Machine) -> float:
    params = model.trained * model.share
    if not model.job.offloads_optimizer:
        return params / (machine.gpu_update_params_per_s or float("inf"))
    rate = machine.cpu_update_params_per_s
    if rate is None:
        raise MachineError(f"machine {machine.name} has no cpu_update_params_per_s")
    copies_s = model.trained_bytes * params / _rate(machine, "h2d")
    return copies_s + params * _HALF_UPDATE / rate


def _rate(machine: Machine, direction: str) -> float:
    rate: float | None = getattr(machine, f"{direction}_bytes_per_s")
    if rate is None:
        raise MachineError(f"machine {machine.name} has no {direction}_bytes_per_s")
    return rate
