"""Compare runs of ml_dataflow, which streams all layers of a model, with plans of the
policy `ml-dataflow`.

    python benchmarks/streamed_layers.py fit CARD | predict | table | bound | budgets | mixes

`fit` fits the rates of a card to some of its runs; `predict` writes the predicted steps
of all runs; `table` prints the comparison. The runs are in `streamed_layer_runs.py`.
"""

import argparse
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace

from accuracy_jobs import FOLDER, Job, read_rows, write_rows
from streamed_layer_runs import (
    GIB,
    MOST_ROUNDS,
    SHAPES,
    SHEETS,
    Budget,
    Rates,
    Settings,
    Step,
    attention_work,
    free_bytes,
    machine_of,
    measured_s,
    runs,
    step_s,
    workload_of,
)

from ebbtide.features.layers.systems.ml_dataflow import dataflow_layers, slots_in
from ebbtide.interleave.simulation.bound import min_layer_iteration_s

# A step that is longer than its compute by this factor waits for copies.
WAITING = 1.05
# Cards: sizes whose runs the rates of a card are fitted to, how many of them, and which
# rates.
FITS = {
    "h100-80gb": (("h100_8b",), 24, (0, 1, 3, 4, 6)),
    "rtx3090": (("rtx3090_8b",), 24, (0, 1, 3, 4, 6)),
    "a100-80gb-sxm": (("a100_",), 20, (0, 1, 2, 3, 4, 5, 6)),
    "rtx5090": (("rtx5090_",), 20, (0, 1, 2, 3, 4, 5, 6)),
}
CARDS = {
    "h100-80gb": "H100",
    "rtx3090": "RTX 3090",
    "a100-80gb-sxm": "A100 80 GB",
    "rtx5090": "RTX 5090",
}
# Heads of 64 on H100 are in runs with 1 G parameters alone.
HEADS_64 = ("h100-80gb", ("h100_1b",), 20, (2,))
RATES_FILE = FOLDER / "streamed-layers.rates.json"


