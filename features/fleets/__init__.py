"""Pictures of traces of many ranks."""

from ebbtide.seams import Feature

FEATURE = Feature("fleets", {"plots": {"ranks": "plot_ranks"}})
