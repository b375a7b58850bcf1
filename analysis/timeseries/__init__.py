"""Step functions, intervals, and their placement on lanes."""
