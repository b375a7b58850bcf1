"""Reads the command of a launcher: the script that it starts, and in how many processes."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from ebbtide.profiler.dryrun.errors import DryRunError

_MODULES = ("torch.distributed.run", "torch.distributed.launch")
_FLAGS = ("--standalone", "--virtual-local-rank", "--use-env")
_VALUES = (
    "--rdzv-backend", "--rdzv-endpoint", "--rdzv-id", "--rdzv-conf", "--max-restarts", "--monitor-interval",
    "--start-method", "--event-log-handler", "--role", "--log-dir", "--local-ranks-filter", "--node-rank",
    "--master-addr", "--master-port", "--local-addr", "--logs-specs", "--numa-binding", "--signals-to-handle",
    "--shutdown-timeout", "--duplicate-stdout-filters", "--duplicate-stderr-filters",
)  # fmt: skip


@dataclass(frozen=True)
class LaunchedJob:
    """A job that a launcher starts.

    Attributes:
        command: The command of one of its processes, as `python train.py ...`.
        ranks: Processes in all; None: there is no launcher.
        ranks_per_node: Processes on one host; None: not stated.
    """

    command: list[str]
    ranks: int | None = None
    ranks_per_node: int | None = None


def read_launcher(command: Sequence[str]) -> LaunchedJob:
    """Return what `torchrun` or `python -m torch.distributed.run` would start; any other command as it is.

    Raises:
        DryRunError: The options cannot be read, or do not tell the number of processes.
    """
    program, *words = command
    python = "python"
    if words[:1] == ["-m"] and words[1:2] and words[1] in _MODULES:
        python, words = program, words[2:]
    elif Path(program).name != "torchrun":
        return LaunchedJob(list(command))
    options = _parser().parse_args(words)
    if options.no_python or options.run_path or not options.script:
        raise DryRunError("a dry run needs the Python script that torchrun starts, as in `torchrun ... train.py`")
    per_node, nodes = _number(options.nproc_per_node, "--nproc-per-node"), _nodes(options.nnodes)
    script = ["-m", options.script] if options.module else [options.script]
    return LaunchedJob([python, *script, *options.arguments], per_node * nodes, per_node)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise DryRunError(f"torchrun: {message}")


def _parser() -> argparse.ArgumentParser:
    """Return a parser of torchrun's options, with either `-` or `_` in their names."""
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument(*_spellings("--nproc-per-node"), default="1")
    parser.add_argument("--nnodes", default="1")
    parser.add_argument("-m", "--module", action="store_true")
    parser.add_argument(*_spellings("--no-python"), action="store_true")
    parser.add_argument(*_spellings("--run-path"), action="store_true")
    parser.add_argument("-r", "--redirects")
    parser.add_argument("-t", "--tee")
    for name in _FLAGS:
        parser.add_argument(*_spellings(name), action="store_true")
    for name in _VALUES:
        parser.add_argument(*_spellings(name))
    parser.add_argument("script", nargs="?")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    return parser


def _spellings(name: str) -> tuple[str, ...]:
    other = "--" + name.removeprefix("--").replace("-", "_")
    return (name,) if other == name else (name, other)


def _nodes(text: str) -> int:
    return _number(text.rpartition(":")[2], "--nnodes")


def _number(text: str, name: str) -> int:
    if not text.isdecimal() or not int(text):
        raise DryRunError(f"torchrun: {name} is {text!r}; a dry run needs a number, as in {name} 8")
    return int(text)
