"""`ebbtide plan`: choose a machine for a job."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from ebbtide.cli.options import Force, Host, Json, count
from ebbtide.cli.outputs import check_outputs, new_outputs, picture_format, print_outputs
from ebbtide.cli.printing import echo
from ebbtide.machines.box import MAX_RANKS

if TYPE_CHECKING:
    from ebbtide.interleave.provisioning.job_sources import BatchSettings
    from ebbtide.interleave.provisioning.training_job import TrainingJob
    from ebbtide.profiler.trace import Trace


def plan(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[RUN.ebb]", help="Trace of the job, recorded or predicted by `ebbtide dry-run`."),
    ] = None,
    workload: Annotated[Path | None, typer.Option(metavar="W.json", help="Workload file, instead of a trace.")] = None,
    params: Annotated[
        int | None, typer.Option(help="Number of parameters, instead of a trace, e.g. 13e9.", parser=count, metavar="N")
    ] = None,
    machine: Annotated[
        list[str] | None,
        typer.Option(
            metavar="M...",
            help="Machine files, or names of presets. Repeatable.",
            show_default="the recorded machine, else all presets",
        ),
    ] = None,
    host: Host = None,
    price_per_hour: Annotated[
        list[float] | None,
        typer.Option(metavar="P", help="Price of a host per hour: one for all machines, or one for each.", min=0),
    ] = None,
    ranks: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Ranks that share parameters and optimizer state.",
            min=1,
            max=MAX_RANKS,
            show_default="those of the trace, else 1",
        ),
    ] = None,
    ranks_per_host: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Ranks on a host.",
            min=1,
            max=MAX_RANKS,
            show_default="all, up to those of the machine's box",
        ),
    ] = None,
    micro_batch: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="Samples of a micro-step on a rank.", min=1, show_default="that of the trace, else 1"
        ),
    ] = None,
    sequence: Annotated[
        int | None,
        typer.Option(metavar="N", help="Tokens of a sample.", min=1, show_default="2048 with --params, else not known"),
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Tokens of an iteration of all ranks, e.g. 5e5.",
            parser=count,
            show_default="ranks x micro-batch x sequence x micro-steps",
        ),
    ] = None,
    layers: Annotated[
        int | None,
        typer.Option(metavar="N", help="Layers (only with --params).", min=1, show_default="by the parameters"),
    ] = None,
    hidden: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="Width of a layer (only with --params).", min=1, show_default="by the parameters"
        ),
    ] = None,
    vocabulary: Annotated[
        int, typer.Option(metavar="N", help="Entries of the vocabulary (only with --params).", min=1)
    ] = 50_304,
    checkpointing: Annotated[
        bool, typer.Option("--checkpointing", help="The job checkpoints activations (only with --params).")
    ] = False,
    policy: Annotated[
        list[str] | None,
        typer.Option(metavar="P", help="Choose among these policies only. Repeatable.", show_default="all"),
    ] = None,
    sort: Annotated[
        Literal["iteration", "cost"] | None,
        typer.Option(
            metavar="KEY",
            help="Order of the table: iteration or cost.",
            show_default="cost with prices, else iteration",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="FILE", help="Also write a picture to this .png, .svg or .pdf file."),
    ] = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Choose a machine for a job: does it fit, which change makes it fit, which policy, how fast, at which cost?

    Figures are per rank, times are ranges that hold with a probability of 80 %.
    """
    check_outputs(output, None)
    traces = [name for name in names or () if _is_trace(name)]
    machines = [*(machine or ()), *(name for name in names or () if not _is_trace(name))]
    _check_sources(traces, workload, params, machine is not None, list(names or ()))
    if params is None and (layers or hidden or checkpointing):
        raise typer.BadParameter("--layers, --hidden and --checkpointing need --params")

    from ebbtide.cli.render.plan import print_plans
    from ebbtide.interleave.provisioning.job_sources import BatchSettings
    from ebbtide.interleave.provisioning.machine_plan import PlanRequest, plan_for_machine
    from ebbtide.interleave.provisioning.targets import find_targets
    from ebbtide.interleave.provisioning.transformer import shape_of
    from ebbtide.profiler.trace import open_trace

    batch = BatchSettings(ranks, micro_batch, sequence, tokens)
    recording = open_trace(Path(traces[0])) if traces else None
    job: TrainingJob
    if params is not None:
        from ebbtide.interleave.provisioning.job_sources import job_of_size

        job = job_of_size(shape_of(params, sequence or 2048, vocabulary, layers, hidden), batch, checkpointing)
    else:
        job = _described_job(recording, workload, batch)
    targets = find_targets(machines, host, price_per_hour or [], recording)
    with new_outputs(output, None, force) as (picture, _):
        plans = []
        for target in targets:
            # The rates of a workload's machine are those of its own ranks, unless these are stated.
            own = target.machine.box.ranks if workload and not ranks and target.machine.box is not None else None
            request = PlanRequest(target.source, policy or (), ranks_per_host or own, target.price_per_hour)
            plans.append(plan_for_machine(job, target.machine, request))
        if picture is not None and output is not None:
            from ebbtide.analysis.plot import save
            from ebbtide.interleave.provisioning.picture import draw_plans

            save(draw_plans(job, plans), picture, picture_format(output))
    if as_json:
        echo(json.dumps({"job": job.as_json(), "plans": [one.as_json() for one in plans]}))
    else:
        print_plans(job, plans, sort or ("cost" if price_per_hour else "iteration"))
    print_outputs(output)


def _is_trace(name: str) -> bool:
    return Path(name).is_dir() or name.rstrip("/").endswith(".ebb")


def _check_sources(
    traces: list[str], workload: Path | None, params: int | None, has_machines: bool, names: list[str]
) -> None:
    if len(traces) < len(names) and not has_machines:
        other = next(name for name in names if name not in traces)
        raise typer.BadParameter(f"{other} is not a trace (RUN.ebb); name machines with --machine")
    if len(traces) + (workload is not None) + (params is not None) != 1:
        raise typer.BadParameter("name a trace, a --workload file, or a size (--params): one of the three")


def _described_job(recording: Trace | None, workload: Path | None, batch: BatchSettings) -> TrainingJob:
    from ebbtide.interleave.model.workload import load_workload
    from ebbtide.interleave.provisioning.job_sources import job_of_trace, job_of_workload

    if workload is not None:
        return job_of_workload(load_workload(workload), batch)
    assert recording is not None
    return job_of_trace(recording, batch)
