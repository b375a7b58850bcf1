"""`ebbtide plan`: choose a machine for a job."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from ebbtide.cli import options
from ebbtide.cli.command import command
from ebbtide.cli.outputs import check_outputs, new_outputs, print_outputs
from ebbtide.cli.printing import echo, echo_line, progress_bar
from ebbtide.machines.machine import MAX_RANKS

if TYPE_CHECKING:
    from ebbtide.features.advise.block_swap import BlockSwap
    from ebbtide.features.advise.machine_plan import MachinePlan
    from ebbtide.interleave.model.workload import Workload
    from ebbtide.machines.machine import Machine
    from ebbtide.profiler.trace import Trace

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
    head_size: Annotated[
        int | None,
        options.valued(
            "N",
            "Width of a head, also where heads times it is not the layer's width.",
            "by --heads",
            rich_help_panel=SHAPE,
            min=1,
        ),
    ] = None,
    kv_heads: Annotated[
        int | None,
        options.valued(
            "N",
            "Heads of keys and values (grouped queries).",
            "as --heads",
            rich_help_panel=SHAPE,
            min=1,
        ),
    ] = None,
    feed_forward: Annotated[
        Literal["gated", "plain"],
        options.valued(
            "KIND",
            "Feed-forward network: gated (three matrices) or plain (two).",
            rich_help_panel=SHAPE,
        ),
    ] = "gated",
    tied: Annotated[
        bool | None,
        typer.Option(
            "--tied/--untied",
            help="Input and output share the embedding (default: by the parameters).",
            rich_help_panel=SHAPE,
        ),
    ] = None,
    experts: Annotated[
        int,
        options.valued(
            "N",
            "Experts of a layer; --params counts all.",
            rich_help_panel=SHAPE,
            min=1,
        ),
    ] = 1,
    active_experts: Annotated[
        int,
        options.valued("N", "Experts that a token uses.", rich_help_panel=SHAPE, min=1),
    ] = 1,
    tensor_parallel: Annotated[
        int,
        options.valued(
            "N", "Ranks that share each layer.", rich_help_panel=SHAPE, min=1
        ),
    ] = 1,
    pipeline_parallel: Annotated[
        int,
        options.valued("N", "Pipeline stages of layers.", rich_help_panel=SHAPE, min=1),
    ] = 1,
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
    traces, machines = _sources(list(names or ()), machine)
    has_shape = (
        layers is not None and hidden is not None and (ranks or 1) == len(machines) == 1
    )
    only_with_params = (
        *(layers, hidden, heads, head_size, kv_heads, tied is not None),
        *(feed_forward != "gated", experts > 1, active_experts > 1),
        *(tensor_parallel > 1, pipeline_parallel > 1),
        *(runtime, attention, checkpointing),
    )
    _check_source(
        (len(traces), workload, params),
        has_layers=has_shape or bool(traces) or save_workload is None,
        has_options=any(only_with_params),
    )

    from ebbtide.features.advise import machine_plan
    from ebbtide.features.advise.job import decoder, sources
    from ebbtide.features.advise.printing import (
        MAX_PLANS,
        print_code,
        print_plans,
        save_plans,
    )
    from ebbtide.features.advise.whole_job import layers_of_job, plan_whole_job
    from ebbtide.interleave.policies import as_policy
    from ebbtide.interleave.replay import inputs
    from ebbtide.profiler.trace import open_trace

    batch = sources.BatchSettings(ranks, micro_batch, sequence, tokens)
    recording = open_trace(Path(traces[0])) if traces else None
    job = sources.job_of_files(recording, workload, batch) or sources.job_of_size(
        decoder.shape_of(
            params or 0,
            sequence or 2048,
            vocabulary,
            layers,
            hidden,
            heads or 0,
            decoder.LayerParts(
                head_size=head_size,
                key_value_heads=kv_heads,
                is_gated=feed_forward == "gated",
                is_tied=tied,
                experts=experts,
                active_experts=active_experts,
                parallel=decoder.Parallelism(tensor_parallel, pipeline_parallel),
            ),
        ),
        batch,
        checkpointing,
        decoder.Implementation(runtime, attention),
    )
    machines += [code] if code is not None and code not in machines else []
    card = inputs.own_preset(recording) if not machines else None
    targets = inputs.find_targets(
        machines if card is None else [card], host, price_per_hour or [], recording
    )
    is_one_trace = recording is not None and len(targets) == 1 and batch.is_empty
    has_layers = has_shape or (is_one_trace and bool(explain or save_workload))
    with new_outputs(plot, None, force) as (picture, _), progress_bar() as update:
        layered = (
            layers_of_job(job, recording, targets[0].machine) if has_layers else None
        )
        if save_workload is not None:
            _write_workload(layered, job.workload.name, save_workload, force)
        request = machine_plan.PlanRequest(
            policies=[as_policy(text) for text in policy or ()],
            ranks_per_host=ranks_per_host,
        )
        # All ranks of a box share the rates of a machine, unless they are stated.
        per_box = workload is not None and not ranks
        placed = machine_plan.place_on(job, targets, request, per_box=per_box)
        if code is not None and not as_json and plot is None:
            placed = [placed[machines.index(code)]]
        by = sort or ("cost" if price_per_hour else "iteration")
        count = None if as_json or explain or plot else MAX_PLANS
        plans = machine_plan.fastest_plans(placed, by, count, as_json, update)
        shared = placed[0].share(targets[0].machine)
        whole = plan_whole_job(layered, job.tokens, shared) if layered else None
        is_named = bool(machines) or len(plans) == 1
        answer = machine_plan.JobPlans(
            job,
            plans,
            by,
            is_named,
            whole,
            tuple(targets[0].machine.limits(shared)),
            _block_swap(plans[0], layered, recording if is_one_trace else None),
        )
        save_plans(answer, picture, plot)
    if as_json:
        echo(json.dumps(answer.as_json()))
    elif code is not None:
        print_code(
            plans[machines.index(code) if len(plans) > 1 else 0], answer.block_swap
        )
    else:
        print_plans(answer, explain)
        if card is not None and recording is not None:
            echo_line(inputs.own_preset_text(card, recording))
    print_outputs(plot, save_workload)
    if save_workload is not None and not as_json:
        source = (machines or [card or targets[0].machine.name])[0]
        _print_replay(save_workload, source, host, shared)


def _block_swap(
    plan: MachinePlan, layered: Workload | None, trace: Trace | None
) -> BlockSwap | None:
    """Return the frozen layers to swap where the job of a trace does not fit."""
    from ebbtide.features.advise.block_swap import plan_block_swap
    from ebbtide.features.advise.whole_job import layers_of_job

    own = plan.placed
    if trace is None or plan.fits or not own.job.facts.has_adapters:
        return None
    layered = layered or layers_of_job(own.job, trace, own.machine)
    return plan_block_swap(layered, own.shared, own.recorded)


def _sources(
    names: list[str], machines: list[str] | None
) -> tuple[list[str], list[str]]:
    """Return the traces and the machines among the arguments."""
    traces = [
        name
        for name in names
        if Path(name).is_dir() or name.rstrip("/").endswith(".ebb")
    ]
    others = [name for name in names if name not in traces]
    if others and machines is None:
        raise typer.BadParameter(
            f"{others[0]} is not a trace (RUN.ebb); name machines with --machine"
        )
    return traces, [*(machines or ()), *others]


def _check_source(
    sources: tuple[int, Path | None, int | None], *, has_layers: bool, has_options: bool
) -> None:
    """Check the number of sources; `has_layers`: whether layers are known, or not asked
    for; `has_options`: whether options are set that need a size."""
    traces, workload, params = sources
    if traces + (workload is not None) + (params is not None) != 1:
        raise typer.BadParameter(
            "name a trace, a --workload file, or a size (--params): one of the three"
        )
    if not has_layers:
        raise typer.BadParameter(
            "--save-workload needs --params, --layers, --hidden and one --machine, for "
            "one rank, or a dry run"
        )
    if params is None and has_options:
        raise typer.BadParameter(
            "options of the model (--layers, --heads, --runtime, --checkpointing and "
            "others) need --params"
        )


def _write_workload(
    layered: Workload | None, name: str, file: Path, force: bool
) -> None:
    from ebbtide.errors import WorkloadError
    from ebbtide.output_files import new_output

    if layered is None:
        raise WorkloadError(
            f"{name}: layers are known of dry runs of one rank, on their own machine"
        )
    with new_output(file, force, Path.is_file, "a file") as new_file:
        new_file.write_text(json.dumps(layered.as_json(), indent=1) + "\n")


def _print_replay(file: Path, source: str, host: str | None, rank: Machine) -> None:
    """Print the command that replays a workload file; `rank`: the rates of a rank."""
    source += f" --host {host}" if host else ""
    per_host = rank.box.ranks if rank.box is not None else 1
    echo_line(
        f"next: ebbtide replay --workload {file} --machine {source} "
        f"--ranks-per-host {per_host}"
    )
