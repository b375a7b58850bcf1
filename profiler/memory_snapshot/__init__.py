"""Reads snapshots of torch's memory allocator, for the table `allocations`."""
