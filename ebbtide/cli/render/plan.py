"""Prints plans: a table of machines, then the best one with the lines to paste."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ebbtide.cli.printing import echo
from ebbtide.cli.render.recommendation import json_block
from ebbtide.cli.render.tables import print_table
from ebbtide.units import ms_text

if TYPE_CHECKING:
    from ebbtide.interleave.provisioning.machine_plan import MachinePlan
    from ebbtide.interleave.provisioning.training_job import TrainingJob

_CHANGES = {
    "policy": "offload",
    "activation_checkpointing": "checkpointing",
    "micro_batch": "micro-batch {}",
    "ranks": "{} ranks",
}


def print_plans(job: TrainingJob, plans: list[MachinePlan], sort: str) -> None:
    """Print a table of plans and the details of the first one.

    Args:
        job: The job.
        plans: A plan per machine.
        sort: `iteration` or `cost`; machines without the figure come last.
    """
    settings = job.settings
    parts = [f"{job.workload.params / 1e9:.3g} G parameters per rank", _plural(settings.ranks, "rank")]
    if settings.micro_batch is not None:
        parts.append(f"micro-batch {settings.micro_batch}")
    if job.tokens is not None:
        parts.append(f"{job.tokens:,.0f} tokens an iteration")
    echo(f"{job.workload.name}: {', '.join(parts)}")
    for note in job.notes:
        echo(f"note: {note}")
    ordered = sorted(plans, key=lambda plan: _sort_key(plan, sort))
    prices = any(plan.cost_per_billion_tokens is not None for plan in plans)
    columns = ["machine", "fits", "policy", "device, GB", "host, GB", "iteration, s", "tokens/s", "limited by"]
    print_table(
        "Machines for this job (memory of a rank; ranges hold with a probability of 80 %)",
        [*columns, *(["cost, 1e9 tokens"] if prices else [])],
        [[*_row(plan), *([_range(plan.cost_low, plan.cost_high)] if prices else [])] for plan in ordered],
    )
    best = ordered[0]
    if best.policy is None:
        echo(f"{best.machine}: {'; '.join(best.notes)}")
    else:
        _print_details(best)


def change_text(plan: MachinePlan) -> str:
    """Return whether a plan's job fits, or the change that makes it fit."""
    if plan.change is not None:
        return "with " + ", ".join(_CHANGES[key].format(value) for key, value in plan.change.items())
    return "yes" if plan.fits else "no"


def _sort_key(plan: MachinePlan, sort: str) -> tuple[bool, float]:
    value = plan.cost_per_billion_tokens if sort == "cost" else plan.iteration_ms
    return value is None, value if value is not None else 0.0


def _row(plan: MachinePlan) -> list[str]:
    if plan.policy is None:
        return [plan.machine, change_text(plan), *["-"] * 6]
    return [
        plan.machine,
        change_text(plan),
        plan.policy,
        _of(plan.device_bytes, plan.device_capacity_bytes),
        _of(plan.host_bytes, plan.host_capacity_bytes),
        _range(plan.iteration_low_ms, plan.iteration_high_ms, 1e3),
        _range(plan.tokens_per_s_low, plan.tokens_per_s_high),
        str(plan.limited_by),
    ]


def _print_details(plan: MachinePlan) -> None:
    settings, lines = plan.settings, plan.lines
    assert settings is not None
    assert lines is not None
    place = f"{_plural(settings.ranks, 'rank')} on {_plural(plan.hosts or 1, 'host')}"
    title = f"{plan.machine}: {plan.policy}, {place}"
    echo(f"{title}\n{'-' * len(title)}")
    echo(f"fits: {change_text(plan)}")
    for note in plan.notes:
        echo(note)
    echo(f"accuracy: {plan.accuracy}")
    if len(plan.policies) > 1:
        rows = [
            [
                time.policy,
                ms_text(time.iteration_ms),
                f"{ms_text(time.iteration_low_ms)} to {ms_text(time.iteration_high_ms)}",
            ]
            for time in plan.policies
        ]
        print_table("Other policies that fit", ["policy", "iteration", "range"], rows)
    echo(f"With DeepSpeed, in its configuration, whose other keys stay:\n\n{json_block(lines.deepspeed_config)}")
    if lines.deepspeed_code is not None:
        echo(f"\nand in the script, before deepspeed.initialize:\n\n{lines.deepspeed_code}")
    blocks = [block for block in (lines.checkpointing, lines.fsdp2, lines.optimizer) if block is not None]
    echo("\nWithout DeepSpeed, in the script:\n\n" + "\n\n".join(blocks))


def _range(low: float | None, high: float | None, scale: float = 1.0) -> str:
    """Return a range with three digits at its high end."""
    if low is None or high is None:
        return "-"
    high /= scale
    digits = 0 if high >= 100 else 1 if high >= 10 else 2
    return f"{low / scale:,.{digits}f} to {high:,.{digits}f}"


def _of(size: float | None, capacity: float | None) -> str:
    texts = ["-" if value is None else f"{value / 1e9:,.0f}" for value in (size, capacity)]
    return " of ".join(texts)


def _plural(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
