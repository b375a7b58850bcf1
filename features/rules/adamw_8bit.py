"""AdamW with moments in 8 bits and a scale for each block, in the format of
bitsandbytes (AdamW8bit)."""

from dataclasses import replace

import torch

from ebbtide.features.rules.blocks import quantize_moment, widen_moment
from ebbtide.features.rules.dynamic_type import MIDDLES, VALUES
from ebbtide.interleave.engine.rules.adamw import ADAMW
from ebbtide.interleave.engine.rules.rule import ScaledMoments, register

register(
    replace(
        ADAMW,
        name="adamw-8bit",
        title="AdamW8bit",
        moments=("state1", "state2"),
        moment_dtype=torch.uint8,
        scaled=ScaledMoments(
            names=("absmax1", "absmax2"),
            values=VALUES,
            middles=MIDDLES,
            constants={"qmap1": VALUES[0], "qmap2": VALUES[1]},
            widen=widen_moment,
            quantize=quantize_moment,
            loops="ebbtide.features.rules.compiled_blocks",
        ),
    )
)
