"""The printed blocks: DeepSpeed reads each configuration, and real jobs of two steps
run with each, as printed."""

from __future__ import annotations

import json
import os
import re
import socket
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from ebbtide.features.advise.choice import DEEPSPEED_OVERLAP, OPTIMIZER_OVERLAP
from tests.conftest import ebbtide_in_process, run_process, slow
from tests.features.advise.filled import filled
from tests.interleave.job_files import MACHINE

ROOT = Path(__file__).parents[3]
OVERLAPPED = f"adaptive,overlap={OPTIMIZER_OVERLAP}"
ENGINE_POLICIES = (OVERLAPPED, "adaptive", "interleaved", "pipelined")
POLICIES = (*ENGINE_POLICIES, "twin-flow", "zero-offload", "gpu-only")
# The parameters of the model of the jobs, whose state does not fit at all times.
WORKLOAD: dict[str, Any] = {
    "name": "small",
    "params": 38_171,
    "subgroup_params": 9_000,
    "forward_s": 0.2,
    "backward_s": 0.6,
    "gpu_free_bytes": [
        {"at_s": 0, "bytes": 250e3},
        {"at_s": 0.2, "bytes": 260e3},
        {"at_s": 0.8, "bytes": 350e3},
    ],
}
STEPS = 2


@cache
def recommendation(workload: str) -> str:
    """Return what `replay --recommend` prints for a workload, as JSON."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "w.json").write_text(workload)
        (folder / "m.json").write_text(json.dumps(MACHINE))
        command = (
            "replay --workload w.json --machine m.json --policy zero-offload "
            "--recommend --all"
        )
        done = ebbtide_in_process(*command.split(), cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


def printed_blocks(policy: str) -> dict[str, list[str]]:
    """Print a recommendation, and return the policy's string and its blocks: JSON, and
    lines of Python."""
    changes: dict[str, dict[str, float]] = {
        "gpu-only": {"gpu_free_bytes": 1e9},
        # Phases about as short as the update, which has much to gain there.
        OVERLAPPED: {"gpu_free_bytes": 250e3, "forward_s": 2e-5, "backward_s": 6e-5},
    }
    printed = filled(recommendation(json.dumps(WORKLOAD | changes.get(policy, {}))))
    sections = re.split(r"^(\S+): .* an iteration.*\n-+$", printed, flags=re.MULTILINE)
    for name, section in zip(sections[1::2], sections[2::2], strict=True):
        if name.partition(":")[0] == policy:
            multiline = re.MULTILINE | re.DOTALL
            return {
                "policy": [name],
                "json": re.findall(r"^\{\n.*?^\}$", section, multiline),
                "python": re.findall(r"^from ebbtide.*?^\)$", section, multiline),
            }
    pytest.fail(f"nothing is printed for {policy}:\n{printed}")


@pytest.mark.parametrize("policy", slow(POLICIES, but=POLICIES[1:]))
def test_recommend__deepspeed_reads_each_printed_configuration(
    policy: str, deepspeed_extensions: None
) -> None:
    from deepspeed.runtime.config import DeepSpeedConfig

    blocks = printed_blocks(policy)
    (text,) = blocks["json"]
    config = DeepSpeedConfig(json.loads(text))
    zero = config.zero_config
    assert (zero.stage, zero.sub_group_size, config.gradient_clipping) == (
        3,
        9_000,
        1.0,
    )
    assert config.bfloat16_config.enabled
    offload = zero.offload_optimizer
    assert offload is not None
    assert str(offload.device) == ("none" if policy == "gpu-only" else "cpu")
    if policy == "twin-flow":
        assert blocks["policy"] == [f"twin-flow:{offload.ratio:g}"]
        assert 0 <= offload.ratio < 1
    else:
        assert offload.ratio == 1
    assert len(blocks["python"]) == (2 if policy in ENGINE_POLICIES else 0)


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_recommend__jobs_run_with_the_blocks_as_printed(
    policy: str, deepspeed_extensions: None, tmp_path: Path
) -> None:
    (tmp_path / "blocks.json").write_text(json.dumps(printed_blocks(policy)))
    # The lines read the machine's file again.
    (tmp_path / "m.json").write_text(json.dumps(MACHINE))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        rank = {
            "RANK": "0",
            "LOCAL_RANK": "0",
            "WORLD_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1",
        }
        port = {"MASTER_PORT": str(probe.getsockname()[1])}
    environment = {
        **os.environ,
        **rank,
        **port,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
    }
    done = run_process([sys.executable, "-m", __name__], cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.splitlines()[-1] == (
        "2 jobs" if policy in ENGINE_POLICIES else "1 job"
    )


def run_deepspeed(policy: str, config: str, code: str | None) -> None:
    """Run a job of DeepSpeed with a printed configuration, and printed lines before
    it."""
    import deepspeed

    from tests.features.deepspeed.engine.training import Model, train

    Path("ds_config.json").write_text(config)
    deepspeed.init_distributed("gloo", verbose=False)
    if code is not None:
        exec(code, {})
    model = Model()
    assert sum(param.numel() for param in model.parameters()) == WORKLOAD["params"]
    # Without offload, DeepSpeed uses its FusedAdam, which takes minutes to compile.
    optimizer = torch.optim.AdamW(model.parameters()) if policy == "gpu-only" else None
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        model_parameters=model.parameters(),
        config="ds_config.json",
        dist_init_required=False,
    )
    losses = train(engine, STEPS)
    assert torch.isfinite(torch.tensor(losses)).all()
    assert (engine.global_steps, engine.skipped_steps) == (STEPS, 0)
    if code is None:
        assert not hasattr(engine.optimizer, "ebbtide_policy")
    else:
        # DeepSpeed runs another overlap.
        expected = (
            f"adaptive,overlap={DEEPSPEED_OVERLAP}" if policy == OVERLAPPED else policy
        )
        assert engine.optimizer.ebbtide_policy == expected
        assert engine.optimizer.last_schedule.plan.policy == expected
    engine.destroy()


def run_torch(policy: str, code: str) -> None:
    """Run a job without DeepSpeed with printed lines, which need a name `model` and
    make `optimizer`."""
    from tests.features.deepspeed.engine.training import WIDTH, Model

    torch.manual_seed(0)
    model = Model().to(torch.bfloat16)
    before = [param.detach().clone() for param in model.parameters()]
    names: dict[str, Any] = {"model": model}
    exec(code, names)
    optimizer = names["optimizer"]
    for _ in range(STEPS):
        loss = F.cross_entropy(
            model(torch.randn(4, WIDTH, dtype=torch.bfloat16)).float(),
            torch.randint(0, 7, (4,)),
        )
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert torch.isfinite(loss)
    optimizer.synchronize()
    assert optimizer.last_schedule.plan.policy == policy
    assert any(
        not torch.equal(old, new)
        for old, new in zip(before, model.parameters(), strict=True)
    )
    optimizer.close()


def main() -> None:
    blocks = json.loads(Path("blocks.json").read_text())
    (policy,), (config,), python = blocks["policy"], blocks["json"], blocks["python"]
    call, optimizer = python or (None, None)
    run_deepspeed(policy, config, call)
    if optimizer is not None:
        run_torch(policy, optimizer)
    torch.distributed.destroy_process_group()
    print("1 job" if optimizer is None else "2 jobs")


if __name__ == "__main__":
    main()
