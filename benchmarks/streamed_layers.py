"""Compare runs of ml_dataflow, which streams all layers of a model, with plans of the policy `ml-dataflow`.

    python benchmarks/streamed_layers.py fit CARD | predict | table | bound | budgets | mixes

`fit` fits the rates of a card to some of its runs; `predict` writes the predicted steps of all runs; `table` prints
the comparison. Data are those of `benchmarks/accuracy/`; settings are apart from times.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

from accuracy_jobs import FOLDER, Job, read_rows, write_rows

from ebbtide.interleave.model.workload import ActivationForm, Layer, Workload, with_layers
from ebbtide.interleave.policies.systems.ml_dataflow import dataflow_layers, dataflow_plan, slots_in
from ebbtide.interleave.simulation.bound import min_layer_iteration_s
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
# Peaks of data sheets: bf16 with sums in fp32, bytes of device memory, of the link in a direction (PCIe 4 or 5), and of
# host memory by ml_dataflow's README, which does not say the A100's.
SHEETS = {
    "h100-80gb": (989.5e12, 3350e9, 64e9, 307.2e9),
    "a100-80gb-sxm": (312e12, 2039e9, 32e9, math.inf),
    "rtx3090": (71.2e12, 936e9, 32e9, 51.2e9),
    "rtx5090": (209.5e12, 1792e9, 64e9, 83.2e9),
}
# More rounds than these are alike.
FEWEST_ROUNDS, MOST_ROUNDS = 2, 4
# A step that is longer than its compute by this factor waits for copies.
WAITING = 1.05


@dataclass(frozen=True)
class Settings:
    """Budgets, memory and mix of a run: activations on the host by form, and on the device."""

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
    """Shares of a data sheet's peaks: of products, of attention by the size of its heads, of link and device memory."""

    product: float = 0.75
    attention: float = 0.55
    attention_64: float = 0.45
    link: float = 0.8  # A direction.
    both: float = 0.75  # Both directions together.
    memory: float = 0.8  # Bytes of elementwise work and of the update.


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
        settings = {one.name: one for one in read_rows(Settings, FOLDER / f"{name}.settings.csv")}
        pairs += [(job, settings[job.name]) for job in read_rows(Job, FOLDER / f"{name}.jobs.csv")]
    return pairs


def workload_of(job: Job, settings: Settings, rates: Rates, rounds: int) -> Workload:
    """Return the workload of some rounds of a run: the time of each chunk by its work and the rates."""
    peak, memory_rate, _, _ = SHEETS[job.machine]
    d, tokens = job.hidden, settings.chunk_tokens
    e, kv, head_size = SHAPES[job.params]
    attention_rate = peak * (rates.attention if head_size == 128 else rates.attention_64)
    chunks = max(1, chunks_of(job, settings))
    if job.sequence <= tokens:
        contexts = [job.sequence / 2] * chunks
    else:
        in_sequence = job.sequence // tokens
        contexts = [(chunk % in_sequence + 0.5) * tokens for chunk in range(chunks)]
    params = 2 * d * d + 2 * d * kv + 3 * d * e
    products_s = 2 * tokens * params / (peak * rates.product)
    elementwise_s = tokens / (memory_rate * rates.memory)
    attention_s = [4 * tokens * context * d / attention_rate for context in contexts]
    forward_s = [products_s + one + elementwise_s * (16 * d + 6 * e) for one in attention_s]
    backward_s = [2 * products_s + 2.5 * one + elementwise_s * (30 * d + 18 * e) for one in attention_s]
    # Up to the products that "all" holds: the backward computes the activation function after them in any form.
    again_s = 2 * tokens * (2 * d * d + 2 * d * e) / (peak * rates.product) + elementwise_s * 8 * d
    total = [a + b for a, b in zip(forward_s, backward_s, strict=True)]
    sizes = 2 * tokens * (d + 2 * kv), 2 * tokens * (2 * d + 2 * kv) + 4 * tokens * job.heads, 0
    full = 2 * tokens * (4 * d + 2 * kv + 2 * e)
    count = chunks * rounds
    attention_again_s = rounds * (sum(attention_s) + chunks * again_s)
    forms = (
        ActivationForm("all", full * count, 0.0),
        ActivationForm("input and attention", sizes[1] * count, again_s * count),
        ActivationForm("input", sizes[0] * count, attention_again_s),
    )
    layer = Layer("layer", params, rounds * sum(forward_s), rounds * sum(backward_s), forms)
    head_s = 2 * tokens * d * job.vocabulary / (peak * rates.product) + elementwise_s * 4 * job.vocabulary
    layers = [layer] * job.layers
    workload = Workload(
        name=job.name,
        params=job.params,
        subgroup_params=job.params,
        forward_s=job.layers * layer.forward_s + count * head_s,
        backward_s=job.layers * layer.backward_s + 2 * count * head_s,
        state_bytes=4.0,
        gpu_free=((0.0, _free_bytes(job, settings)),),
        clipping=False,
    )
    return with_layers(workload, layers, [one for _ in range(rounds) for one in total], job.name)


