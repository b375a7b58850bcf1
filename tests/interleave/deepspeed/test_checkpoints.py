"""Checkpoints go both ways between plain DeepSpeed and ours, and from one policy to another."""

from typing import Any

import pytest

from .training import config, digest, engine, train


@pytest.mark.parametrize(
    ("saves", "loads"), [("twin-flow:0.5", None), ("interleaved:2", "adaptive"), ("adaptive", "pipelined")]
)
def test_what_one_saves_the_other_loads(deepspeed: Any, saves: str, loads: str | None, tmp_path: Any) -> None:
    settings = config("bf16", 2)
    with engine(saves, settings) as made:
        train(made, 3)
        made.save_checkpoint(tmp_path, tag="three")
        saved = digest(made)
        after = train(made, 2, seed=7)
        end = digest(made)
    with engine(loads, settings, seed=3) as made:
        made.load_checkpoint(tmp_path, tag="three")
        assert digest(made) == saved
        losses = train(made, 2, seed=7)
        if loads is None:
            assert losses == pytest.approx(after, abs=2e-3)
        else:
            assert (losses, digest(made)) == (after, end)


def test_saving_changes_nothing(deepspeed: Any, tmp_path: Any) -> None:
    found = []
    for saves in (False, True):
        with engine("twin-flow:0.5", config("bf16")) as made:
            losses = train(made, 2)
            if saves:
                made.save_checkpoint(tmp_path, tag="two")
            found.append((losses, train(made, 2, seed=4), digest(made)))
    assert found[0] == found[1]


def test_a_checkpoint_from_before_the_first_step(deepspeed: Any, tmp_path: Any) -> None:
    for saves, loads in ((None, "pipelined"), ("pipelined", None)):
        with engine(saves, config("bf16")) as made:
            made.save_checkpoint(tmp_path / str(saves), tag="zero")
        with engine(loads, config("bf16"), seed=2) as made:
            made.load_checkpoint(tmp_path / str(saves), tag="zero")
            train(made, 2)


def test_parameters_alone_can_be_loaded(deepspeed: Any, tmp_path: Any) -> None:
    """Without optimizer states the masters follow the parameters."""
    with engine(None, config("bf16")) as made:
        train(made, 2)
        made.save_checkpoint(tmp_path, tag="two")
    found = []
    for policy in (None, "interleaved:2"):
        with engine(policy, config("bf16"), seed=2) as made:
            made.load_checkpoint(tmp_path, tag="two", load_optimizer_states=False, load_module_only=True)
            masters = [master.detach().clone() for master in made.optimizer.fp32_partitioned_groups_flat]
            found.append([float(master.sum()) for master in masters])
    assert found[0] == found[1]
