"""The data types that policies, simulator and engine share: workload, plan and
schedule."""
