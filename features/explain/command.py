"""`ebbtide explain`: explain a message, a log or a table that somebody has pasted."""

import json
from pathlib import Path
from typing import Annotated

import typer

from ebbtide.cli.command import command
from ebbtide.cli.options import Json, Params, Verbose, valued
from ebbtide.cli.printing import echo, print_view
from ebbtide.errors import UserError


@command(
    "Explain",
    0,
    examples=("explain train.log ds_config.json", "explain --redact -"),
)
def explain(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE...",
            help=(
                "Texts of any kind: error messages, logs, output of nvidia-smi, "
                "configurations, or a whole issue with several of them; - is standard "
                "input."
            ),
        ),
    ],
    redact: Annotated[
        bool,
        typer.Option(
            "--redact",
            help=(
                "Print the texts with hosts, paths, user names, keys and tokens "
                "replaced, for an issue. Nothing is ever sent anywhere."
            ),
        ),
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="RUN.ebb",
            help="Where to keep the trace that a log or a file is imported as.",
            show_default="not kept",
        ),
    ] = None,
    params: Params = None,
    gpu: Annotated[
        str | None,
        valued("NAME", "GPU that the job sees, by the name of a preset.", "none"),
    ] = None,
    verbose: Verbose = False,
    as_json: Json = False,
) -> None:
    """Explain an error message, a log, a table or a configuration: what it shows,
    what it does not tell, and the next command."""
    from ebbtide.features.explain.answer import explain_records
    from ebbtide.features.explain.imported import imported_traces, without_repeats
    from ebbtide.features.explain.pasted import read_pasted
    from ebbtide.features.explain.record import Records, read_records
    from ebbtide.features.explain.redact import redacted
    from ebbtide.features.explain.view import explanation_view
    from ebbtide.machines.catalog import find_machine

    if gpu is not None:
        find_machine(gpu)
    texts = [read_pasted(path) for path in files]
    if redact:
        for text in texts:
            lines = [line.text for line in text.lines]
            echo(redacted("\n".join(lines)))
        return
    read = [record for text in texts for record in read_records(text)]
    imported = [
        record
        for path, text in zip(files, texts, strict=True)
        for record in imported_traces(path, text, output)
    ]
    records = Records((*without_repeats(read, imported), *imported), params, gpu)
    if not records.records:
        names = ", ".join(text.name for text in texts)
        raise UserError(
            f"{names}: nothing that ebbtide reads: no out-of-memory message, log of "
            "steps, table of memory or configuration"
        )
    explanation = explain_records(records)
    if as_json:
        echo(json.dumps(explanation.as_json()))
    else:
        print_view(explanation_view(explanation, verbose))