def chunks_of(job: Job, settings: Settings) -> int:
    """Return the chunks of a round."""
    acts = settings.saved_input + settings.saved_attention + settings.saved_full + settings.on_device
    return acts // job.layers


def _free_bytes(job: Job, settings: Settings) -> float:
    """Return the device memory that is left for layers: all but embedding, head and buffers of fixed size."""
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
    used = context + workspace + ends + transitions + head + working + buffers + 200 * 2**20
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
    """Return the predicted step of a run, s. Rounds are alike: of many, only some are simulated."""
    if settings.rounds <= MOST_ROUNDS:
        return _simulated_s(job, settings, rates, settings.rounds)
    few, more = (_simulated_s(job, settings, rates, number) for number in (FEWEST_ROUNDS, FEWEST_ROUNDS + 1))
    return few + (settings.rounds - FEWEST_ROUNDS) * (more - few)


def _simulated_s(job: Job, settings: Settings, rates: Rates, rounds: int) -> float:
    workload = workload_of(job, settings, rates, rounds)
    slots = slots_in(workload, rounds)._replace(activations=settings.on_device)
    numbers = [settings.saved_full, settings.saved_attention, settings.saved_input]
    layers = dataflow_layers(workload, rounds, slots, numbers)
    return simulate(dataflow_plan("ml-dataflow", workload, layers), workload, machine_of(job, rates)).iteration_s


# Cards: sizes whose runs the rates of a card are fitted to, how many of them, and which rates.
FITS = {
    "h100-80gb": (("h100_8b",), 24, (0, 1, 3, 4)),
    "rtx3090": (("rtx3090_8b",), 24, (0, 1, 3, 4)),
    "a100-80gb-sxm": (("a100_",), 20, (0, 1, 2, 3, 4, 5)),
    "rtx5090": (("rtx5090_",), 20, (0, 1, 2, 3, 4, 5)),
}
# Heads of 64 on H100 are in runs with 1 G parameters alone.
HEADS_64 = ("h100-80gb", ("h100_1b",), 20, (2,))
RATES_FILE = FOLDER / "streamed-layers.rates.json"


