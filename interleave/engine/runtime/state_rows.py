"""The layout of a subgroup's optimizer state in memory."""

from __future__ import annotations

import torch

from ebbtide.interleave.engine.runtime.layout import Subgroup

# Rows of a subgroup's state, in the order of ParamState. The first has masters or their remainders.
MASTER, EXP_AVG, EXP_AVG_SQ = range(3)


def state_elements(subgroup: Subgroup) -> int:
    """Return the number of fp32 elements of memory for a subgroup's state."""
    # Two remainders take the memory of one fp32 number.
    return 2 * subgroup.params + -(-subgroup.params // 2) if subgroup.has_remainders else 3 * subgroup.params


def state_shape(subgroup: Subgroup) -> tuple[int, ...]:
    """Return the shape of a subgroup's state, fp32: (3, params), or flat if it has remainders."""
    return (state_elements(subgroup),) if subgroup.has_remainders else (3, subgroup.params)


def state_rows(state: torch.Tensor, subgroup: Subgroup) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return views of a state of `state_shape`: master (fp32) or remainder (int16), first and second moment (fp32)."""
    if not subgroup.has_remainders:
        return state[MASTER], state[EXP_AVG], state[EXP_AVG_SQ]
    moments, end = state[: 2 * subgroup.params].view(2, -1), 2 * subgroup.params
    return state[end:].view(torch.int16)[: subgroup.params], moments[0], moments[1]
