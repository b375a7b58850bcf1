"""Supports DeepSpeed: records its jobs, imports its logs, and drives its ZeRO stage 3
with offload by a policy."""

from ebbtide.seams import Feature

FEATURE = Feature(
    "deepspeed",
    {
        "baselines": {"deepspeed": "baseline:BASELINE"},
        # Rules stand in the order of these names among the themes of the core.
        "findings": {
            "storage": "findings.storage",
            "transfers": "findings.gradients",
            "update_of_zero": "findings.update",
        },
        "frames": {"deepspeed": "frames:OPTIMIZER"},
        "importers": {"deepspeed": "log_importer:IMPORTERS"},
        "names": {
            "interleave.deepspeed.enable": "engine.patching:enable",
            "interleave.deepspeed.disable": "engine.patching:disable",
        },
        "setups": {"deepspeed": "setup:read_setup"},
        "splits": {"deepspeed": "split:DeepSpeedSplit"},
    },
)
