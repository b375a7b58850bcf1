"""Captures allocations, copies and kernels in some iterations."""
