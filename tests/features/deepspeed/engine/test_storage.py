"""ZeRO-3 with state in files: the bits of `enable` without storage, checkpoints, and
commits to go on from."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ebbtide.interleave.deepspeed import enable
from ebbtide.interleave.engine.errors import EngineError
from ebbtide.machines.machine import StoragePath
from tests.conftest import slow_case
from tests.interleave.engine.training import MACHINE

from .training import batches, config, digest, engine, loss_of, train

# All state of the job takes 458 kB, and copies of gradients and parameters 153 kB in
# bf16 and 305 kB in fp32.
SMALL = {"bf16": 300e3, "fp32": 450e3}
# More slices than buffers.
SLICE = 5_003


@contextmanager
def storing(
    folders: list[Path], policy: str, settings: dict[str, Any], **options: Any
) -> Iterator[Any]:
    for folder in folders:
        folder.mkdir(exist_ok=True)
    paths = tuple(StoragePath(1e8, 1e8, path=str(folder)) for folder in folders)
    budget = SMALL["bf16" if "bf16" in settings else "fp32"]
    options = {
        "storage": folders,
        "host_memory_budget": budget,
        "subgroup_params": SLICE,
        **options,
    }
    with engine(
        policy, settings, machine=replace(MACHINE, storage=paths), **options
    ) as running:
        yield running


@pytest.mark.parametrize(
    ("policy", "overlap", "accumulate", "dtype"),
    [
        slow_case("pipelined", "none", 2, "bf16"),
        slow_case("pipelined", "forward", 1, "bf16"),
        ("adaptive", "forward", 1, "fp32"),
        slow_case("adaptive", "none", 1, "bf16"),
    ],
)
def test_step__gives_the_bits_of_steps_without_storage(
    deepspeed: Any,
    tmp_path: Path,
    policy: str,
    overlap: str,
    accumulate: int,
    dtype: str,
) -> None:
    settings, results = config(dtype, accumulate), []
    with engine("zero-offload", settings) as running:
        results.append(
            (
                train(running, 5),
                digest(running),
                train(running, 2, seed=3),
                digest(running),
            )
        )
    folders = [tmp_path / "a", tmp_path / "b"]
    with storing(
        folders, policy, settings, overlap=overlap, memory_budget=20e3
    ) as running:
        results.append(
            (
                train(running, 5),
                digest(running),
                train(running, 2, seed=3),
                digest(running),
            )
        )
        assert running.optimizer._runner.plan.stored
        assert (
            running.optimizer._runner.engine.store.host_bytes
            <= SMALL[dtype] + 3 * 8192 * 12
        )
    assert results[0] == results[1]
    assert not list(tmp_path.glob("*/*")), "files without a commit are left behind"


def read_and_set(running: Any) -> list[float]:
    """Train, read state and gradients between backward and step, and set some of them;
    return what was read."""
    from deepspeed import utils

    weight, bias = running.module.blocks[2][0].weight, running.module.head.bias
    readings = train(running, 2)
    for batch in batches(running, 1, seed=6):
        running.backward(loss_of(running, batch))
        readings.append(utils.safe_get_full_grad(weight).sum().item())
        readings.append(utils.safe_get_full_fp32_param(weight).sum().item())
        readings.append(
            utils.safe_get_full_optimizer_state(bias, "exp_avg").sum().item()
        )
        running.step()
    utils.safe_set_full_fp32_param(bias, torch.full(bias.ds_shape, 0.25))
    utils.safe_set_full_optimizer_state(
        weight, torch.ones(weight.ds_shape), "exp_avg_sq"
    )
    return [*readings, *train(running, 2, seed=7)]


@pytest.mark.slow
def test_state__is_read_set_saved_and_loaded_as_without_storage(
    deepspeed: Any, tmp_path: Path
) -> None:
    settings = config("bf16")
    with engine("zero-offload", settings) as running:
        expected = [read_and_set(running), digest(running)]
        running.save_checkpoint(tmp_path / "held", tag="five")
        expected += [train(running, 2, seed=8), digest(running)]
    with storing(
        [tmp_path / "files"], "pipelined", settings, overlap="forward"
    ) as running:
        assert [read_and_set(running), digest(running)] == expected[:2]
        running.save_checkpoint(tmp_path / "stored", tag="five")
        assert [train(running, 2, seed=8), digest(running)] == expected[2:]
        # The next backward has released the host memory.
        train(running, 1)
        assert sum(master.numel() for master in running.optimizer._masters) == 0
        running.load_checkpoint(tmp_path / "held", tag="five")
        loaded = [digest(running), train(running, 2, seed=8), digest(running)]
    with engine("zero-offload", settings, seed=3) as running:
        running.load_checkpoint(tmp_path / "stored", tag="five")
        assert [digest(running), train(running, 2, seed=8), digest(running)] == loaded
    assert loaded[:2] == expected[1:3]


def test_commit__is_what_another_engine_goes_on_from(
    deepspeed: Any, tmp_path: Path
) -> None:
    """With the bits of a run without an interruption, whatever was written to the files
    after the commit."""
    from deepspeed.utils import safe_set_full_fp32_param

    settings, folders = config("bf16"), [tmp_path / "a", tmp_path / "b"]
    with engine("zero-offload", settings) as running:
        expected = [
            train(running, 3),
            digest(running),
            train(running, 3, seed=5),
            digest(running),
        ]
    with storing(folders, "pipelined", settings) as running:
        assert train(running, 3) == expected[0]
        checkpoint = {
            "optimizer": running.optimizer.commit(),
            "scheduler": running.lr_scheduler.state_dict(),
        }
        torch.save(checkpoint, tmp_path / "checkpoint.pt")
        train(running, 2, seed=9)
    checkpoint = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    with storing(folders, "pipelined", settings, overlap="forward", seed=4) as running:
        running.optimizer.load_commit(checkpoint["optimizer"])
        running.lr_scheduler.load_state_dict(checkpoint["scheduler"])
        assert [
            digest(running),
            train(running, 3, seed=5),
            digest(running),
        ] == expected[1:]
        # Also in the middle of an iteration.
        for batch in batches(running, 1):
            running.backward(loss_of(running, batch))
            safe_set_full_fp32_param(running.module.head.bias, torch.ones(7))
        running.optimizer.load_commit(checkpoint["optimizer"])
        running.lr_scheduler.load_state_dict(checkpoint["scheduler"])
        assert [
            digest(running),
            train(running, 3, seed=5),
            digest(running),
        ] == expected[1:]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"storage": "/nowhere"}, "storage /nowhere is not a folder: create it"),
        ({"host_memory_budget": 1e9}, "host_memory_budget needs storage="),
        (
            {"storage": "/tmp", "host_memory_budget": 0},
            "host_memory_budget is 0: it must be bytes, above 0",
        ),
    ],
)
def test_enable__refuses_options_of_storage_that_are_not_valid(
    deepspeed: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(EngineError, match=message):
        enable("pipelined", beside=True, **options)


def test_commit__needs_storage_and_the_same_model(
    deepspeed: Any, tmp_path: Path
) -> None:
    settings = config("bf16")
    commit = {"storage": {}, "steps": [0], "param_groups": [{}], "loss_scaler": {}}
    with engine("pipelined", settings) as running:
        with pytest.raises(
            EngineError, match=r"commit.. is for optimizers with storage="
        ):
            running.optimizer.commit()
        with pytest.raises(EngineError, match=r"call enable.*storage=FOLDER"):
            running.optimizer.load_commit(commit)
    with storing([tmp_path], "pipelined", settings) as running:
        with pytest.raises(
            EngineError,
            match=r"not what commit.. of an engine's optimizer has returned",
        ):
            running.optimizer.load_commit({"run": "x"})
        with pytest.raises(
            EngineError, match="commit of another model: it has 1 subgroups"
        ):
            running.optimizer.load_commit(commit)
