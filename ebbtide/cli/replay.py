"""`ebbtide replay`: predict an iteration under other policies."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ebbtide.cli.options import Force, Host, Json, Machine, Plot, Policies, count, machine_in_host, size
from ebbtide.cli.outputs import check_outputs, new_outputs, picture_format, print_outputs
from ebbtide.cli.printing import echo
from ebbtide.machines.box import MAX_RANKS

if TYPE_CHECKING:
    from ebbtide.interleave.replay.resolve import JobSize
    from ebbtide.interleave.replay.results import Replay


def replay(
    trace: Annotated[Path | None, typer.Argument(metavar="RUN.ebb", help="Trace to take the workload from.")] = None,
    workload: Annotated[Path | None, typer.Option(metavar="W.json", help="Workload file, instead of a trace.")] = None,
    params: Annotated[
        int | None, typer.Option(help="Number of parameters, instead of a trace, e.g. 13e9.", parser=count, metavar="N")
    ] = None,
    ranks: Annotated[
        int, typer.Option(metavar="N", help="Number of ranks that share the parameters (only with --params).", min=1)
    ] = 1,
    ranks_per_host: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Number of ranks that share a host, whose CPU and memory they divide (machines with a `box`).",
            min=1,
            max=MAX_RANKS,
            show_default="that of the trace, else that of the machine",
        ),
    ] = None,
    forward_ms: Annotated[
        float, typer.Option(metavar="MS", help="Forward time in ms (only with --params).", min=0)
    ] = 0.0,
    backward_ms: Annotated[
        float, typer.Option(metavar="MS", help="Backward time in ms (only with --params).", min=0)
    ] = 0.0,
    free_bytes: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Device memory in bytes that the job leaves free, e.g. 20GiB.",
            show_default="that of the trace or workload",
        ),
    ] = None,
    host_free_bytes: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Host memory in bytes that the optimizer may use, e.g. 64GiB. State beyond it goes to storage, if the "
            "machine has some.",
            show_default="that of the workload, else the host memory of the machine",
        ),
    ] = None,
    machine: Machine = None,
    host: Host = None,
    policy: Policies = None,
    policy_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE.py", help="Python file that registers your own policies; it is executed."),
    ] = None,
    baseline: Annotated[
        str | None, typer.Option(metavar="P", help="Baseline policy for speed-ups.", show_default="the first one")
    ] = None,
    explain: Annotated[bool, typer.Option("--explain", help="Also print the gain of each mechanism.")] = False,
    recommend: Annotated[
        bool, typer.Option("--recommend", help="Also print the recommended DeepSpeed configuration or call.")
    ] = False,
    plot: Plot = None,
    plot_schedules: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Also draw each policy's operations by resource into this file."),
    ] = None,
    save: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Also write a simulated trace per policy into this folder.")
    ] = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Predict the iteration time under other offload policies, and the lower bound for any policy."""
    job_size = _job_size(params, ranks, forward_ms, backward_ms)
    free, host_free = (size(value) if value is not None else None for value in (free_bytes, host_free_bytes))
    machine = machine_in_host(machine, host)
    check_outputs(plot, save)
    check_outputs(plot_schedules, save)
    if plot is not None and plot_schedules is not None and plot.resolve() == plot_schedules.resolve():
        raise typer.BadParameter(f"{plot} cannot be both pictures: choose two paths")

    from ebbtide.cli.render.recommendation import print_recommendation
    from ebbtide.cli.render.replay import print_ablation, print_accuracy, print_replay
    from ebbtide.errors import PlanError, PolicyError
    from ebbtide.interleave.replay import ablation
    from ebbtide.interleave.replay import recommend as recommendation
    from ebbtide.interleave.replay.resolve import (
        load_policies,
        note_other_machine,
        resolve_machine,
        resolve_workload,
        share_box,
    )
    from ebbtide.interleave.replay.results import replay as run
    from ebbtide.profiler.trace import open_trace

    # All outputs are complete before anything is printed.
    with (
        new_outputs(plot, save, force) as (picture, folder),
        new_outputs(plot_schedules, None, force) as (schedules_picture, _),
    ):
        if policy_file is not None:
            load_policies(policy_file)
        recording = open_trace(trace) if trace is not None else None
        job = resolve_workload(recording, workload, job_size, free, host_free)
        rates = share_box(resolve_machine(machine, recording), ranks_per_host, recording)
        job = note_other_machine(job, rates, recording)
        try:
            replayed = run(job, rates, policy)
        except PlanError as error:
            if policy_file is None:
                raise
            raise PolicyError(f"{policy_file}: {error}") from error
        names = [result.policy for result in replayed.results]
        if baseline is not None and baseline not in names:
            raise typer.BadParameter(f"{baseline!r} is not among the policies: {', '.join(names)}")
        steps = ablation.explain(job, rates) if explain else None
        advice = None
        if recommend:
            recorded_job = recommendation.recorded_job(recording) if recording is not None else None
            advice = recommendation.recommend(job, rates, recorded_job, machine)
        if picture is not None and plot is not None:
            _draw(replayed, picture, picture_format(plot))
        if schedules_picture is not None and plot_schedules is not None:
            _draw_schedules(replayed, schedules_picture, picture_format(plot_schedules))
        if folder is not None:
            _save(replayed, folder)
    if as_json:
        additions: dict[str, Any] = {}
        if steps is not None:
            additions["explain"] = [vars(step) for step in steps]
        if advice is not None:
            additions["recommend"] = advice.as_json()
        echo(json.dumps({**replayed.as_json(), **additions}))
    else:
        print_replay(replayed, baseline or names[0])
        if steps is not None:
            print_ablation(steps)
        print_accuracy(rates)
        if advice is not None:
            print_recommendation(advice)
    print_outputs(plot, plot_schedules, save)


def _job_size(params: int | None, ranks: int, forward_ms: float, backward_ms: float) -> JobSize | None:
    if params is None:
        if ranks != 1 or forward_ms or backward_ms:
            raise typer.BadParameter("--ranks, --forward-ms and --backward-ms need --params")
        return None
    from ebbtide.interleave.replay.resolve import JobSize

    return JobSize(params, ranks, forward_ms / 1e3, backward_ms / 1e3)


def _draw(replayed: Replay, file: Path, kind: str) -> None:
    from ebbtide.analysis.plot import save
    from ebbtide.interleave.replay.chart import chart

    save(chart(replayed), file, kind)


def _draw_schedules(replayed: Replay, file: Path, kind: str) -> None:
    from ebbtide.analysis.plot import save
    from ebbtide.interleave.replay.schedule_picture import draw_schedules

    save(draw_schedules(replayed.schedules), file, kind)


def _save(replayed: Replay, folder: Path) -> None:
    """Write one trace per distinct policy."""
    from ebbtide.interleave.replay.schedule_to_trace import file_name, trace_of

    for policy, schedule in {schedule.plan.policy: schedule for schedule in replayed.schedules}.items():
        trace_of(schedule, replayed.machine).write(folder / f"{file_name(policy)}.ebb")
