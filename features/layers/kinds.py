"""Operations that move weights, activations and gradients of layers."""

from ebbtide.interleave.model.kinds import Flow, Kind
from ebbtide.interleave.model.operations import Op
from ebbtide.interleave.model.plan import Plan


def _activation_down_flow(op: Op, plan: Plan) -> Flow:
    return Flow(writes=(f"activation {op.tag}@host",))


def _activation_up_flow(op: Op, plan: Plan) -> Flow:
    return Flow(moves=(f"activation {op.tag}@host",))


KINDS = (
    Kind("weights up", ("h2d",), on_subgroups=False),
    Kind("weights down", ("d2h",), on_subgroups=False),
    Kind("activation down", ("d2h",), on_subgroups=False, flow=_activation_down_flow),
    Kind("activation up", ("h2d",), on_subgroups=False, flow=_activation_up_flow),
    Kind("layer gradient down", ("d2h",), on_subgroups=False),
    Kind("layer gradient up", ("h2d",), on_subgroups=False),
)
LAYER_KINDS = frozenset(kind.name for kind in KINDS)
