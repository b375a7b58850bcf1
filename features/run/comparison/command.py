"""Prints a comparison of policies on the user's own job: `ebbtide compare -- CMD`."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

from ebbtide.cli.outputs import new_outputs, print_outputs, save_picture
from ebbtide.cli.printing import echo, echo_line, print_view, progress_bar
from ebbtide.features.run.comparison.compare import compare_job
from ebbtide.features.run.comparison.page import is_folder_of_comparison, write_page
from ebbtide.features.run.comparison.picture import draw_job_comparison
from ebbtide.features.run.comparison.view import job_comparison_view
from ebbtide.features.run.options import RunOptions
from ebbtide.output_files import new_output


def compare_and_print(
    words: list[str],
    *,
    policies: list[str] | None,
    steps: int,
    memory_budget: float | None,
    link: float | None,
    machine: str | None,
    output: Path | None,
    plot: Path | None,
    force: bool,
    as_json: bool,
) -> int:
    """Compare policies on a command and print the result; return the exit status.

    `link` is the rate of an emulated link. A folder and a picture are written where
    they are named.
    """
    options = RunOptions(folder="", steps=steps, memory_budget=memory_budget)
    with ExitStack() as outputs:
        picture, _ = outputs.enter_context(new_outputs(plot, None, force))
        if output is None:
            folder = Path(outputs.enter_context(TemporaryDirectory()))
        else:
            folder = outputs.enter_context(
                new_output(
                    output, force, is_folder_of_comparison, "a folder of a comparison"
                )
            )
            folder.mkdir()
        with progress_bar() as update:
            comparison = compare_job(
                words,
                folder.resolve(),
                policies,
                options,
                link,
                machine,
                lambda name, done, total: update(
                    f"{name} (run {done + 1} of {total})", done, total
                ),
            )
        result = json.dumps(comparison.as_json())
        if picture is not None:
            save_picture(draw_job_comparison(comparison), picture, plot)
        if output is not None:
            write_page(comparison, folder)
        view = list(job_comparison_view(comparison))
    if as_json:
        echo(result)
    else:
        print_view(iter(view))
        policy = comparison.fastest_policy
        echo_line(f"next: ebbtide run --policy {policy} -- {' '.join(words)}")
    print_outputs(plot, output)
    return comparison.status
