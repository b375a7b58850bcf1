"""`ebbtide replay`: predict the iterations of a job under other policies."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, TypeVar

import typer

from ebbtide.cli import options
from ebbtide.cli.command import command
from ebbtide.cli.outputs import check_outputs, new_outputs, print_outputs, save_picture
from ebbtide.cli.printing import echo, echo_line, print_view

if TYPE_CHECKING:
    from ebbtide.interleave.model.workload import Workload
    from ebbtide.interleave.replay import inputs
    from ebbtide.interleave.replay.recorded_job import RecordedJob
    from ebbtide.interleave.replay.replay import Replay
    from ebbtide.machines.machine import Machine
    from ebbtide.profiler.trace import Trace


Value = TypeVar("Value")


@command(
    "Start",
    7,
    examples=(
        "replay run.ebb --recommend",
        "replay run.ebb --machine rtx4090 --policy twin-flow:0.4",
    ),
)
def replay(
    path: Annotated[
        Path | None,
        typer.Argument(metavar="RUN.ebb", help="Trace to take the workload from."),
    ] = None,
    workload: Annotated[list[Path] | None, options.WORKLOAD] = None,
    params: options.Params = None,
    ranks: Annotated[
        int,
        options.valued(
            "N",
            "Number of ranks that share the parameters (only with --params).",
            min=1,
        ),
    ] = 1,
    ranks_per_host: options.RanksPerHost = None,
    forward_ms: Annotated[
        float,
        options.valued(
            "MS",
            "Forward time in ms (only with --params).",
            rich_help_panel=options.RARE,
            min=0,
        ),
    ] = 0.0,
    backward_ms: Annotated[
        float,
        options.valued(
            "MS",
            "Backward time in ms (only with --params).",
            rich_help_panel=options.RARE,
            min=0,
        ),
    ] = 0.0,
    free_bytes: Annotated[
        list[str] | None,
        options.valued(
            "SIZE",
            "Least device memory in bytes that the job leaves free, e.g. 20GiB: the "
            "free memory is shifted to it.",
            "that of the trace or workload",
        ),
    ] = None,
    host_free_bytes: Annotated[
        list[str] | None,
        options.valued(
            "SIZE",
            "Host memory in bytes that the optimizer may use, e.g. 64GiB. State "
            "beyond it is in storage.",
            "that of the workload, else the host memory of the machine",
        ),
    ] = None,
    machine: Annotated[
        list[str] | None,
        options.machine_option("the recorded one, else that of the trace's card"),
    ] = None,
    host: options.Host = None,
    policy: Annotated[
        list[str] | None,
        options.policy_option("all built-in ones; systems: all other systems"),
    ] = None,
    policy_file: options.PolicyFile = None,
    baseline: Annotated[
        str | None,
        options.valued(
            "P",
            "Baseline policy for speed-ups.",
            "the first one",
            rich_help_panel=options.RARE,
        ),
    ] = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Also print the gain of each mechanism.")
    ] = False,
    recommend: Annotated[
        bool,
        typer.Option(
            "--recommend",
            help="Print the best policy of any overlap, and what to paste for it.",
        ),
    ] = False,
    framework: Annotated[
        Literal["deepspeed", "script"] | None,
        typer.Option(
            "--for",
            metavar="FRAMEWORK",
            help=(
                "What the recommended lines are for: deepspeed, or script (without "
                "DeepSpeed)."
            ),
            show_default="that of the trace, else deepspeed",
        ),
    ] = None,
    print_all: Annotated[
        bool,
        typer.Option(
            "--all",
            "-v",
            "--verbose",
            help="Print all policies; without --recommend as --explain.",
        ),
    ] = False,
    plot: options.Plot = None,
    plot_schedules: Annotated[
        Path | None,
        options.valued(
            "FILE",
            "Also draw each policy's operations by resource into this file.",
            rich_help_panel=options.RARE,
        ),
    ] = None,
    save: options.Save = None,
    force: options.Force = False,
    as_json: options.Json = False,
) -> None:
    """Predict the iteration time under other offload policies, and the lower bound for
    any policy.

    `ebbtide sweep` replays several jobs, machines or sizes."""
    stated_name = options.machine_in_host(_only("--machine", machine), host)
    file = _only("--workload", workload)
    explain = explain or (print_all and not recommend)
    job_size = _job_size(params, ranks, forward_ms, backward_ms)
    free, host_free = (
        options.size(text) if text else None
        for text in (
            _only("--free-bytes", free_bytes),
            _only("--host-free-bytes", host_free_bytes),
        )
    )
    check_outputs([plot, plot_schedules], save)

    from ebbtide import seams
    from ebbtide.interleave.replay import inputs
    from ebbtide.interleave.replay.replay import explain as explain_gains
    from ebbtide.interleave.replay.replay import replay as run
    from ebbtide.profiler.trace import open_trace

    adviser = seams.service("recommendation") if recommend else None
    # All outputs are complete before anything is printed.
    with (
        new_outputs(plot, save, force) as (picture, folder),
        new_outputs(plot_schedules, None, force) as (schedules_picture, _),
        inputs.own_policies(policy_file),
    ):
        recording = open_trace(path) if path else None
        workload_of_job = inputs.resolve_workload(
            recording, file, job_size, free, host_free, policy or ()
        )
        resolved = _resolve(
            recording,
            workload_of_job,
            stated_name,
            ranks_per_host,
            is_trace_size=free is None and host_free is None,
            has_free=free is not None,
            adviser=adviser,
        )
        replayed = run(resolved.job, resolved.rates, policy, resolved.settings)
        first = _baseline(replayed, baseline)
        steps = explain_gains(resolved.job, resolved.rates) if explain else None
        advice = None
        if adviser is not None:
            advice = adviser.recommend_for(resolved.advised, resolved.name, first)
        _draw(replayed, picture, plot, schedules_picture, plot_schedules)
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
        own_notes = () if file else workload_of_job.notes
        printed = _Printed(
            resolved, replayed, first, steps, bool(explain or print_all or policy)
        )
        if adviser is None:
            printed.print_policies(explain)
        else:
            printed.print_advice(adviser, advice, framework, own_notes, print_all)
    print_outputs(plot, plot_schedules, save)


class _Resolved(NamedTuple):
    """A job and a machine to replay it on."""

    recording: Trace | None
    job: Workload
    stated: Machine  # Of the option, or the trace's card.
    rates: Machine  # Those of a rank.
    settings: RecordedJob | None
    name: str | None  # Of the machine.
    own: str | None  # Name of the preset of the trace's card, where none is stated.
    advised: Any  # The job as the adviser takes it; None without one.


def _resolve(
    recording: Trace | None,
    recorded: Workload,
    stated_name: str | None,
    ranks_per_host: int | None,
    *,
    is_trace_size: bool,
    has_free: bool,
    adviser: Any,
) -> _Resolved:
    """Choose the machine, and place the job on it."""
    from ebbtide.interleave.replay import inputs
    from ebbtide.interleave.replay.recorded_job import recorded_job

    own = inputs.own_preset(recording) if stated_name is None else None
    name = stated_name or own
    stated = inputs.resolve_machine(name, recording)
    rates = inputs.share_box(stated, ranks_per_host, recording)
    job = inputs.note_other_machine(recorded, rates, recording, has_free)
    settings = recorded_job(recording) if recording is not None else None
    advised = None
    if adviser is not None:
        advised = adviser.advised_job(job, rates, settings)
        is_own_size = is_trace_size and not job.layers
        if recording is not None and job is not recorded and is_own_size:
            placed = adviser.place_recording(
                recording, stated, ranks_per_host, job.notes, recorded.notes
            )
            advised = placed or advised
        job, rates, settings = advised
    return _Resolved(recording, job, stated, rates, settings, name, own, advised)


def _baseline(replayed: Replay, baseline: str | None) -> str:
    """Return the policy that speed-ups are of: the stated one, else the first."""
    names = [result.policy for result in replayed.results]
    if baseline is not None and baseline not in names:
        raise typer.BadParameter(
            f"{baseline!r} is not among the policies: {', '.join(names)}"
        )
    return baseline or names[0]


def _draw(
    replayed: Replay,
    picture: Path | None,
    plot: Path | None,
    schedules_picture: Path | None,
    plot_schedules: Path | None,
) -> None:
    """Draw the pictures that were asked for, into temporary files."""
    if picture is not None:
        from ebbtide.interleave.replay.pictures.replay import chart

        save_picture(chart(replayed), picture, plot)
    if schedules_picture is not None:
        from ebbtide.interleave.replay.pictures.replay import draw_schedules

        save_picture(
            draw_schedules(replayed.schedules), schedules_picture, plot_schedules
        )


class _Printed(NamedTuple):
    """A replay to print."""

    resolved: _Resolved
    replayed: Replay
    baseline: str
    steps: Sequence[Any] | None  # Gains of mechanisms.
    is_verbose: bool

    def print_policies(self, explain: bool) -> None:
        """Print a table of the policies."""
        self._print_limits()
        self._print_table()
        self._print_end()
        gains = "" if explain else _EXPLAIN
        echo_line(
            f"next: --recommend (the best with any overlap, and what to paste){gains}"
        )

    def print_advice(
        self,
        adviser: Any,
        advice: Any,
        framework: str | None,
        own_notes: Sequence[str],
        print_all: bool,
    ) -> None:
        """Print the best policy and what to paste for it."""
        self._print_limits()
        notes = [note for note in self.resolved.job.notes if note not in own_notes]
        print_view(iter([f"note: {note}" for note in notes]))
        adviser.print_recommendation(advice, framework)
        print_view(iter([*self.replayed.simplest_lines()]))
        adviser.print_next(advice, self.resolved.recording)
        if print_all:
            self._print_table()
        self._print_end(lambda: print_all and adviser.print_setups(advice))

    def _print_limits(self) -> None:
        limits = self.resolved.stated.limits(self.resolved.rates)
        print_view(f"note: {limit}" for limit in limits)

    def _print_table(self) -> None:
        from ebbtide.interleave.replay.tables import accuracy_lines, replay_view

        print_view(replay_view(self.replayed, self.baseline, verbose=self.is_verbose))
        print_view(accuracy_lines(self.resolved.rates))

    def _print_end(self, before_preset: Callable[[], object] = lambda: None) -> None:
        from ebbtide.interleave.replay import inputs
        from ebbtide.interleave.replay.tables import gains_table

        print_view(iter([gains_table(self.steps or ())]))
        before_preset()
        own, recording = self.resolved.own, self.resolved.recording
        if own is not None and recording is not None:
            echo_line(inputs.own_preset_text(own, recording))


_EXPLAIN = ", --explain (what each mechanism gains, and where the state is)"


def _only(option: str, values: list[Value] | None) -> Value | None:
    """Return the value of an option that a sweep takes several values for."""
    if len(values or ()) > 1:
        raise typer.BadParameter(
            f"{option} is given more than once: `ebbtide sweep` is for several values"
        )
    return values[0] if values else None


def _job_size(
    params: int | None, ranks: int, forward_ms: float, backward_ms: float
) -> inputs.JobSize | None:
    if params is None:
        if ranks != 1 or forward_ms or backward_ms:
            raise typer.BadParameter(
                "--ranks, --forward-ms and --backward-ms need --params"
            )
        return None
    from ebbtide.interleave.replay import inputs

    return inputs.JobSize(params, ranks, forward_ms / 1e3, backward_ms / 1e3)


def _save(replayed: Replay, folder: Path) -> None:
    """Write one trace per distinct policy."""
    from ebbtide.interleave.replay.schedule_to_trace import file_name, trace_of

    for policy, schedule in {
        schedule.plan.policy: schedule for schedule in replayed.schedules
    }.items():
        trace_of(schedule, replayed.machine).write(folder / f"{file_name(policy)}.ebb")
