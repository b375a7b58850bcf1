"""The machine for a job: whether it fits, the least change that makes it fit, its speed as a range, its cost."""
