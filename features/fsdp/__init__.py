"""Parameters that PyTorch's fully_shard divides among ranks."""

from ebbtide.seams import Feature

FEATURE = Feature("fsdp", {"gates": {"fsdp": "gates:ShardedGates"}})
