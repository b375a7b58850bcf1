"""A kind of operation with its lane, cost and function, and a policy: one package, and
no change of the core."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tests.conftest import run_process

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "gradient_checksum"
# Its arguments are a command of ebbtide, which runs at the end.
PROGRAM = """
import sys
from zlib import crc32

import torch
from gradient_checksum.performing import CHECKSUMS

from ebbtide.cli import run
from ebbtide.interleave import InterleavedAdamW


def train(policy):
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 64)
    optimizer = InterleavedAdamW(model.parameters(), policy=policy, subgroup_params=1000)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(8, 64)).square().sum().backward()
        optimizer.step()
    gradients = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    return optimizer, model.state_dict(), gradients


optimizer, ours, gradients = train("checked")
_, plain, _ = train("pipelined")
print("same bits:", all(torch.equal(ours[key], plain[key]) for key in plain))
print("operations:", optimizer.plan.counts()["checksum"])
schedule = optimizer.last_schedule
expected, begin = {}, 0
for number, size in enumerate(schedule.workload.subgroups):
    expected[number] = crc32(gradients[begin : begin + size].numpy())
    begin += size
print("checksums:", CHECKSUMS == expected)
spans = [(start, end) for op, start, end in schedule.items() if op.kind == "checksum"]
print("measured:", all(0 <= start <= end for start, end in spans) and "checker" in schedule.busy_shares())
sys.exit(run(sys.argv[1:]))
"""


def test_kind__of_a_package_is_planned_simulated_and_performed(tmp_path: Path) -> None:
    metadata = tmp_path / "gradient_checksum-0.1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: gradient-checksum\nVersion: 0.1\n"
    )
    (metadata / "entry_points.txt").write_text(
        "[ebbtide.features]\ngradient-checksum = gradient_checksum\n"
    )
    paths = os.pathsep.join(map(str, (tmp_path, EXAMPLE, ROOT)))
    environment = {**os.environ, "PYTHONPATH": paths}
    workload = ["--workload", str(ROOT / "examples/workload-13b.json")]
    command = ["replay", *workload, "--machine", "a100-40gb-published"]
    policies = ["--policy", "pipelined", "--policy", "checked"]
    program = [sys.executable, "-c", PROGRAM]
    run = run_process([*program, *command, *policies], env=environment, cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    *_, table = run.stdout.partition("measured: True\n")
    assert run.stdout.removesuffix(table).splitlines() == [
        "same bits: True",
        "operations: 5",
        "checksums: True",
        "measured: True",
    ]
    assert "checked" in table
