"""Two ranks, whose parts of the parameters end in padding."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import run_process

POLICIES = ("zero-offload", "twin-flow:0.5", "adaptive")
ROOT = Path(__file__).parents[3]


def job(folder: Path) -> None:
    """What each rank does: all policies after each other, and a checkpoint of one that another loads."""
    import deepspeed

    from .training import config, digest, engine, train

    deepspeed.init_distributed("gloo", verbose=False)
    found: dict[str, Any] = {}
    for policy in POLICIES:
        with engine(policy, config("bf16", 2)) as made:
            found[policy] = train(made, 3), digest(made)
            if policy == "twin-flow:0.5":
                made.save_checkpoint(folder, tag="three")
                found["further"] = train(made, 2, seed=5), digest(made)
    with engine("interleaved:2", config("bf16", 2), seed=4) as made:
        made.load_checkpoint(folder, tag="three")
        found["loaded"] = train(made, 2, seed=5), digest(made)
    with engine(None, config("bf16", 2)) as made:
        found["plain"] = train(made, 3), ""
    (folder / f"{os.environ['RANK']}.json").write_text(json.dumps(found))


def test_two_ranks(deepspeed_extensions: None, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    done = run_process([*command, "-m", __name__, tmp_path], cwd=ROOT)
    assert done.returncode == 0, done.stderr[-4000:]
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)]
    for found in ranks:
        assert len({hashlib.sha256(str(found[policy]).encode()).hexdigest() for policy in POLICIES}) == 1
        assert found["loaded"] == found["further"]
        assert found["plain"][0] == pytest.approx(found["adaptive"][0], abs=2e-3)
    assert ranks[0]["adaptive"] != ranks[1]["adaptive"]


if __name__ == "__main__":
    job(Path(sys.argv[1]))
