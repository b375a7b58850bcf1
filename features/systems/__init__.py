"""Policies of other systems, as their authors run them."""

from ebbtide.seams import Feature

FEATURE = Feature(
    "systems",
    {
        "baselines": {"torchao": "torchao:BASELINE"},
        "policies": {
            "deepspeed": "deepspeed",
            "megatron_hybrid": "megatron_hybrid",
            "on_storage": "on_storage",
            "pytorch": "pytorch",
        },
    },
    needs=("overlap", "storage"),
)
