"""Step functions, intervals, their placement on lanes, and statistics."""
