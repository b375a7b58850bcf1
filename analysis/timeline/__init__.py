"""Contents and geometry of a timeline, which plots and the report draw: axis, panels,
lines, boxes, limits, colours."""
