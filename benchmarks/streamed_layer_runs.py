"""Runs of ml_dataflow, which streams all layers of a model, and their workloads and
predicted steps by rates of cards.

Data are those of `benchmarks/accuracy/`; settings are apart from times.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from accuracy_jobs import FOLDER, Job, attention_work, read_rows

from ebbtide.features.layers.systems.ml_dataflow import (
    dataflow_layers,
    dataflow_plan,
    slots_in,
)
from ebbtide.interleave.model.workload import (
    ActivationForm,
    Layer,
    Workload,
    with_layers,
)
from ebbtide.interleave.simulation.simulator import simulate
from ebbtide.machines.machine import Machine

GIB = 2**30
# Widths of the feed-forward network, of keys and values, and of a head, by parameters.
SHAPES = {
    1498415104: (8192, 512, 64),
    8029995008: (14336, 1024, 128),
    15009316864: (14336, 1024, 128),
    32762757120: (27648, 1024, 128),
}
# Peaks of data sheets: bf16 with sums in fp32, bytes of device memory, of the link in a
# direction (PCIe 4 or 5), and of host memory by ml_dataflow's README, which does not
# say the A100's.
SHEETS = {
    "h100-80gb": (989.5e12, 3350e9, 64e9, 307.2e9),
    "a100-80gb-sxm": (312e12, 2039e9, 32e9, math.inf),
    "rtx3090": (71.2e12, 936e9, 32e9, 51.2e9),
    "rtx5090": (209.5e12, 1792e9, 64e9, 83.2e9),
}
# More rounds than these are alike.
FEWEST_ROUNDS, MOST_ROUNDS = 2, 4


@dataclass(frozen=True)
class Settings:
    """Budgets, memory and mix of a run: activations on the host by form, and on the
    device."""

    name: str
    host_gib: float
    device_gib: float
    used_host_gib: float
    used_device_gib: float
    chunk_tokens: int
    saved_input: int
    saved_attention: int
    saved_full: int
    on_device: int
    rounds: int


class Rates(NamedTuple):
    """Shares of a data sheet's peaks: of products, of attention's forward by the size
    of its heads, of link and device memory."""

    product: float = 0.75
    attention: float = 0.55
    attention_64: float = 0.45
    link: float = 0.8  # A direction.
    both: float = 0.75  # Both directions together.
    memory: float = 0.8  # Bytes of elementwise work and of the update.
    backward: float = 0.8  # The rate of attention's backward over that of its forward.


@dataclass(frozen=True)
class Budget:
    """Budgets of a run, and whether the job ran in them (1) or not."""

    machine: str
    params: int
    sequence: int
    host_gib: float
    device_gib: float
    fits: int


@dataclass(frozen=True)
class Step:
    """The predicted time of a step, s."""

    name: str
    step_s: float


@cache
def runs() -> list[tuple[Job, Settings]]:
    """Return all runs."""
    pairs = []
    for name in ("streamed-8b", "streamed"):
        settings = {
            one.name: one
            for one in read_rows(Settings, FOLDER / f"{name}.settings.csv")
        }
        pairs += [
            (job, settings[job.name])
            for job in read_rows(Job, FOLDER / f"{name}.jobs.csv")
        ]
    return pairs


def measured_s() -> dict[str, float]:
    """Return the measured steps by name."""
    return {
        one.name: one.step_s
        for name in ("streamed-8b", "streamed")
        for one in read_rows(Step, FOLDER / f"{name}.measured.csv")
    }


def workload_of(job: Job, settings: Settings, rates: Rates, rounds: int) -> Workload:
    """Return the workload of some rounds of a run: the time of each chunk by its work
    and the rates."""
    peak, memory_rate, _, _ = SHEETS[job.machine]
    d, tokens = job.hidden, settings.chunk_tokens
    e, kv, head_size = SHAPES[job.params]
    attention_rate = peak * (
        rates.attention if head_size == 128 else rates.attention_64
    )
    chunks = max(1, chunks_of(job, settings))
    if job.sequence <= tokens:
        contexts = [job.sequence / 2] * chunks
    else:
        in_sequence = job.sequence // tokens
        contexts = [(chunk % in_sequence + 0.5) * tokens for chunk in range(chunks)]
    params = 2 * d * d + 2 * d * kv + 3 * d * e
    products_s = 2 * tokens * params / (peak * rates.product)
    elementwise_s = tokens / (memory_rate * rates.memory)
    forward_work, backward_work = attention_work(job.machine, head_size)
    once_s = [4 * tokens * context * d / attention_rate for context in contexts]
    attention_s = [forward_work * one for one in once_s]
    forward_s = [
        products_s + one + elementwise_s * (16 * d + 6 * e) for one in attention_s
    ]
    backward_s = [
        2 * products_s
        + backward_work / rates.backward * one
        + elementwise_s * (30 * d + 18 * e)
        for one in once_s
    ]
    # Up to the products that "all" holds: the backward computes the activation function
    # after them in any form.
    again_s = (
        2 * tokens * (2 * d * d + 2 * d * e) / (peak * rates.product)
        + elementwise_s * 8 * d
    )
    total = [a + b for a, b in zip(forward_s, backward_s, strict=True)]
    sizes = (
        2 * tokens * (d + 2 * kv),
        2 * tokens * (2 * d + 2 * kv) + 4 * tokens * job.heads,
        0,
    )
    full = 2 * tokens * (4 * d + 2 * kv + 2 * e)
    count = chunks * rounds
    attention_again_s = rounds * (sum(attention_s) + chunks * again_s)
    forms = (
        ActivationForm("all", full * count, 0.0),
        ActivationForm("input and attention", sizes[1] * count, again_s * count),
        ActivationForm("input", sizes[0] * count, attention_again_s),
    )
    layer = Layer(
        "layer", params, rounds * sum(forward_s), rounds * sum(backward_s), forms
    )
    head_s = (
        2 * tokens * d * job.vocabulary / (peak * rates.product)
        + elementwise_s * 4 * job.vocabulary
    )
    layers = [layer] * job.layers
    workload = Workload(
        name=job.name,
        params=job.params,
        subgroup_params=job.params,
        forward_s=job.layers * layer.forward_s + count * head_s,
        backward_s=job.layers * layer.backward_s + 2 * count * head_s,
        state_bytes=4.0,
        gpu_free=((0.0, free_bytes(job, settings)),),
        clipping=False,
    )
    return with_layers(
        workload, layers, [one for _ in range(rounds) for one in total], job.name
    )


def chunks_of(job: Job, settings: Settings) -> int:
    """Return the chunks of a round."""
    acts = (
        settings.saved_input
        + settings.saved_attention
        + settings.saved_full
        + settings.on_device
    )
    return acts // job.layers


def free_bytes(job: Job, settings: Settings) -> float:
    """Return the device memory that is left for layers: all but embedding, head and
    buffers of fixed size."""
    d, tokens, vocabulary = job.hidden, settings.chunk_tokens, job.vocabulary
    e, kv, _ = SHAPES[job.params]
    context = 4 * 2 * max(tokens, job.sequence) * kv
    # Of attention; fitted to the slots of the runs with 8 G parameters.
    workspace = 200 * 2**20 + 6e3 * max(tokens, job.sequence)
    ends = 2 * vocabulary * d * 8
    transitions = 2 * chunks_of(job, settings) * tokens * d * 2
    head = tokens * ((d + 2 * vocabulary) * 2 + 4)
    working = 2 * tokens * (4 * d + 2 * kv + 2 * e)
    buffers = 2 * tokens * d * 2 + tokens * (d + e) * 2
    used = (
        context
        + workspace
        + ends
        + transitions
        + head
        + working
        + buffers
        + 200 * 2**20
    )
    return max(0.0, settings.device_gib * GIB - used)


def machine_of(job: Job, rates: Rates) -> Machine:
    """Return the machine of a run."""
    _, memory_rate, link, host_rate = SHEETS[job.machine]
    return Machine(
        name=job.machine,
        h2d_bytes_per_s=rates.link * link,
        d2h_bytes_per_s=rates.link * link,
        duplex_bytes_per_s=2 * rates.both * link,
        host_memory_bytes_per_s=min(host_rate, 1e12),
        gpu_update_params_per_s=rates.memory * memory_rate / 14,
    )


def step_s(job: Job, settings: Settings, rates: Rates) -> float:
    """Return the predicted step of a run, s. Rounds are alike: of many, only some are
    simulated."""
    if settings.rounds <= MOST_ROUNDS:
        return _simulated_s(job, settings, rates, settings.rounds)
    few, more = (
        _simulated_s(job, settings, rates, number)
        for number in (FEWEST_ROUNDS, FEWEST_ROUNDS + 1)
    )
    return few + (settings.rounds - FEWEST_ROUNDS) * (more - few)


def _simulated_s(job: Job, settings: Settings, rates: Rates, rounds: int) -> float:
    workload = workload_of(job, settings, rates, rounds)
    slots = slots_in(workload, rounds)._replace(activations=settings.on_device)
    numbers = [settings.saved_full, settings.saved_attention, settings.saved_input]
    layers = dataflow_layers(workload, rounds, slots, numbers)
    return simulate(
        dataflow_plan("ml-dataflow", workload, layers), workload, machine_of(job, rates)
    ).iteration_s
