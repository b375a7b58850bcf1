"""Commands of torchrun: the script that they start, and the number of ranks."""

from __future__ import annotations

import pytest

from ebbtide.profiler.dryrun.errors import DryRunError
from ebbtide.profiler.dryrun.launch import LaunchedJob, read_launcher


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (["python", "train.py"], LaunchedJob(["python", "train.py"])),
        (["torchrun", "train.py"], LaunchedJob(["python", "train.py"], 1, 1)),
        (
            ["torchrun", "--standalone", "--nproc_per_node=8", "train.py", "--nnodes", "3"],
            LaunchedJob(["python", "train.py", "--nnodes", "3"], 8, 8),
        ),
        (
            ["/x/torchrun", "--nnodes", "1:4", "--nproc-per-node", "2", "--rdzv-endpoint", "h:1", "-m", "a.b", "c"],
            LaunchedJob(["python", "-m", "a.b", "c"], 8, 2),
        ),
        (
            ["/v/bin/python", "-m", "torch.distributed.run", "--nproc-per-node", "2", "t.py"],
            LaunchedJob(["/v/bin/python", "t.py"], 2, 2),
        ),
    ],
)
def test_read_launcher__finds_script_and_ranks(command: list[str], expected: LaunchedJob) -> None:
    assert read_launcher(command) == expected


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--nproc-per-node", "gpu", "t.py"], "--nproc-per-node is 'gpu'; a dry run needs a number"),
        (["--no-python", "t.sh"], "needs the Python script"),
        ([], "needs the Python script"),
        (["--unknown", "t.py"], "unrecognized arguments|needs the Python script"),
        (["--nnodes"], "expected one argument"),
    ],
)
def test_read_launcher__says_what_is_missing(words: list[str], message: str) -> None:
    with pytest.raises(DryRunError, match=message):
        read_launcher(["torchrun", *words])
