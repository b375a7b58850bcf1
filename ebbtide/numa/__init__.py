"""NUMA nodes of the host.

They tell which node a GPU, a process and its memory are on, and how to bind memory and
threads.
"""
