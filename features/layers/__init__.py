"""Layers whose weights and activations are not on the device all the time."""

from ebbtide.seams import Feature

FEATURE = Feature(
    "layers",
    {
        "findings": {"layers": "findings"},
        "kinds": {"layers": "kinds:KINDS"},
        "names": {
            "interleave.move_layers": "engine.moving:move_layers",
            "interleave.offload_activations": "engine.moving:offload_activations",
            "interleave.stream_weights": "engine.moving:stream_weights",
        },
        "plan-passes": {"layers": "plan_pass:LAYER_PASS"},
        "plan-checks": {"layers": "layer_checks:check_layers"},
        "policies": {
            "block_swap": "systems.block_swap",
            "ml_dataflow": "systems.ml_dataflow",
            "streamed_weights": "systems.streamed_weights",
        },
        "services": {"layer-comparison": "comparison"},
    },
)
