"""Contents and geometry of a timeline.

Plots and the report draw them: axis, panels, lines, boxes, limits, colours.
"""
