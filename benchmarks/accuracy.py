"""Compare predictions with measured runs, and write docs/accuracy.md, its picture, and
what ebbtide prints of it.

    python benchmarks/accuracy.py

Blind: `SET.predicted.csv` in benchmarks/accuracy was committed before
`SET.measured.csv` was read. Fitted: predicted now, by priors that some of these runs
have corrected.
"""

from __future__ import annotations

import csv
import json
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import matplotlib.pyplot as plt
from accuracy_jobs import FOLDER, Job, Prediction, predict, read_rows
from matplotlib.axes import Axes
from published import jobs as published_jobs
from published import simulated_sample

ROOT = Path(__file__).parents[1]
# Sets that were predicted before their times were read, with the priors before
# 2026-11-26 and with those since.
FIRST = {
    "streamed": (
        "ml_dataflow: Llama-like models whose weights and state are streamed from the "
        "host"
    ),
    "llm-foundry": "llm-foundry: MPT on 8 to 512 GPUs with FSDP, bf16",
    "torchtitan": "torchtitan: Llama 3.1 8B on 8 and 128 GPUs with FSDP, bf16",
    "deepspeed": (
        "Deep Optimizer States: ZeRO-3 with offload, four ranks bound to NUMA nodes"
    ),
    "deepspeed-unbound": ("Deep Optimizer States, not bound: one, two and four ranks"),
    "fine-tuning": (
        "fms-acceleration: full fine-tuning of 1 to 8 B on 1 to 4 GPUs with FSDP, bf16"
    ),
}
SECOND = {
    "internevo": "InternEvo: 7 B on 8 to 1,024 GPUs",
    "gpt2-h200": "training-gpt-2: GPT-2 124M on 2 GPUs, as its code was tuned",
    "llmq": "llmq: Qwen2.5 of 0.5 to 32 B on 1 to 8 GPUs, C++ and CUDA",
    "fms-fsdp": "fms-fsdp: Llama 2 of 7 to 70 B on 96 and 128 GPUs",
    "llama1b-h200": "training-llama-3-2: Llama 3.2 1B on 2 and 8 GPUs",
    "flash-attention": "flash-attention: GPT-2 and GPT-3 of 0.1 to 2.7 B on 8 GPUs",
    "litgpt-thunder": "LitGPT with Thunder: TinyLlama 1.1B on 1 and 8 GPUs",
    "torchtitan-a100": "torchtitan: Llama 2 and 3 of 8 to 70 B on 64 GPUs",
    "from-0-to-agi": "From-0-to-AGI: 0.07 to 0.7 B on one GPU limited to 240 W",
    "kempner": "KempnerForge: 0.08 to 13 B on 1 to 32 GPUs",
    "pax": "Pax: GPT of 0.1 and 5 B on 64 and 256 GPUs, XLA",
    "llm-c": "llm.c and modded-nanogpt: GPT-2 of 0.1 to 1.6 B on 8 GPUs",
    "torchtune": "torchtune: Llama 3.2 3B on one GPU",
    "llama-factory": "LLaMA-Factory: Qwen2.5 of 0.5 and 1.5 B on 1 and 4 GPUs",
    "xtuner": "XTuner: Llama 2 and Yi of 7 to 70 B on 8 and 32 GPUs",
    "fp4-fa4": "fp4-fa4: Llama 3.1 8B on one GPU, FlashAttention 4",
    "llm-tii": "llm_TII: Llama 1.3B and Qwen3 1.8B on 2 GPUs",
    "nanogpt-4090": "nanogpt-speedrun: GPT-2 124M on 2 GPUs",
    "tinyllama": "TinyLlama: 1.1 B on 16 GPUs",
}
BLIND = FIRST | SECOND
# Set -> the name that pages and the picture have of it.
NAMES = {name: title.partition(":")[0] for name, title in BLIND.items()}
FITTED = {
    "streamed-8b": "ml_dataflow: 8 B on H100 and RTX 3090",
    **{name: NAMES[name] for name in FIRST},
    "torchtitan-corrected": "torchtitan, its cards and checkpointing stated",
    "gpt2-h200": NAMES["gpt2-h200"],
}
CARDS = {
    "h100": "H100 80GB HBM3",
    "a100": "A100-SXM",
    "rtx5090": "RTX 5090",
    "rtx4090": "RTX 4090",
    "rtx3090": "RTX 3090",
    "rtx-pro": "RTX PRO 6000",
    "h200": "H200",
    "gb200": "GB200",
}
GOOD_SHARE, GOOD_ERROR = 0.75, 0.15
_ALL_KERNELS = (
    "its forward runs kernels of larger heads, too "
    "([attention](validation.md#attention))"
)
REASONS = {
    ("streamed", "A100"): f"{_ALL_KERNELS}: 0.3 of the peak; alone 0.72",
    (
        "streamed",
        "RTX 5090",
    ): "heads of 64 are faster than those of 128 on this card; the prior had them slower",
    (
        "torchtitan",
        "H100",
    ): "cards of 500 W and 2.4 TB/s, selective checkpointing: within 9 % with these stated",
    (
        "deepspeed",
        "A100",
    ): "20B, 256 heads of 16: scores of attention were charged 1.5 times their traffic",
    (
        "deepspeed",
        "H100",
    ): "2 to 16 % too slow, most for small models and blocking copies; the cause is not separated",
    (
        "fine-tuning",
        "A100",
    ): "too slow: with the priors of today +12 %; the rest is not separated",
    (
        "internevo",
        "A100",
    ): "8 runs on 256 to 1,024 GPUs: exchanges are counted as within one host; all up to 128 held",
    (
        "gpt2-h200",
        "H200",
    ): "vocabulary of 50,257, no multiple of 8; GELU of 8 kernels; the 16 runs without held",
    ("llama1b-h200", "H200"): "16 to 25 % too fast; the cause is not separated",
    ("from-0-to-agi", "RTX 3090"): "240 W instead of 350",
    ("pax", "A100"): "without Transformer Engine 26 % too fast, with it 11 %",
    ("pax", "H100"): "too fast; the cause is not separated",
    (
        "llm-c",
        "A100",
    ): "124M and 350M 29 and 38 % too slow, though 13 % on H100; the cause is not separated",
    ("xtuner", "A100"): "70B on 4 hosts: exchanges are counted as within one",
    (
        "fp4-fa4",
        "GB200",
    ): "too fast, within ranges that are wide: no product was measured on this card",
}


