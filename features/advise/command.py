"""`ebbtide plan`: choose a machine for a job."""

import json
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from ebbtide.cli import options
from ebbtide.cli.command import command
from ebbtide.cli.outputs import check_outputs, new_outputs, print_outputs, save_picture
from ebbtide.cli.printing import echo, echo_line, progress_bar
from ebbtide.machines.machine import MAX_RANKS

# The heading of options for the shape of a model.
SHAPE = "Model (only with --params)"


@command(
    "Start",
    8,
    examples=(
        "plan run.ebb --machine rtx4090 a100-80gb-sxm",
        "plan --params 13B --ranks 4 --micro-batch 2 --machine h100-80gb",
    ),
)
def plan(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RUN.ebb]",
            help="Trace of the job, recorded or predicted by `ebbtide dry-run`.",
        ),
    ] = None,
    workload: Annotated[Path | None, options.WORKLOAD] = None,
    params: options.Params = None,
    machine: Annotated[
        list[str] | None,
        options.machine_option(
            "the recorded one, else that of the trace's card, else all presets"
        ),
    ] = None,
    host: options.Host = None,
    price_per_hour: Annotated[
        list[float] | None,
        options.valued(
            "P",
            "Price of a host per hour: one for all machines, or one for each.",
            min=0,
        ),
    ] = None,
    ranks: Annotated[
        int | None,
        options.valued(
            "N",
            "Ranks that share parameters and optimizer state.",
            "those of the trace, else 1",
            min=1,
            max=MAX_RANKS,
        ),
    ] = None,
    ranks_per_host: options.RanksPerHost = None,
    micro_batch: Annotated[
        int | None,
        options.valued(
            "N",
            "Samples of a micro-step on a rank.",
            "that of the trace, else 1",
            min=1,
        ),
    ] = None,
    sequence: Annotated[
        int | None,
        options.valued(
            "N", "Tokens of a sample.", "2048 with --params, else not known", min=1
        ),
    ] = None,
    tokens: Annotated[
        int | None,
        options.valued(
            "N",
            "Tokens of an iteration of all ranks, e.g. 5e5.",
            "ranks x micro-batch x sequence x micro-steps",
            parser=options.count,
        ),
    ] = None,
    layers: Annotated[
        int | None,
        options.valued(
            "N", "Layers.", "by the parameters", rich_help_panel=SHAPE, min=1
        ),
    ] = None,
    hidden: Annotated[
        int | None,
        options.valued(
            "N", "Width of a layer.", "by the parameters", rich_help_panel=SHAPE, min=1
        ),
    ] = None,
    vocabulary: Annotated[
        int,
        options.valued("N", "Entries of the vocabulary.", rich_help_panel=SHAPE, min=1),
    ] = 50_304,
    heads: Annotated[
        int | None,
        options.valued(
            "N",
            "Heads of attention.",
            "of 128 or 64 hidden units",
            rich_help_panel=SHAPE,
            min=1,
        ),
    ] = None,
    runtime: Annotated[
        Literal["fused", "eager", "deepspeed"] | None,
        options.valued(
            "KIND",
            "What runs the job: fused, eager or deepspeed.",
            "fused or eager",
            rich_help_panel=SHAPE,
        ),
    ] = None,
    attention: Annotated[
        Literal["flash2", "flash3", "cudnn", "math"] | None,
        options.valued(
            "KIND",
            "Attention: flash2, flash3, cudnn or math.",
            "any fused one",
            rich_help_panel=SHAPE,
        ),
    ] = None,
    checkpointing: Annotated[
        bool, typer.Option("--checkpointing", help="The job checkpoints activations.")
    ] = False,
    policy: Annotated[list[str] | None, options.policy_option("all")] = None,
    sort: Annotated[
        Literal["iteration", "cost"] | None,
        options.valued(
            "KEY",
            "Order of the table: iteration or cost.",
            "cost with prices, else iteration",
            rich_help_panel=options.RARE,
        ),
    ] = None,
    plot: options.Plot = None,
    save_workload: Annotated[
        Path | None,
        options.valued(
            "FILE.json",
            "Also write the workload file with layers (of a dry run, or with --layers "
            "and --hidden).",
            rich_help_panel=options.RARE,
        ),
    ] = None,
    code: Annotated[
        str | None, options.valued("M", "Print the lines to paste for this machine.")
    ] = None,
    explain: Annotated[
        bool,
        typer.Option(
            "--explain",
            "-v",
            "--verbose",
            help="Also print what limits each plan, and the other policies.",
        ),
    ] = False,
    force: options.Force = False,
    as_json: options.Json = False,
) -> None:
    """Choose a machine for a job: does it fit, which change makes it fit, which policy,
    how fast, at which cost?

    Figures are per rank, times are ranges that hold with a probability of 80 %."""
    check_outputs([plot])
    traces = [name for name in names or () if _is_trace(name)]
    machines = [
        *(machine or ()),
        *(name for name in names or () if not _is_trace(name)),
    ]
    _check_sources(traces, workload, params, machine is not None, list(names or ()))
    has_shape = (
        layers is not None and hidden is not None and (ranks or 1) == len(machines) == 1
    )
    if save_workload is not None and not (has_shape or traces):
        raise typer.BadParameter(
            "--save-workload needs --params, --layers, --hidden and one --machine, for "
            "one rank, or a dry run"
        )
    if params is None and (
        layers or hidden or heads or runtime or attention or checkpointing
    ):
        raise typer.BadParameter(
            "--layers, --hidden, --heads, --runtime, --attention, --checkpointing need "
            "--params"
        )

    from ebbtide.errors import WorkloadError
    from ebbtide.features.advise.changes import share_host
    from ebbtide.features.advise.job.decoder import Implementation, shape_of
    from ebbtide.features.advise.job.sources import (
        BatchSettings,
        job_of_size,
        job_of_trace,
        job_of_workload,
    )
    from ebbtide.features.advise.levers.search import smallest_machine
    from ebbtide.features.advise.machine_plan import (
        JobPlans,
        MachinePlan,
        PlanRequest,
        fastest_plans,
        place_job,
    )
    from ebbtide.features.advise.printing import MAX_PLANS, print_code, print_plans
    from ebbtide.features.advise.whole_job import layers_of_job, plan_whole_job
    from ebbtide.interleave.model.workload import load_workload
    from ebbtide.interleave.policies import as_policy
    from ebbtide.interleave.replay.inputs import (
        find_targets,
        own_preset,
        own_preset_text,
    )
    from ebbtide.machines.catalog import preset, presets
    from ebbtide.output_files import new_output
    from ebbtide.profiler.trace import open_trace

    batch = BatchSettings(ranks, micro_batch, sequence, tokens)
    recording = open_trace(Path(traces[0])) if traces else None
    if recording is not None:
        job = job_of_trace(recording, batch)
    elif workload is not None:
        job = job_of_workload(load_workload(workload), batch)
    else:
        assert params is not None
        shape = shape_of(
            params, sequence or 2048, vocabulary, layers, hidden, heads or 0
        )
        job = job_of_size(
            shape, batch, checkpointing, Implementation(runtime, attention)
        )
    if code is not None and code not in machines:
        machines.append(code)
    card = own_preset(recording) if not machines else None
    targets = find_targets(
        [card] if card is not None else machines, host, price_per_hour or [], recording
    )
    policies = [as_policy(text) for text in policy or ()]
    with new_outputs(plot, None, force) as (picture, _), progress_bar() as update:
        layered = None
        if has_shape or (
            recording is not None
            and (explain or save_workload)
            and len(targets) == 1
            and batch.is_empty
        ):
            layered = layers_of_job(job, recording, targets[0].machine)
        if save_workload is not None:
            if layered is None:
                raise WorkloadError(
                    f"{job.workload.name}: layers are known of dry runs of one rank, "
                    "on their own machine"
                )
            with new_output(save_workload, force, Path.is_file, "a file") as file:
                file.write_text(json.dumps(layered.as_json(), indent=1) + "\n")
        placed = []
        for target in targets:
            # The rates of a workload's machine are those of its own ranks, unless these
            # are stated.
            own = (
                target.machine.box.ranks
                if workload and not ranks and target.machine.box is not None
                else None
            )
            request = PlanRequest(
                target.source, policies, ranks_per_host or own, target.price_per_hour
            )
            placed.append(place_job(job, target.machine, request))
        by = sort or ("cost" if price_per_hour else "iteration")
        if code is not None and not as_json and plot is None:
            placed = [placed[machines.index(code)]]
        count = len(placed) if as_json or explain or plot else MAX_PLANS
        planned: dict[int, MachinePlan] = {}
        entries: dict[int, dict[str, Any]] = {}
        for number, one in fastest_plans(placed, by, count):
            planned[number] = one
            if as_json:
                # At once, while the searches for the lines to paste are remembered.
                entries[number] = one.as_json()
            update(
                f"{len(planned)} of {len(placed)} machines", len(planned), len(placed)
            )
        plans = [planned[number] for number in sorted(planned)]
        first = targets[0].machine
        shared = share_host(first, job.settings.ranks, placed[0].request.ranks_per_host)
        whole = [] if layered is None else [plan_whole_job(layered, job.tokens, shared)]
        if picture is not None:
            from ebbtide.features.advise.pictures import draw_plans

            save_picture(draw_plans(job, plans), picture, plot)
    smallest = smallest_machine(job, map(preset, presets()))
    if as_json:
        name = smallest.name if smallest is not None else None
        result = {
            "job": job.as_json(),
            "plans": [entries[number] for number in sorted(entries)],
            "smallest_machine": name,
        }
        echo(json.dumps(result | {"whole_job": [one.as_json() for one in whole]}))
    elif code is not None:
        print_code(plans[machines.index(code) if len(plans) > 1 else 0])
    else:
        remarks = [
            *(one.text for one in whole),
            *(f"note: {limit}" for limit in first.limits(shared)),
        ]
        print_plans(
            JobPlans(
                job, plans, by, bool(machines) or len(plans) == 1, smallest, remarks
            ),
            explain,
        )
        if card is not None and recording is not None:
            echo_line(own_preset_text(card, recording))
    print_outputs(plot, save_workload)
    if save_workload is not None and not as_json:
        source = " ".join(
            [(machines or [card or first.name])[0], *(["--host", host] if host else [])]
        )
        per_host = shared.box.ranks if shared.box is not None else 1
        echo_line(
            f"next: ebbtide replay --workload {save_workload} --machine {source} "
            f"--ranks-per-host {per_host}"
        )


def _is_trace(name: str) -> bool:
    return Path(name).is_dir() or name.rstrip("/").endswith(".ebb")


def _check_sources(
    traces: list[str],
    workload: Path | None,
    params: int | None,
    has_machines: bool,
    names: list[str],
) -> None:
    if len(traces) < len(names) and not has_machines:
        other = next(name for name in names if name not in traces)
        raise typer.BadParameter(
            f"{other} is not a trace (RUN.ebb); name machines with --machine"
        )
    if len(traces) + (workload is not None) + (params is not None) != 1:
        raise typer.BadParameter(
            "name a trace, a --workload file, or a size (--params): one of the three"
        )
