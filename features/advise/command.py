"""`ebbtide plan`: choose a machine for a job."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ebbtide import seams
from ebbtide.cli import model_options, options
from ebbtide.cli.command import command
from ebbtide.cli.outputs import check_outputs, new_outputs, print_outputs
from ebbtide.cli.printing import echo, echo_line, progress_bar
from ebbtide.machines.catalog import find_machine
from ebbtide.machines.machine import MAX_RANKS
from ebbtide.model_job import ModelJob

if TYPE_CHECKING:
    from ebbtide.features.advise.block_swap import BlockSwap
    from ebbtide.features.advise.job.decoder import TransformerShape
    from ebbtide.features.advise.machine_plan import MachinePlan
    from ebbtide.interleave.model.workload import Workload
    from ebbtide.machines.machine import Machine
    from ebbtide.profiler.trace import Trace

# The heading of options for the shape of a model.
SHAPE = "Model (only with --params)"
# Options of a model of a size.
_OF_A_SIZE = {
    *("layers", "hidden", "vocabulary", "heads", "head_size", "kv_heads", "tied"),
    *("feed_forward", "experts", "active_experts", "runtime", "attention"),
    *("tensor_parallel", "pipeline_parallel", "checkpointing"),
}
# Options of the levers of memory alone, and those that they share with others.
_OF_LEVERS = {*model_options.NAMES, "frontier", "capacity"}
_WITH_LEVERS = {
    *_OF_LEVERS,
    *("model", "params", "machine", "names", "host", "ranks", "micro_batch"),
    *("sequence", "tokens", "layers", "hidden", "vocabulary", "heads", "head_size"),
    *("kv_heads", "tied", "checkpointing", "plot", "force", "as_json"),
}


@command(
    "Start",
    8,
    examples=(
        "plan run.ebb --machine rtx4090 a100-80gb-sxm",
        "plan --model Qwen/Qwen3-8B --machine rtx4090 --frontier",
    ),
)
def plan(
    context: typer.Context,
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
    model: model_options.ModelName = None,
    frontier: Annotated[
        bool,
        typer.Option(
            "--frontier",
            help="List combinations of levers of memory, too, by memory and time "
            "(with --model or --params).",
            rich_help_panel=model_options.PANEL,
        ),
    ] = False,
    method: model_options.MethodOption = "full",
    optimizer: model_options.OptimizerOption = "adamw",
    precision: model_options.PrecisionOption = "bf16",
    loss: model_options.LossOption = "plain",
    strategy: model_options.StrategyOption = None,
    offload_activations: model_options.OffloadActivations = False,
    offload_optimizer: model_options.OffloadOptimizer = False,
    capacity: Annotated[
        str | None,
        options.valued(
            "SIZE",
            "Memory of the GPU in bytes, e.g. 80GB.",
            "the machine's",
            rich_help_panel=model_options.PANEL,
        ),
    ] = None,
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
    if model is not None or frontier:
        _print_levers(context, machines)
        return
    has_shape = (
        layers is not None and hidden is not None and (ranks or 1) == len(machines) == 1
    )
    _check_source(
        context,
        (len(traces), workload, params),
        has_layers=has_shape or bool(traces) or save_workload is None,
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
        _stated_shape(context.params),
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
        _print_replay(
            save_workload, machines or [card or targets[0].machine.name], host, shared
        )


def _stated_shape(stated: Mapping[str, Any]) -> TransformerShape:
    """Return the shape of a decoder of the size and with the parts that are stated."""
    from ebbtide.features.advise.job import decoder

    parts = decoder.LayerParts(
        head_size=stated["head_size"],
        key_value_heads=stated["kv_heads"],
        is_gated=stated["feed_forward"] == "gated",
        is_tied=stated["tied"],
        experts=stated["experts"],
        active_experts=stated["active_experts"],
        parallel=decoder.Parallelism(
            stated["tensor_parallel"], stated["pipeline_parallel"]
        ),
    )
    return decoder.shape_of(
        stated["params"] or 0,
        stated["sequence"] or 2048,
        stated["vocabulary"],
        stated["layers"],
        stated["hidden"],
        stated["heads"] or 0,
        parts,
    )


def _print_levers(context: typer.Context, machines: list[str]) -> None:
    """Print the levers of memory of the job of a model or a size, on one machine."""
    options.refuse_options(
        context, _WITH_LEVERS, "is not for --model, nor for --frontier"
    )
    stated = context.params
    model, params = stated["model"], stated["params"]
    if (model is None) == (params is None):
        raise typer.BadParameter(
            "levers are of a model (--model NAME) or of a size (--params N --frontier)"
        )
    if len(machines) != 1:
        raise typer.BadParameter(
            "levers are for one machine: name it, as in --machine rtx4090"
        )
    fit = seams.service("fit")
    ranks, sharing = stated["ranks"] or 1, stated["strategy"]
    job = ModelJob(
        model or "config.json",
        stated["method"],
        stated["optimizer"],
        stated["micro_batch"] or 1,
        stated["sequence"] or 2048,
        stated["checkpointing"],
        stated["precision"],
        sharing or ("fsdp" if ranks > 1 else None),
        ranks,
        loss=stated["loss"],
        offloads_activations=stated["offload_activations"],
        offloads_optimizer=stated["offload_optimizer"],
    )
    steps = _micro_steps(job, stated["tokens"])
    size = options.optional_size(stated["capacity"])
    request = fit.FitRequest(
        job=replace(job, micro_steps=steps),
        shape=None if params is None else _stated_shape(stated),
        machine=find_machine(options.machine_in_host(machines[0], stated["host"])),
        capacity_bytes=size,
        has_frontier=stated["frontier"],
    )
    fit.print_fit(
        request, stated["plot"], force=stated["force"], as_json=stated["as_json"]
    )


def _micro_steps(job: ModelJob, tokens: int | None) -> int:
    """Return the micro-steps of so many tokens of all ranks; None: of one each."""
    step_tokens = job.ranks * job.batch * job.sequence
    steps, rest = divmod(tokens or step_tokens, step_tokens)
    if rest or not steps:
        raise typer.BadParameter(
            f"--tokens {tokens:,} is not a multiple of the {step_tokens:,} of ranks x "
            "micro-batch x sequence"
        )
    return steps


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
    context: typer.Context,
    sources: tuple[int, Path | None, int | None],
    *,
    has_layers: bool,
) -> None:
    """Check the number of sources, and that options that need a size or levers have
    them; `has_layers`: whether layers are known, or not asked for."""
    options.refuse_options(
        context,
        context.params.keys() - _OF_LEVERS,
        "is for --model, or for --params with --frontier",
    )
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
    if params is None:
        options.refuse_options(
            context,
            context.params.keys() - _OF_A_SIZE,
            "is one of the options of the model that need --params",
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


def _print_replay(
    file: Path, machines: list[str], host: str | None, rank: Machine
) -> None:
    """Print the command that replays a workload file on the first machine; `rank`: the
    rates of a rank."""
    source = machines[0] + (f" --host {host}" if host else "")
    per_host = rank.box.ranks if rank.box is not None else 1
    echo_line(
        f"next: ebbtide replay --workload {file} --machine {source} "
        f"--ranks-per-host {per_host}"
    )
