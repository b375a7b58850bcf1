"""Makes the command of a dry run, and follows a launcher, such as `accelerate launch`,
to the job that it starts.

A launcher runs in the dry run like a job. One that trains in its own process is the
job; where it would start another one, `JobLaunched` ends it, and the dry run begins
again with the command of that process.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from ebbtide.features.dryrun.errors import DryRunError
from ebbtide.profiler.agent.patches import Patches

_PYTHON_OPTIONS_WITH_VALUE = ("-W", "-X")


def become_dry_run(
    command: Sequence[str],
    output: Path,
    settings: Mapping[str, Any],
    environment: Mapping[str, str],
) -> NoReturn:
    """Become a dry run with settings as in `DryRunOptions`; ranks that are not stated
    are those of a launcher."""
    words = dry_run_command(command, output, settings)
    sys.stdout.flush()
    os.execve(words[0], words, dict(environment))


def dry_run_command(
    command: Sequence[str],
    output: Path,
    settings: Mapping[str, Any],
    interpreter: str = sys.executable,
) -> list[str]:
    """Return the command of a dry run of a command; `interpreter`: the one that runs
    `python`."""
    python, options, job = split_command(command, interpreter)
    settings = {**settings, "ranks": settings["ranks"] or stated_ranks(job)}
    guest = settings.get("guest")
    program = ["-m", "ebbtide.features.dryrun"] if guest is None else [guest]
    own = ["-P", *program, str(output), json.dumps(settings)]
    return [python, *options, *own, *job]


def split_command(
    command: Sequence[str], interpreter: str = sys.executable
) -> tuple[str, list[str], list[str]]:
    """Return the interpreter of a command, its options, and the rest: a script, `-m
    MODULE` or `-c CODE`.

    `python` without a folder is `interpreter`, by default the one that runs ebbtide,
    since the dry run needs both. It also runs console scripts, such as
    `accelerate`."""
    program, *words = command = _without_runner(command)
    if Path(program).name == "torchrun":
        return interpreter, [], ["-m", TORCHRUN, *words]
    if Path(program).name in _NOTEBOOK_RUNNERS:
        words = [word for word in words if word.endswith(".ipynb")][:1]
        program, *_ = command = words or command
    if program.endswith((".py", ".ipynb")):
        return interpreter, [], list(command)
    if not Path(program).name.startswith("python"):
        script = find_script(program)
        if script is None:
            raise DryRunError(
                "a dry run needs a Python program, as in `ebbtide dry-run -- python "
                f"train.py`; {program} is "
                f"{'none' if shutil.which(program) else 'not found'}: name the script "
                "that it starts, and its ranks "
                "with --ranks"
            )
        return interpreter, [], [script, *words]
    python = interpreter if os.sep not in program else shutil.which(program)
    if python is None:
        raise DryRunError(f"cannot run {program}: no such program")
    options = []
    while words and words[0].startswith("-") and words[0] not in ("-m", "-c"):
        count = 2 if words[0] in _PYTHON_OPTIONS_WITH_VALUE else 1
        options += words[:count]
        words = words[count:]
    if not words or (words[0] in ("-m", "-c") and len(words) < 2):
        raise DryRunError(
            "a dry run needs a Python script, as in `ebbtide dry-run -- python "
            "train.py`"
        )
    return python, options, words


def _without_runner(command: Sequence[str]) -> list[str]:
    """Return the command that `uv run` and its kin run in their environments."""
    program, *words = command
    if Path(program).name not in _RUNNERS or words[:1] != ["run"]:
        return list(command)
    del words[0]
    while words and words[0].startswith("-") and words[0] not in ("-m", "--module"):
        count = 2 if words[0] in _RUNNER_OPTIONS_WITH_VALUE else 1
        words = words[1:] if words[0] == "--" else words[count:]
    module = words[:1] in (["-m"], ["--module"])
    return ["python", "-m", *words[1:]] if module else words or list(command)


def is_python_job(command: Sequence[str]) -> bool:
    """Return whether a command of Python, or a launcher, may train: not `-c CODE`,
    questions such as `--version`, and installers."""
    program, *words = command
    if not Path(program).name.startswith("python"):
        return True
    try:
        job = split_command(["python", *words])[2]
    except DryRunError:
        return False
    return job[0] != "-c" and job[:2] not in _TOOLS


# Programs that run others in an environment, and their options with a value.
_RUNNERS = frozenset({"uv", "poetry", "pdm", "pipenv", "hatch", "rye", "pixi", "conda"})
_RUNNER_OPTIONS_WITH_VALUE = frozenset(
    {"--with", "--with-requirements", "--with-editable", "--python", "-p", "--extra",
     "--group", "--env-file", "--project", "--directory", "--package", "--index",
     "--index-url", "-n", "--name", "-e", "--environment"}
)  # fmt: skip
_NOTEBOOK_RUNNERS = frozenset({"jupyter", "jupyter-nbconvert", "papermill"})
_TOOLS = (["-m", "pip"], ["-m", "venv"], ["-m", "ensurepip"])
TORCHRUN = "torch.distributed.run"
# Modules that start jobs; also those that console scripts start as processes in
# between.
_MODULES = frozenset(
    {"accelerate.commands.launch", "accelerate.commands.accelerate_cli",
     "deepspeed.launcher.runner",
     "deepspeed.launcher.launch", "axolotl.cli.main", "axolotl.cli.train",
     "llamafactory.cli", "trl.cli",
     TORCHRUN, "torch.distributed.launch"}
)  # fmt: skip
# Their options for the processes on a host, without which they take as many as there
# are devices.
_RANK_OPTIONS = re.compile(
    r"--(?:num[_-]processes|num[_-]gpus|nproc[_-]per[_-]node)(?:=(\d+))?"
)
_PYTHON_FLAGS = ("-u", "-P", "-I", "-E", "-s", "-O")
# How much of a file is read to find its interpreter.
MAX_SHEBANG = 256


class JobLaunched(BaseException):
    """Raised in a launcher that starts a job, past its `except Exception`. Ranks: None
    where the environment says."""

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        ranks: int | None = None,
        ranks_per_node: int | None = None,
    ) -> None:
        super().__init__()
        self.command, self.environment = list(command), dict(environment)
        self.ranks = ranks or _number(environment, "WORLD_SIZE")
        self.ranks_per_node = ranks_per_node or _number(
            environment, "LOCAL_WORLD_SIZE", "LOCAL_SIZE"
        )


def _number(environment: Mapping[str, str], *names: str) -> int | None:
    return next(
        (
            int(environment[name])
            for name in names
            if environment.get(name, "").isdecimal()
        ),
        None,
    )


def find_script(program: str) -> str | None:
    """Return the path of a console script that Python runs, by its name or path; None
    for other programs."""
    path = shutil.which(program)
    if path is None:
        return None
    with open(path, "rb") as file:
        first = file.readline(MAX_SHEBANG)
        if first.startswith(b"#!/bin/sh"):
            # pip's scripts where the path of the interpreter is long.
            first += file.readline(MAX_SHEBANG)
    return path if (first.startswith(b"#!") and b"python" in first) else None


def is_launcher(job: Sequence[str]) -> bool:
    """Return whether a job, a script or `-m MODULE` and its arguments, may start the
    training as another process."""
    if job[0] == "-m":
        return job[1] in _MODULES
    return job[0] != "-c" and not Path(job[0]).suffix


def stated_ranks(job: Sequence[str]) -> int | None:
    """Return the ranks that the options of a launcher state."""
    if not is_launcher(job):
        return None
    for word, value in zip(job, [*job[1:], ""], strict=True):
        option = _RANK_OPTIONS.fullmatch(word)
        number = option and (option[1] or value)
        if number and number.isdecimal():
            return int(number)
    return None


@contextmanager
def launcher_followed(job: Sequence[str]) -> Iterator[None]:
    """Let the start of a Python job raise `JobLaunched`, if a job is a launcher."""
    if not is_launcher(job):
        yield
        return
    patches = Patches()
    original = subprocess.Popen.__init__

    def start(process: Any, args: Any, *others: Any, **options: Any) -> None:
        if isinstance(args, list | tuple) and _is_job(
            [os.fspath(word) for word in args]
        ):
            raise JobLaunched(
                [os.fspath(word) for word in args], options.get("env") or os.environ
            )
        original(process, args, *others, **options)

    def replacing(function: Callable[..., Any]) -> Callable[..., Any]:
        def replace(file: Any, args: Any, environment: Any = None) -> Any:
            words = [os.fspath(word) for word in args]
            if os.path.exists(file) and _is_job(words):
                raise JobLaunched(words, environment or os.environ)
            return function(file, args, *([] if environment is None else [environment]))

        return replace

    patches.set(subprocess.Popen, "__init__", start)
    for name in ("execv", "execve"):  # which the other functions of their kind call
        patches.set(os, name, replacing(getattr(os, name)))
    patches.when_imported(
        "torch.distributed.launcher.api",
        lambda module: _follow_torchrun(module, patches),
    )
    try:
        yield
    finally:
        patches.undo()


def _follow_torchrun(module: Any, patches: Patches) -> None:
    original = module.launch_agent

    def launch(config: Any, entrypoint: Any, args: Any, **options: Any) -> Any:
        if not isinstance(entrypoint, str):
            return original(config, entrypoint, args, **options)
        per_node = config.nproc_per_node
        raise JobLaunched(
            [entrypoint, *args], os.environ, per_node * config.max_nodes, per_node
        )

    patches.set(module, "launch_agent", launch)


def _is_job(command: Sequence[str]) -> bool:
    """Return whether a command is Python with a script or a launcher, or a console
    script of a launcher."""
    program, *words = command
    if not Path(program).name.startswith("python"):
        return (
            Path(program).name in ("torchrun", "accelerate", "deepspeed")
            and find_script(program) is not None
        )
    while words and words[0] in _PYTHON_FLAGS:
        words = words[1:]
    if words[:1] == ["-m"]:
        return len(words) > 1 and words[1] in _MODULES
    return (
        bool(words)
        and Path(words[0]).suffix == ".py"
        and (program != sys.executable or Path(words[0]).is_file())
    )
