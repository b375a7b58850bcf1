"""Options of the job that trains a model, which `dry-run` and `plan` share."""

from typing import Annotated

import typer

from ebbtide.cli import options
from ebbtide.model_job import Loss, Method, Optimizer, Precision, Strategy

# Their heading.
PANEL = "Job of a model (with --model)"
# Names of the options that only such a job has.
NAMES = (
    "method",
    "optimizer",
    "precision",
    "strategy",
    "loss",
    "offload_activations",
    "offload_optimizer",
)

ModelName = Annotated[
    str | None,
    options.valued(
        "NAME",
        "A model to train, by its name on the hub or its folder.",
        "none",
        rich_help_panel=PANEL,
    ),
]
MethodOption = Annotated[
    Method,
    typer.Option("--method", help="Weights that are trained.", rich_help_panel=PANEL),
]
OptimizerOption = Annotated[
    Optimizer, typer.Option("--optimizer", help="Optimizer.", rich_help_panel=PANEL)
]
PrecisionOption = Annotated[
    Precision,
    typer.Option(
        "--precision",
        help="Data type of weights and state; mixed: fp32, with autocast.",
        rich_help_panel=PANEL,
    ),
]
StrategyOption = Annotated[
    Strategy | None,
    typer.Option(
        "--strategy",
        help="Sharing of the job among ranks; offload: zero3, with the optimizer on "
        "the CPU.",
        show_default="ddp for several ranks; of levers fsdp",
        rich_help_panel=PANEL,
    ),
]
LossOption = Annotated[
    Loss,
    typer.Option(
        "--loss",
        help="chunked: the logits of 1,024 tokens at a time.",
        rich_help_panel=PANEL,
    ),
]
OffloadActivations = Annotated[
    bool,
    typer.Option(
        "--offload-activations",
        help="What the forward keeps goes to the host.",
        rich_help_panel=PANEL,
    ),
]
OffloadOptimizer = Annotated[
    bool,
    typer.Option(
        "--offload-optimizer",
        help="Gradients go to the host, which updates.",
        rich_help_panel=PANEL,
    ),
]
