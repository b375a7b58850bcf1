"""DeepSpeed: records its jobs, imports its logs, and drives its ZeRO stage 3 with offload by a policy."""

from ebbtide.seams import Feature

FEATURE = Feature(
    "deepspeed",
    {
        "importers": {"deepspeed": "log_importer:IMPORTERS"},
        "names": {
            "interleave.deepspeed.enable": "engine.patching:enable",
            "interleave.deepspeed.disable": "engine.patching:disable",
        },
    },
)
