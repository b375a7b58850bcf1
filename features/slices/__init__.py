"""Details of some iterations of a job.

They are allocations, copies and kernels, from its start on or while it runs.
"""

from ebbtide.seams import Feature

FEATURE = Feature("slices", {"services": {"slices": "command"}})