def spread(names: Sequence[str], count: int) -> list[tuple[Job, Settings]]:
    """Return so many runs of some files, evenly over budgets and sequences, whatever their times."""
    chosen = [run for run in runs() if run[0].name.startswith(tuple(names))]
    return [chosen[(2 * number + 1) * len(chosen) // (2 * count)] for number in range(count)]


def fit(rates: Rates, sample: Sequence[tuple[Job, Settings]], free: Sequence[int]) -> tuple[float, Rates]:
    """Return the mean size of the errors of a sample where it is least, and its rates; those of `free` may differ."""
    from scipy.optimize import least_squares, minimize

    measured = measured_s()

    def changed(values: Sequence[float]) -> Rates:
        numbers = list(rates)
        for index, value in zip(free, values, strict=True):
            numbers[index] = float(value)
        return Rates(*numbers)

    def errors(values: Sequence[float]) -> list[float]:
        guess = changed(values)
        return [math.log(step_s(job, one, guess) / measured[job.name]) for job, one in sample]

    def mean_error(values: Sequence[float]) -> float:
        return statistics.fmean(map(abs, errors(values))) if min(values) > 0.05 and max(values) < 1.2 else 1.0

    # The slope leads near the best rates, but not through the kinks where the link begins to matter.
    slope = {"loss": "soft_l1", "f_scale": 0.02, "diff_step": 0.02, "max_nfev": 12}
    near = least_squares(errors, [rates[index] for index in free], bounds=(0.05, 1.2), **slope).x
    steps = {"maxfev": 15 * len(free), "xatol": 1e-3, "fatol": 1e-5}
    result = minimize(mean_error, near, method="Nelder-Mead", options=steps)
    error = result.fun
    print(f"{sample[0][0].machine}: {len(sample)} runs, mean {100 * error:.2f} %, {changed(result.x)}", flush=True)
    return error, changed(result.x)


def measured_s() -> dict[str, float]:
    """Return the measured steps by name."""
    return {
        one.name: one.step_s
        for name in ("streamed-8b", "streamed")
        for one in read_rows(Step, FOLDER / f"{name}.measured.csv")
    }


def fit_card(card: str) -> None:
    """Fit the rates of a card, and write them with the runs that they were fitted to."""
    names, count, free = FITS[card]
    sample = spread(names, count)
    _, _, link, host_rate = SHEETS[card]
    # Above what host memory gives, the share of both directions has no slope. Or both are as fast as one alone.
    starts = min(Rates().both, 0.9 * host_rate / (2 * link)), Rates().link / 2
    _, rates = min(fit(Rates(both=both), sample, free) for both in starts)
    own = [job.name for job, _ in sample]
    if card == HEADS_64[0]:
        _, names, count, free = HEADS_64
        sample = spread(names, count)
        _, rates = fit(rates, sample, free)
        own += [job.name for job, _ in sample]
    values = json.loads(RATES_FILE.read_text()) if RATES_FILE.exists() else {}
    values[card] = {"rates": rates._asdict(), "runs": own}
    RATES_FILE.write_text(json.dumps(values, indent=1) + "\n")


def fitted() -> tuple[dict[str, Rates], frozenset[str]]:
    """Return the fitted rates of each card, and the runs that they were fitted to."""
    values = json.loads(RATES_FILE.read_text())
    return {card: Rates(**one["rates"]) for card, one in values.items()}, frozenset(
        name for one in values.values() for name in one["runs"]
    )


def predict_all() -> None:
    """Write the predicted step of each run."""
    rates, _ = fitted()
    steps = [Step(job.name, step_s(job, settings, rates[job.machine])) for job, settings in runs()]
    write_rows(FOLDER / "streamed-layers.predicted.csv", ["predicted by the policy ml-dataflow; s a step"], steps)


def regime(job: Job, settings: Settings, rates: Rates, step_s: float) -> str:
    """Return whether compute alone is nearly as long as the predicted step of a run, or it waits for copies."""
    workload = workload_of(job, settings, rates, 1)
    numbers = [settings.saved_full, settings.saved_attention, settings.saved_input]
    slots = slots_in(workload, 1)._replace(activations=settings.on_device)
    again_s = sum(saved.recompute_s for saved in dataflow_layers(workload, 1, slots, numbers).activations)
    return "compute" if step_s < WAITING * settings.rounds * (workload.compute_s + again_s) else "copies"


def mix_of(job: Job, settings: Settings) -> tuple[Job, Settings]:
    """Return all that is alike in runs that differ by a budget of host memory which they do not use."""
    return replace(job, name=""), replace(settings, name="", host_gib=0, used_host_gib=0, used_device_gib=0)


def table() -> None:
    """Print the errors of runs with mixes that no rate was fitted to, by card, size and regime."""
    rates, excluded = fitted()
    measured = measured_s()
    predicted = {one.name: one.step_s for one in read_rows(Step, FOLDER / "streamed-layers.predicted.csv")}
    groups: dict[tuple[str, ...], list[float]] = {}
    seen = {mix_of(*run) for run in runs() if run[0].name in excluded}
    for job, settings in runs():
        if mix_of(job, settings) in seen:
            continue
        error = predicted[job.name] / measured[job.name] - 1
        size = f"{job.params / 1e9:.0f} B"
        kind = regime(job, settings, rates[job.machine], predicted[job.name])
        for group in ((job.machine, size, kind), ("all", "", kind), ("all", "", "")):
            groups.setdefault(group, []).append(error)
    print("| card | size | limited by | runs | median error | 90 % below | mean, with sign |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for group, errors in sorted(groups.items()):
        sizes = sorted(map(abs, errors))
        values = statistics.median(sizes), sizes[int(0.9 * (len(sizes) - 1))], statistics.fmean(errors)
        print("| " + " | ".join([*group, str(len(errors)), *(f"{100 * value:+.1f} %" for value in values)]) + " |")


def check_bound() -> None:
    """Print the share of the step that the bound has in each run, and where it is above the measured time."""
    rates, _ = fitted()
    measured = measured_s()
    shares = []
    for job, settings in runs():
        own = rates[job.machine]._replace(product=1.0, attention=1.0, attention_64=1.0, link=1.0, both=1.0, memory=1.0)
        rounds = min(settings.rounds, MOST_ROUNDS)
        workload = workload_of(job, settings, own, rounds)
        least_s = min_layer_iteration_s(workload, machine_of(job, own), rounds) * settings.rounds / rounds
        shares.append(least_s / measured[job.name])
        if shares[-1] > 1:
            print(f"{job.name}: bound {least_s:.2f} s, measured {measured[job.name]:.2f} s")
    print(f"bound at the sheets' peaks: {min(shares):.2f} to {max(shares):.2f} of {len(shares)} measured steps")


# Host memory beside blocks and activations, for an embedding of 525 M parameters: the median of 8 G parameters.
HOST_REST_BYTES = 0.285e9


def fits_budget(budget: Budget, job: Job) -> bool:
    """Return whether the device holds a layer with gradient and two activations, and the host all others' inputs."""
    d, (e, kv, _) = job.hidden, SHAPES[job.params]
    tokens = 16384 if job.machine in ("h100-80gb", "a100-80gb-sxm") else 8192
    activations = job.layers * max(1, job.sequence // tokens)
    settings = Settings("", budget.host_gib, budget.device_gib, 0, 0, tokens, 0, 0, 0, activations, 1)
    weights = 2 * d * d + 2 * d * kv + 3 * d * e
    if _free_bytes(job, settings) < 4 * weights + 2 * 2 * tokens * (4 * d + 2 * kv + 2 * e):
        return False
    on_device = slots_in(workload_of(job, settings, Rates(), 1), 1).activations
    rest = (4 + HOST_REST_BYTES / 525_336_576) * job.vocabulary * d
    inputs = (activations - on_device) * 2 * tokens * (d + 2 * kv)
    return budget.host_gib * GIB >= 8 * weights * job.layers + rest + inputs


def check_budgets() -> None:
    """Print how often it is predicted rightly whether a job runs in its budgets."""
    jobs = {(job.machine, job.params): job for job, _ in runs()}
    counts: dict[tuple[str, bool, bool], int] = {}
    for budget in read_rows(Budget, FOLDER / "streamed.budgets.csv"):
        job = replace(jobs[budget.machine, budget.params], sequence=budget.sequence)
        key = budget.machine, bool(budget.fits), fits_budget(budget, job)
        counts[key] = counts.get(key, 0) + 1
    right = sum(count for (_, ran, predicted), count in counts.items() if ran == predicted)
    print(f"{right} of {sum(counts.values())} budgets are predicted rightly; (card, ran, predicted): {counts}")


# Gains in the simulation from which the choice of another mix is counted as promised.
PROMISED = 0.06


def check_mixes() -> None:
    """Print the loss of choosing, by the predicted steps, among the recorded mixes that a budget of host memory
    allows, and which promised gains are real."""
    measured = measured_s()
    predicted = {one.name: one.step_s for one in read_rows(Step, FOLDER / "streamed-layers.predicted.csv")}
    jobs: dict[tuple[str, int, int, int, float], list[Settings]] = {}
    for job, settings in runs():
        key = job.machine, job.params, job.sequence, job.tokens, settings.device_gib
        jobs.setdefault(key, []).append(settings)
    losses, largest, gains = [], [], []
    for mixes in jobs.values():
        for budget in {one.host_gib for one in mixes}:
            allowed = [one.name for one in mixes if max(one.host_gib, one.used_host_gib) <= budget]
            if len(allowed) < 2:
                continue
            chosen, best = (min(allowed, key=times.__getitem__) for times in (predicted, measured))
            losses.append(measured[chosen] / measured[best] - 1)
            own = [one.name for one in mixes if one.host_gib == budget]
            largest.append(measured[min(own)] / measured[best] - 1)
            gains += [(excess_of(predicted, one, chosen), excess_of(measured, one, chosen)) for one in own]
    promised = [(gain, real) for gain, real in gains if gain > PROMISED]
    mean, most, own_mean = (100 * one for one in (statistics.fmean(losses), max(losses), statistics.fmean(largest)))
    print(f"{len(losses)} budgets with a choice: loss {mean:.2f} % in the mean, {most:.1f} % at most;", end=" ")
    print(f"of the mix of that budget itself {own_mean:.2f} % in the mean")
    confirmed = sum(real > PROMISED / 2 for _, real in promised)
    promise, least = round(100 * PROMISED), round(50 * PROMISED)
    print(f"{len(promised)} promised gains above {promise} %, of which {confirmed} measured above {least} %")


def excess_of(steps: Mapping[str, float], name: str, other: str) -> float:
    """Return by how much a step is longer than that of another run."""
    return steps[name] / steps[other] - 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=["fit", "predict", "table", "bound", "budgets", "mixes"])
    parser.add_argument("card", nargs="?", choices=list(FITS), help="card whose rates are fitted")
    arguments = parser.parse_args()
    if arguments.part == "fit":
        fit_card(arguments.card)
        return
    parts = {
        "predict": predict_all,
        "table": table,
        "bound": check_bound,
        "budgets": check_budgets,
        "mixes": check_mixes,
    }
    parts[arguments.part]()


if __name__ == "__main__":
    main()
