"""Libraries and frameworks that a dry run changes: DeepSpeed, parallelism, compiled
extensions."""
