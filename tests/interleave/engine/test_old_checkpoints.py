"""Checkpoints of earlier versions are read, and training goes on with the same bits."""

from pathlib import Path

import pytest
import torch

from tests.interleave.engine.checkpoints.make import (
    RULES,
    make_model,
    make_optimizer,
    train,
)

CHECKPOINTS = sorted((Path(__file__).parent / "checkpoints").glob("*.pt"))


@pytest.mark.parametrize("kind", RULES)
@pytest.mark.parametrize("path", CHECKPOINTS, ids=lambda path: path.stem)
def test_old_checkpoint__goes_on_with_the_bits_of_its_own_version(
    path: Path, kind: str
) -> None:
    checkpoint = torch.load(path, weights_only=True)[kind]
    model = make_model()
    model.load_state_dict(checkpoint["model"])
    optimizer = make_optimizer(model, kind)
    optimizer.load_state_dict(checkpoint["optimizer"])
    train(model, optimizer, steps=1, seed=2)
    optimizer.close()
    for name, value in model.state_dict().items():
        assert torch.equal(value, checkpoint["next"][name]), name
