"""Launchers: the script that they start, and the number of ranks."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from ebbtide.features.dryrun.errors import DryRunError
from ebbtide.features.dryrun.launch import (
    JobLaunched,
    launcher_followed,
    split_command,
    stated_ranks,
)
from ebbtide.profiler.trace import open_trace
from tests.conftest import ebbtide
from tests.features.dryrun.forked import run_forked


def test_split_command__runs_torchrun_of_its_own_interpreter() -> None:
    job = ["-m", "torch.distributed.run", "--nproc_per_node=8", "t.py"]
    assert split_command(["/x/torchrun", *job[2:]]) == (sys.executable, [], job)
    assert stated_ranks(job) == 8


def test_stated_ranks__are_those_of_a_launchers_options() -> None:
    assert (
        stated_ranks(
            ["/v/bin/accelerate", "launch", "--num_processes", "4", "train.py"]
        )
        == 4
    )
    assert stated_ranks(["/v/bin/tune", "run", "--nproc_per_node=2", "recipe"]) == 2
    assert stated_ranks(["/v/bin/deepspeed", "--num_gpus=8", "train.py"]) == 8
    assert stated_ranks(["train.py", "--num_processes", "4"]) is None


def test_split_command__finds_console_scripts_and_refuses_other_programs(
    tmp_path: Path,
) -> None:
    script = tmp_path / "tune"
    script.write_text(f"#!{sys.executable}\nprint('tuned')\n")
    script.chmod(0o755)
    assert split_command([str(script), "run"]) == (
        sys.executable,
        [],
        [str(script), "run"],
    )
    with pytest.raises(DryRunError, match="ls is none"):
        split_command(["ls", "-l"])
    with pytest.raises(DryRunError, match="no-such-launcher is not found"):
        split_command(["no-such-launcher"])


JOB = """
import sys, torch
from accelerate import Accelerator
accelerator = Accelerator()
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64))
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
print("ranks", accelerator.num_processes, type(model).__name__, sys.argv[1:])
for step in range(3):
    accelerator.backward(model(torch.randn(4, 64, device=accelerator.device)).sum())
    optimizer.step()
    optimizer.zero_grad()
