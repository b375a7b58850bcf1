"""Activity of a GPU over time: compute, communication, copies, and idle time.

Idle time has its causes.
"""
