"""The critical path of an iteration over host and device."""
