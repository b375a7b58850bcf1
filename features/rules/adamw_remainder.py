"""AdamW whose masters are a bfloat16 parameter and its rounding's remainder: 10 B of
state (see remainder.py)."""

from dataclasses import replace

import torch

from ebbtide.features.rules.remainder import join_tensors, split_tensor
from ebbtide.interleave.engine.rules.adamw import ADAMW
from ebbtide.interleave.engine.rules.rule import SplitMaster, register

_MODULE = "ebbtide.features.rules"

ADAMW_REMAINDER = register(
    replace(
        ADAMW,
        name="adamw-remainder",
        split=SplitMaster(
            name="remainder",
            dtype=torch.int16,
            param_dtype=torch.bfloat16,
            split=split_tensor,
            join=join_tensors,
            loops=f"{_MODULE}.compiled_remainder",
            kernels=f"{_MODULE}.triton_remainder",
        ),
        whole=ADAMW,
    )
)
