"""Commands that train on the stand-in, and DeepSpeed."""

import json
import sys
from pathlib import Path

import pytest

from tests.cuda_runtime.conftest import OnStandIn
from tests.features.dryrun.test_backends import JOB

POLICIES = ("zero-offload", "interleaved:2")


def test_compare__trains_on_the_device_with_equal_losses(
    on_stand_in: OnStandIn,
) -> None:
    # Without --machine it calibrates, as tests/features/calibrate/test_gpu.py does.
    options = ["--params", "1e5", "--steps", "3", "--machine", "rtx4090", "--json"]
    policies = [text for policy in POLICIES for text in ("--policy", policy)]
    done = on_stand_in(["-m", "ebbtide", "compare", *options, *policies])
    assert done.stderr == ""
    comparison = json.loads(done.stdout)
    assert comparison["device"]["name"] == "Stand-in for a GPU"
    assert not comparison["device"]["emulated"]
    assert comparison["losses_equal"]
    losses = {result["policy"]: result["losses"] for result in comparison["results"]}
    assert list(losses) == list(POLICIES)
    first, *_, last = losses["zero-offload"]
    assert first > last > 0
    assert losses["interleaved:2"] == losses["zero-offload"]


def test_enable__of_deepspeed_trains_on_the_device_with_equal_bits(
    on_stand_in: OnStandIn, tmp_path: Path
) -> None:
    pytest.importorskip("deepspeed", reason="needs DeepSpeed")
    policies = ["interleaved:2", "pipelined,overlap=forward"]
    done = on_stand_in(
        ["-m", "tests.cuda_runtime.deepspeed_job", str(tmp_path / "meeting"), *policies]
    )
    plain, *driven = json.loads(done.stdout.splitlines()[-1]).values()
    assert plain["optimizer"] == "DeepSpeedZeroOptimizer_Stage3"
    assert {run["device"] for run in (plain, *driven)} == {"cuda:0"}
    assert {run["optimizer"] for run in driven} == {"InterleavedStage3"}
    assert [run["losses"] for run in driven] == [plain["losses"]] * 2
    assert driven[0]["digest"] == driven[1]["digest"]


OWN_JOB = """
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(),
                      nn.Linear(64, 16)).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step in range(8):
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(step)).cuda()
    loss = (model(x) - x).square().mean()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()
    print(f"loss {loss.item():.6f}", flush=True)
entry = optimizer.state[model[0].weight]
print(int(entry["step"]), "steps,", optimizer.__dict__["state"][model[0].weight]
      ["exp_avg"].device)
"""


def losses_of(text: str) -> list[float]:
    lines = [line.split() for line in text.splitlines() if line.startswith("loss")]
    return [float(loss) for _, loss in lines]


def test_run__drives_a_job_on_the_device(
    on_stand_in: OnStandIn, tmp_path: Path
) -> None:
    job = tmp_path / "train.py"
    job.write_text(OWN_JOB)
    bare = losses_of(on_stand_in([str(job)]).stdout)
    words = ["-m", "ebbtide", "run", "--machine", "rtx4090", "-o"]
    command = ["--", sys.executable, "-W", "ignore", str(job)]
    part = [str(tmp_path / "part.ebb"), "--memory-budget", "30kB"]
    done = on_stand_in([*words, *part, *command])
    assert losses_of(done.stdout) == pytest.approx(bare, abs=2e-6)
    assert "8 steps under adaptive" in done.stderr
    assert "resident" in done.stderr
    # All of it fits: torch has its state on the device.
    done = on_stand_in([*words, str(tmp_path / "whole.ebb"), *command])
    assert losses_of(done.stdout) == pytest.approx(bare, abs=2e-6)
    assert "8 steps, cuda:0" in done.stdout
    assert "then left to torch: its whole state fits" in done.stderr


def test_compare__of_a_command_has_equal_bits_on_the_device(
    on_stand_in: OnStandIn, tmp_path: Path
) -> None:
    job = tmp_path / "train.py"
    job.write_text(OWN_JOB)
    options = ["--machine", "rtx4090", "--memory-budget", "30kB", "--json"]
    policies = [text for policy in POLICIES for text in ("--policy", policy)]
    command = ["--", sys.executable, "-W", "ignore", str(job)]
    done = on_stand_in(["-m", "ebbtide", "compare", *options, *policies, *command])
    comparison = json.loads(done.stdout)
    assert comparison["equal"] == {"losses": True, "parameters": True}
    assert not comparison["emulated"]
    _, *driven = comparison["runs"]
    assert [run["policy"] for run in driven] == list(POLICIES)
    assert all(run["optimizers"][0]["steps"] == 8 for run in driven)
    assert comparison["against_job"]["loss"] < 1e-5


def test_dry_run__calls_neither_runtime_nor_driver(on_stand_in: OnStandIn) -> None:
    done = on_stand_in(JOB, fail="cu:1:999:sticky")
    figures = json.loads(done.stdout)
    assert figures["phases"] == ["forward", "backward", "update"] * 2
    assert figures["peak_bytes"] > 70_000_000
