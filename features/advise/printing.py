"""Prints advice: a recommendation, the plans of a job, and what to paste for them."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ebbtide.cli.outputs import save_picture
from ebbtide.cli.printing import echo, echo_line, print_view
from ebbtide.errors import UserError
from ebbtide.units import counted, ms_text

if TYPE_CHECKING:
    from pathlib import Path

    from ebbtide.analysis.metrics.advice import IterationGain
    from ebbtide.features.advise.block_swap import BlockSwap
    from ebbtide.features.advise.lines.setups import PolicySetup
    from ebbtide.features.advise.lines.systems import SystemSetup
    from ebbtide.features.advise.machine_plan import JobPlans, MachinePlan
    from ebbtide.features.advise.present import Present
    from ebbtide.features.advise.recommendation import Framework, Recommendation


# Objects within the object have one line up to this length.
_MAX_INNER_WIDTH = 60


# Most plans that are printed without being asked for.
MAX_PLANS = 10
# Frameworks that code is printed for, as people say it.
_FRAMEWORKS = {"deepspeed": "DeepSpeed", "script": "a plain script"}
# Keys of the configuration with the argument of InterleavedAdamW for the same.
_PLACEHOLDERS = {
    "gradient_clipping": "gradient_clipping (max_grad_norm)",
    "optimizer": "optimizer (lr)",
}


def print_recommendation(
    recommended: Recommendation, framework: Framework | None = None
) -> None:
    """Print the recommended policy, its iteration and that of the job as it is, and
    what to paste for it, by default for the framework of the job."""
    framework, baseline = framework or recommended.framework, recommended.baseline
    if recommended.is_as_today:
        as_it_is = _as_it_is(recommended.present, baseline)
        echo_line(f"Nothing to change: {as_it_is}", fg="green", bold=True)
        echo_line("all policies: --all")
        return
    headline = f"Use {recommended.policy.replace(',', ', ')}"
    if recommended.keeps_on_device:
        headline = "Do not offload"
    gain = _gain(recommended.gain, baseline)
    echo_line(f"{headline}: {gain}", fg="green", bold=True)
    split = recommended.split_advice
    if framework == "deepspeed" and split is not None and not recommended.is_split:
        ratio = split.settings["offload_optimizer"]["ratio"]
        # The line before has the recorded iteration.
        split_gain = _gain(replace(split.gain, recorded_ms=None), baseline)
        echo_line(f"Plain DeepSpeed: offload_optimizer.ratio {ratio:g}: {split_gain}")
    for warning in recommended.warnings:
        echo_line(f"But {warning}", fg="yellow")
    block = recommended.lines[framework]
    echo(f"{block}\n")
    _print_fill_in(block)
    other = "deepspeed" if framework == "script" else "script"
    changes = " and changes of the job" if recommended.alternatives else ""
    echo_line(f"all policies{changes}: --all; {_FRAMEWORKS[other]}: --for {other}")


def _print_fill_in(lines: str) -> None:
    """Print the note on marks if some lines have any."""
    from ebbtide.features.advise.lines.fill_in import NOTE, is_marked

    if is_marked(lines):
        echo_line(NOTE, fg="yellow")


def _as_it_is(present: Present, baseline: str | None) -> str:
    """Return the iteration of a job as it is, and what it is."""
    length_ms = present.recorded_ms or present.iteration_ms
    if length_ms is None:
        return "no setting gains anything"
    time = f"{length_ms:,.0f} ms"
    if present.recorded_ms is None:
        time += " simulated"
    if present.policy is None:
        return f"{time} as recorded"
    if present.policy == "gpu-only":
        return f"{time} with all state on the GPU"
    return f"{time} with {baseline or present.policy}"


def _gain(times: IterationGain, baseline: str | None) -> str:
    """Return the iterations before, where it is known, and after."""
    if times.present_ms is None:
        return f"{times.iteration_ms:,.0f} ms (simulated)"
    over = "" if baseline is None else f" over {baseline}"
    source = beside = ""
    if times.baseline is None:
        source = " recorded"
    elif times.recorded_ms is not None:
        beside = f"; {times.recorded_ms:,.0f} recorded"
    factor = times.present_ms / times.iteration_ms
    return (
        f"{times.present_ms:,.0f}{source} -> {times.iteration_ms:,.0f} ms "
        f"({factor:.2f}x{over}, simulated{beside})"
    )


def print_setups(advice: Recommendation) -> None:
    """Print the recommended policy, and the lines to paste for each policy."""
    echo_line(f"recommended: {advice.line}")
    for alternative in advice.alternatives:
        echo_line(f"instead of offloading: {alternative}")
    faster = [system for system in advice.systems if system.is_faster]
    if faster:
        texts = (
            f"{system.policy}{'' if system.exact else ' (not exact)'}"
            for system in faster
        )
        echo_line(
            f"{_advantage(faster[0], advice)} in other systems: {', '.join(texts)}"
        )
    for policy, reason in advice.choice.left_out.items():
        echo_line(f"not among the blocks below: {policy} ({reason})")
    if advice.placeholders:
        names = ", ".join(_PLACEHOLDERS.get(name, name) for name in advice.placeholders)
        echo_line(f"fill in the values of your job, which are not known: {names}")
    for number, setup in enumerate(advice.setups):
        _print_setup(setup, is_recommended=not number)
    for system in advice.systems:
        _print_system(system, advice)


def json_block(value: Any, indent: int = 0) -> str:
    """Return a JSON value as text to copy: an object has a line per key, unless it fits
    into one line."""
    line = json.dumps(value)
    if not isinstance(value, dict) or (indent and len(line) <= _MAX_INNER_WIDTH):
        return line
    inner = " " * (indent + 2)
    entries = (
        f"{inner}{json.dumps(key)}: {json_block(entry, indent + 2)}"
        for key, entry in value.items()
    )
    return "{\n" + ",\n".join(entries) + "\n" + " " * indent + "}"


def _print_setup(setup: PolicySetup, is_recommended: bool) -> None:
    _print_title(setup, " (recommended)" if is_recommended else "")
    if setup.code is not None or not setup.uses_storage:
        echo(
            "In the configuration of DeepSpeed, whose other keys "
            f"stay:\n\n{json_block(setup.deepspeed_config)}"
        )
    if setup.code is not None:
        echo(f"\nand in the script, before deepspeed.initialize:\n\n{setup.code}")
    if setup.optimizer_code is not None:
        echo(
            "\nIn a script without DeepSpeed, instead of "
            f"torch.optim.AdamW:\n\n{setup.optimizer_code}"
        )
    if setup.policy == "gpu-only":
        echo("\nIn a script without DeepSpeed: keep torch.optim.AdamW.")


def _print_title(setup: PolicySetup | SystemSetup, remark: str) -> None:
    title = f"{setup.policy}: {ms_text(setup.iteration_ms)} an iteration{remark}"
    echo(f"\n{title}\n{'-' * len(title)}")


def _advantage(system: SystemSetup, advice: Recommendation) -> str:
    """Return in a word what a system has over the recommended policy: it is faster, or
    fits where that does not."""
    return "faster" if system.iteration_ms < advice.setups[0].iteration_ms else "fits"


def _print_system(system: SystemSetup, advice: Recommendation) -> None:
    kind = _advantage(system, advice) if system.is_faster else "the best fraction"
    _print_title(system, f" ({kind}{'' if system.exact else ', not exact'})")
    if system.note is not None:
        echo_line(f"Not exact: {system.note}.")
    echo(f"{system.place}:\n\n{system.lines}")


def print_plans(answer: JobPlans, explain: bool) -> None:
    """Print the answer and the table of plans; `explain`: of all, also what limits
    each, and the other policies."""
    from ebbtide.features.advise.tables import plan_view, policies_table

    ordered = answer.ordered()
    print_view(plan_view(answer, None if explain else MAX_PLANS))
    for plan in ordered if explain else ():
        notes = [f"  {note}" for note in (*plan.notes, f"accuracy: {plan.accuracy}")]
        print_view(iter(["", _title(plan), *notes, policies_table(plan)]))
    best = ordered[0]
    if best.policy is None:
        echo_line("next: " + "; ".join(best.notes))
    elif not explain:
        echo_line(
            f"next: --code {best.machine} (lines to paste), --explain (why, and the "
            "other policies)"
        )


def save_plans(answer: JobPlans, picture: Path | None, plot: Path | None) -> None:
    """Draw plans into the file `picture`, which becomes the file `plot`."""
    if picture is not None:
        from ebbtide.features.advise.pictures import draw_plans

        save_picture(draw_plans(answer.job, answer.plans), picture, plot)


def print_code(plan: MachinePlan, swap: BlockSwap | None = None) -> None:
    """Print the lines to paste for a plan, and for frozen blocks to swap. Raises
    UserError if there is none."""
    from ebbtide.features.advise.levers.keys import TITLES

    if swap is not None and swap.fits:
        echo(f"Of frozen weights, {swap.text}:\n")
        for tool, line in swap.lines:
            echo(f"{tool}:\n  {line}")
        echo()
    settings, lines = plan.settings, plan.lines
    if settings is None or lines is None:
        raise UserError(f"no policy fits on {plan.machine}: {'; '.join(plan.notes)}")
    echo(f"{_title(plan)}\n")
    cheapest = plan.cheapest
    if cheapest and {*cheapest.text.split(" + ")} != {*plan.changes_text()}:
        framework = TITLES[cheapest.action["kind"]]
        echo(f"Cheapest, in the settings of {framework} ({cheapest.text}):\n")
        echo(f"{json_block(cheapest.action['settings'])}\n")
    if plan.fits and plan.policy == "gpu-only" and settings.ranks == 1:
        echo("It fits as it is on one GPU: nothing has to be changed.")
        return
    echo(
        "With DeepSpeed, in its configuration, whose other keys "
        f"stay:\n\n{json_block(lines.deepspeed_config)}"
    )
    before = [*filter(None, (lines.checkpointing, lines.deepspeed_code))]
    blocks = [*filter(None, (lines.checkpointing, lines.fsdp2, lines.optimizer))]
    if before:
        echo(
            "\n\n".join(["\nand in the script, before deepspeed.initialize:", *before])
        )
    echo("\n\n".join(["\nWithout DeepSpeed, in the script:", *blocks]) + "\n")
    _print_fill_in("\n".join([*before, *blocks, json.dumps(lines.deepspeed_config)]))


def _title(plan: MachinePlan) -> str:
    from ebbtide.features.advise.tables import fits_text

    if plan.policy is None or plan.settings is None:
        return f"{plan.machine}: {fits_text(plan)}"
    place = (
        f"{counted(plan.settings.ranks, 'rank')} on {counted(plan.hosts or 1, 'host')}"
    )
    return f"{plan.machine}: {plan.policy}, {place}; change: {fits_text(plan)}"