@dataclass(frozen=True)
class Comparison:
    """A prediction beside the measured step, s."""

    job: Job
    prediction: Prediction
    measured_s: float

    @property
    def error(self) -> float:
        """The relative error of the likely time."""
        return self.prediction.likely_s / self.measured_s - 1

    @property
    def holds(self) -> bool:
        """Whether the range holds the measured step."""
        return self.prediction.low_s <= self.measured_s <= self.prediction.high_s

    @property
    def width(self) -> float:
        """The high end of the range over the low one."""
        return self.prediction.high_s / self.prediction.low_s

    @property
    def card(self) -> str:
        """The GPU."""
        return next(
            name for key, name in CARDS.items() if self.job.machine.startswith(key)
        )

    @property
    def short_card(self) -> str:
        """The GPU in few letters."""
        return {"H100 80GB HBM3": "H100", "A100-SXM": "A100"}.get(self.card, self.card)


def compare(
    name: str, predicted: Callable[[str, Job], Prediction | None]
) -> list[Comparison]:
    """Return the runs of a set with their predictions."""
    with (FOLDER / f"{name}.measured.csv").open() as file:
        rows = csv.DictReader(line for line in file if not line.startswith("#"))
        measured = {row["name"]: float(row["step_s"]) for row in rows}
    pairs = [
        (job, predicted(name, job))
        for job in read_rows(Job, FOLDER / f"{name}.jobs.csv")
    ]
    return [
        Comparison(job, one, measured[job.name])
        for job, one in pairs
        if one is not None
    ]


def stored() -> Callable[[str, Job], Prediction]:
    """Return a function that looks up predictions that were committed."""
    files = {
        name: {
            one.name: one
            for one in read_rows(Prediction, FOLDER / f"{name}.predicted.csv")
        }
        for name in BLIND
    }
    return lambda name, job: files[name][job.name]


