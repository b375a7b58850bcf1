"""`ebbtide replay`: predict an iteration under other policies."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ebbtide.cli.options import Force, Json, Machine, Plot, Policies, count, size
from ebbtide.cli.outputs import check_outputs, new_outputs, picture_format, tell_outputs
from ebbtide.cli.render.tables import table
from ebbtide.units import bytes_text, ms_text

if TYPE_CHECKING:
    from ebbtide.interleave.replay.results import Replay


def replay(
    trace: Annotated[Path | None, typer.Argument(metavar="RUN.ebb", help="Trace whose workload is replayed.")] = None,
    workload: Annotated[Path | None, typer.Option(metavar="W.json", help="Workload file instead of a trace.")] = None,
    params: Annotated[
        int | None, typer.Option(help="Number of parameters instead of a trace, e.g. 13e9.", parser=count, metavar="N")
    ] = None,
    ranks: Annotated[
        int, typer.Option(metavar="N", help="Ranks that share the parameters (only with --params).", min=1)
    ] = 1,
    forward_ms: Annotated[
        float, typer.Option(metavar="MS", help="Forward time in ms (only with --params).", min=0)
    ] = 0.0,
    backward_ms: Annotated[
        float, typer.Option(metavar="MS", help="Backward time in ms (only with --params).", min=0)
    ] = 0.0,
    free_bytes: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", help="Device memory that is free beside the job, e.g. 20GiB.", show_default="as recorded"
        ),
    ] = None,
    machine: Machine = None,
    policy: Policies = None,
    policy_file: Annotated[
        Path | None, typer.Option(metavar="FILE.py", help="Python file that defines policies of your own; it is run.")
    ] = None,
    baseline: Annotated[
        str | None, typer.Option(metavar="P", help="Baseline policy for speed-ups.", show_default="the first one")
    ] = None,
    explain: Annotated[bool, typer.Option("--explain", help="Print the gain of each mechanism.")] = False,
    recommend: Annotated[bool, typer.Option("--recommend", help="Print the recommended setup in one line.")] = False,
    plot: Plot = None,
    save: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Also write a simulated trace per policy.")
    ] = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Predict the iteration time under other offload policies, and the lower bound of any policy."""
    of_size = _size(params, ranks, forward_ms, backward_ms)
    room = size(free_bytes) if free_bytes is not None else None
    check_outputs(plot, save)

    from ebbtide.errors import PlanError, PolicyError
    from ebbtide.interleave.replay import ablation as explaining
    from ebbtide.interleave.replay.resolve import Size, find_machine, find_workload, load_policies
    from ebbtide.interleave.replay.results import replay as run

    # What is written stands whole, or not at all, before anything is printed.
    with new_outputs(plot, save, force) as (picture, folder):
        if policy_file is not None:
            load_policies(policy_file)
        job = find_workload(trace, workload, Size(**of_size) if of_size is not None else None, room)
        box = find_machine(machine, trace)
        try:
            found = run(job, box, policy)
        except PlanError as error:
            if policy_file is None:
                raise
            raise PolicyError(f"{policy_file}: {error}") from error
        names = [result.policy for result in found.results]
        if baseline is not None and baseline not in names:
            raise typer.BadParameter(f"{baseline!r} is not among the policies: {', '.join(names)}")
        steps = explaining.explain(job, box) if explain else None
        advice = explaining.recommend(job, box, _stage(trace)) if recommend else None
        if picture is not None and plot is not None:
            _draw(found, picture, picture_format(plot))
        if folder is not None:
            _save(found, folder)
    if as_json:
        more: dict[str, Any] = {}
        if steps is not None:
            more["explain"] = [vars(step) for step in steps]
        if advice is not None:
            more["recommend"] = vars(advice)
        typer.echo(json.dumps({**found.as_json(), **more}))
    else:
        _print(found, baseline or names[0])
        if steps is not None:
            rows = [[step.mechanism, step.policy, ms_text(step.iteration_ms), ms_text(step.gain_ms)] for step in steps]
            table("Each mechanism, added to those before it", ["mechanism", "policy", "iteration", "gain"], rows)
        if advice is not None:
            typer.echo(f"recommended: {advice.line}")
    tell_outputs(plot, save)


def _stage(trace: Path | None) -> int | None:
    """Of ZeRO, where the trace is of a DeepSpeed job."""
    from ebbtide.analysis.metrics.deepspeed import deepspeed_of
    from ebbtide.profiler.trace import open_trace

    job = deepspeed_of(open_trace(trace)) if trace is not None else None
    return job.stage if job is not None else None


def _size(params: int | None, ranks: int, forward_ms: float, backward_ms: float) -> dict[str, Any] | None:
    if params is None:
        if ranks != 1 or forward_ms or backward_ms:
            raise typer.BadParameter("--ranks, --forward-ms and --backward-ms need --params")
        return None
    return {"params": params, "ranks": ranks, "forward_s": forward_ms / 1e3, "backward_s": backward_ms / 1e3}


def _print(found: Replay, baseline: str) -> None:
    job, least = found.workload, found.bound
    params = f"{job.params / 1e9:.3g} G parameters a rank in {len(job.subgroups):,} subgroups"
    typer.echo(f"{job.name} on {found.machine.name}: {params}")
    for note in job.notes:
        typer.echo(f"note: {note}")
    base = next(result.iteration_ms for result in found.results if result.policy == baseline)
    rows = [
        [
            result.policy,
            ms_text(result.iteration_ms),
            f"{base / result.iteration_ms:.2f}x" if result.iteration_ms else "-",
            ms_text(result.backward_ms),
            ms_text(result.update_ms),
            ms_text(result.exposed_ms),
            result.limited_by,
            bytes_text(result.peak_device_bytes),
            {True: "yes", False: "no", None: "not known"}[result.fits],
        ]
        for result in found.results
    ]
    bound_ms = least.iteration_s * 1e3
    faster = f"{base / bound_ms:.2f}x" if bound_ms else "-"
    rows.append(["bound", ms_text(bound_ms), faster, "", "", ms_text(least.exposed_s * 1e3), "", "", ""])
    times = ["iteration", "speed-up", "backward", "update", "exposed"]
    columns = ["policy", *times, "update limited by", "on the device", "fits"]
    table(f"One iteration of each policy (speed-up over {baseline})", columns, rows)
    for result, schedule in zip(found.results, found.schedules, strict=True):
        if schedule.plan.remark:
            typer.echo(f"{result.policy}: {schedule.plan.remark}")
    for name, why in found.skipped.items():
        typer.echo(f"left out: {name} ({why})")


def _draw(found: Replay, file: Path, kind: str) -> None:
    from ebbtide.analysis.plot import save
    from ebbtide.interleave.replay.chart import chart

    save(chart(found), file, kind)


def _save(found: Replay, folder: Path) -> None:
    """A trace for each policy; for one that was asked for twice, once."""
    from ebbtide.interleave.replay.schedule_to_trace import file_name, trace_of

    for policy, schedule in {schedule.plan.policy: schedule for schedule in found.schedules}.items():
        trace_of(schedule, found.machine).write(folder / f"{file_name(policy)}.ebb")
