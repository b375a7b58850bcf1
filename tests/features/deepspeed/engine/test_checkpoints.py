"""Checkpoints: they load both ways between plain DeepSpeed and ebbtide, and from one
policy to another."""

from typing import Any

import pytest
import torch

from ebbtide.interleave.engine.errors import EngineError
from tests.conftest import slow_case

from .training import config, digest, engine, train


@pytest.mark.parametrize(
    ("saves", "loads"),
    [
        slow_case("twin-flow:0.5", None),
        ("interleaved:2,overlap=forward", "adaptive"),
        slow_case("adaptive", "pipelined,overlap=forward"),
    ],
)
def test_load_checkpoint__loads_across_policies_and_plain_deepspeed(
    deepspeed: Any, saves: str, loads: str | None, tmp_path: Any
) -> None:
    settings = config("bf16", 2)
    with engine(saves, settings) as running:
        train(running, 3)
        running.save_checkpoint(tmp_path, tag="three")
        saved = digest(running)
        after = train(running, 2, seed=7)
        end = digest(running)
    with engine(loads, settings, seed=3) as running:
        running.load_checkpoint(tmp_path, tag="three")
        assert digest(running) == saved
        losses = train(running, 2, seed=7)
        if loads is None:
            assert losses == pytest.approx(after, abs=2e-3)
        else:
            assert (losses, digest(running)) == (after, end)


@pytest.mark.slow
def test_save_checkpoint__changes_nothing(deepspeed: Any, tmp_path: Any) -> None:
    results = []
    for saves in (False, True):
        with engine("twin-flow:0.5", config("bf16")) as running:
            losses = train(running, 2)
            if saves:
                running.save_checkpoint(tmp_path, tag="two")
            results.append((losses, train(running, 2, seed=4), digest(running)))
    assert results[0] == results[1]


def test_load_checkpoint__from_before_the_first_step(
    deepspeed: Any, tmp_path: Any
) -> None:
    for saves, loads in ((None, "pipelined"), ("pipelined", None)):
        with engine(saves, config("bf16")) as running:
            running.save_checkpoint(tmp_path / str(saves), tag="zero")
        with engine(loads, config("bf16"), seed=2) as running:
            running.load_checkpoint(tmp_path / str(saves), tag="zero")
            train(running, 2)


def test_load_checkpoint__loads_parameters_only(deepspeed: Any, tmp_path: Any) -> None:
    """Without optimizer states the masters are set to the parameters."""
    with engine(None, config("bf16")) as running:
        train(running, 2)
        running.save_checkpoint(tmp_path, tag="two")
    results = []
    for policy in (None, "interleaved:2"):
        with engine(policy, config("bf16"), seed=2) as running:
            running.load_checkpoint(
                tmp_path, tag="two", load_optimizer_states=False, load_module_only=True
            )
            masters = [
                master.detach().clone()
                for master in running.optimizer.fp32_partitioned_groups_flat
            ]
            results.append([float(master.sum()) for master in masters])
    assert results[0] == results[1]


def test_load_state_dict__refuses_what_lacks_a_part_of_the_state_and_changes_nothing(
    deepspeed: Any,
) -> None:
    with engine("interleaved:2", config("bf16")) as running:
        train(running, 2)
        saved, before = running.optimizer.state_dict(), digest(running)
        inner = saved["optimizer_state_dict"]
        moments = {
            number: {**entry, "exp_avg_sq": torch.empty(0)}
            for number, entry in inner["state"].items()
        }
        first = {number: entry for number, entry in inner["state"].items() if number}
        wrong = [
            {**saved, "zero_stage": 2},
            {**saved, "partition_count": 2},
            {**saved, "fp32_flat_groups": saved["fp32_flat_groups"][1:]},
            {**saved, "optimizer_state_dict": {**inner, "state": moments}},
            {**saved, "optimizer_state_dict": {**inner, "state": first}},
        ]
        for state_dict in wrong:
            with pytest.raises(EngineError, match="the checkpoint has"):
                running.optimizer.load_state_dict([state_dict])
            assert digest(running) == before
        running.optimizer.load_state_dict([saved])
        assert digest(running) == before