def cells(rows: list[Comparison]) -> list[str]:
    """Return runs, held share, width, median of errors and of their sizes, and the
    largest, as cells."""
    errors = [row.error for row in rows]
    sizes = [abs(error) for error in errors]
    return [
        f"{len(rows):,}",
        f"{100 * coverage(rows):.0f} %",
        f"{statistics.median(row.width for row in rows):.2f}",
        f"{100 * statistics.median(errors):+.1f} %",
        f"{100 * statistics.median(sizes):.1f} %",
        f"{100 * max(sizes):.0f} %",
    ]


HEAD = ["runs", "held", "width", "median error", "median size of errors", "largest"]


def coverage(rows: list[Comparison]) -> float:
    """Return the share of the runs that the ranges hold."""
    return sum(row.holds for row in rows) / len(rows)


def by_card(
    rows: Iterable[Comparison], by_size: bool = False
) -> dict[str, list[Comparison]]:
    """Return the rows by GPU, or by GPU and size of the model (which names of streamed
    jobs have)."""
    groups: dict[str, list[Comparison]] = defaultdict(list)
    for row in rows:
        size = f", {row.job.name.split('_')[1].upper()}" if by_size else ""
        groups[row.short_card + size].append(row)
    return dict(sorted(groups.items()))


def table(head: list[str], rows: Iterable[list[str]]) -> str:
    """Return a Markdown table."""
    return "".join(
        f"| {' | '.join(line)} |\n" for line in (head, ["---"] * len(head), *rows)
    )


def misses(blind: dict[str, list[Comparison]]) -> list[list[str]]:
    """Return the groups whose ranges hold less than three quarters, or whose median is
    off, the worst first."""
    groups = [
        (name, group, rows)
        for name, all_rows in blind.items()
        for group, rows in by_card(all_rows, by_size=name == "streamed").items()
    ]

    def is_bad(rows: list[Comparison]) -> bool:
        return (
            coverage(rows) < GOOD_SHARE
            or abs(statistics.median(row.error for row in rows)) > GOOD_ERROR
        )

    bad = sorted(
        (one for one in groups if is_bad(one[2])), key=lambda one: coverage(one[2])
    )
    return [
        [
            NAMES[name],
            card,
            *cells(rows)[:4],
            REASONS.get((name, card.partition(",")[0]), "not known"),
        ]
        for name, card, rows in bad
    ]


def updates() -> list[float]:
    """Return the errors of updates of published runs, each by a fit to the other runs
    of its job."""
    errors = []
    for job in published_jobs():
        for name, run in job.runs.items():
            machine = job.fit(other for other in job.runs if other != name).machine
            errors.append(
                simulated_sample(run.sample, machine).update_s / run.sample.update_s - 1
            )
    return errors


def blind_table(titles: dict[str, str], blind: dict[str, list[Comparison]]) -> str:
    """Return the table of some sets, whole and by GPU."""
    rows = []
    for name, title in titles.items():
        groups = by_card(blind[name])
        rows.append(
            [
                f"**{title}**",
                "all" if len(groups) > 1 else next(iter(groups)),
                *cells(blind[name]),
            ]
        )
        if len(groups) > 1:
            rows += [
                [NAMES[name], card, *cells(group)] for card, group in groups.items()
            ]
    return table(["set", "GPU", *HEAD], rows)


def page(
    blind: dict[str, list[Comparison]],
    fitted: dict[str, list[Comparison]],
    errors: list[float],
) -> str:
    """Return docs/accuracy.md: `page.md` beside the sets, with figures and tables."""
    everything, second = (
        [row for name in names for row in blind[name]] for names in (BLIND, SECOND)
    )
    sizes = [abs(error) for error in errors]
    return (
        (FOLDER / "page.md")
        .read_text()
        .format(
            held=f"{100 * coverage(everything):.0f}",
            runs=f"{len(everything):,}",
            error=cells(everything)[3],
            size=cells(everything)[4],
            misses=table(["set", "GPU", *HEAD[:4], "reason"], misses(blind)),
            runs_first=f"{len(everything) - len(second):,}",
            held_second=f"{100 * coverage(second):.0f}",
            runs_second=f"{len(second):,}",
            error_second=cells(second)[3],
            size_second=cells(second)[4],
            sets=len(SECOND),
            sets_held=sum(coverage(blind[name]) >= GOOD_SHARE for name in SECOND),
            first=blind_table(FIRST, blind),
            second=blind_table(SECOND, blind),
            fitted=table(
                ["set", *HEAD],
                [[title, *cells(fitted[name])] for name, title in FITTED.items()],
            ),
            updates=len(errors),
            mean=f"{100 * statistics.mean(sizes):.1f}",
            largest=f"{100 * max(sizes):.1f}",
        )
    )


