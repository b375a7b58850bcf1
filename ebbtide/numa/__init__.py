"""NUMA nodes of the host: which node a GPU, a process and its memory are on, and how to
bind memory and threads."""
