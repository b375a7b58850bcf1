"""`ebbtide machines`: the machines that come with ebbtide."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ebbtide.cli.command import command
from ebbtide.cli.options import Json, Verbose
from ebbtide.cli.printing import echo, print_view

if TYPE_CHECKING:
    from ebbtide.machines.machine import Machine


@command("Predict", 1, examples=("machines", "machines h100"))
def machines(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="NAME...",
            help="Names, or the first letters of names.",
            show_default="all",
        ),
    ] = None,
    verbose: Verbose = False,
    as_json: Json = False,
) -> None:
    """Print the machines that --machine takes by name: their rates, where these come
    from, how far to trust them."""
    from ebbtide.analysis.tables.machines import catalog_view
    from ebbtide.machines.catalog import named, preset

    chosen = [preset(name) for name in named(names or ())]
    if as_json:
        echo(json.dumps({"machines": [_entry(machine) for machine in chosen]}))
    else:
        print_view(catalog_view(chosen, with_sources=bool(names) or verbose))


def _entry(machine: Machine) -> dict[str, Any]:
    from ebbtide.machines.accuracy import accuracy_of

    accuracy = accuracy_of(machine)
    kind = "data sheet" if accuracy.basis == "data sheets" else accuracy.basis
    source = machine.extra["source"]["data"]
    entry = {"name": machine.name, "source": source, "kind": kind}
    return {**entry, "accuracy": accuracy.as_json(), "file": machine.as_json()}
