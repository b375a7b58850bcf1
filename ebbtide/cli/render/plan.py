"""Prints plans: a table of machines, and the lines to paste for one of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ebbtide.cli.printing import echo, echo_line, print_view
from ebbtide.cli.render.recommendation import json_block
from ebbtide.errors import UserError

if TYPE_CHECKING:
    from ebbtide.interleave.advise.job.training_job import TrainingJob
    from ebbtide.interleave.advise.machine_plan import MachinePlan
    from ebbtide.machines.machine import Machine


def print_plans(
    job: TrainingJob, plans: list[MachinePlan], sort: str, explain: bool, is_named: bool, smallest: Machine | None
) -> None:
    """Print a table of plans, sorted by `iteration` or `cost`; machines without the figure come last.

    The first machine is answered for if machines were named (`is_named`). `smallest` as for `plan_view`. With `explain`
    also what limits each plan, and the other policies."""
    from ebbtide.interleave.advise.tables import plan_view, policies_table

    def sort_key(plan: MachinePlan) -> tuple[bool, float]:
        value = plan.cost_per_billion_tokens if sort == "cost" else plan.iteration_ms
        return value is None, value or 0.0

    ordered = sorted(plans, key=sort_key)
    print_view(plan_view(job, ordered, plans[0] if is_named else None, smallest))
    for plan in ordered if explain else ():
        notes = (*plan.notes, f"accuracy: {plan.accuracy}")
        print_view(iter(["", _title(plan), *(f"  {note}" for note in notes), policies_table(plan)]))
    best = ordered[0]
    if best.policy is None:
        echo_line("next: " + "; ".join(best.notes))
    elif not explain:
        echo_line(f"next: --code {best.machine} (lines to paste), --explain (why, and the other policies)")


def print_code(plan: MachinePlan) -> None:
    """Print the lines to paste for a plan. Raises UserError if there is none."""
    from ebbtide.interleave.advise.levers.keys import TITLES

    settings, lines = plan.settings, plan.lines
    if settings is None or lines is None:
        raise UserError(f"no policy fits on {plan.machine}: {'; '.join(plan.notes)}")
    echo(f"{_title(plan)}\n")
    if plan.cheapest is not None:
        framework, names = plan.cheapest.action["kind"], " + ".join(plan.cheapest.levers)
        echo(f"Cheapest, in the settings of {TITLES[framework]} ({names}):\n")
        echo(f"{json_block(plan.cheapest.action['settings'])}\n")
    if plan.fits and plan.policy == "gpu-only" and settings.ranks == 1:
        echo("It fits as it is on one GPU: nothing has to be changed.")
        return
    echo(f"With DeepSpeed, in its configuration, whose other keys stay:\n\n{json_block(lines.deepspeed_config)}")
    if lines.deepspeed_code is not None:
        echo(f"\nand in the script, before deepspeed.initialize:\n\n{lines.deepspeed_code}")
    blocks = [block for block in (lines.checkpointing, lines.fsdp2, lines.optimizer) if block is not None]
    echo("\nWithout DeepSpeed, in the script:\n\n" + "\n\n".join(blocks))


def _title(plan: MachinePlan) -> str:
    from ebbtide.interleave.advise.tables import fits_text, plural

    if plan.policy is None or plan.settings is None:
        return f"{plan.machine}: {fits_text(plan)}"
    place = f"{plural(plan.settings.ranks, 'rank')} on {plural(plan.hosts or 1, 'host')}"
    return f"{plan.machine}: {plan.policy}, {place}; change: {fits_text(plan)}"
