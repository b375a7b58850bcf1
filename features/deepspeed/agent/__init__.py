"""Records DeepSpeed's phases, the sub-steps of its updates, and its settings."""
