"""Trains with DeepSpeed's CUDA accelerator, plainly and driven by policies, and prints
losses and digests as JSON.

    python -m tests.cuda_runtime -m tests.cuda_runtime.deepspeed_job FILE POLICY...

Ranks meet in a file. NCCL does not run on the stand-in, so that they talk by gloo; the
optimizer is torch's, since DeepSpeed's CPU Adam would be compiled first.
"""

import json
import os
import sys
from typing import Any

import deepspeed

from tests.features.deepspeed.engine import training

STEPS = 4


def settings() -> dict[str, Any]:
    optimizer = {
        "type": "AdamW",
        "params": {"lr": 1e-3, "weight_decay": 0.1, "torch_adam": True},
    }
    return training.config(optimizer=optimizer, zero_force_ds_cpu_optimizer=False)


def run(policy: str | None) -> dict[str, Any]:
    with training.engine(policy, settings()) as engine:
        losses = training.train(engine, STEPS)
        if policy is not None:
            engine.optimizer.synchronize()
        return {
            "device": str(engine.device),
            "optimizer": type(engine.optimizer).__name__,
            "losses": losses,
            "digest": training.digest(engine),
        }


def main() -> None:
    file, *policies = sys.argv[1:]
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    meeting: dict[str, Any] = {
        "init_method": f"file://{file}",
        "rank": 0,
        "world_size": 1,
    }
    deepspeed.init_distributed(
        "gloo", auto_mpi_discovery=False, verbose=False, **meeting
    )
    print(
        json.dumps(
            {
                policy: run(None if policy == "plain" else policy)
                for policy in ("plain", *policies)
            }
        )
    )


if __name__ == "__main__":
    main()
