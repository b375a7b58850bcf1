"""`ebbtide export`: write a trace for ui.perfetto.dev, or as tables.

The tables are for pandas, R and spreadsheets.
"""

from pathlib import Path
from typing import Annotated, Literal

import typer

from ebbtide.cli.command import command
from ebbtide.cli.options import (
    Force,
    MinBytes,
    TraceFile,
    output_option,
    refuse_options,
    size,
    valued,
)
from ebbtide.terminal_lines import print_note

ENDINGS = (".json", ".json.gz")


@command(
    "Files",
    1,
    examples=(
        "export run.ebb -o run.json.gz",
        "export run.ebb -o tables --format parquet",
    ),
)
def export(
    context: typer.Context,
    trace: TraceFile,
    output: Annotated[Path, output_option("FILE.json[.gz]|FOLDER")],
    format: Annotated[
        Literal["perfetto", "csv", "parquet"],
        valued(
            "F", "Format: perfetto (trace events), or tables as csv or parquet files."
        ),
    ] = "perfetto",
    min_bytes: MinBytes = "1GiB",
    force: Force = False,
) -> None:
    """Write a trace as trace-event JSON, which ui.perfetto.dev and chrome://tracing
    open, or as tables.

    Tables are a folder of files: phases, memory, link, gpu, transfers, ops, iterations,
    windows. --force replaces it only if it contains nothing but tables."""
    from ebbtide.profiler.trace import open_trace

    if format != "perfetto":
        from ebbtide.features.export.tables import write_tables

        for note in write_tables(
            open_trace(trace), output, format, size(min_bytes), force
        ):
            print_note(note)
        print_note(str(output))
        return
    refuse_options(
        context,
        {"trace", "output", "format", "force"},
        "is for tables: --format csv or --format parquet",
    )
    if not output.name.lower().endswith(ENDINGS):
        raise typer.BadParameter(
            f"{output} must end in {' or '.join(ENDINGS)} (or choose --format csv or "
            "parquet)"
        )
    from ebbtide.features.export.chrome_trace import write_chrome_trace

    write_chrome_trace(open_trace(trace), output, force)
    print_note(f"{output} (open it in https://ui.perfetto.dev)")
