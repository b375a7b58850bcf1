"""`ebbtide dry-run`: predict the memory of a training job that has never run, without a
GPU."""

from pathlib import Path
from typing import Annotated

import typer

from ebbtide.cli import model_options, options
from ebbtide.cli.command import command
from ebbtide.cli.printing import echo_line, on_stderr
from ebbtide.features.dryrun.jobs.settings import PreparedJob
from ebbtide.model_job import ModelJob

# Options of `--model` alone.
_OF_MODEL = " (only with --model)"
_MODEL_OPTIONS = {
    *model_options.NAMES,
    *("batch", "sequence", "checkpointing", "micro_steps", "write_job"),
}


@command(
    "Start",
    2,
    runs_a_job=True,
    extra="dry-run",
    examples=(
        "dry-run --gpu h100-80gb -o predicted.ebb -- python train.py",
        "dry-run --gpu rtx4090 --model Qwen/Qwen3-8B --method qlora --checkpointing",
    ),
)
def dry_run(
    context: typer.Context,
    command: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="-- CMD...", help="Command that starts the job: python train.py ..."
        ),
    ] = None,
    model: model_options.ModelName = None,
    config: Annotated[
        Path | None,
        options.valued(
            "RECIPE",
            "Instead of CMD: a file of TRL, Axolotl, LLaMA-Factory or torchtune.",
            "none",
        ),
    ] = None,
    method: model_options.MethodOption = "full",
    optimizer: model_options.OptimizerOption = "adamw",
    batch: Annotated[
        int, options.valued("N", f"Samples of a step on a rank{_OF_MODEL}.", min=1)
    ] = 1,
    sequence: Annotated[int, options.valued("N", "Tokens of a sample.", min=1)] = 2048,
    checkpointing: Annotated[
        bool, typer.Option("--checkpointing", help="The job checkpoints activations.")
    ] = False,
    precision: model_options.PrecisionOption = "bf16",
    strategy: model_options.StrategyOption = None,
    micro_steps: Annotated[
        int,
        options.valued(
            "N",
            "Micro-steps of a step, whose gradients add up.",
            rich_help_panel=model_options.PANEL,
            min=1,
        ),
    ] = 1,
    loss: model_options.LossOption = "plain",
    offload_activations: model_options.OffloadActivations = False,
    offload_optimizer: model_options.OffloadOptimizer = False,
    write_job: Annotated[
        Path | None,
        options.valued(
            "FILE",
            f"Script of the job, to read, edit and run{_OF_MODEL}.",
            "RUN-job.py beside the trace",
            rich_help_panel=options.RARE,
        ),
    ] = None,
    output: Annotated[
        Path | None, options.output_option("RUN.ebb", "SCRIPT-TIME.ebb")
    ] = None,
    gpu: Annotated[
        str | None,
        options.valued(
            "NAME", "GPU that the job sees, by the name of a preset.", "none"
        ),
    ] = None,
    machine: Annotated[str | None, options.machine_option("none")] = None,
    host: options.Host = None,
    capacity: Annotated[
        str | None,
        options.valued(
            "SIZE",
            "Memory of the GPU in bytes, e.g. 80GB.",
            "that of the GPU, if named",
        ),
    ] = None,
    steps: Annotated[int, options.STEPS] = 2,
    iterations: options.FormerSteps = None,
    ranks: Annotated[
        int | None,
        options.valued(
            "N",
            "Ranks of the job; rank 0 is run with process groups of N ranks.",
            "those of torchrun",
            min=1,
        ),
    ] = None,
    python: Annotated[
        str | None,
        options.valued(
            "PATH",
            "Interpreter of the environment that CMD runs in, which needs torch.",
            "ebbtide's own",
            rich_help_panel=options.RARE,
        ),
    ] = None,
    check: Annotated[
        bool,
        typer.Option(
            "--check",
            help="End with exit code 3 if the job does not fit the memory of the GPU.",
        ),
    ] = False,
    force: options.Force = False,
) -> None:
    """Predict the device memory and the copies of a training job, without a GPU.

    The unmodified script runs on this host with a faked CUDA device: tensors on it have
    shapes and no values, so that they take no memory and no time. The result is a trace
    like a recorded one. What the job saves is not written."""
    from ebbtide.cli.commands.profile import trace_name
    from ebbtide.errors import UserError
    from ebbtide.features.dryrun.jobs.model_job import prepare_model_job
    from ebbtide.features.dryrun.jobs.recipes import prepare_recipe
    from ebbtide.features.dryrun.start import StartOptions, refuse_existing
    from ebbtide.features.dryrun.start import dry_run as start_dry_run
    from ebbtide.machines.catalog import find_machine

    if gpu is not None and machine is not None:
        raise UserError(
            "name the GPU with --gpu or the machine with --machine, not both"
        )
    if [model, config, command or None].count(None) != 2:
        raise UserError(
            "a dry run needs one of --model NAME, --config RECIPE and -- CMD..., as in "
            "-- python train.py"
        )
    if python is not None and command is None:
        raise UserError("--python is for -- CMD..., as in -- python train.py")
    number = iterations if iterations is not None else steps
    if not number:
        raise typer.BadParameter("--steps must be at least 1")
    if model is None:
        options.refuse_options(
            context, context.params.keys() - _MODEL_OPTIONS, "is for --model"
        )
    name = options.machine_in_host(gpu or machine, host)
    chosen = find_machine(name) if name is not None else None
    path = output or Path(
        trace_name(command or [str(Path(model or config or "").absolute())])
    )
    refuse_existing(path, force)
    if model is not None:
        sharing = strategy or ("ddp" if (ranks or 1) > 1 else None)
        settings = ModelJob(
            model,
            method,
            optimizer,
            batch,
            sequence,
            checkpointing,
            precision,
            sharing,
            ranks or 1,
            micro_steps,
            loss,
            offload_activations,
            offload_optimizer,
        )
        job = prepare_model_job(
            settings, write_job or path.with_name(f"{path.stem}-job.py"), force
        )
    elif config is not None:
        job = prepare_recipe(config, ranks or 1)
    else:
        job = PreparedJob(command or [])
    with on_stderr():
        for line in job.lines:
            echo_line(line)
    started = StartOptions(
        iterations=number,
        capacity_bytes=options.size(capacity) if capacity is not None else None,
        machine=chosen,
        force=force,
        ranks=ranks,
        prints=True,
        check=check,
        scratch=job.scratch,
        python=python,
    )
    start_dry_run(job.command, path, started)
