"""Operations that move weights, activations and gradients of layers."""

from ebbtide.interleave.model.kinds import Kind

KINDS = (
    Kind("weights up", ("h2d",), on_layer=True),
    Kind("weights down", ("d2h",), on_layer=True),
    Kind("activation down", ("d2h",), on_layer=True),
    Kind("activation up", ("h2d",), on_layer=True),
    Kind("layer gradient down", ("d2h",), on_layer=True),
    Kind("layer gradient up", ("h2d",), on_layer=True),
)
