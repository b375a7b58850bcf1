"""DeepSpeed's Adam on the CPU, as `compare --against` measures it."""

import importlib
from typing import Any

import torch

from ebbtide.interleave.compare.baselines import Baseline, Update, update_of_masters


def _make(params: list[Any]) -> Update:
    adam = importlib.import_module("deepspeed.ops.adam").DeepSpeedCPUAdam
    return update_of_masters(
        params, torch.device("cpu"), adam, adamw_mode=True, fp32_optimizer_states=True
    )


BASELINE = Baseline("CPU Adam of fp32 masters", _make)