def draw(blind: dict[str, list[Comparison]], path: Path) -> None:
    """Draw measured over predicted times, of the sets of each time below each other."""
    figure, both = plt.subplots(2, figsize=(9, 9), layout="constrained")
    for axes, names, priors in zip(
        both, (SECOND, FIRST), ("of 2026-11-26", "before 2026-11-26"), strict=True
    ):
        _draw_sets(axes, {name: blind[name] for name in names})
        axes.set_title(
            f"Predicted blind, with the priors {priors}: each run, and the median 80 "
            "% range (grey)",
            fontsize=10,
        )
    figure.savefig(path, dpi=110)


def _draw_sets(axes: Axes, sets: dict[str, list[Comparison]]) -> None:
    labels = []
    for name, all_rows in sets.items():
        for card, rows in by_card(all_rows).items():
            place = len(labels)
            ratios = sorted(row.measured_s / row.prediction.likely_s for row in rows)
            offsets = [
                place - 0.3 + 0.6 * (number + 0.5) / len(ratios)
                for number in range(len(ratios))
            ]
            low = statistics.median(
                row.prediction.low_s / row.prediction.likely_s for row in rows
            )
            high = statistics.median(
                row.prediction.high_s / row.prediction.likely_s for row in rows
            )
            axes.fill_between(
                [place - 0.4, place + 0.4], low, high, color="0.85", linewidth=0
            )
            axes.plot(offsets, ratios, ".", markersize=3, color="tab:blue")
            labels.append(
                f"{NAMES[name]}, {card}: {100 * coverage(rows):.0f} % of {len(rows):,}"
            )
    axes.axhline(1, color="0.4", linewidth=0.8)
    axes.set_xticks(
        range(len(labels)),
        labels,
        fontsize=7,
        rotation=40,
        ha="right",
        rotation_mode="anchor",
    )
    axes.set_yscale("log")
    axes.set_yticks([0.5, 0.7, 1, 1.5, 2], ["0.5", "0.7", "1", "1.5", "2"])
    axes.minorticks_off()
    axes.set_ylabel("measured / predicted")


def record(
    blind: dict[str, list[Comparison]], errors: list[float]
) -> dict[str, object]:
    """Return what ebbtide prints: ranges of iterations by GPU, and held-out updates."""
    everything = [row for rows in blind.values() for row in rows]
    groups: dict[str, list[Comparison]] = {"all": everything}
    for row in everything:
        groups.setdefault(row.card, []).append(row)
    sizes = [abs(error) for error in errors]
    return {
        "date": "2026-11-26",
        "page": "docs/accuracy.md",
        "iterations": {
            name: {"runs": len(rows), "held": round(coverage(rows), 3)}
            for name, rows in groups.items()
        },
        "updates": {
            "runs": len(errors),
            "mean_error": round(statistics.mean(sizes), 4),
            "largest_error": round(max(sizes), 4),
        },
    }


def main() -> None:
    look_up = stored()
    blind = {name: compare(name, look_up) for name in BLIND}
    fitted = {name: compare(name, lambda _, job: predict(job)) for name in FITTED}
    errors = updates()
    (ROOT / "docs" / "accuracy.md").write_text(page(blind, fitted, errors))
    draw(blind, ROOT / "docs" / "pictures" / "accuracy.png")
    values = json.dumps(record(blind, errors))
    (ROOT / "ebbtide" / "machines" / "track_record.json").write_text(values + "\n")


if __name__ == "__main__":
    main()
