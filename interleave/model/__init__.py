"""The data types that policies, simulator and engine share.

They are workload, plan and schedule.
"""
