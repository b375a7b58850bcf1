"""`ebbtide compare`: run policies and compare them with their predictions."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ebbtide import seams
from ebbtide.cli import options
from ebbtide.cli.command import command
from ebbtide.cli.outputs import check_outputs, new_outputs, print_outputs, save_picture
from ebbtide.cli.printing import echo, echo_error, echo_line, print_view

if TYPE_CHECKING:
    from ebbtide.interleave.compare.runs import PhaseWaits

# Options that go with a command.
_OF_COMMANDS = {
    "command",
    "policy",
    "steps",
    "memory_budget",
    "emulate_link",
    "machine",
    "output",
    "plot",
    "force",
    "as_json",
}
_BASELINES = ("torch", *seams.plugs("baselines"))


@command(
    "Run",
    1,
    runs_a_job=True,
    examples=(
        "compare -- python train.py",
        "compare --policy zero-offload --policy adaptive --params 5e8",
    ),
)
def compare(
    context: typer.Context,
    command: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="-- CMD...",
            help="Command that starts a job of yours, instead of a small model.",
        ),
    ] = None,
    policy: Annotated[
        list[str] | None,
        options.policy_option(
            "zero-offload, pipelined, twin-flow:0.5, interleaved:2, adaptive"
        ),
    ] = None,
    policy_file: options.PolicyFile = None,
    steps: Annotated[int, options.STEPS] = 12,
    iterations: options.FormerSteps = None,
    params: Annotated[
        int | None,
        options.valued(
            "N",
            "Approximate number of parameters of the model, e.g. 5e8.",
            "20e6, with --layers 4e5",
            parser=options.count,
        ),
    ] = None,
    subgroup_params: Annotated[
        int | None,
        options.valued(
            "N",
            "Parameters per subgroup, e.g. 1e8.",
            "a tenth of the model",
            rich_help_panel=options.RARE,
            parser=options.count,
        ),
    ] = None,
    memory_budget: Annotated[
        str | None,
        options.memory_budget_option("half of the state and three subgroups"),
    ] = None,
    emulate_link: Annotated[str | None, options.EMULATE_LINK] = None,
    forward_ms: Annotated[
        float | None,
        options.valued(
            "MS",
            "Time that each forward waits, in addition to its arithmetic (only "
            "emulated devices).",
            "that of all updates on the CPU if a policy has an overlap, else 0",
            rich_help_panel=options.RARE,
            min=0,
        ),
    ] = None,
    backward_ms: Annotated[
        float | None,
        options.valued(
            "MS",
            "The same of each backward.",
            "twice that of the forward",
            rich_help_panel=options.RARE,
            min=0,
        ),
    ] = None,
    machine: Annotated[
        str | None,
        options.machine_option(
            "this machine, which is measured; emulated devices have their own link and "
            "GPU"
        ),
    ] = None,
    storage: Annotated[
        list[Path] | None,
        options.valued(
            "FOLDER",
            "Folder for state that host memory does not hold. Repeatable: several are "
            "used at once.",
            "none",
        ),
    ] = None,
    host_free_bytes: Annotated[
        str | None,
        options.valued(
            "SIZE",
            "Host memory in bytes that the optimizer may use, e.g. 64GiB. State "
            "beyond it is in storage.",
            "what gradients, parameters, half of the state and three subgroups need",
        ),
    ] = None,
    against: Annotated[
        str | None,
        options.valued(
            "NAME,...", f"Other optimizers to measure: {', '.join(_BASELINES)}.", "none"
        ),
    ] = None,
    layers: Annotated[
        bool,
        typer.Option(
            "--layers",
            help="Compare choices for weights and activations of layers, not policies.",
        ),
    ] = False,
    seed: Annotated[
        int,
        options.valued(
            "N",
            "Seed of weights and tokens.",
            rich_help_panel=options.RARE,
            min=0,
            max=2**63 - 1,
        ),
    ] = 0,
    output: Annotated[
        Path | None, options.output_option("FOLDER", "none, and only with CMD")
    ] = None,
    plot: options.Plot = None,
    save: options.Save = None,
    force: options.Force = False,
    verbose: options.Verbose = False,
    as_json: options.Json = False,
) -> None:
    """Run a job under each policy and compare measured with predicted times.

    The job is CMD, which needs no change and runs once as it is and once under each
    policy, or a small model. Without a GPU the device is emulated: times then say
    nothing about a GPU, only whether the plan runs as predicted. Losses must be equal
    under all policies, bit for bit; otherwise the exit status is 1. Medians leave the
    first steps of each out."""
    check_outputs([plot], save or output)
    if command:
        options.refuse_options(context, _OF_COMMANDS, "is not for a command")
        status = seams.service("job-comparison").compare_and_print(
            command,
            policies=policy,
            steps=iterations if iterations is not None else steps,
            memory_budget=options.optional_size(memory_budget),
            link=options.optional_size(emulate_link),
            machine=machine,
            output=output,
            plot=plot,
            force=force,
            as_json=as_json,
        )
        raise typer.Exit(status)
    if output is not None:
        raise typer.BadParameter("-o is for a command: keep traces with --save FOLDER")
    if subgroup_params == 0:
        raise typer.BadParameter("--subgroup-params must be at least 1")
    memory_budget_bytes = options.optional_size(memory_budget)
    host_bytes = options.optional_size(host_free_bytes)
    link_bytes_per_s = options.optional_size(emulate_link)
    # Torch reads these when it is imported. Without the first one, matrix products on a
    # GPU differ from run to run; by the second one, waiting threads of torch leave the
    # cores to the updates.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    own = (
        policy,
        policy_file,
        subgroup_params,
        machine,
        storage,
        host_free_bytes,
        against,
        save,
    )
    if layers and any(own):
        raise typer.BadParameter(
            "--layers goes with the options of job, link and memory alone"
        )

    from ebbtide.cli.printing import progress_bar
    from ebbtide.interleave.compare import comparison as policies
    from ebbtide.interleave.compare.compare import CompareConfig
    from ebbtide.interleave.compare.results import save_traces
    from ebbtide.interleave.replay.inputs import own_policies

    compared: Any = seams.service("layer-comparison") if layers else policies
    # All outputs are complete before anything is printed.
    with (
        new_outputs(plot, save, force) as (picture_file, folder),
        own_policies(policy_file),
    ):
        config = CompareConfig(
            policies=policy,
            iterations=iterations if iterations is not None else steps,
            params=params or (400_000 if layers else 20_000_000),
            subgroup_params=subgroup_params,
            memory_budget=memory_budget_bytes,
            link_bytes_per_s=link_bytes_per_s,
            machine=machine,
            waits=_phase_waits(forward_ms, backward_ms),
            baselines=[name.strip() for name in against.split(",")]
            if against is not None
            else [],
            seed=seed,
            storage=storage or [],
            host_bytes=host_bytes,
        )
        with progress_bar() as update:
            comparison = compared.compare(
                config,
                lambda name, done, total: update(
                    f"{name} (iteration {done} of {total})", done, total
                ),
            )
        if picture_file is not None:
            save_picture(compared.draw_comparison(comparison), picture_file, plot)
        if folder is not None:
            save_traces(comparison, folder)
    if as_json:
        echo(json.dumps(comparison.as_json()))
    else:
        print_view(compared.comparison_view(comparison, verbose))
        auto = "--policy adaptive,weights=auto,activations=auto (for a job of yours)"
        following = auto if layers else "--recommend (which policy for a job of yours)"
        echo_line(f"next: ebbtide replay RUN.ebb {following}")
    print_outputs(plot, save)
    if not comparison.losses_equal:
        echo_error(f"{comparison.difference}: this is a bug, please report it")
        raise typer.Exit(1)


def _phase_waits(
    forward_ms: float | None, backward_ms: float | None
) -> PhaseWaits | None:
    """Return the waits that the options give, None for the default."""
    from ebbtide.interleave.compare.runs import PhaseWaits

    if forward_ms is None and backward_ms is None:
        return None
    forward_s = (forward_ms or 0.0) / 1e3
    return PhaseWaits(
        forward_s, 2 * forward_s if backward_ms is None else backward_ms / 1e3
    )
