"""The comparison of policies, its picture and its tables."""

from ebbtide.interleave.compare.compare import compare
from ebbtide.interleave.compare.picture import draw_comparison
from ebbtide.interleave.compare.tables import comparison_view

__all__ = ["compare", "comparison_view", "draw_comparison"]
