"""The memory of a dry run: the allocator's segments, what kernels take beside tensors,
and the host's."""