def spread(names: Sequence[str], count: int) -> list[tuple[Job, Settings]]:
    """Return so many runs of some files, evenly over budgets and sequences, whatever
    their times."""
    chosen = [run for run in runs() if run[0].name.startswith(tuple(names))]
    return [
        chosen[(2 * number + 1) * len(chosen) // (2 * count)] for number in range(count)
    ]


def fit(
    rates: Rates, sample: Sequence[tuple[Job, Settings]], free: Sequence[int]
) -> tuple[float, Rates]:
    """Return the mean size of the errors of a sample where it is least, and its rates;
    those of `free` may differ."""
    from scipy.optimize import least_squares, minimize

    measured = measured_s()

    def changed(values: Sequence[float]) -> Rates:
        numbers = list(rates)
        for index, value in zip(free, values, strict=True):
            numbers[index] = float(value)
        return Rates(*numbers)

    def errors(values: Sequence[float]) -> list[float]:
        guess = changed(values)
        return [
            math.log(step_s(job, one, guess) / measured[job.name])
            for job, one in sample
        ]

    def mean_error(values: Sequence[float]) -> float:
        # Clocks, but not links, exceed what data sheets say.
        possible = (
            min(values) > 0.05 and max(values) < 1.2 and changed(values).link <= 1
        )
        return statistics.fmean(map(abs, errors(values))) if possible else 1.0

    # The slope leads near the best rates, but not through the kinks where the link
    # begins to matter.
    slope = {"loss": "soft_l1", "f_scale": 0.02, "diff_step": 0.02, "max_nfev": 12}
    near = least_squares(
        errors, [rates[index] for index in free], bounds=(0.05, 1.2), **slope
    ).x
    steps = {"maxfev": 15 * len(free), "xatol": 1e-3, "fatol": 1e-5}
    result = minimize(mean_error, near, method="Nelder-Mead", options=steps)
    error = result.fun
    print(
        f"{sample[0][0].machine}: {len(sample)} runs, mean {100 * error:.2f} %, "
        f"{changed(result.x)}",
        flush=True,
    )
    return error, changed(result.x)


def fit_card(card: str) -> None:
    """Fit the rates of a card, and write them with the runs that they were fitted
    to."""
    names, count, free = FITS[card]
    sample = spread(names, count)
    _, _, link, host_rate = SHEETS[card]
    values = json.loads(RATES_FILE.read_text()) if RATES_FILE.exists() else {}
    # Above what host memory gives, the share of both directions has no slope. Or both
    # are as fast as one alone. Or where the last fit ended.
    starts = [
        Rates(both=both)
        for both in (min(Rates().both, 0.9 * host_rate / (2 * link)), Rates().link / 2)
    ]
    starts += [Rates(**values[card]["rates"])] if card in values else []
    _, rates = min(fit(start, sample, free) for start in starts)
    own = [job.name for job, _ in sample]
    if card == HEADS_64[0]:
        _, names, count, free = HEADS_64
        sample = spread(names, count)
        _, rates = fit(rates, sample, free)
        own += [job.name for job, _ in sample]
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
    steps = [
        Step(job.name, step_s(job, settings, rates[job.machine]))
        for job, settings in runs()
    ]
    write_rows(
        FOLDER / "streamed-layers.predicted.csv",
        ["predicted by the policy ml-dataflow; s a step"],
        steps,
    )


def regime(job: Job, settings: Settings, rates: Rates, step_s: float) -> str:
    """Return whether compute alone is nearly as long as the predicted step of a run, or
    it waits for copies."""
    workload = workload_of(job, settings, rates, 1)
    numbers = [settings.saved_full, settings.saved_attention, settings.saved_input]
    slots = slots_in(workload, 1)._replace(activations=settings.on_device)
    again_s = sum(
        saved.recompute_s
        for saved in dataflow_layers(workload, 1, slots, numbers).activations
    )
    return (
        "compute"
        if step_s < WAITING * settings.rounds * (workload.compute_s + again_s)
        else "copies"
    )


def mix_of(job: Job, settings: Settings) -> tuple[Job, Settings]:
    """Return all that is alike in runs that differ by a budget of host memory which
    they do not use."""
    return replace(job, name=""), replace(
        settings, name="", host_gib=0, used_host_gib=0, used_device_gib=0
    )


def table() -> None:
    """Print the errors of runs with mixes that no rate was fitted to, by card, size and
    regime."""
    rates, excluded = fitted()
    measured = measured_s()
    predicted = {
        one.name: one.step_s
        for one in read_rows(Step, FOLDER / "streamed-layers.predicted.csv")
    }
    groups: dict[tuple[str, ...], list[float]] = {}
    seen = {mix_of(*run) for run in runs() if run[0].name in excluded}
    for job, settings in runs():
        if mix_of(job, settings) in seen:
            continue
        error = predicted[job.name] / measured[job.name] - 1
        size = f"{job.params // 10**9} B"
        kind = regime(job, settings, rates[job.machine], predicted[job.name])
        for group in (
            (CARDS[job.machine], size, kind),
            ("all", "", kind),
            ("all", "", ""),
        ):
            groups.setdefault(group, []).append(error)
    print(
        "| card | size | limited by | runs | median error | 90 % below | mean, with "
        "sign |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for group, errors in sorted(groups.items()):
        sizes = sorted(map(abs, errors))
        values = statistics.median(sizes), sizes[int(0.9 * (len(sizes) - 1))]
        shares = [
            *(f"{100 * value:.1f} %" for value in values),
            f"{100 * statistics.fmean(errors):+.1f} %",
        ]
        print("| " + " | ".join([*group, str(len(errors)), *shares]) + " |")


def check_bound() -> None:
    """Print the share of the step that the bound has in each run, and where it is above
    the measured time."""
    measured = measured_s()
    shares = []
    for job, settings in runs():
        # Attention's forward once, and its backward without turns: no implementation
        # needs less.
        once, backward = attention_work(job.machine, SHAPES[job.params][2])
        own = Rates(1.0, once, once, 1.0, 1.0, 1.0, backward / (2.5 * once))
        rounds = min(settings.rounds, MOST_ROUNDS)
        workload = workload_of(job, settings, own, rounds)
        least_s = (
            min_layer_iteration_s(workload, machine_of(job, own), rounds)
            * settings.rounds
            / rounds
        )
        shares.append(least_s / measured[job.name])
        if shares[-1] > 1:
            print(
                f"{job.name}: bound {least_s:.2f} s, measured {measured[job.name]:.2f} "
                "s"
            )
    print(
        f"bound at the sheets' peaks: {min(shares):.2f} to {max(shares):.2f} of "
        f"{len(shares)} measured steps"
    )


# Host memory beside blocks and activations, for an embedding of 525 M parameters: the
# median of 8 G parameters.
HOST_REST_BYTES = 0.285e9


def fits_budget(budget: Budget, job: Job) -> bool:
    """Return whether the device holds a layer with gradient and two activations, and
    the host all others' inputs."""
    d, (e, kv, _) = job.hidden, SHAPES[job.params]
    tokens = 16384 if job.machine in ("h100-80gb", "a100-80gb-sxm") else 8192
    activations = job.layers * max(1, job.sequence // tokens)
    settings = Settings(
        "", budget.host_gib, budget.device_gib, 0, 0, tokens, 0, 0, 0, activations, 1
    )
    weights = 2 * d * d + 2 * d * kv + 3 * d * e
    if free_bytes(job, settings) < 4 * weights + 2 * 2 * tokens * (
        4 * d + 2 * kv + 2 * e
    ):
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
    right = sum(
        count for (_, ran, predicted), count in counts.items() if ran == predicted
    )
    print(
        f"{right} of {sum(counts.values())} budgets are predicted rightly; (card, ran, "
        f"predicted): {counts}"
    )


# Gains in the simulation from which the choice of another mix is counted as promised.
PROMISED = 0.06


def check_mixes() -> None:
    """Print the loss of choosing, by the predicted steps, among the recorded mixes that
    a budget of host memory allows, and which promised gains are real."""
    measured = measured_s()
    predicted = {
        one.name: one.step_s
        for one in read_rows(Step, FOLDER / "streamed-layers.predicted.csv")
    }
    jobs: dict[tuple[str, int, int, int, float], list[Settings]] = {}
    for job, settings in runs():
        key = job.machine, job.params, job.sequence, job.tokens, settings.device_gib
        jobs.setdefault(key, []).append(settings)
    losses, largest, gains = [], [], []
    for mixes in jobs.values():
        for budget in {one.host_gib for one in mixes}:
            allowed = [
                one.name
                for one in mixes
                if max(one.host_gib, one.used_host_gib) <= budget
            ]
            if len(allowed) < 2:
                continue
            chosen, best = (
                min(allowed, key=times.__getitem__) for times in (predicted, measured)
            )
            losses.append(measured[chosen] / measured[best] - 1)
            own = [one.name for one in mixes if one.host_gib == budget]
            largest.append(measured[min(own)] / measured[best] - 1)
            gains += [
                (excess_of(predicted, one, chosen), excess_of(measured, one, chosen))
                for one in own
            ]
    promised = [(gain, real) for gain, real in gains if gain > PROMISED]
    mean, most, own_mean = (
        100 * one
        for one in (statistics.fmean(losses), max(losses), statistics.fmean(largest))
    )
    print(
        f"{len(losses)} budgets with a choice: loss {mean:.2f} % in the mean, "
        f"{most:.1f} % at most;",
        end=" ",
    )
    print(f"of the mix of that budget itself {own_mean:.2f} % in the mean")
    confirmed = sum(real > PROMISED / 2 for _, real in promised)
    promise, least = round(100 * PROMISED), round(50 * PROMISED)
    print(
        f"{len(promised)} promised gains above {promise} %, of which {confirmed} "
        f"measured above {least} %"
    )


def excess_of(steps: Mapping[str, float], name: str, other: str) -> float:
    """Return by how much a step is longer than that of another run."""
    return steps[name] / steps[other] - 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "part", choices=["fit", "predict", "table", "bound", "budgets", "mixes"]
    )
    parser.add_argument(
        "card", nargs="?", choices=list(FITS), help="card whose rates are fitted"
    )
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
