"""The data types: workload, plan and schedule."""
