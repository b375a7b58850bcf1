"""`ebbtide run`: run a training job with its optimizer state where a policy puts it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ebbtide.cli import options
from ebbtide.cli.command import command
from ebbtide.cli.commands.profile import trace_name


@command(
    "Run",
    0,
    runs_a_job=True,
    examples=(
        "run -- python train.py",
        "run --policy twin-flow:0.3 --steps 20 -- torchrun --nproc-per-node 2 train.py",
    ),
)
def run(
    command: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="-- CMD...",
            help="Command that starts the job: python, torchrun, accelerate, ...",
        ),
    ] = None,
    policy: Annotated[
        str,
        options.valued(
            "P", "Offload policy, e.g. twin-flow:0.4; static: the best split that fits."
        ),
    ] = "adaptive",
    steps: Annotated[int | None, options.STEPS] = None,
    memory_budget: Annotated[
        str | None,
        options.memory_budget_option(
            "what the job leaves free; without a GPU, half of the state"
        ),
    ] = None,
    machine: Annotated[
        str | None, options.machine_option("this machine, which is measured")
    ] = None,
    emulate_link: Annotated[str | None, options.EMULATE_LINK] = None,
    weights: Annotated[
        str,
        options.valued(
            "CHOICE",
            "Weights of layers: resident, streamed, streamed:K or auto.",
            rich_help_panel=options.RARE,
        ),
    ] = "resident",
    activations: Annotated[
        str,
        options.valued(
            "CHOICE",
            "Activations of layers: keep, recompute, offload or auto.",
            rich_help_panel=options.RARE,
        ),
    ] = "keep",
    output: Annotated[
        str | None, options.output_option("RUN.ebb", "SCRIPT-TIME.ebb")
    ] = None,
    force: options.Force = False,
) -> int:
    """Run a training job with its optimizer state where a policy puts it.

    The job needs no change: torch's Adam, AdamW, SGD and Muon update by ebbtide's
    engine. It begins under zero-offload; after three iterations the policy is planned
    with the memory that they left free. Where the whole state fits, torch goes on. The
    job is recorded meanwhile."""
    from ebbtide.features.run.launch import run_job
    from ebbtide.features.run.options import LINK_BYTES_PER_S, RunOptions
    from ebbtide.features.run.results import summary_lines
    from ebbtide.interleave.policies import as_policy
    from ebbtide.terminal_lines import print_note

    if not command:
        raise typer.BadParameter(
            "name the command that starts the job after --", param_hint="CMD"
        )
    if policy != "static":
        as_policy(policy).refuse_simulation_only()
    # Raises PolicyError for choices that there are not.
    as_policy(f"adaptive,weights={weights},activations={activations}")
    if steps == 0:
        raise typer.BadParameter("--steps must be at least 1")
    run_options = RunOptions(
        folder="",
        policy=policy,
        steps=steps,
        memory_budget=options.optional_size(memory_budget),
        machine=machine,
        link_bytes_per_s=options.optional_size(emulate_link) or LINK_BYTES_PER_S,
        weights=weights,
        activations=activations,
    )
    path = Path(output) if output else trace_name(command)
    code, logs = run_job(list(command), Path(path), run_options, force)
    for line in [] if logs is None else summary_lines(logs):
        print_note(line)
    if logs is not None and code:
        print_note(f"the job ended with exit code {code}")
    return code
