"""`ebbtide replay`: predict iterations under other policies, of one job or of several on several machines."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ebbtide.cli import options
from ebbtide.cli.command import command
from ebbtide.cli.outputs import check_outputs, new_outputs, print_outputs, save_picture
from ebbtide.cli.printing import echo, echo_line, print_view
from ebbtide.cli.sweep import Sweep, SweepOutputs, replay_many

if TYPE_CHECKING:
    from ebbtide.interleave.advise.job import inputs
    from ebbtide.interleave.advise.replay import Replay


# The options of several jobs, machines or sizes.
_OF_SWEEPS = (
    {"traces", "workload", "machine", "host", "ranks_per_host", "policy", "jobs", "scheduler"}
    | {"scale_params", "free_bytes", "subgroup_params", "host_free_bytes"}
    | {"print_all", "output", "plot", "force", "as_json"}
)


@command(
    "Start",
    7,
    examples=("replay run.ebb --recommend", "replay run.ebb --machine rtx4090 --machine h200 -o table.parquet"),
)
def replay(
    context: typer.Context,
    traces: Annotated[
        list[Path] | None, typer.Argument(metavar="RUN.ebb", help="Traces to take workloads from.")
    ] = None,
    workload: Annotated[list[Path] | None, options.WORKLOAD] = None,
    params: options.Params = None,
    ranks: Annotated[
        int, options.valued("N", "Number of ranks that share the parameters (only with --params).", min=1)
    ] = 1,
    ranks_per_host: options.RanksPerHost = None,
    forward_ms: Annotated[float, options.valued("MS", "Forward time in ms (only with --params).", min=0)] = 0.0,
    backward_ms: Annotated[float, options.valued("MS", "Backward time in ms (only with --params).", min=0)] = 0.0,
    scale_params: Annotated[
        list[str] | None,
        options.valued(
            "F,...",
            "Factors for the number of parameters. Forward and backward times are scaled, free memory shrinks.",
            "1",
        ),
    ] = None,
    free_bytes: Annotated[
        list[str] | None,
        options.valued(
            "SIZE,...",
            "Least device memory in bytes that the job leaves free, e.g. 20GiB: the free memory is shifted to it.",
            "that of the trace or workload",
        ),
    ] = None,
    subgroup_params: Annotated[
        list[str] | None, options.valued("N,...", "Parameters per subgroup, e.g. 1e8.", "those of the workload")
    ] = None,
    host_free_bytes: Annotated[
        list[str] | None,
        options.valued(
            "SIZE,...",
            "Host memory in bytes that the optimizer may use, e.g. 64GiB. State beyond it is in storage.",
            "that of the workload, else the host memory of the machine",
        ),
    ] = None,
    machine: Annotated[
        list[str] | None, options.machine_option("the recorded one, else that of the trace's card")
    ] = None,
    host: options.Host = None,
    policy: Annotated[list[str] | None, options.policy_option("all built-in ones; systems: all other systems")] = None,
    policy_file: options.PolicyFile = None,
    baseline: Annotated[str | None, options.valued("P", "Baseline policy for speed-ups.", "the first one")] = None,
    explain: Annotated[bool, typer.Option("--explain", help="Also print the gain of each mechanism.")] = False,
    recommend: Annotated[
        bool, typer.Option("--recommend", help="Print the best policy of any overlap, and what to paste for it.")
    ] = False,
    framework: Annotated[
        Literal["deepspeed", "script"] | None,
        typer.Option(
            "--for",
            metavar="FRAMEWORK",
            help="What the recommended lines are for: deepspeed, or script (without DeepSpeed).",
            show_default="that of the trace, else deepspeed",
        ),
    ] = None,
    print_all: Annotated[
        bool,
        typer.Option(
            "--all", "-v", "--verbose", help="Print all combinations; with --recommend all policies; else as --explain."
        ),
    ] = False,
    output: Annotated[Path | None, options.output_option("FILE.parquet")] = None,
    plot: options.Plot = None,
    plot_schedules: Annotated[
        Path | None, options.valued("FILE", "Also draw each policy's operations by resource into this file.")
    ] = None,
    save: options.Save = None,
    jobs: Annotated[int | None, options.jobs_option("one per core")] = None,
    scheduler: options.Scheduler = None,
    force: options.Force = False,
    as_json: options.Json = False,
) -> None:
    """Predict the iteration time under other offload policies, and the lower bound for any policy.

    Several traces, workload files, machines or sizes are replayed in all combinations; -o writes a table of them."""
    machines = [options.machine_in_host(name, host) for name in [*(machine or ())] or [None]]
    sweep = Sweep(
        traces=traces or [],
        workloads=workload or [],
        machines=[name for name in machines if name is not None],
        policies=policy or [],
        ranks_per_host=ranks_per_host,
        scale_params=scale_params or [],
        free_bytes=free_bytes or [],
        subgroup_params=subgroup_params or [],
        host_free_bytes=host_free_bytes or [],
    )
    if output is not None or not sweep.is_one:
        options.refuse_options(context, _OF_SWEEPS, "is for one job on one machine")
        replay_many(sweep, SweepOutputs(output, plot, force, print_all, as_json), jobs, scheduler)
        return
    if jobs is not None or scheduler is not None:
        raise typer.BadParameter("--jobs and --scheduler are for several jobs, machines or sizes")
    explain = explain or (print_all and not recommend)
    job_size = _job_size(params, ranks, forward_ms, backward_ms)
    free, host_free = (options.size(values[0]) if values else None for values in (free_bytes, host_free_bytes))
    check_outputs([plot, plot_schedules], save)

    from ebbtide.cli.advice import print_recommendation, print_setups
    from ebbtide.errors import MachineError, WorkloadError
    from ebbtide.interleave.advise.changes import leave_system_share
    from ebbtide.interleave.advise.job import inputs
    from ebbtide.interleave.advise.job.training_job import RecordedJob, recorded_job
    from ebbtide.interleave.advise.machine_plan import place_as_it_is
    from ebbtide.interleave.advise.recommendation import recommend as recommend_policy
    from ebbtide.interleave.advise.replay import explain as explain_gains
    from ebbtide.interleave.advise.replay import replay as run
    from ebbtide.interleave.advise.tables import accuracy_lines, gains_table, replay_view
    from ebbtide.profiler.trace import open_trace

    # All outputs are complete before anything is printed.
    with (
        new_outputs(plot, save, force) as (picture, folder),
        new_outputs(plot_schedules, None, force) as (schedules_picture, _),
        inputs.own_policies(policy_file),
    ):
        recording = open_trace(traces[0]) if traces else None
        file = workload[0] if workload else None
        job = inputs.resolve_workload(recording, file, job_size, free, host_free, policy or ())
        own = inputs.own_preset(recording) if machines[0] is None else None
        name = machines[0] or own
        stated = inputs.resolve_machine(name, recording)
        rates = inputs.share_box(stated, ranks_per_host, recording)
        own_notes, recorded = () if file else job.notes, job
        job = inputs.note_other_machine(recorded, rates, recording, free is not None)
        settings = recorded_job(recording) if recording is not None else None
        if recommend:
            rates = leave_system_share(rates)
        is_placed = recommend and job is not recorded and free is None and host_free is None and not job.layers
        if is_placed and recording is not None:
            # As `plan` does: its times are those of the other machine.
            with suppress(MachineError, WorkloadError):
                placed = place_as_it_is(recording, stated, ranks_per_host)
                first, *others = (note for note in job.notes if note not in recorded.notes)
                scaled = f"{first.partition(':')[0]}; {placed.placed.times.note}"
                notes = (*recorded.notes, scaled, *others)
                job, rates, settings = replace(placed.placed.workload, notes=notes), placed.shared, placed.recorded
        replayed = run(job, rates, policy, settings)
        names = [result.policy for result in replayed.results]
        if baseline is not None and baseline not in names:
            raise typer.BadParameter(f"{baseline!r} is not among the policies: {', '.join(names)}")
        steps = explain_gains(job, rates) if explain else None
        advised = settings or RecordedJob()
        is_known = advised.policy is not None or advised.recorded_s(rates) is not None
        if not is_known:
            advised = replace(advised, policy=baseline or names[0])
        advice = recommend_policy(job, rates, advised, name) if recommend else None
        if picture is not None:
            from ebbtide.interleave.advise.pictures.replay import chart

            save_picture(chart(replayed), picture, plot)
        if schedules_picture is not None:
            from ebbtide.interleave.advise.pictures.replay import draw_schedules

            save_picture(draw_schedules(replayed.schedules), schedules_picture, plot_schedules)
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
        print_view(f"note: {limit}" for limit in stated.limits(rates))
        baseline = baseline or names[0]
        if advice is not None:
            is_deepspeed = settings is None or bool(settings.section("zero_optimization"))
            print_view(iter([f"note: {note}" for note in job.notes if note not in own_notes]))
            for_framework = framework or ("deepspeed" if is_deepspeed else "script")
            print_recommendation(advice, for_framework, None if is_known else baseline)
            print_view(iter([*replayed.simplest_lines()]))
            if advice.warnings and recording is not None:
                target = f" --machine {name}" if name else ""
                echo_line(f"next: ebbtide plan {recording.path}{target} (the changes that make it fit)")
        if advice is None or print_all:
            print_view(replay_view(replayed, baseline, verbose=bool(explain or print_all or policy)))
            print_view(accuracy_lines(rates))
        print_view(iter([gains_table(steps or ())]))
        if advice is not None and print_all:
            print_setups(advice)
        if own is not None and recording is not None:
            echo_line(inputs.own_preset_text(own, recording))
        if advice is None:
            gains = "" if explain else ", --explain (what each mechanism gains, and where the state is)"
            echo_line(f"next: --recommend (the best with any overlap, and what to paste){gains}")
    print_outputs(plot, plot_schedules, save)


def _job_size(params: int | None, ranks: int, forward_ms: float, backward_ms: float) -> inputs.JobSize | None:
    if params is None:
        if ranks != 1 or forward_ms or backward_ms:
            raise typer.BadParameter("--ranks, --forward-ms and --backward-ms need --params")
        return None
    from ebbtide.interleave.advise.job import inputs

    return inputs.JobSize(params, ranks, forward_ms / 1e3, backward_ms / 1e3)


def _save(replayed: Replay, folder: Path) -> None:
    """Write one trace per distinct policy."""
    from ebbtide.interleave.advise.schedule_to_trace import file_name, trace_of

    for policy, schedule in {schedule.plan.policy: schedule for schedule in replayed.schedules}.items():
        trace_of(schedule, replayed.machine).write(folder / f"{file_name(policy)}.ebb")
