"""Reads snapshots of torch's memory allocator, and makes the table `allocations` from
them."""
