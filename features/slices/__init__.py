"""Details of some iterations of a job, from its start on or while it runs: allocations,
copies and kernels."""

from ebbtide.seams import Feature

FEATURE = Feature("slices", {"services": {"slices": "command"}})
