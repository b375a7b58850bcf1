"""Tasks that wait for nothing."""

import numpy as np

from ebbtide.interleave.simulation.fluid import Tasks
from ebbtide.interleave.simulation.lanes import Lanes


def independent_tasks(lanes: Lanes, names: list[str], alone_s: list[float], demand: list[float]) -> Tasks:
    """Return tasks on the lanes of these names, in the order of the lanes."""
    lane = np.array([lanes.index[name] for name in names])
    nothing = np.zeros(len(names), int)
    return Tasks(
        lane=lane,
        alone_s=np.array(alone_s),
        demand=np.array(demand),
        mode=nothing,
        waits=nothing,
        first=np.zeros(len(names) + 1, int),
        successors=nothing,
        first_of_lane=np.searchsorted(lane, np.arange(len(lanes.index) + 1)),
    )