"""
TORCH_JOB = """
import sys, torch
torch.distributed.init_process_group("nccl")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64).to("cuda"))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
print("ranks", torch.distributed.get_world_size(), type(model).__name__, sys.argv[1:])
for step in range(3):
    model(torch.randn(4, 64, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
DEEPSPEED_JOB = """
import torch, deepspeed
model = torch.nn.Linear(64, 64)
config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "Adam", "params": {}}}
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
print("ranks", torch.distributed.get_world_size(), type(engine).__name__, [])
for step in range(3):
    engine.backward(engine(torch.randn(4, 64, device=engine.device)).sum())
    engine.step()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "job", "line"),
    [
        (
            "torchrun --nproc-per-node 2 --nnodes 1:2",
            TORCH_JOB,
            "ranks 4 DistributedDataParallel ['--lr', '1']",
        ),
        (
            "torchrun --nproc-per-node 2 --nnodes 1:2",
            JOB,
            "ranks 4 DistributedDataParallel ['--lr', '1']",
        ),
        (
            "torchrun --nproc-per-node gpu --standalone",
            JOB,
            "ranks 1 Sequential ['--lr', '1']",
        ),
        (
            "accelerate launch --num_processes 4",
            JOB,
            "ranks 4 DistributedDataParallel ['--lr', '1']",
        ),
        ("accelerate launch", JOB, "ranks 1 Sequential ['--lr', '1']"),
        (
            "accelerate launch --num_processes 2 --mixed_precision bf16 --use_fsdp "
            "--fsdp_version 2",
            JOB,
            "ranks 2 FSDPSequential ['--lr', '1']",
        ),
        ("deepspeed --num_gpus 2", DEEPSPEED_JOB, "ranks 2 DeepSpeedEngine []"),
    ],
)
def test_dry_run__follows_launchers_to_their_job(
    launcher: str, job: str, line: str, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(job)
    program, *words = launcher.split()
    command = [Path(sys.executable).parent / program, *words, "train.py", "--lr", "1"]
    process = ebbtide("dry-run", "-o", "run.ebb", "--", *command, cwd=tmp_path)
    assert process.returncode == 0, process.stderr
    assert line in process.stdout
    assert open_trace(tmp_path / "run.ebb").meta.exit.code == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--no-python", "ls"], "ls is none: name the script that it starts"),
        (["--unknown", "t.py"], "unrecognized arguments: --unknown"),
    ],
)
def test_dry_run__says_what_a_launcher_cannot_start(
    words: list[str], message: str, tmp_path: Path
) -> None:
    process = ebbtide(
        "dry-run", "-o", "run.ebb", "--", "torchrun", *words, cwd=tmp_path
    )
    assert process.returncode == 2
    assert message in process.stderr
    assert "Traceback" not in process.stderr


@pytest.mark.parametrize("function", ["execvpe", "execv"])
def test_launcher_followed__sees_a_job_that_replaces_the_launcher(
    function: str,
) -> None:
    command = [sys.executable, "-m", "accelerate.commands.launch", "train.py"]

    def launch() -> Any:
        environment = [{"WORLD_SIZE": "4"}] if function == "execvpe" else []
        try:
            with launcher_followed(["/v/bin/axolotl"]):
                getattr(os, function)(sys.executable, command, *environment)
        except JobLaunched as launched:
            return launched.command, launched.ranks

    assert run_forked(launch) == (command, 4 if function == "execvpe" else None)


@pytest.mark.parametrize(
    ("command", "job"),
    [
        (["uv", "run", "train.py", "-x"], ["train.py", "-x"]),
        (["uv", "run", "--with", "wandb", "-m", "train"], ["-m", "train"]),
        (["poetry", "run", "--", "python", "-u", "train.py"], ["train.py"]),
        (["papermill", "a.ipynb", "b.ipynb", "-p", "x", "1"], ["a.ipynb"]),
        (["jupyter", "nbconvert", "--execute", "a.ipynb"], ["a.ipynb"]),
    ],
)
def test_split_command__leaves_out_what_runs_jobs_in_an_environment(
    command: list[str], job: list[str]
) -> None:
    assert split_command(command)[2] == job


TRAIN = """
import os, torch
model = torch.nn.Linear(64, 64).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(9):
    model(torch.ones(4, 64, device="cuda")).sum().backward()
    optimizer.step()
"""
SHELL = """#!/bin/sh
set -e
python --version
python -c "print('probe')"
python prepare.py
SIZE=8 python -u train.py "$@"
python prepare.py evaluated
"""


def test_dry_run__follows_a_shell_script_to_the_job_that_trains(tmp_path: Path) -> None:
    (tmp_path / "prepare.py").write_text("import sys; print('prepared', sys.argv[1:])")
    (tmp_path / "train.py").write_text(
        TRAIN + "assert os.environ['SIZE'] == '8' and not optimizer"
    )
    (tmp_path / "run.sh").write_text(SHELL)
    (tmp_path / "run.sh").chmod(0o755)
    command = ("dry-run", "-o", "run.ebb", "--", "env", "A=1", "./run.sh")
    process = ebbtide(*command, cwd=tmp_path)
    assert process.returncode == 0, process.stderr
    assert process.stdout.splitlines()[1:] == ["probe", "prepared []"]
    assert "left out, since a job has been run: python prepare.py" in process.stderr
    assert len(open_trace(tmp_path / "run.ebb").phases(0)) == 6


def test_dry_run__replaces_a_trace_of_a_job_that_a_program_starts(
    tmp_path: Path,
) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    job = ("--", "env", "python", "train.py")
    for options in (("--steps", "1"), ("--force",)):
        process = ebbtide("dry-run", "-o", "run.ebb", *options, *job, cwd=tmp_path)
        assert process.returncode == 0, process.stderr
    assert len(open_trace(tmp_path / "run.ebb").phases(0)) == 6


def test_dry_run__says_that_a_program_has_started_no_job(tmp_path: Path) -> None:
    process = ebbtide("dry-run", "--", "env", "true", cwd=tmp_path)
    assert process.returncode == 2
    assert process.stderr.endswith(
        "env started no Python job: name the script that trains\n"
    )


def test_dry_run__runs_a_notebook(tmp_path: Path) -> None:
    cells = ["%pip install x\n!ls", "%%bash\nls", "%%time" + TRAIN, "display(model)"]
    notebook = {
        "cells": [{"cell_type": "code", "source": [source]} for source in cells]
        + [{"cell_type": "markdown", "source": ["# Title"]}]
    }
    (tmp_path / "a.ipynb").write_text(json.dumps(notebook))
    process = ebbtide("dry-run", "-o", "run.ebb", "--", "a.ipynb", cwd=tmp_path)
    assert process.returncode == 0, process.stderr
    assert "4 lines of a.ipynb are magics, which are left out" in process.stderr
    assert len(open_trace(tmp_path / "run.ebb").phases(0)) == 6
    (tmp_path / "a.ipynb").write_text("no notebook")
    process = ebbtide("dry-run", "--", "a.ipynb", cwd=tmp_path)
    assert process.returncode == 2
    assert "a.ipynb cannot be read as a notebook" in process.stderr
